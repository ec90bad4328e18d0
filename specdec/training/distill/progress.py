"""How far the writing is, on stderr: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["WritingProgress"]

SECONDS_BETWEEN_LINES = 30.0


class WritingProgress:
    """Texts and tokens per second of this process; the first process shows its own, the others nothing.

    Args:
        num_texts: how many this process will write.
        rank: of this process.
        count: of all processes.
    """

    def __init__(self, num_texts: int, rank: int = 0, count: int = 1) -> None:
        console = Console(stderr=True)
        self._total = num_texts
        self._name = "the target writes" if count == 1 else f"the target writes (process 1 of {count})"
        self._console = console if rank == 0 and not console.is_terminal else None
        columns = (TextColumn(self._name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        speed = TextColumn("{task.fields[speed]}")
        self._bar = Progress(
            *columns, speed, console=console, transient=True, disable=rank != 0 or not console.is_terminal
        )
        self._task = self._bar.add_task("", total=num_texts, speed="")
        self._done = self._num_tokens = 0
        self._began = self._last_line = time.monotonic()

    def __enter__(self) -> "WritingProgress":
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it away."""
        self._bar.stop()

    def advance(self, num_tokens: Sequence[int]) -> None:
        """Count texts with their numbers of written tokens."""
        now = time.monotonic()
        self._done += len(num_tokens)
        self._num_tokens += sum(num_tokens)
        speed = f"{self._num_tokens / max(now - self._began, 1e-9):.0f} tokens/s"
        self._bar.update(self._task, advance=len(num_tokens), speed=speed)
        is_due = now - self._last_line >= SECONDS_BETWEEN_LINES or self._done == self._total
        if self._console is not None and is_due:
            self._console.print(f"{self._name}: {self._done}/{self._total} texts, {speed}", highlight=False)
            self._last_line = now
