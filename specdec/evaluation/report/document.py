"""What a report says, before it becomes a page or Markdown: sections of sentences, tables and charts.

Both forms are made of one document, so that they cannot say different things.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Cell", "Chart", "Document", "Section", "Table", "markdown"]

# what means something in the middle of a line; an underscore within a word and brackets without an address do not
_MARKUP = re.compile(r"([\\`*<>|~&]|(?<=\])\(|(?<!\w)_|_(?!\w))")
_SPACES = re.compile(r"[\s\x00-\x1f\x7f]+")


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: what it says.
        note: said less loudly behind it, such as an interval.
        is_best: whether it is to be seen first in its column.
    """

    text: str
    note: str = ""
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a head.

    Attributes:
        title: what it is of.
        head: names of the columns.
        rows: cells, as many a row as there are columns; the first one names the row.
        num_words: leading columns of words, which start at the left; the others are figures.
        is_folded: whether the page shows its title alone until one unfolds it.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    num_words: int = 1
    is_folded: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture and the figures in it.

    Attributes:
        title: what it is of.
        svg: an `<svg>` element.
        table: the same figures.
    """

    title: str
    svg: str
    table: Table


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report.

    Attributes:
        name: unique in its report; of letters and dashes.
        title: above it.
        text: paragraphs.
        tables: behind the paragraphs.
        charts: of the page alone; Markdown has none.
        is_brief: whether Markdown has it.
        code: a command as one can type it.
        terms: words and what they mean.
        fold: what the page shows of the terms until one unfolds them; empty if they are to be seen at once.
    """

    name: str
    title: str
    text: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    is_brief: bool = True
    code: list[str] = field(default_factory=list)
    terms: list[tuple[str, str]] = field(default_factory=list)
    fold: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report.

    Attributes:
        title: of the page.
        headlines: what it comes to, a sentence each; of the first the leading figure is shown large.
        figures: of every headline its figure and what that counts, as ("1.62x", "plain decoding's speed").
        warnings: what a reader has to know before the figures.
        sections: in the order of reading.
    """

    title: str
    headlines: list[str]
    figures: list[tuple[str, str]]
    warnings: list[str]
    sections: list[Section]


def markdown(document: Document) -> str:
    """The document for a code host: headings, sentences and tables."""
    blocks = [f"# {_plain(document.title)}"]
    blocks += [f"**{_plain(sentence)}**" for sentence in document.headlines]
    blocks += [f"> {_plain(sentence)}" for sentence in document.warnings]
    for section in document.sections:
        if not section.is_brief:
            continue
        blocks.append(f"## {_plain(section.title)}")
        blocks += [_plain(paragraph) for paragraph in section.text]
        blocks += ["    " + line for line in section.code]
        blocks += ["\n".join(f"- **{_plain(term)}**: {_plain(meaning)}" for term, meaning in section.terms)]
        for table in section.tables:
            blocks += [f"### {_plain(table.title)}"] if table.title else []
            blocks.append(_rows(table))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _rows(table: Table) -> str:
    """A table in Markdown."""
    rules = ["---" if column < table.num_words else "---:" for column in range(len(table.head))]
    rows = [[_cell(cell) for cell in row] for row in table.rows]
    return "\n".join(_line(row) for row in ([_plain(name) for name in table.head], rules, *rows))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    text = _plain(cell.text)
    marked = f"**{text}**" if cell.is_best else text
    return f"{marked} {_plain(cell.note)}".strip()


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    return _MARKUP.sub(r"\\\1", _SPACES.sub(" ", text))
