"""What the measured arms say about every claim, and the page that tells it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from specdec.bench.claims.arms import Arm, Counts, NotRunError, shared
from specdec.bench.claims.table import Claim
from specdec.bench.common.tables import table
from specdec.drafters.kinds import KINDS_WITHOUT_WEIGHTS
from specdec.evaluation.intervals import Interval, mean_of, ratio_interval, verdict_of

__all__ = ["NOT_RUN", "Measured", "Outcome", "judge", "page"]

NOT_RUN = "not run"
MIN_PROMPTS = 20
MIN_SEEDS = 3
CLOSE = 0.05

Measured: TypeAlias = Callable[[Arm], Sequence[Counts]]
"""Counts of an arm, one entry per training seed; raises NotRunError, which says why there is none."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found of one claim.

    Attributes:
        verdict: as of `verdict_of`, or `NOT_RUN`.
        ours: figure of the arm that the claim is about; None if it was not run.
        theirs: of the other.
        ratio: ours by theirs, with its interval; None unless both were run.
        num_prompts: prompts that both arms decoded.
        note: what the verdict has to be read with; empty for nothing.
    """

    verdict: str
    ours: float | None = None
    theirs: float | None = None
    ratio: Interval | None = None
    num_prompts: int = 0
    note: str = ""


def judge(claim: Claim, measured: Measured) -> Outcome:
    """Compare the arms of a claim on the prompts that all of their seeds decoded.

    Two trained drafters that are within 5 % of each other are told apart by three training seeds each, or not at all:
    one training's luck is of that size. A few prompts tell nothing: their bootstrap is too sure of itself.
    """
    try:
        ours, theirs = measured(claim.ours), measured(claim.theirs)
    except NotRunError as error:
        return Outcome(NOT_RUN, note=str(error))
    places = sorted(set.intersection(*(set(counts) for counts in (*ours, *theirs))))
    if len(places) < 2:
        return Outcome(NOT_RUN, note="fewer than two prompts in common")
    first, second = shared(ours, places), shared(theirs, places)
    ratio = ratio_interval(first, second)
    verdict, note = str(verdict_of(claim.sign, ratio, margin=claim.margin)), ""
    trained = {arm.drafter for arm in (claim.ours, claim.theirs)} - set(KINDS_WITHOUT_WEIGHTS)
    num_seeds = min(len(ours), len(theirs))
    if len(places) < MIN_PROMPTS:
        verdict, note = "undecided", f"{len(places)} prompts are too few to tell"
    elif len(trained) == 2 and abs(ratio.value - 1) < CLOSE and num_seeds < MIN_SEEDS and verdict != "undecided":
        verdict, note = "undecided", f"within 5 %, which takes {MIN_SEEDS} training seeds to tell; {num_seeds} ran"
    if verdict == "reproduced" and claim.presupposes and judge(claim.presupposes, measured).verdict != "reproduced":
        verdict, note = "undecided", f"says nothing without: {claim.presupposes.text}"
    return Outcome(verdict, mean_of(first), mean_of(second), ratio, len(places), note)


def page(claims: Mapping[str, Iterable[Claim]], measured: Measured, setup: Mapping[str, Any]) -> str:
    """The whole page in Markdown.

    Args:
        claims: by section.
        measured: what was run.
        setup: what all arms have in common, by name; it is printed as it is.
    """
    judged = {section: [(claim, judge(claim, measured)) for claim in found] for section, found in claims.items()}
    verdicts = [outcome.verdict for found in judged.values() for _, outcome in found]
    counts = {verdict: verdicts.count(verdict) for verdict in ("reproduced", "not reproduced", "undecided", NOT_RUN)}
    parts = [
        _HEAD.format(
            setup="\n".join(f"* {name}: {value}" for name, value in setup.items()),
            min_prompts=MIN_PROMPTS,
            min_seeds=MIN_SEEDS,
            total=len(verdicts),
            counts=", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
        )
    ]
    for section, found in judged.items():
        parts.append(f"## {section}\n\n{table([_row(claim, outcome) for claim, outcome in found])}")
    arms = dict.fromkeys(arm for found in claims.values() for claim in found for arm in (claim.ours, claim.theirs))
    rows = []
    for arm in arms:
        with suppress(NotRunError):
            rows.append(_arm_row(arm, measured(arm)))
    parts.append(f"## Arms\n\n{table(rows)}")
    return "\n".join(parts)


_HEAD = """\
# The papers' orders

What the papers claim of acceptance, tested on one small chat model with paired intervals. This page is written by
`python -m specdec.bench.papers --update`; its claims, with the sentences of the last column, are in
[bench/claims/table.py](../bench/claims/table.py).

{setup}

A row compares two arms on the same prompts. *Ours* gives the two figures (acceptance lengths count the next root), and
their ratio with the interval that holds 95 % of 10 000 paired draws of prompts, and of training seeds where there are
several. An order is reproduced if all of the interval is on its side of 1, not reproduced if all of it is on the
other, and undecided otherwise; so it is below {min_prompts} prompts, and for two trained drafters within 5 % of each
other that have not {min_seeds} training seeds each. A small target, and drafters trained for minutes, can contradict a
paper without refuting it.

Of {total} claims: {counts}.
"""


def _row(claim: Claim, outcome: Outcome) -> dict[str, str]:
    """A row of a section's table."""
    if outcome.ratio is None:
        ours = "-"
    else:
        ours = f"{outcome.ours:.2f} and {outcome.theirs:.2f}: {outcome.ratio}, {outcome.num_prompts} prompts"
    verdict = f"**{outcome.verdict}**" + (f" ({outcome.note})" if outcome.note else "")
    return {"claim": claim.text, "paper": claim.paper, "ours": ours, "outcome": verdict, "why": claim.why}


def _arm_row(arm: Arm, counts: Sequence[Counts]) -> dict[str, str]:
    """A row of the table of all arms."""
    means = [mean_of(shared([one], sorted(one))) for one in counts]
    name = "tau" if arm.figure == "tau" else arm.figure
    return {
        "arm": str(arm),
        "figure": name,
        "by training seed": " ".join(f"{mean:.3f}" for mean in means),
        "prompts": str(len(counts[0])),
    }
