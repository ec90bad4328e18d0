"""`specdec train` and `train-tiny`: drafters of a target, and the bundled model with its own."""

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.commands.options import (
    add_target,
    as_tree_option,
    chat_template_of,
    given,
    hide_progress_of_loading,
    load_target,
    read_settings,
)

if TYPE_CHECKING:
    from specdec.commands.options import Commands

__all__ = ["add_to", "check_can_train"]

# name, type and help of the options that take the place of a recipe's values
_RUN_OPTIONS = (
    ("--epochs", int, "passes over the texts"),
    ("--steps", int, "optimiser steps, instead of epochs"),
    ("--batch-size", int, "texts per step"),
    ("--accumulate", int, "parts in which a batch is run, to save memory"),
    ("--learning-rate", float, "peak of the schedule"),
    ("--eval-every", int, "steps between evaluations, which are checkpoints"),
    ("--seed", int, "of the order of the texts and of all noise"),
)


def add_to(commands: "Commands") -> None:
    """Add both commands to the parser."""
    _add_train(commands.add_parser("train", help="train a drafter of any kind for a target"))
    _add_train_tiny(commands.add_parser("train-tiny", help="train the bundled model and its drafters anew"))


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drafter", required=True, metavar="KIND", help="medusa, hydra, hydra++, eagle, ...")
    add_target(parser)
    data = "texts: .jsonl (see docs/training.md) or .pt of token ids"
    setting = "a setting of the kind, such as num_heads=3; values are JSON or text; may be repeated"
    labels = "what drafters guess: the text, or the target's most probable token at each place (default: %(default)s)"
    keywords: dict[str, Any] = {"action": "append", "default": [], "metavar": "KEY=VALUE", "dest": "settings"}
    parser.add_argument("--data", type=Path, required=True, help=data)
    parser.add_argument("--held-out", help="texts to evaluate on: a file, or a part of the data (default: 0.05)")
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the drafter")
    parser.add_argument("--work-dir", type=Path, help="checkpoints (default: a hidden folder beside OUTPUT)")
    parser.add_argument("--resume", action="store_true", help="go on with the interrupted run in the work directory")
    parser.add_argument("--set", help=setting, **keywords)
    parser.add_argument("--tree", help="as for generate; saved with the drafter, and used to measure tau")
    parser.add_argument("--labels", choices=("text", "target"), default="text", help=labels)
    parser.add_argument("--max-length", type=int, help="tokens at which texts are cut off")
    for name, kind, about in _RUN_OPTIONS:
        parser.add_argument(name, type=kind, help=about)
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> int:
    check_can_train("train")
    from specdec.training.data import Texts
    from specdec.training.objectives.recipe import Run
    from specdec.training.train import train_drafter

    target, tokenizer = load_target(options.target, options)
    held_out = 0.05 if options.held_out is None else _number(options.held_out)
    report = train_drafter(
        options.drafter,
        target,
        Texts(options.data, held_out, tokenizer, options.max_length, chat_template_of(options)),
        options.output,
        settings=read_settings("--set", options.settings),
        run=Run(**given(options, *(name.removeprefix("--").replace("-", "_") for name, _, _ in _RUN_OPTIONS))),
        labels=options.labels,
        tree=as_tree_option(options.tree),
        work_dir=options.work_dir,
        resume=options.resume,
    )
    if os.environ.get("RANK", "0") == "0":  # set by torchrun
        print(json.dumps(report, indent=2))
    return 0


def _add_train_tiny(parser: argparse.ArgumentParser) -> None:
    work_dir = "checkpoints; a run started again resumes (default: OUTPUT/work)"
    parser.add_argument("--output", type=Path, required=True, help="folder that receives target/ and the drafters")
    parser.add_argument("--work-dir", type=Path, help=work_dir)
    parser.add_argument("--only", action="append", metavar="PART", help="one part, such as medusa; may be repeated")
    parser.add_argument("--num-steps", type=int, help="training steps of the target (default: the recipe's)")
    parser.set_defaults(run=_train_tiny)


def _train_tiny(options: argparse.Namespace) -> int:
    check_can_train("train-tiny")
    from specdec.training.tiny import train_tiny
    from specdec.training.tiny_target import TinyTargetRecipe

    hide_progress_of_loading()
    recipe = TinyTargetRecipe(**given(options, "num_steps"))
    work_dir = options.work_dir or options.output / "work"
    report = train_tiny(options.output, work_dir, only=options.only, target_recipe=recipe)
    print(json.dumps(report, indent=2))
    return 0


def check_can_train(command: str) -> None:
    """Raise RuntimeError, with the command's name, where what training needs is not installed."""
    if importlib.util.find_spec("accelerate") is None:  # transformers' Trainer needs it
        raise RuntimeError(f"{command} needs accelerate: pip install 'specdec-triton[train]'")


def _number(text: str) -> float | str:
    """A number where it is one, else text."""
    try:
        return float(text)
    except ValueError:
        return text
