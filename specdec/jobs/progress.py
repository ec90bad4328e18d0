"""How far the writing is, on stderr: a bar on a terminal, a line now and then elsewhere."""

import time
from datetime import timedelta
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
        self._total, self._rank = num_texts, rank
        self._name = "the target writes" if count == 1 else f"the target writes (process 1 of {count})"
        self._console = console if rank == 0 and not console.is_terminal else None
        columns = (TextColumn(self._name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        speed = TextColumn("{task.fields[speed]}")
        self._bar = Progress(
            *columns, speed, console=console, transient=True, disable=rank != 0 or not console.is_terminal
        )
        self._task = self._bar.add_task("", total=num_texts, speed="")
        self._done = self._num_tokens = 0
        self._has_begun = False
        self._began = self._last_line = time.monotonic()

    def __enter__(self) -> "WritingProgress":
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it away; after an error say what is kept."""
        self._bar.stop()
        if error is not None and self._has_begun and self._rank == 0:
            kept = "what was written is kept; the same command goes on with the rest"
            self._bar.console.print(f"{self._name}: {kept}", highlight=False, soft_wrap=True)

    def begin(self) -> None:
        """Time begins to count: what is to write is there."""
        self._has_begun = True
        self._began = self._last_line = time.monotonic()

    def advance(self, num_tokens: int) -> None:
        """Count a text with its number of written tokens."""
        now = time.monotonic()
        self._done += 1
        self._num_tokens += num_tokens
        seconds = max(now - self._began, 1e-9)
        speed = f"{self._num_tokens / seconds:.0f} tokens/s"
        self._bar.update(self._task, advance=1, speed=speed)
        is_due = now - self._last_line >= SECONDS_BETWEEN_LINES or self._done == self._total
        if self._console is not None and is_due:
            left = timedelta(seconds=round(seconds / self._done * (self._total - self._done)))
            text = f"{self._name}: {self._done}/{self._total} texts, {speed}, {left} left"
            self._console.print(text, highlight=False, soft_wrap=True)
            self._last_line = now
