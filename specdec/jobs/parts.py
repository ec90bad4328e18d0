"""What several processes have written so far, until it is one file.

Each process appends whole batches of lines to a part of its own beside the output, `OUTPUT.part-RANK`, and nobody else
does. The parts stay where a run was interrupted, and the next one, of however many processes, goes on from them. At the
end the first process puts all lines in order into the output, in one step, and removes the parts.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from specdec.common.files import replace_file

__all__ = ["Parts", "Processes", "processes"]

_LONGEST_WAIT = timedelta(days=7)
"""How long a process waits at the end for the slowest one; one that dies is torchrun's to notice."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that write one file together: this one's place, and how many they are."""

    rank: int
    count: int

    def wait(self) -> None:
        """Return once all processes are here."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def processes() -> Iterator[Processes]:
    """Those that torchrun started, or this one alone; they can wait for each other inside the block."""
    if dist.is_available() and dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size())
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:  # set by torchrun
        dist.init_process_group("gloo", timeout=_LONGEST_WAIT)
        try:
            yield Processes(dist.get_rank(), dist.get_world_size())
        finally:
            dist.destroy_process_group()
    else:
        yield Processes(0, 1)


class Parts:
    """The lines of an output and of its parts.

    Args:
        output: the file that they will be.
        rank: of this process.
    """

    def __init__(self, output: Path, rank: int) -> None:
        self.output = output
        self._own = output.with_name(f"{output.name}.part-{rank}")

    def read(self) -> dict[int, tuple[Path, dict[str, Any]]]:
        """All lines that are there, by index, and where; what a crash left of a line is passed over.

        Of two lines of an index the first one without an `"error"` counts.

        Raises:
            ValueError: a line that no job wrote.
        """
        found: dict[int, tuple[Path, dict[str, Any]]] = {}
        for path in [self.output, *self._all()]:
            for line in _whole_lines(path):
                try:
                    record = json.loads(line)
                    index = int(record["index"])
                    if index not in found or "error" in found[index][1]:
                        found[index] = path, record
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"output: expected a new file or one of the same prompts, got {path} with other lines"
                    ) from error
        return found

    @contextmanager
    def appending(self) -> Iterator[Callable[[Iterable[Mapping[str, Any]]], None]]:
        """Yield what appends lines to this process's part; each call's are on the disk when it returns."""
        self._own.parent.mkdir(parents=True, exist_ok=True)
        with self._own.open("ab") as file:
            file.truncate(len(b"".join(_whole_lines(self._own))))

            def append(records: Iterable[Mapping[str, Any]]) -> None:
                file.write("".join(map(_line, records)).encode())
                file.flush()
                os.fsync(file.fileno())

            yield append

    def merge(self) -> None:
        """Make the output of all lines, in order, and remove the parts."""
        parts = self._all()
        if parts:
            lines = self.read()
            replace_file(self.output, "".join(_line(lines[index][1]) for index in sorted(lines)))
        for path in parts:
            path.unlink()

    def _all(self) -> list[Path]:
        prefix = f"{self.output.name}.part-"
        if not self.output.parent.is_dir():
            return []
        return sorted(path for path in self.output.parent.iterdir() if path.name.startswith(prefix))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _whole_lines(path: Path) -> list[bytes]:
    """Lines with their ends; none of a file that is not there."""
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
