"""What was made of a file; rows of which nothing can be made are counted by reason, and never a reason to stop."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specdec.training.data.samples import Sample, UnusableError

__all__ = ["LeftOut", "Reading", "Reason"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why rows were left out.

    Attributes:
        text: what ends a sentence that begins with "a text ...".
        count: how many rows.
        place: where the first of them stands, such as `:12`.
        detail: what was found there.
    """

    text: str
    count: int
    place: str
    detail: str

    def __str__(self) -> str:
        return f"{self.text} (the first at {self.place}{self.detail and ': '}{self.detail})"


@dataclass(frozen=True, slots=True)
class Reading:
    """What was made of a file or data set.

    Attributes:
        samples: the texts that can be learnt from.
        num_rows: all rows.
        num_cut: texts that were cut off at the longest length.
        num_answers: what assistants say in the conversations that can be learnt from, in turns.
        num_hidden: those of them that the chat template does not show as they are, and that are not learnt.
        left_out: what cannot be learnt from.
    """

    samples: Sequence[Sample]
    num_rows: int
    num_cut: int
    num_answers: int
    num_hidden: int
    left_out: tuple[Reason, ...]


class LeftOut:
    """Counts the rows of a file that are left out, by reason, in the order in which reasons come up.

    Args:
        source: the file, for messages.
        reasons: those that are known already.
    """

    def __init__(self, source: str | Path, reasons: tuple[Reason, ...] = ()) -> None:
        self._source = source
        self._reasons = {reason.text: reason for reason in reasons}

    def add(self, error: UnusableError, place: str) -> None:
        """Count one more."""
        known = self._reasons.get(error.reason, Reason(error.reason, 0, place, error.detail))
        self._reasons[error.reason] = replace(known, count=known.count + 1)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """What was counted."""
        return tuple(self._reasons.values())

    def report(self, wanted: str, num_rows: int) -> None:
        """Log what was left out.

        Args:
            wanted: what the rest is, in the singular, such as "usable text".
            num_rows: all rows.

        Raises:
            ValueError: nothing remains.
        """
        if sum(reason.count for reason in self.reasons) == num_rows:
            why = "; ".join(f"{reason.count} {reason}" for reason in self.reasons) or "the file is empty"
            raise ValueError(f"data: expected at least one {wanted} in {self._source}, got none of {num_rows}: {why}")
        for reason in self.reasons:
            logger.warning("%s: left out %d of %d texts: %s", self._source, reason.count, num_rows, reason)
