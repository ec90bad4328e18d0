"""What drafters that choose step by step chose, and what came of it: tables over all answers, charts of a few."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from specdec.evaluation.plans import AnswerPlan
from specdec.evaluation.records import PLAIN, Answer, ArmInfo, Results
from specdec.evaluation.report.document import Cell, Chart, Section, Table
from specdec.evaluation.report.drawing import SOFT, Style, drawn, legend, marker_options, styles_of
from specdec.evaluation.report.found import Found
from specdec.evaluation.report.numbers import NONE, at_temperature, count, interval_cell, percent, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["chosen"]

NUM_ANSWERS = 3
"""Answers of an arm that are drawn."""

MAX_STEPS = 400
"""Steps of an answer that are drawn: more cannot be told apart."""

_FLOOR = 0.75
"""Where the axis of tokens begins: a little below 1, so that a single token can be seen."""

_TEXT = (
    "At every step these arms choose which drafters propose and how many nodes the target scores, by what earlier "
    "steps accepted and by a table of what steps cost on this machine; where nothing pays, plain decoding. Expected "
    "tokens are by the chances that drafters give their nodes, before the target has seen them."
)
_CHARTS = (
    "In the charts of the page the line is the number of nodes, 1 in plain decoding, and the area the tokens that came"
)
_SINGLE = ": what lies between them was scored in vain."
_BATCHES = ". Steps and their tokens are those of a whole batch, nodes are counted per row."


@dataclass(frozen=True, slots=True)
class _Planned:
    """An answer with what was chosen for it."""

    answer: Answer
    plan: AnswerPlan

    @property
    def length(self) -> int:
        """Tokens that its steps emitted."""
        return sum(self.plan.emitted)


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a plan; its number is from 1."""

    number: int
    proposers: tuple[str, ...]
    num_nodes: int
    predicted: float
    emitted: int


def chosen(found: Found) -> Section:
    """What was chosen; a section without anything where no arm chooses."""
    by_arm = _by_arm(found.results)
    if not by_arm:
        return Section("chosen", "What was chosen")
    tables: list[Table] = []
    for temperature in found.whole:
        planned = {arm: every[temperature] for arm, every in by_arm.items() if temperature in every}
        tables += [_sets_table(arm, every, temperature) for arm, every in planned.items()]
        tables += (
            [_members_table(planned, temperature), _speedups_table(found, planned, temperature)] if planned else []
        )
    text = [_TEXT, _CHARTS + (_BATCHES if found.batch_size > 1 else _SINGLE)]
    return Section("chosen", "What was chosen", text=text, tables=tables, charts=_charts(found.results, by_arm))


def _by_arm(results: Results) -> dict[str, dict[float, list[_Planned]]]:
    """Answers with plans, by arm and temperature in their order; repeats are answers too."""
    made = [_Planned(one, one.plan) for one in results.answers.values() if one.plan is not None and one.plan.chosen]
    made.sort(key=lambda one: (one.answer.question, one.answer.turn, one.answer.seed, one.answer.repeat))
    found: dict[str, dict[float, list[_Planned]]] = {}
    for arm in results.about.arms:
        for temperature in results.temperatures:
            of_arm = [one for one in made if (one.answer.arm, one.answer.temperature) == (arm.name, temperature)]
            if of_arm:
                found.setdefault(arm.name, {})[temperature] = of_arm
    return found


def _steps(plan: AnswerPlan) -> Iterator[_Step]:
    """The steps of a plan; tokens are known of all of them."""
    for place, (num_nodes, predicted, emitted) in enumerate(
        zip(plan.num_nodes, plan.predicted, plan.emitted, strict=True)
    ):
        yield _Step(place + 1, plan.proposers(place), num_nodes, predicted, emitted)


def _name(proposers: Sequence[str]) -> str:
    """A set of drafters in words."""
    return " + ".join(proposers) or "plain decoding"


def _sets_table(arm: str, planned: Sequence[_Planned], temperature: float) -> Table:
    """How often each set of drafters proposed, with how many nodes, and what was expected and came."""
    steps = [step for one in planned for step in _steps(one.plan)]
    by_set: dict[tuple[str, ...], list[_Step]] = {}
    for step in steps:
        by_set.setdefault(step.proposers, []).append(step)
    ordered = sorted(by_set.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = [_set_row(_name(proposers), its, len(steps)) for proposers, its in ordered]
    if len(rows) > 1:
        rows.append(_set_row("all steps", steps, len(steps)))
    head = ("proposed by", "steps", "nodes, median", "expected tokens a step", "tokens a step")
    return Table(f"{arm}, {at_temperature(temperature)}", head, rows)


def _set_row(name: str, steps: Sequence[_Step], num_all: int) -> tuple[Cell, ...]:
    nodes = [step.num_nodes for step in steps]
    is_one = min(nodes) == max(nodes)
    return (
        Cell(name),
        Cell(percent(len(steps) / num_all), f"{len(steps):,}"),
        Cell(f"{statistics.median(nodes):g}", "" if is_one else f"{min(nodes)} to {max(nodes)}"),
        Cell(f"{statistics.fmean(step.predicted for step in steps):.2f}"),
        Cell(f"{statistics.fmean(step.emitted for step in steps):.2f}"),
    )


def _members_table(by_arm: Mapping[str, Sequence[_Planned]], temperature: float) -> Table:
    """What each drafter proposed of what was accepted."""
    rows = []
    for arm, planned in by_arm.items():
        steps = [step for one in planned for step in _steps(one.plan)]
        tokens = sum(step.emitted for step in steps)
        for member in dict.fromkeys(name for one in planned for name in one.plan.members):
            num_steps = sum(member in step.proposers for step in steps)
            accepted = sum(
                number
                for one in planned
                for name, number in zip(one.plan.members, one.plan.proposed_by, strict=True)
                if name == member
            )
            share = Cell(percent(num_steps / len(steps)))
            each = f"{accepted / num_steps:.2f}" if num_steps else NONE
            rows.append((Cell(arm), Cell(member), share, Cell(f"{accepted:,}", percent(accepted / tokens)), Cell(each)))
    head = ("arm", "drafter", "proposed in", "accepted of it", "each time")
    return Table(f"What each drafter contributed, {at_temperature(temperature)}", head, rows, num_words=2)


def _speedups_table(found: Found, by_arm: Mapping[str, Sequence[_Planned]], temperature: float) -> Table:
    """Speedups by the table of costs, of what was expected and of what came, beside the measured one."""
    measured = {one.arm.name: one.speedup for one in found.whole[temperature]}
    rows = []
    for arm, planned in by_arm.items():
        plans = [one.plan for one in planned]
        expected = _together(plans, [plan.predicted_speedup for plan in plans])
        came = _together(plans, [plan.real_speedup for plan in plans])
        rows.append((Cell(arm), expected, came, interval_cell(measured.get(arm), is_ratio=True)))
    head = ("arm", "expected", "with the tokens that came", "measured, prompt included")
    return Table(f"Speedup by the table of costs, {at_temperature(temperature)}", head, rows)


def _together(plans: Sequence[AnswerPlan], speedups: Sequence[float | None]) -> Cell:
    """The speedup of several answers: that of each counts by the time it was expected to take."""
    known = [(plan.cost_ms, speedup) for plan, speedup in zip(plans, speedups, strict=True) if speedup is not None]
    spent = sum(cost for cost, _ in known)
    return Cell(times(sum(cost * speedup for cost, speedup in known) / spent) if spent else NONE)


def _charts(results: Results, by_arm: Mapping[str, Mapping[float, Sequence[_Planned]]]) -> list[Chart]:
    """Of every arm, a few answers of its first temperature."""
    styles = _styles(results, [one.plan for every in by_arm.values() for part in every.values() for one in part])
    shown = [one for every in by_arm.values() for one in _longest(next(iter(every.values())))]
    return [_chart(one, styles, f"chosen-{number}") for number, one in enumerate(shown)]


def _longest(planned: Sequence[_Planned]) -> list[_Planned]:
    """The longest answer of each of a few categories; without categories the longest ones."""
    ordered = sorted((one for one in planned if one.answer.repeat == 0), key=lambda one: -one.length)
    firsts: dict[str, _Planned] = {}
    for one in ordered:
        firsts.setdefault(one.answer.category, one)
    return (list(firsts.values()) if len(firsts) > 1 else ordered)[:NUM_ANSWERS]


def _styles(results: Results, plans: Sequence[AnswerPlan]) -> dict[str, Style]:
    """How every set of drafters is drawn, by its name: as the arm of the same name, if there is one."""
    arms = [arm.name for arm in results.about.arms if arm.library == "specdec"]
    sets = dict.fromkeys(plan.proposers(step) for plan in plans for step in range(len(plan.chosen)))
    arm_of = {proposers: "+".join(proposers) or PLAIN for proposers in sorted(sets, key=lambda one: (len(one), one))}
    every = styles_of([ArmInfo(name, "specdec") for name in dict.fromkeys([*arms, *arm_of.values()])])
    return {_name(proposers): every[arm] for proposers, arm in arm_of.items()}


def _chart(one: _Planned, styles: Mapping[str, Style], name: str) -> Chart:
    """Nodes and tokens over the steps of an answer."""
    answer, steps = one.answer, list(_steps(one.plan))[:MAX_STEPS]
    runs = [list(group) for _, group in groupby(steps, key=lambda step: (step.proposers, step.num_nodes))]
    about = f"{answer.question} ({answer.category})" if answer.category else answer.question
    title = f"{answer.arm}, prompt {about}" + (f", turn {answer.turn}" if answer.turn > 1 else "")
    title += f", temperature {answer.temperature:g}" if answer.temperature else ""
    title += f", the first {MAX_STEPS} steps" if len(one.plan.chosen) > MAX_STEPS else ""
    head = ("steps", "proposed by", "nodes", "expected tokens a step", "tokens of each step")
    table = Table(title, head, [_run_row(run) for run in runs], num_words=2)
    with drawn(name, _spoken(title, steps), height=2.7) as (axes, pictures):
        edges = [0.5 + place for place in range(len(steps) + 1)]
        tokens = [max(step.emitted, _FLOOR) for step in steps]
        axes.stairs(
            tokens, edges, baseline=_FLOOR, fill=True, color=SOFT, alpha=0.35, linewidth=0, label="tokens that came"
        )
        nodes = [step.num_nodes for step in steps]
        axes.stairs(nodes, edges, baseline=None, color=SOFT, linewidth=0.5)
        _nodes_line(axes, steps, styles)
        _scale(axes, max(max(nodes), max(tokens)))
        axes.set_xlim(0.5, len(steps) + 0.5)
        axes.set_xlabel("step")
        axes.set_ylabel("nodes, tokens")
        legend(axes, axes.get_legend_handles_labels()[1])
    return Chart(title, pictures[0], table)


def _run_row(run: Sequence[_Step]) -> tuple[Cell, ...]:
    """Steps one behind the other that chose the same."""
    first, last = run[0], run[-1]
    return (
        Cell(str(first.number) if first is last else f"{first.number} to {last.number}"),
        Cell(_name(first.proposers)),
        Cell(str(first.num_nodes)),
        Cell(f"{statistics.fmean(step.predicted for step in run):.2f}"),
        Cell(_counted([step.emitted for step in run])),
    )


def _counted(numbers: Sequence[int]) -> str:
    """Numbers in their order, equal ones behind each other once: 2, 3 times 1."""
    runs = [(len(list(group)), number) for number, group in groupby(numbers)]
    return ", ".join(
        str(number) if length == 1 else f"{length} \N{MULTIPLICATION SIGN} {number}" for length, number in runs
    )


def _nodes_line(axes: "Axes", steps: Sequence[_Step], styles: Mapping[str, Style]) -> None:
    """The number of nodes in the colours of those who proposed; every run of steps of one set has a marker."""
    runs = [list(group) for _, group in groupby(steps, key=lambda step: step.proposers)]
    lines: dict[str, tuple[list[float], list[float]]] = {}
    marks: dict[str, tuple[list[float], list[float]]] = {}
    for run in runs:
        xs, ys = lines.setdefault(_name(run[0].proposers), ([], []))
        for step in run:
            xs += [step.number - 0.5, step.number + 0.5]
            ys += [step.num_nodes, step.num_nodes]
        xs.append(float("nan"))
        ys.append(float("nan"))
        middle = run[len(run) // 2]
        places, heights = marks.setdefault(_name(run[0].proposers), ([], []))
        places.append(middle.number)
        heights.append(middle.num_nodes)
    for name in (name for name in styles if name in lines):
        options = {**marker_options(styles[name]), "markersize": 4, "markeredgewidth": 1}
        axes.plot(*lines[name], color=options["color"], linewidth=1.6, solid_capstyle="butt")
        axes.plot(*marks[name], linestyle="", label=name, **options)


def _scale(axes: "Axes", most: float) -> None:
    """Powers of two from 1 up to the most nodes or tokens."""
    ticks = [1]
    while ticks[-1] < most:
        ticks.append(2 * ticks[-1])
    axes.set_yscale("log", base=2)
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(_FLOOR, max(2, most) * 1.25)


def _spoken(title: str, steps: Sequence[_Step]) -> str:
    """A chart in words, for those who do not see it."""
    names = dict.fromkeys(_name(step.proposers) for step in steps)
    shares = [f"{name} in {sum(_name(step.proposers) == name for step in steps)}" for name in names]
    nodes, tokens = [step.num_nodes for step in steps], sum(step.emitted for step in steps)
    return (
        f"{title}: {count(len(steps), 'step')}, {', '.join(shares)}; {min(nodes)} to {max(nodes)} nodes; "
        f"{count(tokens, 'token')}"
    )
