"""A headless browser for tests of pages: one that the machine has, driven by Playwright.

Playwright, because its driver comes in the wheel and speaks to any installed Chromium: no second package of the same
version as the browser (Selenium's chromedriver), and no browser of its own is ever downloaded.
"""

import os
import shutil
from contextlib import contextmanager

import pytest

# Nothing but the page: no sandbox inside of a container, no services of the browser's own that ask the network.
OPTIONS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync""".split()
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser():
    """Where Chromium is: the environment variable CHROME, or on PATH; None without one."""
    return os.environ.get("CHROME") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def launched():
    """A browser with an empty profile; the test is skipped, by name, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install 'specdec-triton[dev]'")
    place = find_browser()
    if place is None:
        pytest.skip(f"no Chromium on PATH: none of {', '.join(NAMES)}, and CHROME is not set")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=place, args=OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser, file, *, width=1440, theme="light", scale=1):
    """A file in a window of its own: the page, what it said on its console, and what it asked for."""
    size = {"width": width, "height": 900}
    context = browser.new_context(viewport=size, color_scheme=theme, device_scale_factor=scale)
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(file.resolve().as_uri())
        yield page, said, asked
    finally:
        context.close()
