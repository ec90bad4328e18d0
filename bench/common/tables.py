"""Records as tables in Markdown, padded (to 24 places at most) so that a terminal can show them too."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Record", "decode_tables", "groups", "number", "table"]

Record = Mapping[str, Any]

_DECODE_COLUMNS = {
    **{"tokens per s": "tokens_per_second", "speedup": "speedup"},
    **{"lowest": "speedup_lowest", "highest": "speedup_highest", "tau": "tau", "speedup / tau": "efficiency"},
    **{"step, ms": "step_ms", "draft": "draft", "score": "score", "verify": "verify", "commit": "commit"},
    **{"% of its floor": "percent_of_floor"},
}


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows by the headings of their columns; nothing for no rows."""
    if not rows:
        return ""
    widths = {heading: min(24, max(3, len(heading), *(len(row[heading]) for row in rows))) for heading in rows[0]}
    lines = [dict(zip(widths, widths, strict=True)), {heading: "-" * width for heading, width in widths.items()}, *rows]
    return "".join(f"| {' | '.join(line[h].ljust(width) for h, width in widths.items())} |\n" for line in lines)


def number(value: float | None) -> str:
    """Three digits, "-" for none."""
    return "-" if value is None or math.isnan(value) else f"{value:.3g}"


def groups(records: Iterable[Record], *keys: str) -> dict[tuple[Any, ...], list[Record]]:
    """The records by their values of some keys, in the order of the first of each."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        found.setdefault(tuple(record[key] for key in keys), []).append(record)
    return found


def decode_tables(records: Sequence[Record]) -> str:
    """A title and a table for every cell of the decoding benchmark; the phases of a step are in ms."""
    tables = []
    for names, cell in groups(records, "model", "dtype", "batch", "context", "acceptance").items():
        rows = []
        for record in cell:
            known = {**record, **record.get("split_ms", {})}
            figures = {heading: number(known.get(key)) for heading, key in _DECODE_COLUMNS.items()}
            near_ties = f"{len(record.get('divergences', ()))} near-ties"
            text = record.get("missing") or ("identical" if record["identical"] else near_ties)
            rows.append({"arm": record["arm"], **figures, "text": text})
        title = "{}, {}, batch {}, context {}, greedy, **{}**".format(*names)
        tables.append(f"{title}\n\n{table(rows)}")
    return "\n".join(tables)
