"""The `specdec` command: its parser, and what becomes of errors. Each command has a module of its own.

These modules import what is heavy only once their command runs, so that `specdec --help` is quick.
"""

import argparse
import logging
import sys
from collections.abc import Sequence

from specdec import __version__
from specdec.commands import (
    batch,
    chat,
    data,
    demo,
    distill,
    evaluate,
    generate,
    report,
    serve,
    train,
    train_smollm2,
    tune,
)
from specdec.jobs.interruption import Terminated

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Expected errors print one line, not a traceback."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    try:
        return int(options.run(options))
    except KeyboardInterrupt as error:
        print("\ninterrupted", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130
    except (TypeError, ValueError, OSError, NotImplementedError, RuntimeError) as error:
        if options.verbose:
            raise
        print(f"specdec: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specdec", description="Tree speculative decoding for Hugging Face models.")
    parser.add_argument("--version", action="version", version=f"specdec {__version__}")
    parser.add_argument("--verbose", action="store_true", help="log decisions and show tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (demo, generate, chat, batch, serve, evaluate, report, tune, data, distill, train, train_smollm2):
        module.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
