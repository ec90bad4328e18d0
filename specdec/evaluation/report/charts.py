"""The charts of a report, each with its figures in a table."""

import statistics
from collections.abc import Mapping, Sequence

from specdec.evaluation.figures import ArmFigures
from specdec.evaluation.records import PLAIN
from specdec.evaluation.report.document import Cell, Chart, Table
from specdec.evaluation.report.drawing import SOFT, Style, drawn, legend, marker_options, name_rows
from specdec.evaluation.report.numbers import NONE, at_temperature, interval_cell, percent, times

__all__ = ["by_category", "by_depth", "over_prompts", "speed_against_tau"]

MAX_SPOKEN = 60
"""Cells of a table that are read aloud for its chart; of a larger one the title is, and the table stands below."""


def speed_against_tau(arms: Sequence[ArmFigures], styles: Mapping[str, Style], temperature: float) -> Chart | None:
    """What each arm's acceptance length is worth in speed; None where no drafter tells one."""
    shown = [(one, one.tau) for one in arms if one.tau is not None]
    if len(shown) < 2:
        return None
    rows = [
        (
            Cell(one.arm.name),
            interval_cell(tau, is_ratio=False),
            interval_cell(one.speedup, is_ratio=True),
            Cell(NONE if one.efficiency is None else percent(one.efficiency)),
        )
        for one, tau in shown
    ]
    title = f"Speed against tau, {at_temperature(temperature)}"
    table = Table(title, ("arm", "tau", "speedup", "efficiency"), rows)
    with drawn(_name("tau", temperature), _spoken(table), height=3.6) as (axes, pictures):
        most = max(tau.value for _, tau in shown)
        axes.axhline(1, color=SOFT, linewidth=0.8, linestyle="--")
        axes.plot([1, most], [1, most], color=SOFT, linewidth=0.8, linestyle=":", label="speedup = tau")
        for one, tau in shown:
            style = marker_options(styles[one.arm.name])
            speed = one.speedup
            if one.arm.name != PLAIN:  # bounds that are NaN are not drawn
                axes.plot([tau.low, tau.high], [speed.value, speed.value], color=style["color"], linewidth=1)
                axes.plot([tau.value, tau.value], [speed.low, speed.high], color=style["color"], linewidth=1)
            axes.plot([tau.value], [speed.value], linestyle="", label=one.arm.name, **style)
        axes.set_xlabel("tau, tokens a step")
        axes.set_ylabel("speedup over plain decoding")
        legend(axes, [one.arm.name for one, _ in shown])
    return Chart(title, pictures[0], table)


def by_depth(arms: Sequence[ArmFigures], styles: Mapping[str, Style], temperature: float) -> Chart | None:
    """How often a node at each depth is accepted; None where no arm proposes any."""
    shown = [arm for arm in arms if arm.acceptance_at_depth]
    if not shown:
        return None
    deepest = max(len(one.acceptance_at_depth) for one in shown)
    rows = []
    for one in shown:
        shares = [percent(share) for share in one.acceptance_at_depth]
        rows.append((Cell(one.arm.name), *map(Cell, shares + [NONE] * (deepest - len(shares)))))
    title = f"Acceptance by depth, {at_temperature(temperature)}"
    table = Table(title, ("arm", *(f"depth {depth}" for depth in range(1, deepest + 1))), rows)
    with drawn(_name("depth", temperature), _spoken(table), height=3.6) as (axes, pictures):
        for one in shown:
            values = [100 * share for share in one.acceptance_at_depth]
            style = marker_options(styles[one.arm.name])
            axes.plot(range(1, len(values) + 1), values, linewidth=1.4, label=one.arm.name, **style)
        axes.set_ylim(-4, 104)
        axes.set_xlim(0.6, max(deepest, 2) + 0.4)
        axes.set_xticks(range(1, deepest + 1, 1 + deepest // 12))
        axes.set_xlabel("depth in the draft tree")
        axes.set_ylabel("accepted there, % of tries")
        legend(axes, [one.arm.name for one in shown])
    return Chart(title, pictures[0], table)


def by_category(
    found: Mapping[str, Sequence[ArmFigures]], styles: Mapping[str, Style], temperature: float
) -> Chart | None:
    """Speedup of every arm for every category; None where there is nothing to compare.

    Args:
        found: by category its figures.
        styles: of the arms.
        temperature: of the figures.
    """
    arms = list(dict.fromkeys(one.arm.name for every in found.values() for one in every if one.arm.name != PLAIN))
    if not arms:
        return None
    rows = []
    for name, every in found.items():
        by_arm = {one.arm.name: one for one in every}
        rows.append((Cell(f"{name} ({len(every[0].groups)})"), *(_speed_and_tau(by_arm[arm]) for arm in arms)))
    title = f"Speedup by category, {at_temperature(temperature)}"
    table = Table(title, ("category (prompts)", *arms), rows)
    height = 1.1 + len(found) * max(0.4, 0.11 * len(arms)) + 0.1 * len(arms)
    with drawn(_name("category", temperature), _spoken(table), height=height) as (axes, pictures):
        axes.axvline(1, color=SOFT, linewidth=0.8, linestyle="--")
        for place, arm in enumerate(arms):
            speeds = [one.speedup.value for every in found.values() for one in every if one.arm.name == arm]
            shift = 0.6 * ((place + 0.5) / len(arms) - 0.5)
            heights = [row + shift for row in range(len(found))]
            axes.plot(speeds, heights, linestyle="", label=arm, **marker_options(styles[arm]))
        for row in range(1, len(found)):
            axes.axhline(row - 0.5, color=SOFT, linewidth=0.4, alpha=0.5)
        name_rows(axes, list(found))
        axes.set_xlabel("speedup over plain decoding")
        legend(axes, arms)
    return Chart(title, pictures[0], table)


def over_prompts(arms: Sequence[ArmFigures], styles: Mapping[str, Style], temperature: float) -> Chart | None:
    """How speedups spread over groups; None where there is nothing to compare."""
    shown = [one for one in arms if one.arm.name != PLAIN and len(one.groups) > 1]
    if not shown:
        return None
    fives = []  # least, quartiles, most
    for one in shown:
        speeds = [group.speedup for group in one.groups]
        fives.append((min(speeds), *statistics.quantiles(speeds, n=4, method="inclusive"), max(speeds)))
    rows = [
        (Cell(one.arm.name), *(Cell(times(speed)) for speed in five), Cell(percent(one.share_slower)))
        for one, five in zip(shown, fives, strict=True)
    ]
    title = f"Speedup over prompts, {at_temperature(temperature)}"
    table = Table(title, ("arm", "least", "25 %", "median", "75 %", "most", "slower than plain"), rows)
    with drawn(_name("prompts", temperature), _spoken(table), height=0.9 + 0.42 * len(shown)) as (axes, pictures):
        axes.axvline(1, color=SOFT, linewidth=0.8, linestyle="--")
        for row, (one, (_, low, middle, high, _)) in enumerate(zip(shown, fives, strict=True)):
            style = {**marker_options(styles[one.arm.name]), "markersize": 4}
            colour = style["color"]
            axes.plot([low, high], [row, row], color=colour, linewidth=9, alpha=0.22, solid_capstyle="butt")
            speeds = [group.speedup for group in one.groups]
            axes.plot(speeds, [row] * len(speeds), linestyle="", alpha=0.6, **style)
            axes.plot([middle, middle], [row - 0.3, row + 0.3], color=colour, linewidth=2)
        name_rows(axes, [one.arm.name for one in shown])
        axes.set_xlabel("speedup of each prompt over plain decoding")
    return Chart(title, pictures[0], table)


def _speed_and_tau(one: ArmFigures) -> Cell:
    return Cell(times(one.speedup.value), "" if one.tau is None else f"tau {one.tau.value:.2f}")


def _name(kind: str, temperature: float) -> str:
    """Of a chart, unique in its page."""
    return f"{kind}-{temperature:g}".replace(".", "-")


def _spoken(table: Table) -> str:
    """A table in words, for those who do not see the chart."""
    if len(table.rows) * len(table.head) > MAX_SPOKEN:
        return f"{table.title}: the figures are in the table below"
    rows = [
        f"{row[0].text}: "
        + ", ".join(f"{name} {cell.text}" for name, cell in zip(table.head[1:], row[1:], strict=True))
        for row in table.rows
    ]
    return f"{table.title}. {'; '.join(rows)}"
