"""What a union of drafters chose for an answer, as records keep it."""

import math
from dataclasses import dataclass

from specdec.drafting.planning import PlanReport

__all__ = ["AnswerPlan", "short_plan"]


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What was chosen in the generation of an answer, and what came of it: a `PlanReport` in short.

    Attributes:
        members: names of the drafters.
        sets: the sets of drafters that proposed in some step, each by the places of its members; none of them in plain
            decoding.
        chosen: per step, the place of its set in `sets`.
        num_nodes: per step, nodes that the target scored per row, root included.
        predicted: per step, tokens that all rows together were expected to emit.
        emitted: per step, tokens that all rows together emitted.
        proposed_by: per member, accepted draft tokens that it had proposed; what several proposed counts for each.
        predicted_tokens: that all steps were expected to emit.
        cost_ms: what all steps were expected to take by the table of costs; 0 without one.
        predicted_speedup: over plain decoding, by the expected tokens and the table of costs; None without one.
        real_speedup: the same by the tokens that came.
    """

    members: list[str]
    sets: list[list[int]]
    chosen: list[int]
    num_nodes: list[int]
    predicted: list[float]
    emitted: list[int]
    proposed_by: list[int]
    predicted_tokens: float
    cost_ms: float
    predicted_speedup: float | None
    real_speedup: float | None

    def proposers(self, step: int) -> tuple[str, ...]:
        """Names of the drafters that proposed in a step."""
        return tuple(self.members[place] for place in self.sets[self.chosen[step]])


def short_plan(report: PlanReport) -> AnswerPlan:
    """A report as records keep it: figures to three digits behind the point, equal sets of drafters once."""
    places = {name: place for place, name in enumerate(report.members)}
    proposers = [tuple(places[name] for name in step.members) for step in report.steps]
    sets = list(dict.fromkeys(proposers))
    return AnswerPlan(
        members=list(report.members),
        sets=[list(one) for one in sets],
        chosen=[sets.index(one) for one in proposers],
        num_nodes=[step.num_nodes for step in report.steps],
        predicted=[round(step.predicted, 3) for step in report.steps],
        emitted=list(report.emitted),
        proposed_by=list(report.proposed_by),
        predicted_tokens=round(report.predicted_tokens, 3),
        cost_ms=round(sum(step.cost_ms for step in report.steps), 3),
        predicted_speedup=_rounded(report.predicted_speedup),
        real_speedup=_rounded(report.real_speedup),
    )


def _rounded(value: float) -> float | None:
    """To three digits behind the point; None for NaN, which JSON does not have."""
    return None if math.isnan(value) else round(value, 3)
