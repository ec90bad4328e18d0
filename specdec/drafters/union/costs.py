"""What the ways through a step cost on a machine. Pure arithmetic; `specdec.tuning.measure` measures."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["WayCosts", "time_at"]


def time_at(pass_ms: Mapping[int, float], num_rows: int) -> float:
    """Time of a pass over `num_rows` nodes: between two entries on the line, beyond the last on that of the last two.

    Args:
        pass_ms: times by numbers of nodes, of all rows together.
        num_rows: nodes, at least 1.
    """
    known = sorted(pass_ms)
    above = bisect_left(known, num_rows)
    if above == 0 or len(known) == 1:
        return pass_ms[known[0]]
    above = min(above, len(known) - 1)
    low, high = known[above - 1], known[above]
    return pass_ms[low] + (num_rows - low) / (high - low) * (pass_ms[high] - pass_ms[low])


@dataclass(frozen=True, slots=True)
class WayCosts:
    """Times in milliseconds.

    Attributes:
        pass_ms: of the target's pass by M, the tree nodes of all rows of the batch together.
        draft_ms: of drafting, by the set of drafters that draft, as bits; merging their trees and learning from the
            step included. A set that is missing takes as long as its largest part and what the others take alone.
        plain_ms: what plain decoding takes beside its pass.
        is_corrected: whether steps are timed, where one ends before the next begins, and these times corrected by what
            they took.

    Raises:
        ValueError: no entries, or times that are not positive.
    """

    pass_ms: Mapping[int, float]
    draft_ms: Mapping[int, float]
    plain_ms: float = 0.0
    is_corrected: bool = False

    def __post_init__(self) -> None:
        if not self.pass_ms or not all(rows >= 1 and time > 0 for rows, time in self.pass_ms.items()):
            raise ValueError(f"pass_ms: expected positive times by numbers of nodes, got {dict(self.pass_ms)}")
        if min(self.draft_ms.values(), default=0) < 0 or self.plain_ms < 0:
            raise ValueError(f"draft_ms, plain_ms: expected times of at least 0, got {self.draft_ms}, {self.plain_ms}")

    def of(self, group: int, num_nodes: int, batch_size: int) -> float:
        """Time of a step in which the drafters of `group` propose and the target scores `num_nodes` per row."""
        drafting = self.plain_ms if not group else self._drafting(group)
        return drafting + time_at(self.pass_ms, num_nodes * batch_size)

    def _drafting(self, group: int) -> float:
        if group in self.draft_ms:
            return self.draft_ms[group]
        parts = [mask for mask in self.draft_ms if mask and mask & group == mask]
        largest = max(parts, key=lambda mask: mask.bit_count())
        rest = (1 << bit for bit in range(group.bit_length()) if group & ~largest & 1 << bit)
        return self.draft_ms[largest] + sum(self.draft_ms.get(one, 0.0) for one in rest)
