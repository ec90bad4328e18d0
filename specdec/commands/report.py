"""`specdec report`: the page of an evaluation made anew from its records, or several evaluations side by side."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.commands.options import Commands

__all__ = ["add_to"]


def add_to(commands: "Commands") -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("report", help="the page of an evaluation, or several evaluations side by side")
    folders = "what 'specdec eval' wrote; of several, the first is what the others are compared with"
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help=folders)
    output = "with several: .html or .md file that receives the comparison (default: the terminal, as Markdown)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from specdec.evaluation.records import read_results
    from specdec.evaluation.report.write import PAGE, SUMMARY, check_installed, write_report

    if options.output is not None:
        raise ValueError(f"--output: expected several folders with it, got one; its page is {PAGE} in that folder")
    check_installed()
    (folder,) = options.folders
    write_report(read_results(folder), folder)
    print(f"{folder / PAGE} and {SUMMARY}", file=sys.stderr)
    return 0
