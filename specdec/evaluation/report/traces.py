"""The answers of an evaluation as the page's own data: texts, steps and draft trees, made small.

Every text of a token stands once, in `strings`, and is named by its place there. Equal texts share a list of places.
Probabilities are in ten-thousandths. The page's script (`page/traces.js`) reads:

    strings     texts, those that occur most often first
    arms        [name, library]
    questions   [name, category, number of turns, opening]
    texts       of answers: places in `strings`, token by token
    answers     [arm, question, turn, temperature, seed, text, tokens of every step or 0, trace or -1, difference or
                -1]; arms, questions, texts and traces by their places, the difference as the first token that is not
                plain decoding's
    traces      [whether its text is another than the answer's, first token, steps], a step being
                [parents, texts, probabilities, choices, their probabilities, path, emitted]
    num_traces  how many were made; the page holds those that fit
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from specdec.evaluation.records import Answer, Key, Results, Trace, TracedStep

__all__ = ["trace_data"]

MAX_NODES = 60_000
"""Nodes of all traces of a page, about two megabytes."""


def trace_data(results: Results) -> dict[str, Any]:
    """What the page's script shows.

    Args:
        results: what was measured; repeats of an answer are left out.
    """
    answers = [one for one in results.answers.values() if one.repeat == 0]
    traces = _that_fit(results)
    numbers = _numbers(results, answers, traces)
    strings = list(numbers)
    texts: dict[tuple[int, ...], int] = {}
    arms = {arm.name: place for place, arm in enumerate(results.about.arms)}
    questions = {question["name"]: place for place, question in enumerate(results.about.questions)}
    places = {key: place for place, key in enumerate(traces)}
    rows = []
    for one in answers:
        text = tuple(numbers[piece] for piece in results.text_of(one))
        rows.append(
            [
                arms[one.arm],
                questions[one.question],
                one.turn,
                one.temperature,
                one.seed,
                texts.setdefault(text, len(texts)),
                one.num_emitted or 0,
                places.get(one.key, -1),
                -1 if one.divergence is None else one.divergence["position"],
            ]
        )
    return {
        "strings": strings,
        "arms": [[arm.name, arm.library] for arm in results.about.arms],
        "questions": [
            [one["name"], one["category"], one["num_turns"], one["opening"]] for one in results.about.questions
        ],
        "texts": [list(text) for text in texts],
        "answers": rows,
        "traces": [_trace(one, results, numbers) for one in traces.values()],
        "num_traces": len(results.traces),
    }


def _that_fit(results: Results) -> dict[Key, Trace]:
    """Traces of answers, question by question with all arms, up to the most nodes of a page."""
    order = {question["name"]: place for place, question in enumerate(results.about.questions)}
    known = [trace for trace in results.traces.values() if trace.key in results.answers]
    found, num_nodes = {}, 0
    for trace in sorted(known, key=lambda one: (order[one.question], one.turn, one.seed)):
        num_nodes += sum(len(step.parent) for step in trace.steps)
        if num_nodes > MAX_NODES:
            break
        found[trace.key] = trace
    return found


def _numbers(results: Results, answers: list[Answer], traces: dict[Key, Trace]) -> dict[str, int]:
    """Every text of a token with its place, the most frequent first."""
    counts: Counter[str] = Counter()
    for answer in answers:
        counts.update(results.text_of(answer))
    for trace in traces.values():
        counts.update(_texts_of(trace))
    # by the text where they are equally many, so that the order in which arms came does not matter
    return {text: place for place, text in enumerate(sorted(counts, key=lambda text: (-counts[text], text)))}


def _texts_of(trace: Trace) -> Iterator[str]:
    yield trace.first
    for step in trace.steps:
        yield from step.pieces
        yield from step.choices
        yield from step.emitted


def _trace(trace: Trace, results: Results, numbers: dict[str, int]) -> list[Any]:
    """A trace; its text is another than the timed answer's where kernels of two loops round differently."""
    text = [trace.first, *(piece for step in trace.steps for piece in step.emitted)]
    is_other = text != results.text_of(results.answers[trace.key])
    return [int(is_other), numbers[trace.first], [_step(step, numbers) for step in trace.steps]]


def _step(step: TracedStep, numbers: dict[str, int]) -> list[list[int]]:
    return [
        step.parent,
        [numbers[piece] for piece in step.pieces],
        [round(10_000 * prob) for prob in step.probs],
        [numbers[piece] for piece in step.choices],
        [round(10_000 * prob) for prob in step.choice_probs],
        step.path,
        [numbers[piece] for piece in step.emitted],
    ]
