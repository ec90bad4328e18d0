"""What drafters without weights accept on text that repeats itself and on text that does not.

    python -m specdec.bench.lookups --output RECORDS [--prompts FILE|NAME ...]
    python -m specdec.bench.lookups --table RECORDS

The first command decodes prompts plainly with the chat model, once, and drafts for what it said
(`specdec.evaluation.replay`). The second prints the table in docs/drafters/suffix.md: tau by category of prompt lookup,
of suffix, and of suffix with the answers to all prompts before, in the order of the file.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress, track

from specdec.bench.common.tables import table
from specdec.bundled.load import load_model
from specdec.common.provenance import append_record, read_records
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.drafters.weightless.suffix import Suffix
from specdec.drafting.base import Drafter
from specdec.evaluation.prompt_sets import find_questions
from specdec.evaluation.prompts import Question, first_turns
from specdec.evaluation.replay import RecordedTarget, Recording, record, replay
from specdec.evaluation.selection import stratified
from specdec.models.target.target import Target

__all__ = ["ARMS", "lookup_table", "main"]

ARMS: dict[str, Callable[[], Drafter]] = {
    "prompt_lookup": PromptLookup,
    "suffix": Suffix,
    "suffix, shared": lambda: Suffix(shared=True),
}
_PROMPTS = Path(__file__).parent / "results" / "cpu" / "lookups_prompts.jsonl"


def main(arguments: list[str] | None = None) -> int:
    """Measure, or print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="specdec.bench.lookups", description=__doc__.splitlines()[0])
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--output", type=Path, help="JSON-lines file, to which a run is added")
    place.add_argument("--table", type=Path, help="such a file, to print the table of")
    given = [str(_PROMPTS), "spec_bench"]
    parser.add_argument("--prompts", nargs="+", default=given, help="files or names (texts that repeat; spec_bench)")
    parser.add_argument("--num-prompts", type=int, default=40, help="of every file, at most (40)")
    parser.add_argument("--num-new-tokens", type=int, default=160, help="most new tokens of a prompt (160)")
    options = parser.parse_args(arguments)
    if options.output is not None:
        sets = [find_questions(name) for name in options.prompts]
        chosen = [stratified(one.questions, min(options.num_prompts, len(one.questions)), seed=0) for one in sets]
        _measure(options.output, [question for part in chosen for question in part], options.num_new_tokens)
    print(lookup_table(options.output or options.table), end="")
    return 0


def lookup_table(records: Path) -> str:
    """Markdown: a row per category of the last run, a column per arm.

    Args:
        records: JSON lines.
    """
    last = {(one["category"], one["arm"]): one for one in read_records(records)}
    rows = []
    for category in dict.fromkeys(category for category, _ in last):
        tau = {arm: last[category, arm]["tau"] for arm in ARMS}
        cells = {arm: f"{value:.2f}" for arm, value in tau.items()}
        rows.append(
            {
                "category (prompts)": f"{category} ({last[category, 'suffix']['num_prompts']})",
                **{f"tau, {arm}": cell for arm, cell in cells.items()},
                "suffix / prompt_lookup": f"{tau['suffix'] / tau['prompt_lookup']:.2f}",
            }
        )
    return table(rows)


def _measure(output: Path, questions: list[Question], num_new_tokens: int) -> None:
    """Add a record per category and arm."""
    model, tokenizer = load_model("smollm2")
    target = Target(model)
    recorded = RecordedTarget(target, _recording(target, first_turns(questions, tokenizer), num_new_tokens))
    for arm, make in track(ARMS.items(), description="drafting", console=Console(stderr=True)):
        emitted = replay(recorded, make()).num_emitted
        for category, count in Counter(question.category for question in questions).items():
            steps = [
                tokens
                for question, row in zip(questions, emitted, strict=True)
                for tokens in row
                if question.category == category
            ]
            figures = {"tau": sum(steps) / len(steps), "num_prompts": count, "num_new_tokens": num_new_tokens}
            append_record(output, {"category": category, "arm": arm, **figures})


def _recording(target: Target, prompts: Sequence[torch.Tensor], num_new_tokens: int) -> Recording:
    """The target's texts, with progress on the terminal."""
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("decoding plainly", total=len(prompts))
        return record(
            target,
            prompts,
            num_new_tokens,
            stop_tokens=target.stop_tokens,
            batch_size=8,
            on_progress=lambda count: progress.update(bar, completed=count),
        )


if __name__ == "__main__":
    sys.exit(main())
