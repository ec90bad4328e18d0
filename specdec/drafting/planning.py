"""How a step is gone through where a drafter knows several ways: what chooses on the host, and what it tells later.

A drafter of one way is asked nothing (`Planner`). One of several (`Drafter.num_ways`) leaves a few numbers on the
device after every step (`Drafter.forecast`), which reach the host with the message that tells whether any row still
runs. So the device never waits: a choice is made from what was known one step before, two where steps are replayed. It
never depends on what the same step will draw, so that sampling stays exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PlanReport", "PlannedStep", "Planner"]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """How one step was gone through.

    Attributes:
        members: the drafters that proposed, by name; none in plain decoding.
        num_nodes: nodes that the target scored per row, root included.
        num_rows: rows that were running.
        predicted: tokens that all running rows together were expected to emit, by the reach of the nodes.
        cost_ms: what the step was expected to take by the table of costs; 0 without one.
        plain_ms: the same of a step of plain decoding.
    """

    members: tuple[str, ...]
    num_nodes: int
    num_rows: int
    predicted: float
    cost_ms: float
    plain_ms: float


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What was chosen in a generation, step by step, and what came of it; `str` is a table.

    Attributes:
        members: names of the drafters.
        steps: one entry a step.
        emitted: tokens that all rows together emitted in each of these steps.
        proposed_by: per drafter, accepted draft tokens that it had proposed; what several proposed counts for each.
    """

    members: tuple[str, ...]
    steps: tuple[PlannedStep, ...]
    emitted: tuple[int, ...]
    proposed_by: tuple[int, ...]

    @property
    def predicted_tokens(self) -> float:
        """Tokens that the steps were expected to emit."""
        return sum(step.predicted for step in self.steps)

    @property
    def predicted_speedup(self) -> float:
        """Tokens per second over those of plain decoding, by expected tokens and the table of costs; NaN without."""
        return self._speedup([step.predicted for step in self.steps])

    @property
    def real_speedup(self) -> float:
        """The same with the tokens that came; times are still those of the table."""
        return self._speedup(self.emitted)

    def _speedup(self, tokens: Sequence[float]) -> float:
        spent = sum(step.cost_ms for step in self.steps)
        plain = sum(
            count * step.plain_ms / max(step.num_rows, 1) for count, step in zip(tokens, self.steps, strict=True)
        )
        return plain / spent if spent else float("nan")

    def __str__(self) -> str:
        ways: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for number, step in enumerate(self.steps):
            ways.setdefault((step.members, step.num_nodes), []).append(number)
        lines = [f"{'proposed by':<32}{'nodes':>7}{'steps':>7}{'expected':>10}{'tokens':>8}  a step"]
        for (members, num_nodes), numbers in sorted(ways.items(), key=lambda way: -len(way[1])):
            expected = sum(self.steps[number].predicted for number in numbers) / len(numbers)
            came = sum(self.emitted[number] for number in numbers) / len(numbers)
            name = " + ".join(members) or "plain decoding"
            lines.append(f"{name:<32}{num_nodes:>7}{len(numbers):>7}{expected:>10.2f}{came:>8.2f}")
        shares = (f"{name} {count}" for name, count in zip(self.members, self.proposed_by, strict=True))
        lines.append("accepted tokens proposed by " + ", ".join(shares))
        if self.predicted_speedup == self.predicted_speedup:
            lines.append(f"speedup by table: expected {self.predicted_speedup:.2f}, came {self.real_speedup:.2f}")
        return "\n".join(lines)


class Planner:
    """Chooses a way for every step. This one knows one way."""

    def choose(self) -> int:
        """The way of the next step, below the drafter's `num_ways`."""
        return 0

    def observe(self, numbers: Sequence[float]) -> None:
        """Take in the drafter's `forecast` as a step left it; called for the steps in their order."""

    def forget(self) -> None:
        """Report nothing of what was chosen so far; for generations without an end."""

    def report(self, emitted: Sequence[int]) -> PlanReport | None:
        """What was chosen since the planner was made; None where there was no choice.

        Args:
            emitted: tokens that all rows together emitted in each step.
        """
        return None
