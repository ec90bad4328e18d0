"""From the records of an evaluation to the figures of its reports.

A group is a batch of prompts that every arm decoded at the same moment; of batches of one it is a question, all its
turns together. Arms are compared on the groups that all of them have finished: a run that was cut off is a smaller run.
Of repeats of an answer the median time counts.

    tokens per second   new tokens by the wall time of the whole calls, prompts included
    speedup             its ratio to plain decoding's, with a paired bootstrap interval over the groups
    efficiency          speedup by tau: how much of what is accepted becomes speed
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specdec.evaluation.intervals import Interval, mean_interval, mean_of, ratio_interval
from specdec.evaluation.records import PLAIN, Answer, ArmInfo, Results
from specdec.loop.stats import AcceptanceStats

__all__ = ["ArmFigures", "GroupSpeed", "categories", "compare_speeds", "figures", "group_rates", "num_finished"]


@dataclass(frozen=True, slots=True)
class GroupSpeed:
    """How fast one group was with an arm.

    Attributes:
        questions: names of its questions.
        category: theirs.
        speedup: tokens per second over those of plain decoding on the same group.
        tau: acceptance length on it; None for arms that do not tell.
    """

    questions: tuple[str, ...]
    category: str
    speedup: float
    tau: float | None


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One arm's figures over all finished groups.

    Attributes:
        arm: which.
        num_answers: prompts that were answered, repeats not counted.
        num_tokens: new tokens of these.
        tokens_per_second: as above.
        speedup: as above; its bounds are NaN with fewer than two groups.
        tau: acceptance length, with an interval; None for arms that do not tell, or without a step.
        acceptance_at_depth: as in `AcceptanceStats`.
        times_ms: time by phase, first repeats.
        num_identical: greedy answers whose text is plain decoding's; None for sampling.
        divergences: greedy answers whose text is another, with where and how far.
        groups: per group its speed, in the order of the records.
    """

    arm: ArmInfo
    num_answers: int
    num_tokens: int
    tokens_per_second: float
    speedup: Interval
    tau: Interval | None
    acceptance_at_depth: list[float]
    times_ms: dict[str, float]
    num_identical: int | None
    divergences: list[Answer]
    groups: list[GroupSpeed]

    @property
    def efficiency(self) -> float | None:
        """Speedup by tau; None where there is no tau."""
        return self.speedup.value / self.tau.value if self.tau else None

    @property
    def share_slower(self) -> float:
        """Share of the groups that were slower than with plain decoding."""
        return sum(group.speedup < 1 for group in self.groups) / len(self.groups)


_Group = tuple[int, int]  # seed, number


def figures(results: Results, temperature: float, *, category: str | None = None) -> list[ArmFigures]:
    """The figures of every arm that was measured, in the order of the records.

    Args:
        results: what was measured.
        temperature: of the answers.
        category: of the questions; all by default.

    Returns:
        An empty list where no group is finished.
    """
    by_arm = _by_arm(results, temperature)
    groups = [group for group in _finished(results, by_arm) if category in (None, by_arm[PLAIN][group][0].category)]
    if not groups:
        return []
    plain = [_rate(by_arm[PLAIN][group]) for group in groups]
    found = []
    for arm in results.about.arms:
        if arm.name in by_arm:
            answers = [by_arm[arm.name][group] for group in groups]
            found.append(_figures(arm, answers, _by_number(groups, plain), plain, groups, is_greedy=temperature == 0))
    return found


def categories(results: Results) -> list[str]:
    """Categories of the questions, in the order of the records; empty where no question has one."""
    return list(dict.fromkeys(question["category"] for question in results.about.questions if question["category"]))


def num_finished(results: Results, temperature: float) -> int:
    """Groups that all arms have finished."""
    return len(_finished(results, _by_arm(results, temperature)))


def compare_speeds(results: Results, temperature: float, ours: str, theirs: str) -> Interval | None:
    """Tokens per second of one arm over those of another, with a paired interval; None if one was not measured."""
    by_arm = _by_arm(results, temperature)
    groups = _finished(results, by_arm)
    if not groups or ours not in by_arm or theirs not in by_arm:
        return None
    first, second = ([_rate(by_arm[name][group]) for group in groups] for name in (ours, theirs))
    return _ratio(_by_number(groups, first), _by_number(groups, second))


def group_rates(
    results: Results, temperature: float, arm: str
) -> dict[tuple[int, tuple[tuple[str, str], ...]], tuple[int, float]]:
    """New tokens and seconds of an arm, by seed and questions.

    Returns:
        Of every finished group; its questions by name and opening, so that those of another evaluation can be found.
        Empty if the arm was not measured.
    """
    by_arm = _by_arm(results, temperature)
    if arm not in by_arm:
        return {}
    questions: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for question in results.about.questions:
        questions[question["group"]].append((question["name"], question["opening"]))
    return {
        (seed, tuple(sorted(questions[number]))): _rate(by_arm[arm][seed, number])
        for seed, number in _finished(results, by_arm)
    }


def _by_arm(results: Results, temperature: float) -> Mapping[str, Mapping[_Group, list[Answer]]]:
    """The answers of every arm that did not fail, by group."""
    found: dict[str, dict[_Group, list[Answer]]] = {
        arm.name: defaultdict(list) for arm in results.about.arms if arm.name not in results.missing
    }
    for answer in results.answers.values():
        if answer.temperature == temperature and answer.arm in found:
            found[answer.arm][answer.seed, answer.group].append(answer)
    return found


def _finished(results: Results, by_arm: Mapping[str, Mapping[_Group, list[Answer]]]) -> list[_Group]:
    """The groups of which every arm has all answers, in order."""
    if PLAIN not in by_arm:
        return []
    sizes = {group: max(len(groups.get(group, ())) for groups in by_arm.values()) for group in by_arm[PLAIN]}
    wanted = _full_sizes(results)
    whole = [
        group
        for group, size in sizes.items()
        if size >= wanted.get(group[1], size) and all(len(groups.get(group, ())) == size for groups in by_arm.values())
    ]
    seeds = {seed for seed, _ in whole}
    # of several seeds a group counts once every seed has it
    return [group for group in whole if all((seed, group[1]) in whole for seed in seeds)]


def _full_sizes(results: Results) -> dict[int, int]:
    """Answers of a group with all its turns and repeats."""
    sizes: dict[int, int] = defaultdict(int)
    for question in results.about.questions:
        sizes[question["group"]] += results.about.settings["repeats"] * question["num_turns"]
    return sizes


def _figures(
    arm: ArmInfo,
    answers: Sequence[Sequence[Answer]],
    plain: torch.Tensor,
    plain_rates: Sequence[tuple[int, float]],
    groups: Sequence[_Group],
    *,
    is_greedy: bool,
) -> ArmFigures:
    """The figures of an arm from its answers by group."""
    rates = [_rate(group) for group in answers]
    first = [[one for one in group if one.repeat == 0] for group in answers]
    stats = [_stats(group) for group in first]
    told = [one for one in stats if one is not None]
    merged = AcceptanceStats.merged(told)
    counts = [(sum(map(sum, one.num_emitted)), sum(map(len, one.num_emitted))) for one in told]
    has_tau = len(told) == len(stats) and sum(steps for _, steps in counts) > 0
    differing = [one for group in first for one in group if one.divergence is not None]
    num_answers = sum(map(len, first))
    return ArmFigures(
        arm=arm,
        num_answers=num_answers,
        num_tokens=sum(tokens for tokens, _ in rates),
        tokens_per_second=sum(tokens for tokens, _ in rates) / sum(seconds for _, seconds in rates),
        speedup=_ratio(_by_number(groups, rates), plain),
        tau=_mean(_by_number(groups, counts)) if has_tau else None,
        acceptance_at_depth=merged.acceptance_at_depth,
        times_ms=_times(first),
        num_identical=num_answers - len(differing) if is_greedy else None,
        divergences=differing,
        groups=[
            GroupSpeed(
                questions=tuple(dict.fromkeys(one.question for one in group)),
                category=group[0].category,
                speedup=(rate[0] * other[1]) / (rate[1] * other[0]),  # exactly 1 for the same rate
                tau=one_stats.tau if one_stats is not None and one_stats.num_target_passes else None,
            )
            for group, rate, other, one_stats in zip(first, rates, plain_rates, stats, strict=True)
        ],
    )


def _rate(group: Sequence[Answer]) -> tuple[int, float]:
    """Tokens of a group, and the seconds they took: per turn the median of its repeats."""
    tokens = sum(len(one.tokens) for one in group if one.repeat == 0)
    seconds: dict[int, dict[int, float]] = defaultdict(dict)
    for one in group:  # all rows of a batch say the same
        seconds[one.turn][one.repeat] = one.seconds
    return tokens, sum(statistics.median(turn.values()) for turn in seconds.values())


def _stats(group: Sequence[Answer]) -> AcceptanceStats | None:
    """What the steps of a group accepted; None for arms that do not tell."""
    rows = [(one.num_emitted, one.deepest) for one in group]
    emitted = [row for row, _ in rows if row is not None]
    deepest = [row for _, row in rows if row is not None]
    if len(emitted) < len(rows):
        return None
    return AcceptanceStats(emitted, deepest, lossless=True, times_ms={}, num_target_passes=sum(map(len, emitted)))


def _times(groups: Sequence[Sequence[Answer]]) -> dict[str, float]:
    """Time by phase; all rows of a batch say the same."""
    times: dict[str, float] = defaultdict(float)
    for group in groups:
        for one in {answer.turn: answer for answer in group}.values():
            for phase, value in one.times_ms.items():
                times[phase] += value
    return dict(times)


def _by_number(groups: Sequence[_Group], counts: Sequence[tuple[float, float]]) -> torch.Tensor:
    """[1, groups, 2] float64 counts; seeds of a group are summed, as both sides of a ratio have the same ones."""
    found: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (_, number), (above, below) in zip(groups, counts, strict=True):
        found[number][0] += above
        found[number][1] += below
    return torch.tensor([[*found.values()]], dtype=torch.float64)


def _ratio(ours: torch.Tensor, theirs: torch.Tensor) -> Interval:
    """As `ratio_interval`, without bounds where one group tells nothing of others."""
    if ours.shape[1] < 2:
        return Interval(mean_of(ours) / mean_of(theirs), float("nan"), float("nan"))
    return ratio_interval(ours, theirs)


def _mean(counts: torch.Tensor) -> Interval:
    """As `mean_interval`, without bounds where one group tells nothing of others."""
    return Interval(mean_of(counts), float("nan"), float("nan")) if counts.shape[1] < 2 else mean_interval(counts)
