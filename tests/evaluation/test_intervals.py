"""Intervals of ratios against cases that are known, and what they say about a claim."""

import math

import pytest
import torch

from specdec.evaluation.intervals import Interval, mean_interval, mean_of, per_prompt, ratio_interval, verdict_of


def arm(tokens, steps):
    """[1, prompts, 2] counts."""
    return torch.stack((torch.as_tensor(tokens), torch.as_tensor(steps)), -1)[None].double()


def test_counts_are_tokens_and_steps_of_every_prompt():
    counts = per_prompt([[2, 3, 1], [4]])
    assert counts.tolist() == [[[6, 3], [4, 1]]]
    assert mean_of(counts) == 10 / 4  # of all steps, not of the prompts' means


def test_an_arm_that_is_better_by_one_factor_everywhere_has_no_doubt():
    steps = torch.tensor([9, 5, 12, 7])
    interval = ratio_interval(arm(steps * 3, steps), arm(steps * 2, steps), num_draws=50)
    assert (interval.value, interval.low, interval.high) == pytest.approx((1.5, 1.5, 1.5))
    # whatever prompts differ in, both arms share
    tau = torch.tensor([1.0, 2.0, 3.0, 8.0])
    paired = ratio_interval(arm(steps * tau * 1.1, steps), arm(steps * tau, steps), num_draws=50)
    assert (paired.low, paired.high) == pytest.approx((1.1, 1.1))


def test_the_interval_is_that_of_the_normal_approximation(generator):
    """With as many steps everywhere the ratio's error is that of a mean of differences (delta method)."""
    num, steps = 200, torch.full((200,), 50.0)
    theirs = 2 + 0.5 * torch.randn(num, generator=generator)
    ours = theirs * 1.05 + 0.2 * torch.randn(num, generator=generator)
    interval = ratio_interval(arm(ours * steps, steps), arm(theirs * steps, steps))
    ratio = float(ours.mean() / theirs.mean())
    error = float((ours - ratio * theirs).std() / theirs.mean() / math.sqrt(num))
    assert interval.value == pytest.approx(ratio)
    assert interval.low == pytest.approx(ratio - 1.96 * error, abs=0.15 * error)  # 10 000 draws: 0.04 of it
    assert interval.high == pytest.approx(ratio + 1.96 * error, abs=0.15 * error)


def test_nineteen_of_twenty_intervals_hold_the_truth(generator):
    steps, hits = torch.full((60,), 40.0), 0
    for _ in range(200):
        theirs = 2 + 0.5 * torch.randn(60, generator=generator)
        ours = theirs * 1.1 + 0.3 * torch.randn(60, generator=generator)
        interval = ratio_interval(arm(ours * steps, steps), arm(theirs * steps, steps), num_draws=400)
        hits += interval.low <= 1.1 <= interval.high
    assert 178 <= hits <= 198  # 190 are expected, with a standard deviation of 3.1


def test_training_seeds_are_a_level_of_their_own(generator):
    """Seeds that differ widen the interval, which prompts alone would make narrow."""
    steps = torch.full((100,), 40.0)
    theirs = arm(2 * steps, steps)
    seeds = torch.cat([arm(tau * steps, steps) for tau in (2.0, 2.2, 2.4)])
    interval = ratio_interval(seeds, theirs)
    assert interval.value == pytest.approx(1.1)
    assert (interval.low, interval.high) == pytest.approx((1.0, 1.2))  # all draws of the worst, or of the best seed
    alone = ratio_interval(seeds[1:2], theirs)
    assert (alone.low, alone.high) == pytest.approx((1.1, 1.1))


def test_a_seed_gives_the_same_interval(generator):
    counts = arm(torch.randint(50, 100, (30,), generator=generator), torch.full((30,), 40))
    other = arm(torch.randint(50, 100, (30,), generator=generator), torch.full((30,), 40))
    assert ratio_interval(counts, other, num_draws=100) == ratio_interval(counts, other, num_draws=100)
    assert ratio_interval(counts, other, num_draws=100) != ratio_interval(counts, other, num_draws=100, seed=1)


@pytest.mark.parametrize(
    ("sign", "low", "high", "verdict"),
    [
        ("more", 1.01, 1.2, "reproduced"),
        ("more", 1.0, 1.2, "undecided"),
        ("more", 0.9, 1.2, "undecided"),
        ("more", 0.8, 0.99, "not reproduced"),
        ("less", 0.8, 0.99, "reproduced"),
        ("less", 0.8, 1.01, "undecided"),
        ("less", 1.01, 1.2, "not reproduced"),
        ("equal", 0.985, 1.015, "reproduced"),
        ("equal", 0.95, 1.01, "undecided"),
        ("equal", 1.03, 1.1, "not reproduced"),
        ("equal", 0.9, 0.97, "not reproduced"),
    ],
)
def test_what_an_interval_says(sign, low, high, verdict):
    assert verdict_of(sign, Interval((low + high) / 2, low, high)) == verdict


def test_counts_that_do_not_fit_are_refused():
    counts = arm([4.0, 5.0], [2.0, 2.0])
    with pytest.raises(ValueError, match="theirs: expected 2 prompts, as ours has, got 1"):
        ratio_interval(counts, counts[:, :1])
    with pytest.raises(ValueError, match=r"ours: expected \[seeds, prompts, 2\] counts, got shape \[2, 2\]"):
        ratio_interval(counts[0], counts)
    with pytest.raises(ValueError, match="ours: expected at least 2 prompts, got 1"):
        ratio_interval(counts[:, :1], counts[:, :1])


def test_the_interval_of_one_mean_is_that_of_its_draws():
    counts = torch.tensor([[[2.0, 1.0], [4.0, 1.0], [6.0, 4.0]]])
    found = mean_interval(counts, num_draws=4000)
    assert found.value == 12 / 6
    # of 27 draws one in 27 takes the second prompt alone, which is the largest mean, and one the third alone
    assert (found.low, found.high) == (1.5, 4.0)
    assert mean_interval(counts.expand(2, -1, -1)).value == 2
