"""What a measurement of many cells has begun and ended, so that one that was cut off goes on where it stopped.

A cell is whatever is measured as one: a test, a benchmark at a shape, an arm of the decoding benchmark. That it begins
is written before it runs, so that one which hangs or takes its process down with it is known by that and is not tried
for ever.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specdec.common.provenance import append_record, read_records

__all__ = ["AGAIN", "LEFT", "Journal", "ended", "last_lines"]

AGAIN = 75
"""Exit status of a command that lost the device; a new process can go on with its cells at once."""

LEFT = 76
"""Exit status of a command whose own time ran out before its cells did."""

_MAX_FAILURES = 2
_MAX_STARTS = 3  # of a cell that never ended: a limit may fall into it once, but not always


class Journal:
    """The records of one command, in a JSON-lines file."""

    def __init__(self, path: Path | None, *, resume: bool = False, always: Mapping[str, Any] | None = None) -> None:
        """Open a journal.

        Args:
            path: the file, which is appended to; None to keep nothing.
            resume: count what the file tells of earlier runs.
            always: what every record says.
        """
        self.path = path
        self.always = always or {}
        self.starts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._done: set[str] = set()
        for record in read_records(path) if path is not None and resume else ():
            self._count(record)

    def _count(self, record: Mapping[str, Any]) -> None:
        if "begun" in record:
            self.starts[record["begun"]] += 1
        elif record.get("failed"):
            self._failures[record["cell"]] += 1
        elif "cell" in record:
            self._done.add(record["cell"])

    def is_due(self, cell: str) -> bool:
        """Whether a cell has neither ended well nor been tried often enough."""
        tried = self._failures[cell] >= _MAX_FAILURES or self.starts[cell] >= _MAX_STARTS
        return cell not in self._done and not tried

    def is_done(self, cell: str) -> bool:
        """Whether a cell has ended well."""
        return cell in self._done

    def due(self, cells: Iterable[str]) -> list[str]:
        """The cells that are due, those that were never begun first."""
        return sorted(filter(self.is_due, cells), key=self.starts.__getitem__)

    def begin(self, cell: str) -> None:
        """Note that a cell is about to run."""
        self._append({"begun": cell})

    def end(self, cell: str, record: Mapping[str, Any], *, failed: bool = False) -> None:
        """Note what became of a cell; a failed one is due once more in a later run."""
        self._append({**record, "cell": cell, **({"failed": True} if failed else {})})

    def _append(self, record: Mapping[str, Any]) -> None:
        if self.path is not None:
            append_record(self.path, {**record, **self.always})
        self._count(record)


def ended(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of results: the last of every cell, and a note for each that began and never ended."""
    cells: dict[str, Mapping[str, Any]] = {}
    others: list[Mapping[str, Any]] = []
    begun: dict[str, Mapping[str, Any]] = {}
    for record in records:
        if "begun" in record:
            begun.setdefault(record["begun"], record)
        elif "cell" in record:
            cells[record["cell"]] = record
        else:
            others.append(record)
    lost = [
        {"bench": "lost", "cell": cell, "provenance": record["provenance"]}
        for cell, record in begun.items()
        if cell not in cells
    ]
    return [*others, *cells.values(), *lost]


def last_lines(text: str, count: int = 30) -> str:
    """The end of a text, in lines and at most 4000 characters."""
    return "\n".join(text.splitlines()[-count:])[-4000:]
