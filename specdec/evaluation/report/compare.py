"""Evaluations side by side: of two commits, of two machines."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specdec.evaluation.figures import ArmFigures, figures, group_rates
from specdec.evaluation.intervals import Interval, mean_of, ratio_interval
from specdec.evaluation.records import Answer, Results
from specdec.evaluation.report.document import Cell, Document, Section, Table
from specdec.evaluation.report.machine import machine_rows
from specdec.evaluation.report.numbers import NONE, around, at_temperature, bounds, count, interval_cell, setting, times

__all__ = ["compare"]

MAX_DIFFERENCES = 20
"""Differing texts that are listed of each pair of runs."""


def compare(runs: Mapping[str, Results]) -> Document:
    """What changed from the first run to each of the others.

    Args:
        runs: by name, at least two.
    """
    (base, first), *others = runs.items()
    headlines = [_headline(base, first, name, results) for name, results in others]
    sections = []
    for place, (name, results) in enumerate(others, start=1):
        sections += _sections(base, first, name, results, place)
    return Document(f"{' and '.join(name for name, _ in others)} against {base}", headlines, [], [], sections)


def _sections(base: str, first: Results, name: str, second: Results, place: int) -> list[Section]:
    """Everything about one pair."""
    shared = [temperature for temperature in first.temperatures if temperature in second.temperatures]
    tables, notes = [], []
    for temperature in shared:
        table, note = _speeds(base, first, name, second, temperature)
        tables += [table] if table.rows else []
        notes.append(note)
    if not tables:
        notes = ["No arm was measured in both at the same temperature."]
    pair = f"{name} against {base}"
    return [
        Section(f"speed-{place}", f"Speed: {pair}", text=list(dict.fromkeys(notes)), tables=tables),
        Section(f"apart-{place}", f"What else differs: {pair}", tables=[_apart(base, first, name, second)]),
        _texts(base, first, name, second, place),
    ]


def _headline(base: str, first: Results, name: str, second: Results) -> str:
    """Whether arms became faster."""
    for temperature in first.temperatures:
        arms = _both(first, second, temperature)
        ratios = [_ratio(first, second, temperature, ours.arm.name) for ours, _ in arms]
        faster = sum(ratio.low > 1 for ratio, _ in ratios)
        slower = sum(ratio.high < 1 for ratio, _ in ratios)
        if arms:
            rest = len(arms) - faster - slower
            return (
                f"With {at_temperature(temperature)}, {name} is faster than {base} in {faster} of {len(arms)} arms, "
                f"slower in {slower}, and open in {rest}, whose interval includes 1."
            )
    return f"{name} and {base} have no arm in common."


def _both(first: Results, second: Results, temperature: float) -> list[tuple[ArmFigures, ArmFigures]]:
    """The figures of the arms that both have."""
    theirs = {one.arm.name: one for one in figures(second, temperature)}
    return [(one, theirs[one.arm.name]) for one in figures(first, temperature) if one.arm.name in theirs]


def _speeds(base: str, first: Results, name: str, second: Results, temperature: float) -> tuple[Table, str]:
    """One row an arm, and how the ratios were made."""
    rows, note = [], ""
    for before, after in _both(first, second, temperature):
        ratio, note = _ratio(first, second, temperature, before.arm.name)
        rows.append(
            (
                Cell(before.arm.name),
                Cell(f"{before.tokens_per_second:,.1f}"),
                Cell(f"{after.tokens_per_second:,.1f}"),
                Cell(times(ratio.value), bounds(ratio), is_best=ratio.low > 1 or ratio.high < 1),
                interval_cell(before.speedup, is_ratio=True),
                interval_cell(after.speedup, is_ratio=True),
                interval_cell(before.tau, is_ratio=False),
                interval_cell(after.tau, is_ratio=False),
            )
        )
    head = ["arm"]
    head += [f"tok/s, {base}", f"tok/s, {name}", "ratio"]
    head += [f"{figure}, {run}" for figure in ("speedup", "tau") for run in (base, name)]
    return Table(at_temperature(temperature).capitalize(), tuple(head), rows), note


def _ratio(first: Results, second: Results, temperature: float, arm: str) -> tuple[Interval, str]:
    """Tokens per second of the second run over the first one's, and how that was taken.

    Runs whose questions are the same are compared question by question. Of others, those that both have are; where
    there are fewer than two of these, all of both, drawn anew each for itself.
    """
    ours, theirs = group_rates(second, temperature, arm), group_rates(first, temperature, arm)
    common = [key for key in theirs if key in ours]
    if len(common) > 1:
        is_all = len(common) == len(ours) == len(theirs)
        which = "the same prompts" if is_all else f"the {len(common)} groups of prompts that both have"
        return _interval([ours[key] for key in common], [theirs[key] for key in common], paired=True), (
            f"Ratios are of tokens per second, the later run by the first, with paired intervals over {which}."
        )
    return _interval(list(ours.values()), list(theirs.values()), paired=False), (
        "The prompts are not the same: ratios are of tokens per second over all prompts of each run, and their "
        "intervals are unpaired, which is wide and says nothing if the prompts differ in kind."
    )


def _interval(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]], *, paired: bool) -> Interval:
    """The ratio of two rates over groups; without bounds where one group tells nothing of others."""
    first, second = (torch.tensor([rates], dtype=torch.float64) for rates in (ours, theirs))
    if min(len(ours), len(theirs)) < 2:
        return Interval(mean_of(first) / mean_of(second), float("nan"), float("nan"))
    return ratio_interval(first, second, paired=paired)


def _apart(base: str, first: Results, name: str, second: Results) -> Table:
    """Settings, machine and software that are not the same in both."""
    told = []
    for results in (first, second):
        rows = {key.replace("_", " "): setting(value) for key, value in results.about.settings.items()}
        rows["questions"] = str(len(results.about.questions))
        rows |= machine_rows(results.sessions[-1]) if results.sessions else {}
        told.append(rows)
    before, after = told
    names = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    cells = [(Cell(key), Cell(before.get(key, NONE)), Cell(after.get(key, NONE))) for key in names]
    nothing = (Cell("nothing"), Cell(NONE), Cell(NONE))
    return Table("", ("", base, name), cells or [nothing], num_words=3)


def _texts(base: str, first: Results, name: str, second: Results, place: int) -> Section:
    """Greedy answers to the same question whose tokens differ."""
    same = {_question(row) for row in first.about.questions} & {_question(row) for row in second.about.questions}
    names = {question for question, _ in same}
    pairs = [
        (one, second.answers[one.key])
        for one in first.answers.values()
        if one.temperature == 0 and one.repeat == 0 and one.question in names and one.key in second.answers
    ]
    differing = [(one, other, where) for one, other in pairs if (where := _first(one, other)) is not None]
    if not pairs:
        text = "There is no greedy answer to the same question in both."
    elif not differing:
        text = f"All {len(pairs)} greedy texts that both have are the same, token for token."
    else:
        differ = "1 differs" if len(differing) == 1 else f"{len(differing)} differ"
        text = f"Of {count(len(pairs), 'greedy text')} that both have {differ}."
    rows = [
        (
            Cell(one.arm),
            Cell(one.question if one.turn == 1 else f"{one.question}, turn {one.turn}"),
            Cell(around(first.text_of(one), where)),
            Cell(around(second.text_of(other), where)),
            Cell(str(where + 1)),
        )
        for one, other, where in differing[:MAX_DIFFERENCES]
    ]
    tables = [Table("", ("arm", "prompt", base, name, "at token"), rows, num_words=4)] if rows else []
    return Section(f"texts-{place}", f"Texts: {name} against {base}", text=[text], tables=tables)


def _question(row: Mapping[str, Any]) -> tuple[str, str]:
    """By what two runs have the same question."""
    return row["name"], row["opening"]


def _first(one: Answer, other: Answer) -> int | None:
    """The first token that differs; of answers of other lengths the common part counts."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next((place for place, (before, after) in enumerate(pairs) if before != after), None)
