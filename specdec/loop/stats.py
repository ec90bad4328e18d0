"""What the steps of a generation accepted: one definition of every count, used by every report."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.drafting.planning import PlanReport

__all__ = ["AcceptanceStats"]


@dataclass(slots=True)
class AcceptanceStats:
    """What a generation's steps accepted. Prefill's first token is not a step's and is not counted.

    Attributes:
        num_emitted: per row, tokens emitted by each of its steps (accepted draft tokens and the next root).
        deepest: per row, depth of the deepest proposed node at each of its steps.
        lossless: whether the acceptance rule is.
        times_ms: wall time per phase: prefill, draft, score, verify, commit. On a GPU these are times of the device.
        num_target_passes: scoring passes over the batch; prefill is not counted.
        captured: whether the steps were replayed from one that was captured as a CUDA graph. Then times_ms has one
            entry for all of them, `steps`, instead of those from draft to commit. False on a CPU.
        spans_ms: name, begin and end of every phase in milliseconds since prefill began, in order of their beginning.
        plan: with a drafter of several ways, what was chosen step by step, and what came of it; otherwise None.
    """

    num_emitted: list[list[int]]
    deepest: list[list[int]]
    lossless: bool
    times_ms: dict[str, float]
    num_target_passes: int
    captured: bool = False
    spans_ms: list[tuple[str, float, float]] = field(default_factory=list, repr=False)
    plan: PlanReport | None = field(default=None, repr=False)

    @classmethod
    def merged(cls, stats: Sequence["AcceptanceStats"]) -> "AcceptanceStats":
        """The statistics of several generations as if their rows were one batch; without spans and plan."""
        times: dict[str, float] = {}
        for one in stats:
            for phase, value in one.times_ms.items():
                times[phase] = times.get(phase, 0.0) + value
        return cls(
            num_emitted=[row for one in stats for row in one.num_emitted],
            deepest=[row for one in stats for row in one.deepest],
            lossless=all(one.lossless for one in stats),
            times_ms=times,
            num_target_passes=sum(one.num_target_passes for one in stats),
            captured=any(one.captured for one in stats),
        )

    @property
    def tau(self) -> float:
        """Acceptance length: mean tokens emitted per step and row, next root included; NaN without a step."""
        counts = [count for row in self.num_emitted for count in row]
        return sum(counts) / len(counts) if counts else float("nan")

    @property
    def acceptance_at_depth(self) -> list[float]:
        """Entry d - 1: how often a node at depth d was accepted, given that one at depth d - 1 was.

        A row's last step ends because the row does, so it counts as evidence up to the depth it accepted only.
        """
        tries: dict[int, int] = {}
        successes: dict[int, int] = {}
        for emitted_row, deepest_row in zip(self.num_emitted, self.deepest, strict=True):
            for step, (emitted, deepest) in enumerate(zip(emitted_row, deepest_row, strict=True)):
                accepted = emitted - 1
                tried = accepted if step == len(emitted_row) - 1 else min(accepted + 1, deepest)
                for depth in range(1, tried + 1):
                    tries[depth] = tries.get(depth, 0) + 1
                    successes[depth] = successes.get(depth, 0) + (depth <= accepted)
        return [successes[depth] / tries[depth] for depth in range(1, max(tries, default=0) + 1)]

    @property
    def histogram(self) -> dict[int, int]:
        """How many steps emitted how many tokens."""
        counts = [count for row in self.num_emitted for count in row]
        return {count: counts.count(count) for count in sorted(set(counts))}
