"""`specdec report`: the page of an evaluation made anew from its records, or several evaluations side by side."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.commands.common.options import Commands

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

    if len(options.folders) > 1:
        return _compare(options.folders, options.output)
    if options.output is not None:
        raise ValueError(f"--output: expected several folders with it, got one; its page is {PAGE} in that folder")
    check_installed()
    (folder,) = options.folders
    write_report(read_results(folder), folder)
    print(f"{folder / PAGE} and {SUMMARY}", file=sys.stderr)
    return 0


def _compare(folders: "Sequence[Path]", output: Path | None) -> int:
    """Several evaluations, to the terminal or a file."""
    from specdec.common.files import replace_file
    from specdec.evaluation.records import read_results
    from specdec.evaluation.report.compare import compare
    from specdec.evaluation.report.document import markdown
    from specdec.evaluation.report.write import as_bytes, page

    if output is not None and output.suffix not in (".html", ".md"):
        raise ValueError(f"--output: expected a file that ends in .html or .md, got {output}")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"folders: expected different ones, got {', '.join(map(str, folders))}")
    short = [folder.resolve().name for folder in folders]
    names = short if len(set(short)) == len(short) else list(map(str, folders))
    document = compare({name: read_results(folder) for name, folder in zip(names, folders, strict=True)})
    if output is None:
        print(markdown(document), end="")
    else:
        replace_file(output, page(document) if output.suffix == ".html" else as_bytes(markdown(document)))
        print(output, file=sys.stderr)
    return 0
