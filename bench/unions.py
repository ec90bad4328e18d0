"""What it is worth to propose together and to size every step: a union against its members and against fixed sizes.

    python -m specdec.bench.unions --model tiny --prompts bundled --output FOLDER
    python -m specdec.bench.unions --table FOLDER

The first command is one evaluation (`specdec.evaluation`), all arms in turns prompt by prompt: plain decoding, the
members, their union, the same union with as many nodes in every step (`union@N`), and a drafter that is never right
(`contrary`: Medusa's tokens, each replaced by its neighbour in the vocabulary), alone and sized. The second prints the
tables of docs/drafters/union.md.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from specdec.bench.common.tables import table
from specdec.bundled.load import load_model
from specdec.drafters.medusa import Medusa
from specdec.drafting.base import Drafter
from specdec.drafting.candidates import Choose
from specdec.drafting.draft_tree import DraftTree
from specdec.evaluation.figures import categories, compare_speeds, figures
from specdec.evaluation.intervals import Interval
from specdec.evaluation.prompt_sets import find_questions
from specdec.evaluation.records import PLAIN, Results, read_results
from specdec.evaluation.run import Plan, Progress, evaluate
from specdec.evaluation.selection import stratified
from specdec.models.target.target import Target
from specdec.tuning.auto import load_drafter

__all__ = ["SIZES", "Contrary", "main", "union_table"]

SIZES = (4, 8, 16)
"""Nodes of the fixed arms."""

UNION, CONTRARY = "union", "contrary"


class Contrary(Medusa):
    """Medusa, sure of tokens that are not its own: nothing is ever accepted, but by chance."""

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """As `Medusa`, with every token's neighbour in its place."""
        tree = super().draft(root, choose)
        tokens = (tree.tokens + 1) % self._target.vocab_size
        tokens[:, 0] = root
        return replace(tree, tokens=tokens)


def main(arguments: list[str] | None = None) -> int:
    """Measure, or print the tables; returns the exit status."""
    parser = argparse.ArgumentParser(prog="specdec.bench.unions", description=__doc__.splitlines()[0])
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--output", type=Path, help="folder for the records")
    place.add_argument("--table", type=Path, help="such a folder, to print the tables of")
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--lookup", default="prompt_lookup", help="the member without weights (%(default)s)")
    parser.add_argument("--network", default="medusa", help="a bundled drafter, the other member (%(default)s)")
    parser.add_argument("--prompts", default="bundled", help="a file, or a name as for specdec eval (%(default)s)")
    parser.add_argument("--num-prompts", type=int, help="spread over the categories (all)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of every prompt (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with what the folder has")
    options = parser.parse_args(arguments)
    if options.output is not None:
        _measure(options)
    print(union_table(options.output or options.table), end="")
    return 0


def union_table(folder: Path) -> str:
    """Markdown: speed of the union over members and fixed sizes by category, and of the contrary drafter over plain.

    Args:
        folder: of the records.
    """
    results = read_results(folder)
    names = [arm.name for arm in results.about.arms]
    members = names[1:3]
    fixed = [name for name in names if name.startswith(f"{UNION}@")]
    rows = []
    for category in [*categories(results), None]:
        speeds = {one.arm.name: one.speedup.value for one in figures(results, 0.0, category=category)}
        part = results if category is None else _part(results, category)
        best, size = max(members, key=speeds.__getitem__), max(fixed, key=speeds.__getitem__)
        rows.append(
            {
                "category (prompts)": f"{category or 'all'} ({len(part.about.questions)})",
                **{f"{name} / plain": f"{speeds[name]:.2f}" for name in (*members, UNION)},
                "union / better member": _text(compare_speeds(part, 0.0, UNION, best)),
                "best fixed size": size.partition("@")[2],
                "union / best fixed size": _text(compare_speeds(part, 0.0, UNION, size)),
            }
        )
    contrary = [
        {"drafter (never right)": name, "speed / plain": _text(compare_speeds(results, 0.0, name, PLAIN))}
        for name in (CONTRARY, f"{CONTRARY}@auto")
    ]
    return f"{table(rows)}\n{table(contrary)}"


def _part(results: Results, category: str) -> Results:
    """The results of one category."""
    questions = [one for one in results.about.questions if one["category"] == category]
    kept = {one["name"] for one in questions}
    answers = {key: one for key, one in results.answers.items() if one.question in kept}
    return replace(results, about=replace(results.about, questions=questions), answers=answers)


def _text(interval: Interval | None) -> str:
    if interval is None:
        return ""
    value = f"{interval.value:.2f}"
    return value if math.isnan(interval.low) else f"{value} [{interval.low:.2f}, {interval.high:.2f}]"  # of one prompt


def _measure(options: argparse.Namespace) -> None:
    """Run the evaluation."""
    model, tokenizer = load_model(options.model)
    target = Target(model)
    questions = find_questions(options.prompts).questions
    chosen = stratified(questions, min(options.num_prompts or len(questions), len(questions)), seed=0)
    plan = Plan(max_new_tokens=options.max_new_tokens, with_transformers=False, num_traces=0)
    names = {"model": options.model, "lookup": options.lookup, "network": options.network}
    console = Console(stderr=True)

    def show(progress: Progress) -> None:
        console.print(f"{progress.num_done} of {progress.num_all}: {progress.doing}", highlight=False)

    drafters = _drafters(target, options)
    settings = {**names, "prompts": Path(options.prompts).name}
    evaluate(
        target,
        drafters,
        chosen,
        tokenizer,
        options.output,
        plan,
        settings=settings,
        resume=options.resume,
        on_progress=show,
    )


def _drafters(target: Target, options: argparse.Namespace) -> Mapping[str, Drafter]:
    """All arms but plain decoding, the members first."""
    network = f"{options.model}/{options.network}"
    sources = [options.lookup, network]
    medusa = load_drafter(f"{options.model}/medusa", target)
    assert isinstance(medusa, Medusa)
    contrary = Contrary(medusa.network, medusa.shape)
    return {
        options.lookup: load_drafter(options.lookup, target),
        options.network: load_drafter(network, target),
        UNION: load_drafter(sources, target),
        **{f"{UNION}@{size}": load_drafter(sources, target, tree=size) for size in SIZES if size > len(sources)},
        CONTRARY: contrary,
        f"{CONTRARY}@auto": load_drafter(contrary, target, tree="auto"),
    }


if __name__ == "__main__":
    sys.exit(main())
