"""`specdec distill`: the target writes the texts that drafters learn from."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.commands.options import add_target, bundled, chat_template_of, load_target

if TYPE_CHECKING:
    from specdec.commands.options import Commands

__all__ = ["add_to"]


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("distill", help="let the target write the texts that drafters learn from")
    add_target(parser)
    temperature = "may be repeated: batches take turns (default: 0, greedy)"
    parser.add_argument("--data", type=Path, required=True, help="prompts: .jsonl with prompt, text or conversations")
    parser.add_argument("--output", type=Path, required=True, help=".jsonl file; lines that are there are kept")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, action="append", help=temperature)
    parser.add_argument("--batch-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--drafter", default="none", help="as for generate: speeds the writing up")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from specdec.training.distill import distill

    target, tokenizer = load_target(options.target, options)
    counts = distill(
        target,
        tokenizer,
        options.data,
        options.output,
        max_new_tokens=options.max_new_tokens,
        temperatures=options.temperature or (0.0,),
        batch_size=options.batch_size,
        drafter=bundled(options.target, options.drafter),
        chat_template=chat_template_of(options),
        seed=options.seed,
    )
    print(json.dumps(counts))
    return 0
