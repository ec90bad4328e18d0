"""Getting a file from an address, with its progress on stderr and one kind of error for all that a network does."""

import contextlib
import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["FetchError", "download", "read_address", "say", "show_progress"]

_SECONDS = 30  # without a word from the other side
_BLOCK_BYTES = 1 << 18
_NOT_THERE = (urllib.error.URLError, TimeoutError, ConnectionError, ssl.SSLError, http.client.HTTPException, ValueError)


class FetchError(RuntimeError):
    """What an address has cannot be had: there is no network, no such file, or the connection ended too early."""


def say(text: str) -> None:
    """Tell the user on stderr what takes a while."""
    Console(stderr=True, highlight=False).print(text, style="dim", soft_wrap=True)


def read_address(address: str) -> bytes:
    """What an address has.

    Raises:
        FetchError: it cannot be had.
    """
    try:
        with urllib.request.urlopen(address, timeout=_SECONDS) as reply:
            return bytes(reply.read())
    except _NOT_THERE as error:
        raise FetchError(str(error)) from error


def download(address: str, file: Path, *, text: str, num_bytes: int) -> None:
    """Write what an address has into a file; on an error a part of it is left there.

    Args:
        address: where it is.
        file: where it goes.
        text: what to tell the user.
        num_bytes: that are expected; fewer are an error, and what the bytes are is the caller's to check.

    Raises:
        FetchError: it cannot be had, or not all of it.
        OSError: the file cannot be written.
    """
    with file.open("wb") as content, show_progress(text, num_bytes) as show:
        try:
            reply = urllib.request.urlopen(address, timeout=_SECONDS)
        except _NOT_THERE as error:
            raise FetchError(str(error)) from error
        with reply:
            while block := _next_block(reply):
                content.write(block)
                show(content.tell())
        if content.tell() < num_bytes:
            raise FetchError(f"{content.tell()} of {num_bytes} bytes")


def _next_block(reply: http.client.HTTPResponse) -> bytes:
    """Apart from writing, whose errors are of the disk and not of the network."""
    try:
        return reply.read(_BLOCK_BYTES)
    except _NOT_THERE as error:
        raise FetchError(str(error)) from error


@contextlib.contextmanager
def show_progress(text: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yields what takes the bytes that are there: a bar on a terminal, else one line at the beginning."""
    console = Console(stderr=True)
    if not console.is_terminal:
        say(f"{text} ({decimal(num_bytes)})")
    columns = (TextColumn(text), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=num_bytes)
        yield lambda num_there: progress.update(task, completed=min(num_there, num_bytes))
