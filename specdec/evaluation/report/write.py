"""The files of a report: a page of its own and Markdown, made of the records alone."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.common.files import replace_file
from specdec.evaluation.records import Results
from specdec.evaluation.report.document import Document, markdown
from specdec.evaluation.report.drawing import check_installed
from specdec.evaluation.report.found import find
from specdec.evaluation.report.sections import document_of
from specdec.evaluation.report.traces import trace_data

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["PAGE", "SUMMARY", "as_bytes", "check_installed", "page", "write_report"]

PAGE, SUMMARY = "report.html", "summary.md"

_FOLDER = Path(__file__).parent / "page"


def write_report(results: Results, folder: str | Path) -> None:
    """Write `report.html` and `summary.md` into a folder; the same records give the same bytes.

    Args:
        results: what `read_results` gives.
        folder: receives both; files of these names are replaced.

    Raises:
        RuntimeError: without matplotlib (`check_installed`).
    """
    check_installed()
    document = document_of(find(results))
    # both are made before either is written
    files = {PAGE: page(document, trace_data(results)), SUMMARY: as_bytes(markdown(document))}
    for name, content in files.items():
        replace_file(Path(folder) / name, content)


def page(document: Document, traces: dict[str, Any] | None = None) -> bytes:
    """A document as one HTML file that needs nothing else.

    Args:
        document: what it says.
        traces: of `trace_data`; a page without has no answers to unfold.
    """
    template = _environment().get_template("page.html.jinja")
    scripts = ["theme.js", *(["traces.js"] if traces else [])]
    return as_bytes(
        template.render(
            document=document,
            traces=traces,
            style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
            scripts=[(_FOLDER / name).read_text(encoding="utf-8") for name in scripts],
        )
    )


def as_bytes(text: str) -> bytes:
    """UTF-8; halves of surrogate pairs, which a text of bytes may hold and no file can, become question marks."""
    return text.encode("utf-8", "replace")


def _breakable(text: str) -> str:
    """Text that may go on in a new line behind an underscore, as markup."""
    from markupsafe import Markup, escape

    return escape(text).replace("_", Markup("_<wbr>"))


@cache
def _environment() -> "Environment":
    """Templates that escape what they are given; JSON in them is escaped for script elements."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment
