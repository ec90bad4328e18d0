"""What a report says of an evaluation, section by section."""

import math
import shlex
from collections.abc import Sequence

from specdec.evaluation.checking import Divergence
from specdec.evaluation.figures import ArmFigures, GroupSpeed
from specdec.evaluation.records import PLAIN, Answer, Results
from specdec.evaluation.report.charts import by_category, by_depth, over_prompts, speed_against_tau
from specdec.evaluation.report.chosen import chosen
from specdec.evaluation.report.document import Cell, Chart, Document, Section, Table
from specdec.evaluation.report.drawing import styles_of
from specdec.evaluation.report.found import Found, is_explained
from specdec.evaluation.report.headline import describe, headline, headline_table, transformers_table, warnings
from specdec.evaluation.report.machine import machine_table
from specdec.evaluation.report.numbers import NONE, around, at_temperature, setting, times
from specdec.evaluation.report.terms import TERMS

__all__ = ["document_of"]

NUM_SLOWEST = 3
"""Slowest prompts that are listed of every arm."""

MAX_DIFFERENCES = 50
"""Differing texts that are listed; the records have all of them."""


def document_of(found: Found) -> Document:
    """The report of an evaluation."""
    results = found.results
    sentences, figures = headline(found)
    sections = [
        _speeds(found),
        _acceptance(found),
        chosen(found),
        _categories(found),
        _prompts(found),
        _differences(found),
        _left_out(results),
        Section("machine", "Machine and software", tables=[machine_table(results.sessions)]),
        _command(results),
        Section("reading", "How to read this", terms=TERMS),
    ]
    shown = [one for one in sections if one.text or one.tables or one.charts or one.code or one.terms]
    return Document(describe(results), sentences, figures, warnings(found), shown)


def _speeds(found: Found) -> Section:
    """The table that people look at first."""
    tables: list[Table] = []
    for temperature, arms in found.whole.items():
        if arms:
            beside = transformers_table(found, temperature)
            tables += [headline_table(found, temperature), *([] if beside is None else [beside])]
    abouts = [(arm.name, f"{arm.about} ({arm.library})") for arm in found.results.about.arms]
    return Section("speed", "How fast", tables=tables, terms=abouts, fold="What the arms are")


def _acceptance(found: Found) -> Section:
    """What drafters guess, and what it is worth."""
    charts: list[Chart | None] = []
    styles = styles_of(found.results.about.arms)
    for temperature, arms in found.whole.items():
        charts += [speed_against_tau(arms, styles, temperature), by_depth(arms, styles, temperature)]
    text = "What a drafter is worth: how many tokens its draft trees win per step, and what of that becomes speed."
    shown = [chart for chart in charts if chart is not None]
    return Section("acceptance", "Speed and acceptance", text=[text] if shown else [], charts=shown, is_brief=False)


def _categories(found: Found) -> Section:
    """The same speeds, kind of question by kind of question."""
    styles = styles_of(found.results.about.arms)
    every = [by_category(parts, styles, temperature) for temperature, parts in found.parts.items() if parts]
    charts = [chart for chart in every if chart is not None]
    return Section("categories", "By category", tables=[chart.table for chart in charts], charts=charts)


def _prompts(found: Found) -> Section:
    """How much depends on the prompt."""
    styles = styles_of(found.results.about.arms)
    every = [over_prompts(arms, styles, temperature) for temperature, arms in found.whole.items()]
    openings = {question["name"]: question["opening"] for question in found.results.about.questions}
    tables = [_slowest(arms, openings, temperature) for temperature, arms in found.whole.items() if len(arms) > 1]
    charts = [chart for chart in every if chart is not None]
    text = "Each mark is a prompt. The bar spans the middle half of them, the line across it is their median."
    return Section(
        "prompts", "Prompt by prompt", text=[text] if charts else [], tables=tables, charts=charts, is_brief=False
    )


def _slowest(arms: Sequence[ArmFigures], openings: dict[str, str], temperature: float) -> Table:
    """Where every arm gains least."""
    rows = []
    for one in arms:
        slowest = sorted(one.groups, key=lambda group: group.speedup) if one.arm.name != PLAIN else []
        rows += [_slow_row(one.arm.name, group, openings) for group in slowest[:NUM_SLOWEST]]
    title = f"Slowest prompts of each arm, {at_temperature(temperature)}"
    return Table(title, ("arm", "prompt", "speedup", "tau"), rows, num_words=2, is_folded=True)


def _slow_row(arm: str, group: GroupSpeed, openings: dict[str, str]) -> tuple[Cell, ...]:
    names = ", ".join(group.questions)
    about = f"{names} ({group.category})" if group.category else names
    tau = NONE if group.tau is None else f"{group.tau:.2f}"
    return Cell(arm), Cell(about, _shortened(openings[group.questions[0]])), Cell(times(group.speedup)), Cell(tau)


def _shortened(text: str) -> str:
    """A text in one line of some seventy characters."""
    line = " ".join(text.split())
    return line if len(line) <= 70 else line[:69] + "\N{HORIZONTAL ELLIPSIS}"


def _differences(found: Found) -> Section:
    """Greedy texts that are not plain decoding's."""
    results = found.results
    if not any(key.temperature == 0 for key in results.answers):
        return Section("texts", "Texts")
    differing = [one for one in results.answers.values() if one.divergence is not None and one.repeat == 0]
    ours = [one for one in differing if _library(results, one) == "specdec"]
    if not differing:
        text = "Every greedy text of every arm is that of plain decoding, token for token."
        return Section("texts", "Are the texts the same?", text=[text])
    shown = differing[:MAX_DIFFERENCES]
    texts = "1 greedy text differs" if len(differing) == 1 else f"{len(differing)} greedy texts differ"
    text = f"{texts} from plain decoding, {len(ours)} of them of this library."
    if len(shown) < len(differing):
        text += f" The first {len(shown)} are listed."
    head = ("arm", "prompt", "plain decoding", "this arm", "at token", "logit margin", "rounding explains it")
    rows = [_difference(results, one) for one in shown]
    return Section("texts", "Are the texts the same?", text=[text], tables=[Table("", head, rows, num_words=4)])


def _difference(results: Results, answer: Answer) -> tuple[Cell, ...]:
    """One text's first difference."""
    assert answer.divergence is not None
    where = Divergence(**answer.divergence)
    plain = next(
        one
        for one in results.answers.values()
        if one.arm == PLAIN and (one.question, one.turn) == (answer.question, answer.turn) and one.temperature == 0
    )
    margin = "one text ends" if math.isinf(where.margin) else f"{where.margin:.3g}"
    return (
        Cell(answer.arm),
        Cell(answer.question if answer.turn == 1 else f"{answer.question}, turn {answer.turn}"),
        Cell(around(results.text_of(plain), where.position)),
        Cell(around(results.text_of(answer), where.position)),
        Cell(str(where.position + 1)),
        Cell(margin, f"of {where.tolerance:.3g}" if where.tolerance else ""),
        Cell("yes" if is_explained(answer) else "no"),
    )


def _library(results: Results, answer: Answer) -> str:
    return next((arm.library for arm in results.about.arms if arm.name == answer.arm), "")


def _left_out(results: Results) -> Section:
    """What is not in the figures, and why."""
    rows = [
        (
            Cell(one.question),
            Cell(str(one.turn)),
            Cell(NONE if one.num_tokens is None else f"{one.num_tokens:,}"),
            Cell(one.reason),
        )
        for one in results.left_out
    ]
    missing = [(Cell(name), Cell(reason)) for name, reason in results.missing.items()]
    tables = [Table("Arms that could not run", ("arm", "reason"), missing, num_words=2)] if missing else []
    if rows:
        head = ("prompt", "from turn", "tokens", "reason")
        tables.append(Table("Prompts that could not be asked", head, rows, num_words=4))
    return Section("left-out", "What is left out", tables=tables)


def _command(results: Results) -> Section:
    """What one types to get this, and what was asked for."""
    commands = list(dict.fromkeys(shlex.join(one["argv"]) for one in results.sessions if one.get("argv")))
    rows = [(Cell(name.replace("_", " ")), Cell(setting(value))) for name, value in results.about.settings.items()]
    text = ["It was called more than once, and went on where it had ended."] if len(commands) > 1 else []
    tables = [Table("What was asked for", ("setting", "value"), rows, num_words=2)] if rows else []
    return Section("command", "The command", text=text, code=commands, tables=tables)
