"""How sure an order is: intervals of a ratio of two measured means, by a paired bootstrap over prompts.

A mean is a sum over prompts by another sum over prompts: acceptance length is tokens by steps, an acceptance rate
accepted by tried. Both arms are measured on the same prompts, which differ far more from each other than the arms do.
So each draw takes the same prompts for both arms, which leaves the prompts' differences out of the ratio (Efron's
bootstrap, paired). An arm that was trained with several seeds has a level above: each draw takes as many of its seeds,
with repetition, before it takes prompts.

The interval says what other prompts (and seeds) of the same kind would give. It says nothing of other models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from specdec.common.checks import check_at_least

__all__ = ["Interval", "Sign", "Verdict", "mean_interval", "mean_of", "per_prompt", "ratio_interval", "verdict_of"]

Sign: TypeAlias = Literal["more", "less", "equal"]
Verdict: TypeAlias = Literal["reproduced", "not reproduced", "undecided"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and where 95 % of the draws fell.

    Attributes:
        value: of all prompts and seeds as they were measured.
        low: 2.5 % of the draws are below.
        high: 2.5 % of the draws are above.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_of(counts: torch.Tensor) -> float:
    """The mean of all counts `[seeds, prompts, 2]`, as of `ratio_interval`: one sum divided by the other."""
    total = counts.double().sum((0, 1))
    return float(total[0] / total[1])


def ratio_interval(
    ours: torch.Tensor, theirs: torch.Tensor, *, paired: bool = True, num_draws: int = 10_000, seed: int = 0
) -> Interval:
    """The mean of one arm divided by that of another.

    Args:
        ours: [seeds, prompts, 2] per training seed and prompt what is summed above and below the bar of the mean;
            sums below the bar over all prompts are more than 0.
        theirs: [seeds', prompts, 2] of the other arm, on the same prompts in the same order.
        paired: whether they are; without it each side has prompts of its own, as many as it likes, and is drawn alone.
        num_draws: draws of the bootstrap.
        seed: of the draws.

    Raises:
        ValueError: other shapes, arms on different numbers of prompts, or on one prompt, which tells nothing of others.
    """
    check_at_least(1, {"num_draws": num_draws})
    for name, counts in (("ours", ours), ("theirs", theirs)):
        if counts.ndim != 3 or counts.shape[2] != 2 or not counts.numel():
            raise ValueError(f"{name}: expected [seeds, prompts, 2] counts, got shape {list(counts.shape)}")
    if paired and ours.shape[1] != theirs.shape[1]:
        raise ValueError(f"theirs: expected {ours.shape[1]} prompts, as ours has, got {theirs.shape[1]}")
    for name, counts in (("ours", ours), ("theirs", theirs)):
        if counts.shape[1] < 2:
            raise ValueError(f"{name}: expected at least 2 prompts, got {counts.shape[1]}")
    generator = torch.Generator().manual_seed(seed)
    # how often each draw takes each prompt, of pairs the same for both arms
    prompts = _times_taken(ours.shape[1], num_draws, generator)
    others = prompts if paired else _times_taken(theirs.shape[1], num_draws, generator)
    ratios = _drawn_means(ours, prompts, generator) / _drawn_means(theirs, others, generator)
    low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(mean_of(ours) / mean_of(theirs), low, high)


def mean_interval(counts: torch.Tensor, *, num_draws: int = 10_000, seed: int = 0) -> Interval:
    """The mean of one arm, with its interval over prompts (and seeds). Arguments and errors: `ratio_interval`."""
    ones = torch.ones(1, counts.shape[1], 2) if counts.ndim == 3 else counts
    return ratio_interval(counts, ones, num_draws=num_draws, seed=seed)


def verdict_of(sign: Sign, interval: Interval, *, margin: float = 0.02) -> Verdict:
    """What the interval of a ratio says about a claimed order.

    Args:
        sign: what is claimed: the ratio is more than 1, less than 1, or equal to it.
        interval: of the ratio.
        margin: two arms are equal if the whole interval is within this part of 1.

    Returns:
        An order is reproduced if the whole interval is on its side of 1, not reproduced if all of it is on the other,
        and undecided if 1 is inside. Equality is reproduced if the whole interval is within the margin, not reproduced
        if all of it is outside.
    """
    if sign == "equal":
        inside = 1 - margin <= interval.low and interval.high <= 1 + margin
        outside = interval.high < 1 - margin or interval.low > 1 + margin
    else:
        above, below = interval.low > 1, interval.high < 1
        inside, outside = (above, below) if sign == "more" else (below, above)
    return "reproduced" if inside else "not reproduced" if outside else "undecided"


def per_prompt(num_emitted: Sequence[Sequence[int]]) -> torch.Tensor:
    """[1, prompts, 2] float64 counts of an acceptance length: per prompt, its tokens and its steps.

    Args:
        num_emitted: per prompt, tokens that each step emitted.
    """
    return torch.tensor([[[sum(row), len(row)] for row in num_emitted]], dtype=torch.float64)


def _times_taken(count: int, num_draws: int, generator: torch.Generator) -> torch.Tensor:
    """[draws, count] float64: `count` draws with repetition from as many things, how often each was drawn."""
    drawn = torch.randint(count, (num_draws, count), generator=generator)
    return torch.zeros(num_draws, count, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones_like(drawn, dtype=torch.float64)
    )


def _drawn_means(counts: torch.Tensor, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """[draws] means of an arm; `prompts [draws, P]` says how often each draw takes each prompt."""
    seeds = _times_taken(counts.shape[0], prompts.shape[0], generator)
    sums = torch.einsum("ds,dp,spc->dc", seeds, prompts, counts.double())
    return sums[:, 0] / sums[:, 1]
