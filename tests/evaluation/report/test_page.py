"""The report in a real browser, from its file: nothing overflows, nothing is fetched, everything can be reached.

Playwright drives the Chromium that the machine has (`lib.browser` says why that one); without Chromium these tests are
skipped, by name.
"""

import re

import pytest

from lib.browser import launched, opened
from lib.evaluations import AWKWARD, evaluation, planned_evaluation
from specdec.evaluation.report import write_report

# Parts of the page that stand out at the right, but for what scrolls inside of a box of its own.
OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter((one) => {
  if (one.closest(".unseen")) return false;
  const box = one.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 0.5) return false;
  for (let up = one.parentElement; up; up = up.parentElement) {
    if (["auto", "scroll", "hidden"].includes(getComputedStyle(up).overflowX) && up !== document.body) return false;
  }
  return true;
}).map((one) => one.tagName + "." + one.className)"""

# Boxes that keep what stands out of them to themselves and cannot be scrolled by keys.
UNREACHABLE = """() => [...document.querySelectorAll("body *")].filter((one) =>
  one.scrollWidth > one.clientWidth + 1 && ["auto", "scroll"].includes(getComputedStyle(one).overflowX) &&
  one.tabIndex < 0 && !one.querySelector("[tabindex='0']")).map((one) => one.className)"""

CONTRASTS = """() => {
  const channel = (value) => ((value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const parsed = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (one) => {
    for (let up = one; up; up = up.parentElement) {
      const colour = parsed(getComputedStyle(up).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const one of document.querySelectorAll("body *")) {
    const hasText = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!hasText || !one.getClientRects().length || one.closest("script, style, select, .unseen")) continue;
    const style = getComputedStyle(one);
    const [a, b] = [light(parsed(one.closest("svg") ? style.fill : style.color)), light(behind(one))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${one.tagName}.${one.className.baseVal ?? one.className} ${ratio.toFixed(2)}`);
  }
  return [...new Set(found)];
}"""


@pytest.fixture(scope="module")
def browser():
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    write_report(evaluation(), folder)
    return folder / "report.html"


@pytest.fixture
def page(browser, file):
    """The page at 1440 pixels; its console and its requests are looked at when the test is over."""
    with opened(browser, file) as (page, said, asked):
        yield page
    assert said == []
    assert asked == [file.as_uri()]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1440])
def test_nothing_overflows_is_fetched_or_complained_about(browser, file, width, theme):
    with opened(browser, file, width=width, theme=theme) as (page, said, asked):
        for one in page.locator("summary").all():
            one.click()
        for one in page.locator("button.step").all():
            one.click()
        for one in page.get_by_role("button", name="Unfold the whole tree").all():
            one.click()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(OVERFLOWING) == []
        assert page.evaluate(UNREACHABLE) == []
        assert page.evaluate(CONTRASTS) == []
        assert page.locator("svg.chart").count() >= 6
    assert said == []
    assert asked == [file.as_uri()]


@pytest.mark.parametrize(("width", "theme"), [(360, "dark"), (1440, "light")])
def test_what_was_chosen_fits_every_page(browser, tmp_path, width, theme):
    write_report(planned_evaluation(), tmp_path)
    with opened(browser, tmp_path / "report.html", width=width, theme=theme) as (page, said, asked):
        for one in page.locator("#chosen summary").all():
            one.click()
        assert page.locator("#chosen svg.chart").count() == 2  # an answer of each category
        assert page.evaluate(OVERFLOWING) == []
        assert page.evaluate(UNREACHABLE) == []
        assert page.evaluate(CONTRASTS) == []
        assert all(box["width"] <= width for box in (one.bounding_box() for one in page.locator("#chosen svg").all()))
    assert said == []
    assert asked == [(tmp_path / "report.html").as_uri()]


def test_the_page_follows_the_system_until_the_button_is_pressed(browser, file):
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, file, theme="light") as (page, _, _):
        light = page.evaluate(ground)
        button = page.get_by_role("button", name="Dark")
        assert button.get_attribute("aria-pressed") == "false"
        button.click()
        dark = page.evaluate(ground)
        assert (button.get_attribute("aria-pressed"), dark != light) == ("true", True)
        button.click()
        assert page.evaluate(ground) == light
    with opened(browser, file, theme="dark") as (page, _, _):
        assert page.evaluate(ground) == dark
        assert page.get_by_role("button", name="Dark").get_attribute("aria-pressed") == "true"


def test_a_step_unfolds_to_its_tree_by_mouse(page):
    step = page.get_by_role("button", name="Step 1")
    assert page.get_by_role("tree").count() == 0
    step.click()
    tree = page.get_by_role("tree", name="Draft tree of step 1")
    names = [one.get_attribute("aria-label") for one in tree.get_by_role("treeitem").all()]
    assert [name for name in names if "accepted" in name] == [
        "\u201c w1\u201d, accepted, target's probability 60 %, 2 nodes behind it",
        "\u201c w2\u201d, accepted, target's probability 52 %, 1 node behind it",
    ]
    assert "\u201c w3\u201d, target's own, target's probability 70 %" in names
    assert sum("wasted" in name for name in names) == 2
    assert page.locator("#step-0").inner_text().startswith("4 nodes drafted, 2 kept, 2 wasted.")
    step.click()
    assert page.get_by_role("tree").count() == 0


def test_a_token_in_the_text_leads_to_its_step(page):
    page.locator("#answer .traced").nth(2).click()
    assert page.evaluate("document.activeElement.querySelector('.number').textContent") == "Step 3"
    assert page.get_by_role("tree", name="Draft tree of step 3").is_visible()


def test_traces_unfold_by_keyboard_alone(page):
    focused = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
    page.locator("#pick-arm").focus()
    page.keyboard.press("Tab")
    assert page.evaluate(focused).startswith("Step 1")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")  # the only stop of the tree, as no branch of it is folded
    assert page.evaluate(focused).startswith("\u201c w0\u201d, root")
    expected = [("ArrowDown", " w1"), ("ArrowDown", " w2"), ("ArrowDown", " w3"), ("ArrowLeft", " w2")]
    expected += [("ArrowLeft", " w2"), ("ArrowDown", " z"), ("End", " x"), ("Home", " w0"), ("ArrowRight", " w1")]
    for key, text in expected:
        page.keyboard.press(key)
        assert page.evaluate(focused).startswith(f"\u201c{text}\u201d"), (key, text)
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"
    page.keyboard.press("*")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    page.keyboard.press("Tab")
    assert page.evaluate(focused).startswith("Step 2")


def test_everything_one_can_do_something_with_has_a_name(page):
    for one in page.locator("button.step").all():
        one.click()
    roles = ("button", "link", "combobox", "treeitem", "tree", "region", "img", "form")
    assert {role for role in roles if page.get_by_role(role).count()} == set(roles)
    named = re.compile(r"\w")
    assert {role: page.get_by_role(role).count() - page.get_by_role(role, name=named).count() for role in roles} == (
        dict.fromkeys(roles, 0)
    )
    assert all(one.strip() for one in page.locator("summary").all_inner_texts())
    assert page.locator("a[href], button, select, summary, input, [tabindex]").count() > 30


def test_awkward_texts_are_shown_as_they_are(page):
    page.locator("#pick-question").select_option(
        label=next(label for label in page.locator("#pick-question option").all_inner_texts() if "111" in label)
    )
    text = page.locator("#answer").evaluate("one => one.textContent")
    assert text == "".join([*AWKWARD, " and", "\n", "", "more"])
    page.get_by_role("button", name="Step 1").click()
    assert page.locator("#step-0 .chip").all_inner_texts().count("&amp; <b>".replace(" ", "\u2423")) >= 1
    assert page.locator("img").count() == 0


def test_a_page_that_holds_some_of_the_traces_says_so(browser, page, tmp_path, monkeypatch):
    assert page.locator("#traces-left").is_hidden()
    monkeypatch.setattr("specdec.evaluation.report.traces.MAX_NODES", 30)  # one trace has 25
    write_report(evaluation(), tmp_path)
    with opened(browser, tmp_path / "report.html") as (other, _, _):
        assert other.locator("#traces-left").inner_text().startswith("The page holds 1 of 2 traces")


def test_only_answers_that_exist_are_offered(page):
    page.locator("#pick-temperature").select_option(label="1")
    assert page.locator("#pick-arm option").all_inner_texts() == [
        "none (no trees)",
        "medusa (no trees)",
        "transformers (no steps)",
    ]
    page.locator("#pick-arm").select_option(label="transformers (no steps)")
    assert "does not tell its steps" in page.locator("#trace-summary").inner_text()
    assert page.locator("#answer .accepted").count() == 0


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ('<div style="width:500px">x</div>', "overflow"),
        ('<img src="https://example.com/x.png">', "said"),
        ("<script>nothing()</script>", "said"),
    ],
)
def test_a_fault_in_the_page_is_seen(browser, file, tmp_path, fault, found):
    """The checks above can fail: they do on a page with a fault."""
    broken = tmp_path / "broken.html"
    broken.write_bytes(file.read_bytes().replace(b"<main>", f"<main>{fault}".encode(), 1))
    with opened(browser, broken, width=360) as (page, said, asked):
        overflow = page.evaluate(OVERFLOWING)
    assert bool(overflow) == (found == "overflow")
    assert bool(said or len(asked) > 1) == (found == "said")
