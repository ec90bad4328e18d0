"""A job that is told to end: what it has written stays, and the same command goes on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Terminated", "ended_by_sigterm"]


class Terminated(KeyboardInterrupt):
    """A SIGTERM came."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside, a SIGTERM raises `Terminated`, as Ctrl-C raises `KeyboardInterrupt`; in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise Terminated
