"""What an evaluation comes to: a sentence and a table per temperature, and what a reader must know first."""

from collections.abc import Sequence
from typing import Any

from specdec.evaluation.figures import ArmFigures, compare_speeds
from specdec.evaluation.records import PLAIN, ArmInfo, Results
from specdec.evaluation.report.document import Cell, Table
from specdec.evaluation.report.found import Found, is_explained
from specdec.evaluation.report.machine import describe_machine
from specdec.evaluation.report.numbers import NONE, at_temperature, bounds, count, interval_cell, percent, times

__all__ = ["describe", "headline", "headline_table", "transformers_table", "warnings"]


def describe(results: Results) -> str:
    """What was evaluated, as a title."""
    model, prompts = results.about.settings.get("model"), _joined(results.about.settings.get("prompts"))
    return " on ".join(str(part) for part in (model, prompts) if part) or "Evaluation"


def headline(found: Found) -> tuple[list[str], list[tuple[str, str]]]:
    """A sentence for every temperature, and the figure in each."""
    sentences, figures = [], []
    for temperature, arms in found.whole.items():
        if arms:
            sentence, figure = _headline(found, temperature, arms)
            sentences.append(sentence)
            figures.append(figure)
    return sentences or ["No prompt was finished by every arm yet: there is nothing to compare."], figures


def headline_table(found: Found, temperature: float) -> Table:
    """One row an arm; arms that could not run follow with the reason."""
    arms = found.whole[temperature]
    best = max(arms, key=lambda one: one.speedup.value).arm.name
    rows = [_row(one, is_best=one.arm.name == best) for one in arms]
    head = ("arm", "tok/s", "speedup", "tau", "efficiency", "slower than plain", "same texts")
    rows += [
        (Cell(name, f"not measured: {reason}"), *[Cell(NONE)] * (len(head) - 1))
        for name, reason in found.results.missing.items()
    ]
    num_prompts = arms[0].num_answers
    return Table(f"{at_temperature(temperature).capitalize()}, {count(num_prompts, 'prompt')}", head, rows)


def transformers_table(found: Found, temperature: float) -> Table | None:
    """How fast each arm of ours is beside what transformers has for it; None where that was not measured."""
    measured = [one.arm for one in found.whole[temperature]]
    theirs = [arm.name for arm in measured if arm.library != "specdec"]
    rows = []
    for arm in measured:
        counterpart = _counterpart(arm, theirs)
        if arm.library == "specdec" and counterpart is not None:
            ratio = compare_speeds(found.results, temperature, arm.name, counterpart)
            rows.append((Cell(arm.name), Cell(counterpart), interval_cell(ratio, is_ratio=True)))
    head = ("arm", "beside", "ratio of speeds")
    title = f"Beside transformers, {at_temperature(temperature)}"
    return Table(title, head, rows, num_words=2) if rows else None


def _counterpart(arm: ArmInfo, theirs: Sequence[str]) -> str | None:
    """The arm of transformers that does the same; its `generate` for what it does not have."""
    own = [f"transformers_{arm.name}", *["transformers_prompt_lookup"] * arm.about.startswith("prompt_lookup,")]
    return next((name for name in (*own, "transformers") if name in theirs), None)


def warnings(found: Found) -> list[str]:
    """What one must know before one reads figures."""
    results = found.results
    sentences = []
    for arm in _ours(results):
        firsts = [one for one in results.answers.values() if one.arm == arm and one.repeat == 0]
        if bad := sum(not is_explained(one) for one in firsts):
            texts = "1 greedy text differs" if bad == 1 else f"{bad} greedy texts differ"
            sentences.append(f"{arm}: {texts} from plain decoding, and rounding does not explain it.")
    for temperature, planned in found.num_planned.items():
        finished = found.num_finished[temperature]
        if finished < planned:
            noun = "groups of prompts" if found.batch_size > 1 else "questions"
            part = f"{finished} of {planned} {noun} ({percent(finished / planned)})"
            sentences.append(
                f"The run was cut off: of {at_temperature(temperature)} it has {part}. "
                "The same command with --resume goes on where it ended."
            )
    for name, reason in results.missing.items():
        sentences.append(f"{name} could not run: {reason}")
    if results.left_out:
        sentences.append(f"{count(len(results.left_out), 'prompt')} could not be asked, and why: see What is left out.")
    return sentences


def _headline(found: Found, temperature: float, arms: Sequence[ArmFigures]) -> tuple[str, tuple[str, str]]:
    """The sentence of one temperature, and its figure with what that counts."""
    results = found.results
    where = f"on {count(arms[0].num_answers, 'prompt')}, {at_temperature(temperature)}"
    if found.batch_size > 1:
        where += f", {found.batch_size} at a time"
    machine = describe_machine(results.sessions[-1]) if results.sessions else "an unknown machine"
    best = max(arms, key=lambda one: one.speedup.value)
    if best.arm.name == PLAIN:
        sentence = f"Nothing is faster than plain decoding {where} ({machine})."
        return sentence, (times(1.0), f"plain decoding, {at_temperature(temperature)}")
    interval = bounds(best.speedup)
    shown = f"{times(best.speedup.value)} plain decoding{' ' * bool(interval)}{interval}"
    sentence = f"{best.arm.name} is the fastest of {len(arms)} arms: {shown} {where} ({machine})."
    if best.speedup.low <= 1 <= best.speedup.high:
        sentence += " The interval includes 1: more prompts would tell."
    return sentence, (times(best.speedup.value), f"{best.arm.name}, {at_temperature(temperature)}")


def _row(one: ArmFigures, *, is_best: bool) -> tuple[Cell, ...]:
    is_plain = one.arm.name == PLAIN
    same = NONE if one.num_identical is None else f"{one.num_identical} of {one.num_answers}"
    return (
        Cell(
            one.arm.name, "" if one.arm.library in (one.arm.name.split("_")[0], "specdec") else one.arm.library, is_best
        ),
        Cell(f"{one.tokens_per_second:,.1f}", is_best=is_best),
        Cell(times(1.0)) if is_plain else interval_cell(one.speedup, is_ratio=True, is_best=is_best),
        interval_cell(one.tau, is_ratio=False),
        Cell(NONE if one.efficiency is None or is_plain else percent(one.efficiency)),
        Cell(NONE if is_plain else percent(one.share_slower)),
        Cell(NONE if is_plain else same),
    )


def _ours(results: Results) -> list[str]:
    """Arms of this library, whose texts have to be right."""
    return [arm.name for arm in results.about.arms if arm.library == "specdec"]


def _joined(value: Any) -> str | None:
    """What a setting names; of prompts only the names, without what else is known of them."""
    values = value if isinstance(value, list | tuple) else [value]
    names = [one.get("name") if isinstance(one, dict) else one for one in values]
    return ", ".join(str(name) for name in names if name is not None) or None
