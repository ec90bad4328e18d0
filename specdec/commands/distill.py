"""`specdec distill`: the target writes the texts that drafters learn from."""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.commands.common.options import add_target, bundled, chat_template_of, load_target

if TYPE_CHECKING:
    from specdec.commands.common.options import Commands

__all__ = ["add_to"]


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("distill", help="let the target write the texts that drafters learn from")
    add_target(parser)
    temperature = "may be repeated: texts take turns (default: 0, greedy)"
    turns = "which answers of a conversation the target writes (default: %(default)s)"
    made_up = "prompts that the target makes up, as the user of its chat template; beside --data or without it"
    parser.add_argument("--data", type=Path, help="prompts: .jsonl with prompt, text or conversations")
    parser.add_argument("--self-prompts", type=int, metavar="N", help=made_up)
    parser.add_argument(
        "--prompt-temperature", type=float, default=1.0, help="of made-up prompts; default: %(default)s"
    )
    parser.add_argument("--prompt-tokens", type=int, default=64, help="most of a made-up prompt; default: %(default)s")
    parser.add_argument("--output", type=Path, required=True, help=".jsonl file; lines that are there are kept")
    parser.add_argument("--turns", choices=("all", "last"), default="all", help=turns)
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of an answer; default: %(default)s")
    parser.add_argument("--temperature", type=float, action="append", help=temperature)
    parser.add_argument("--batch-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--drafter", default="none", help="as for generate: speeds the writing up")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from specdec.training.distill import SelfPrompts, distill

    self_prompts = None
    if options.self_prompts is not None:
        self_prompts = SelfPrompts(options.self_prompts, options.prompt_temperature, options.prompt_tokens)
    target, tokenizer = load_target(options.target, options)
    counts = distill(
        target,
        tokenizer,
        options.data,
        options.output,
        self_prompts=self_prompts,
        turns=options.turns,
        max_new_tokens=options.max_new_tokens,
        temperatures=options.temperature or (0.0,),
        batch_size=options.batch_size,
        drafter=bundled(options.target, options.drafter),
        chat_template=chat_template_of(options),
        seed=options.seed,
    )
    if os.environ.get("RANK", "0") == "0":  # set by torchrun
        print(json.dumps(counts))
    return 0
