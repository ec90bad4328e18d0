"""`specdec demo`: three drafters write the same text in front of your eyes, then all ways to decode in one table.

The first line is there before torch is imported; whatever takes longer than a second says so, on a terminal and in a
pipe.
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.commands.common.options import bundled, check_positive, hide_progress_of_loading

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from specdec.commands.common.options import Commands
    from specdec.drafting.base import Drafter
    from specdec.evaluation.figures import ArmFigures
    from specdec.evaluation.prompts import Question
    from specdec.evaluation.records import Results
    from specdec.models.target.target import Target

__all__ = ["SHOWS", "Show", "add_to", "demo_questions", "run_demo"]


@dataclass(frozen=True, slots=True)
class Show:
    """What is shown of a model.

    Attributes:
        about: the model in words.
        max_new_tokens: new tokens of every text.
        repeats: how often every answer of the table is timed.
    """

    about: str
    max_new_tokens: int
    repeats: int


SHOWS: Mapping[str, Show] = {
    "tiny": Show("a LLaMA of 5 million parameters completes Python", 80, 3),
    "smollm2": Show("SmolLM2-135M-Instruct, a chat model, answers questions", 64, 1),
}
"""By the name of the model."""

_STREAMED = {
    "prompt_lookup": "no network; what followed the same words earlier in the text",
    "medusa": "one head for each of the next tokens, all guessing at once",
    "eagle": "one layer that reads the target's states and runs ahead of it",
}
"""The drafters that write in front of your eyes, and what they are."""

_MARKS = ("«", "»")
_MINUTES = 0.6  # after which the table asks no further prompt, so that a busy machine has a first minute too


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("demo", help="drafters write in front of your eyes, then a table; about a minute")
    lengths = ", ".join(f"{show.max_new_tokens} with {name}" for name, show in SHOWS.items())
    times = ", ".join(f"{show.repeats} with {name}" for name, show in SHOWS.items())
    models = "the model that ships, or a real chat model, which is fetched once (default: %(default)s)"
    report = "keep what was measured there, with a page to look at"
    parser.add_argument("--model", choices=tuple(SHOWS), default="tiny", help=models)
    parser.add_argument("--all", action="store_true", help="all bundled drafters in the table; takes minutes")
    parser.add_argument("--max-new-tokens", type=int, help=f"new tokens of every text (default: {lengths})")
    parser.add_argument("--repeats", type=int, help=f"times that an answer is timed; medians count (default: {times})")
    parser.add_argument("--mark", action="store_true", help=f"put {' and '.join(_MARKS)} around accepted draft tokens")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help=report)
    parser.add_argument("--json", action="store_true", help="print the table as JSON, and no texts")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    check_positive(options, "max_new_tokens", "repeats")
    is_right = run_demo(
        options.model,
        with_all=options.all,
        max_new_tokens=options.max_new_tokens,
        repeats=options.repeats,
        is_marked=options.mark,
        report=options.report,
        as_json=options.json,
    )
    return 0 if is_right else 1


def run_demo(
    model: str = "tiny",
    *,
    with_all: bool = False,
    max_new_tokens: int | None = None,
    repeats: int | None = None,
    is_marked: bool = False,
    report: Path | None = None,
    as_json: bool = False,
    console: "Console | None" = None,
) -> bool:
    """Stream one text with three drafters, then time them, plain decoding and transformers on a few prompts.

    Args:
        model: one of `SHOWS`.
        with_all: time all bundled drafters and the kinds without weights.
        max_new_tokens: new tokens of every text; by default the model's.
        repeats: times that every answer is timed; the median counts; by default the model's.
        is_marked: put marks around accepted draft tokens, for where there are no colours.
        report: folder for records and report; by default nothing is kept.
        as_json: print the table as JSON instead of texts and table, which leaves standard output to it.
        console: where to print.

    Returns:
        Whether every arm gave the text of plain decoding on every prompt.

    Raises:
        FileExistsError: `report` has records already.
        RuntimeError, ValueError, OSError: the model cannot be had.
    """
    from rich.console import Console

    show = SHOWS[model]
    if report is not None and (report / "records.jsonl").exists():
        raise FileExistsError(f"--report: expected a folder without records.jsonl, got {report}, which has one")
    console = Console(stderr=as_json, highlight=False) if console is None else console
    console.print(f"specdec demo: {show.about}", style="bold")
    if model == "smollm2":
        _announce_download(console)
    with _said(console, "loading torch, transformers and the model"):
        if report is not None:
            from specdec.evaluation.report import check_installed

            check_installed()
        stage = _load(model, max_new_tokens or show.max_new_tokens, with_all=with_all)
    if not as_json:
        _stream_all(stage, console, is_marked=is_marked)
    with contextlib.ExitStack() as stack:
        folder = report or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        minutes = _MINUTES if report is None and not with_all else None
        results = _measure(stage, repeats or show.repeats, folder, minutes=minutes, with_traces=report is not None)
    return _conclude(results, stage, console, report, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Stage:
    """What the demo runs on."""

    model: str
    target: "Target"
    tokenizer: "PreTrainedTokenizerBase"
    drafters: "dict[str, Drafter]"
    questions: "list[Question]"
    max_new_tokens: int


def demo_questions(model: str) -> "list[Question]":
    """The questions of the demo: plain decoding's answers to them do not circle.

    Args:
        model: one of `SHOWS`.
    """
    from specdec.bundled.load import TINY_FOLDER
    from specdec.evaluation.prompts import read_questions

    return read_questions(TINY_FOLDER.parent / model / "demo_prompts.json")


@contextlib.contextmanager
def _said(console: "Console", doing: str) -> Iterator[None]:
    """Says what is being done, at once, and how long it took."""
    console.print(f"{doing} ...", end=" ", soft_wrap=True)
    began = time.perf_counter()
    try:
        yield
    except BaseException:
        console.print()
        raise
    console.print(f"{time.perf_counter() - began:.1f} s")


def _announce_download(console: "Console") -> None:
    """Say that the chat model is about to be fetched, if it is."""
    from specdec.bundled.chat_model import SMOLLM2, cached

    if cached() is None:
        size = f"{SMOLLM2.num_bytes / 1e6:.0f} MB"
        console.print(f"{SMOLLM2.name} is not on this machine yet: it is fetched once, {size}")


def _load(model: str, max_new_tokens: int, *, with_all: bool) -> _Stage:
    """Model, drafters and questions; the drafters that write in front of your eyes have run once."""
    from specdec.bundled.load import bundled_drafters, load_model
    from specdec.drafters.load import load_drafter
    from specdec.evaluation.prompts import conversation_prompt
    from specdec.generation.generate import generate
    from specdec.models.target.target import Target

    hide_progress_of_loading(on_terminals=True)
    loaded, tokenizer = load_model(model)
    target = Target(loaded)
    names = [*_STREAMED, *(["lookahead", *bundled_drafters(model)] if with_all else [])]
    drafters = {name: load_drafter(bundled(model, name), target) for name in dict.fromkeys(names)}
    questions = demo_questions(model)
    prompt = conversation_prompt(questions[0], (), tokenizer)[None]
    for name in _STREAMED:  # the first call of each is slower
        generate(target, drafters[name], prompt, max_new_tokens=8, do_sample=False)
    return _Stage(model, target, tokenizer, drafters, questions, max_new_tokens)


def _stream_all(stage: _Stage, console: "Console", *, is_marked: bool) -> None:
    """The answer to the first question by three drafters, one after the other."""
    from specdec.commands.common.text import CompletionStream, describe_run
    from specdec.evaluation.prompts import conversation_prompt
    from specdec.generation.generate import SpecDecodeOutput, generate

    console.print(_legend(console, is_marked=is_marked), soft_wrap=True)
    question = stage.questions[0]
    prompt = conversation_prompt(question, (), stage.tokenizer)[None]
    is_chat = stage.tokenizer.chat_template is not None
    for name, about in _STREAMED.items():
        console.print(f"\n[bold]{name}[/bold]: {about}", soft_wrap=True)
        console.print(question.turns[0], style="dim", end="\n" if is_chat else "", markup=False, soft_wrap=True)
        stream = CompletionStream(console, stage.tokenizer, marks=_MARKS if is_marked else ("", ""))
        output = generate(
            stage.target,
            stage.drafters[name],
            prompt,
            streamer=stream,
            max_new_tokens=stage.max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert isinstance(output, SpecDecodeOutput)
        assert output.stats is not None
        console.print(describe_run(len(stream.tokens), output.stats), style="italic", soft_wrap=True)
    console.print()


def _legend(console: "Console", *, is_marked: bool) -> "Text":
    """How accepted draft tokens can be told from the target's own."""
    from rich.text import Text

    from specdec.commands.common.text import ACCEPTED_STYLE

    accepted = Text("accepted draft tokens", style=ACCEPTED_STYLE)
    if is_marked:
        return accepted + f" stand between {' and '.join(_MARKS)}; the others are the target's own"
    if console.color_system is None:
        return accepted + f" have a colour on a terminal; --mark puts {' '.join(_MARKS)} around them"
    return accepted + " look like this; the others are the target's own"


def _measure(stage: _Stage, repeats: int, folder: Path, *, minutes: float | None, with_traces: bool) -> "Results":
    """All arms on all questions, or on those that the time was enough for."""
    import torch

    from specdec.commands.evaluate import showing_progress
    from specdec.evaluation.run import Plan, evaluate

    num_traces = len(stage.questions) if with_traces else 0
    plan = Plan(max_new_tokens=stage.max_new_tokens, repeats=repeats, num_traces=num_traces, minutes=minutes)
    settings = {"model": stage.model, "prompts": "demo", "threads": torch.get_num_threads()}
    with showing_progress() as show:
        results, _ = evaluate(
            stage.target,
            stage.drafters,
            stage.questions,
            stage.tokenizer,
            folder,
            plan,
            settings=settings,
            on_progress=show,
        )
    return results


def _conclude(results: "Results", stage: _Stage, console: "Console", report: Path | None, *, as_json: bool) -> bool:
    """Print the table, write the report; returns whether every text is that of plain decoding."""
    import torch

    from specdec.commands.evaluate import figures_table
    from specdec.evaluation.figures import figures

    rows = figures(results, 0.0)
    place = f"{stage.target.device}, {torch.get_num_threads()} threads"
    if as_json:
        print(json.dumps([_record(row) for row in rows], allow_nan=False, indent=2))
    else:
        title = f"{len(rows[0].groups)} prompts, up to {stage.max_new_tokens} new tokens each, greedy, {place}"
        console.print(figures_table(rows, title))
        if len(rows[0].groups) < len(stage.questions):
            console.print(f"the machine is busy: there was no time for all {len(stage.questions)} prompts")
    for arm, reason in results.missing.items():
        console.print(f"{arm} is missing: {reason}", markup=False, soft_wrap=True)
    if report is not None:
        from specdec.evaluation.report import write_report

        write_report(results, report)
        console.print(f"written: {report / 'report.html'}", markup=False, soft_wrap=True)
    return not results.missing and not any(row.divergences for row in rows)


def _record(row: "ArmFigures") -> dict[str, Any]:
    """An arm's figures for a JSON report; None where there is no tau, or no interval, as of one prompt."""
    return {
        "name": row.arm.name,
        "library": row.arm.library,
        "num_tokens": row.num_tokens,
        "tau": row.tau.value if row.tau else None,
        "acceptance_at_depth": row.acceptance_at_depth,
        "tokens_per_second": row.tokens_per_second,
        "speedup": row.speedup.value,
        "speedup_interval": [row.speedup.low, row.speedup.high] if len(row.groups) > 1 else None,
        "identical": not row.divergences,
        "times_ms": row.times_ms,
    }
