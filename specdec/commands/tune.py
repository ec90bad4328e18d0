"""`specdec tune`: which part of a draft tree, or which tree grown on some texts, is fastest on this machine."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.commands.common.options import (
    add_chat_template,
    add_pair,
    chat_template_of,
    check_positive,
    given,
    load_for_decoding,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from specdec.commands.common.options import Commands
    from specdec.models.target.target import Target
    from specdec.tuning.grown import OnProgress

__all__ = ["add_to"]


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("tune", help="measure which part of a draft tree is fastest here; a file for --tree")
    add_pair(parser)
    own = "text to measure acceptance on; may be repeated (default: texts that the target writes itself)"
    context = "tokens of text per row (default: 512, or half of a smaller context)"
    parser.add_argument("--output", type=Path, required=True, help="JSON file that receives the plan")
    parser.add_argument("--prompt", action="append", help=own)
    prompts = "more of them: JSON lines with prompt, text or conversations, as for distill"
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=prompts)
    add_chat_template(parser)
    grow = "grow trees of up to N nodes on these texts, in place of cutting the drafter's tree (Hydra takes 100)"
    parser.add_argument("--grow", type=int, metavar="N", help=grow)
    parser.add_argument("--depth", type=int, help="with --grow: deepest tree (default: the drafter's limit, else 8)")
    parser.add_argument("--batch-size", type=int, default=1, help="rows decoded together (default: %(default)s)")
    parser.add_argument("--context", type=int, help=context)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per prompt (default: %(default)s)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from specdec.trees.shape import MAX_NODES
    from specdec.tuning.grown import tune_grown
    from specdec.tuning.measure import tune

    check_positive(options, "max_new_tokens", "batch_size", "depth")
    if options.grow is not None and not 2 <= options.grow <= MAX_NODES:
        raise ValueError(f"--grow: expected 2 to {MAX_NODES} nodes, got {options.grow}")
    if options.depth is not None and options.grow is None:
        raise ValueError("--depth: expected --grow with it, got none")
    target, drafter, tokenizer = load_for_decoding(options)
    prompts = _prompts(options, target, tokenizer) or None
    sizes = {
        "batch_size": options.batch_size,
        "context": options.context or min(512, target.max_positions // 2),
        "max_new_tokens": options.max_new_tokens,
    }
    if options.grow is None:
        plan = tune(target, drafter, prompts, **sizes)
    else:
        with _progress() as on_progress:
            sizes |= {"num_nodes": options.grow, **given(options, "depth")}
            plan = tune_grown(target, drafter, prompts, **sizes, on_progress=on_progress)
        if len(plan.order) + 1 < options.grow:
            few = f"these texts grow {len(plan.order) + 1} nodes, not {options.grow}: no step would have taken another"
            print(f"{few}; more or longer texts do", file=sys.stderr)
    plan.save(options.output)
    print(plan)
    return 0


def _prompts(
    options: argparse.Namespace, target: "Target", tokenizer: "PreTrainedTokenizerBase"
) -> "list[torch.Tensor]":
    """The texts to measure acceptance on, those left out that are too long for the context."""
    import torch

    from specdec.jobs.prompts import read_prompts

    prompts = [tokenizer(text, return_tensors="pt").input_ids[0].long() for text in options.prompt or ()]
    if options.prompts is not None:
        template = chat_template_of(options)
        rows, _ = read_prompts(options.prompts, tokenizer, vocab_size=target.vocab_size, chat_template=template)
        prompts += [torch.tensor(row.tokens) for row in rows]
    room = target.max_positions - options.max_new_tokens
    usable = [prompt for prompt in prompts if len(prompt) <= room]
    if prompts and not usable:
        raise ValueError(f"--prompts: expected some of at most {room} tokens, got {len(prompts)} longer ones")
    if len(usable) < len(prompts):
        print(f"{len(prompts) - len(usable)} of {len(prompts)} prompts are too long: left out", file=sys.stderr)
    return usable


@contextmanager
def _progress() -> "Iterator[OnProgress]":
    """A bar for what is being done, on stderr; where that is no terminal, a line for every tenth of it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    tenths: dict[str, int] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done)
            if not console.is_terminal and 10 * done // total > tenths.get(stage, 0):
                tenths[stage] = 10 * done // total
                print(f"{stage}: {done} of {total}", file=sys.stderr, flush=True)

        yield report
