"""`specdec train` and `train-tiny`: drafters of a target, and the bundled model with its own."""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.commands.common.options import (
    add_target,
    as_tree_option,
    chat_template_of,
    given,
    hide_progress_of_loading,
    load_target,
    read_settings,
)

if TYPE_CHECKING:
    from specdec.commands.common.options import Commands

__all__ = ["add_to", "check_can_train"]

# name, field of Run, type and help of the options that take the place of a recipe's values
_RUN_OPTIONS = (
    ("--epochs", "epochs", int, "passes over the texts"),
    ("--steps", "steps", int, "optimiser steps, instead of epochs"),
    ("--batch-size", "batch_size", int, "texts per step, over all processes"),
    ("--accumulate", "accumulate", int, "parts in which a batch is run (default: as many as memory asks for)"),
    ("--learning-rate", "learning_rate", float, "peak of the schedule"),
    ("--eval-every", "eval_every", int, "steps between evaluations, which are checkpoints"),
    ("--seed", "seed", int, "of the order of the texts and of all noise"),
    ("--places", "num_places", int, "places of a text that a step learns, drawn anew each time (default: all)"),
    ("--candidates", "num_candidates", int, "tokens that a step's laws are over, drawn anew each time (default: all)"),
)
# name, field of TauProbe and help of the options that say how tau is measured
_PROBE_OPTIONS = (
    ("--probe-prompts", "num_prompts", "held-out prompts that tau is measured on; 0 measures none"),
    ("--probe-prompt-tokens", "prompt_tokens", "most tokens of such a prompt; shorter ones go first"),
    ("--probe-new-tokens", "new_tokens", "tokens that are decoded after each"),
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
    sharding = "of the target's layers over the processes of torchrun: none, each has all, or fsdp, each has a part"
    parser.add_argument("--target-sharding", choices=("none", "fsdp"), default="none", help=sharding)
    parser.add_argument("--data", type=Path, required=True, help=data)
    parser.add_argument("--held-out", help="texts to evaluate on: a file, or a part of the data (default: 0.05)")
    parser.add_argument("--output", type=Path, required=True, help="folder that receives the drafter")
    parser.add_argument("--work-dir", type=Path, help="checkpoints (default: a hidden folder beside OUTPUT)")
    parser.add_argument("--resume", action="store_true", help="go on with the interrupted run in the work directory")
    parser.add_argument("--set", help=setting, **keywords)
    parser.add_argument("--tree", help="as for generate; saved with the drafter, and used to measure tau")
    parser.add_argument("--labels", choices=("text", "target"), default="text", help=labels)
    parser.add_argument("--max-length", type=int, help="tokens at which texts are cut off")
    states = "folder that keeps what the target says, so that further epochs and drafters do without it"
    parser.add_argument("--states", type=Path, help=states)
    for name, field, kind, about in _RUN_OPTIONS:
        parser.add_argument(name, dest=field, metavar="N", type=kind, help=about)
    parser.add_argument("--optimizer", choices=("adamw", "adamw_8bit"), help="adamw_8bit takes less memory")
    tracker = "show losses, tau and acceptance there too; may be repeated"
    parser.add_argument("--report-to", action="append", choices=("tensorboard", "wandb"), help=tracker)
    for name, field, about in _PROBE_OPTIONS:
        parser.add_argument(name, dest=field, metavar="N", type=int, help=about)
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> int:
    check_can_train("train")
    from specdec.training.data import Texts
    from specdec.training.objectives.recipe import Run
    from specdec.training.runs.probe import TauProbe
    from specdec.training.runs.record import is_first_process
    from specdec.training.train import train_drafter

    target, tokenizer = load_target(options.target, options, is_sharded=options.target_sharding == "fsdp")
    held_out = 0.05 if options.held_out is None else _number(options.held_out)
    report = train_drafter(
        options.drafter,
        target,
        Texts(options.data, held_out, tokenizer, options.max_length, chat_template_of(options)),
        options.output,
        settings=read_settings("--set", options.settings),
        run=Run(
            **given(options, *(field for _, field, _, _ in _RUN_OPTIONS), "optimizer"),
            report_to=tuple(options.report_to or ()),
        ),
        labels=options.labels,
        tree=as_tree_option(options.tree),
        work_dir=options.work_dir,
        resume=options.resume,
        probe=TauProbe(**given(options, *(field for _, field, _ in _PROBE_OPTIONS))),
        states=options.states,
    )
    if is_first_process():
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
