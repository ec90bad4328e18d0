"""`specdec tune`: which part of a draft tree is fastest on this machine."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.commands.options import add_pair, check_positive, load_for_decoding

if TYPE_CHECKING:
    from specdec.commands.options import Commands

__all__ = ["add_to"]


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("tune", help="measure which part of a draft tree is fastest here; a file for --tree")
    add_pair(parser)
    own = "text to measure acceptance on; may be repeated (default: texts that the target writes itself)"
    context = "tokens of text per row (default: 512, or half of a smaller context)"
    parser.add_argument("--output", type=Path, required=True, help="JSON file that receives the plan")
    parser.add_argument("--prompt", action="append", help=own)
    parser.add_argument("--batch-size", type=int, default=1, help="rows decoded together (default: %(default)s)")
    parser.add_argument("--context", type=int, help=context)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per prompt (default: %(default)s)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from specdec.tuning.measure import tune

    check_positive(options, "max_new_tokens", "batch_size")
    target, drafter, tokenizer = load_for_decoding(options)
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0].long() for text in options.prompt or ()]
    plan = tune(
        target,
        drafter,
        prompts or None,
        batch_size=options.batch_size,
        context=options.context or min(512, target.max_positions // 2),
        max_new_tokens=options.max_new_tokens,
    )
    plan.save(options.output)
    print(plan)
    return 0
