"""`specdec train-smollm2`: the drafters of the chat model, by one table."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.commands.common.options import add_place, load_target
from specdec.commands.train import check_can_train

if TYPE_CHECKING:
    from specdec.commands.common.options import Commands

__all__ = ["add_to"]


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("train-smollm2", help="train the drafters of the chat model smollm2")
    data = "texts to learn from, as for train (default: those that ship, a million tokens that the model wrote)"
    work_dir = "checkpoints and the target's states; a run started again resumes (default: OUTPUT/work)"
    parser.add_argument("--output", type=Path, required=True, help="folder that receives a folder per drafter")
    parser.add_argument("--work-dir", type=Path, help=work_dir)
    parser.add_argument("--only", action="append", metavar="NAME", help="one drafter; may be repeated")
    parser.add_argument("--data", type=Path, help=data)
    add_place(parser, ("float32", "bfloat16"))
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    check_can_train("train-smollm2")
    from rich.console import Console

    from specdec.training.bundled_drafters import drafters_table, missing_parts
    from specdec.training.smollm2 import train_smollm2
    from specdec.training.smollm2_drafters import SMOLLM2_DRAFTERS

    # a wrong name is told before a model is fetched, and where all are there none is
    if missing_parts([*SMOLLM2_DRAFTERS], options.only, options.output):
        model, tokenizer = load_target("smollm2", options)
        work_dir = options.work_dir or options.output / "work"
        train_smollm2(model, tokenizer, options.output, work_dir, only=options.only, data=options.data)
    if os.environ.get("RANK", "0") == "0":  # set by torchrun
        Console().print(drafters_table(options.output, SMOLLM2_DRAFTERS, f"drafters of smollm2 in {options.output}"))
    return 0
