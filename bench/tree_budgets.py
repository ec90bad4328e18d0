"""What trees add to drafters that guess a block in one pass: tau of a chain and of grown trees, at equal passes.

    python -m specdec.bench.tree_budgets --output RECORDS
    python -m specdec.bench.tree_budgets --table RECORDS

The first command decodes the bundled prompts plainly, once, and drafts for what the target said (`specdec.evaluation.
replay`): per drafter and budget a chain of as many nodes as the budget and the block allow, and the grown tree of the
whole budget. Both cost the drafter one pass of its layers a step, and the target one. The second prints the table in
docs/drafters/dflash.md.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from specdec.bench.common.tables import table
from specdec.bundled.load import bundled_drafter, load_model
from specdec.common.provenance import append_record, read_records
from specdec.drafters.load import load_drafter
from specdec.drafting.network import NetworkDrafter
from specdec.evaluation.prompt_sets import find_questions
from specdec.evaluation.prompts import first_turns
from specdec.evaluation.replay import RecordedTarget, record, replay
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

__all__ = ["main", "tree_table"]

DRAFTERS = ("dflash", "dspark")
BUDGETS = (8, 16, 32, 64)
"""Nodes that the target scores per step, the root included."""
_TOP_K = 10


def main(arguments: list[str] | None = None) -> int:
    """Measure, or print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="specdec.bench.tree_budgets", description=__doc__.splitlines()[0])
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--output", type=Path, help="JSON-lines file, to which a run is added")
    place.add_argument("--table", type=Path, help="such a file, to print the table of")
    parser.add_argument("--num-new-tokens", type=int, default=128, help="most new tokens of a prompt (128)")
    options = parser.parse_args(arguments)
    if options.output is not None:
        _measure(options.output, options.num_new_tokens)
    print(tree_table(options.output or options.table), end="")
    return 0


def tree_table(records: Path) -> str:
    """Markdown: a row per drafter and budget of the last run.

    Args:
        records: JSON lines.
    """
    last = {(one["drafter"], one["budget"], one["shape"]): one for one in read_records(records)}
    rows = []
    for name, budget, shape in last:
        if shape == "tree":
            chain, tree = last[name, budget, "chain"], last[name, budget, "tree"]
            rows.append(
                {
                    "drafter": f"`{name}`",
                    "nodes": str(budget),
                    "tau, chain": f"{chain['tau']:.2f} ({chain['num_nodes']})",
                    "tau, tree": f"{tree['tau']:.2f}",
                    "tree / chain": f"{tree['tau'] / chain['tau']:.2f}",
                }
            )
    return table(rows)


def _measure(output: Path, num_new_tokens: int) -> None:
    """Add a record per drafter, budget and shape."""
    model, tokenizer = load_model("tiny")
    target = Target(model)
    arms = [(name, budget, shape) for name in DRAFTERS for budget in BUDGETS for shape in ("chain", "tree")]
    drafters = {arm: _drafter(target, *arm) for arm in arms}
    for drafter in drafters.values():
        drafter.bind(target)  # before the recording, which has the layers that are read
    prompts = first_turns(find_questions("bundled").questions, tokenizer)
    recorded = RecordedTarget(target, record(target, prompts, num_new_tokens, stop_tokens=target.stop_tokens))
    for arm in track(arms, description="drafting", console=Console(stderr=True)):
        tau = replay(recorded, drafters[arm]).tau
        name, budget, shape = arm
        figures = {"num_nodes": drafters[arm].shape.num_nodes, "tau": tau}
        setup = {"num_prompts": len(prompts), "num_new_tokens": num_new_tokens}
        append_record(output, {"drafter": name, "budget": budget, "shape": shape, **figures, **setup})


def _drafter(target: Target, name: str, budget: int, shape: str) -> NetworkDrafter:
    """A bundled drafter with a chain or a grown tree of so many nodes."""
    drafter = load_drafter(bundled_drafter("tiny", name), target)
    assert isinstance(drafter, NetworkDrafter)
    limit = type(drafter).depth_limit(drafter.network.config)
    assert limit is not None
    depth = limit[0]
    chosen = TreeShape.chain(min(budget - 1, depth)) if shape == "chain" else DynamicTree(budget, depth - 1, _TOP_K)
    return type(drafter)(drafter.network, chosen)


if __name__ == "__main__":
    sys.exit(main())
