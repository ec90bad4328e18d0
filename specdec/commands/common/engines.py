"""Options of the commands that decode on an engine, and the engine that they name."""

import argparse
from typing import TYPE_CHECKING

from specdec.commands.common.options import (
    add_pair,
    as_tree_option,
    bundled,
    check_positive,
    given,
    load_target,
    read_settings,
)

if TYPE_CHECKING:
    from specdec.engine.engine import Engine

__all__ = ["add_engine", "add_ray", "check_ray", "load_engine"]


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Options that name an engine."""
    add_pair(parser)
    parser.add_argument("--max-rows", type=int, default=16, help="texts side by side; default: %(default)s")
    parser.add_argument("--max-length", type=int, help="most tokens of a text, prompt and answer together")
    parser.add_argument("--prefill-tokens", type=int, default=512, help="read between two steps; default: %(default)s")


def add_ray(parser: argparse.ArgumentParser, count: str) -> None:
    """Options of a Ray cluster: its address, and `count`, how many engines it runs."""
    address = "through Ray: auto, host:port or local; default: RAY_ADDRESS, or engines on this machine"
    parser.add_argument("--ray", nargs="?", const="", metavar="ADDRESS", help=address)
    parser.add_argument(count, type=int, metavar="N", help="with --ray: engines; default: one per GPU, or per machine")


def check_ray(options: argparse.Namespace, count: str) -> None:
    """Raise ValueError for a bad number of engines, or one without `--ray`."""
    for name, number in given(options, count.removeprefix("--").replace("-", "_")).items():
        check_positive(options, name)
        if options.ray is None:
            raise ValueError(f"{count}: expected --ray with it, got {number} alone")


def load_engine(options: argparse.Namespace, *, max_rows: int, max_length: int | None, max_queue: int) -> "Engine":
    """The engine that the options name."""
    from specdec.engine.engine import Engine
    from specdec.models.target.target import Target
    from specdec.tuning.auto import AUTO, load_drafter

    source = bundled(options.model, options.drafter)  # a wrong name is told before the target is read
    settings = read_settings("--drafter-set", options.drafter_set)
    model, tokenizer = load_target(options.model, options)
    target, tree = Target(model), as_tree_option(options.tree)
    drafter = load_drafter(source, target, tree=None if tree == AUTO else tree, **settings)
    return Engine(
        target,
        drafter,
        tokenizer=tokenizer,
        tree=AUTO if tree in (None, AUTO) else None,
        max_rows=max_rows,
        max_length=max_length,
        max_queue=max_queue,
        prefill_tokens=options.prefill_tokens,
    )
