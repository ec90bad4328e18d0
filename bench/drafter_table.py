"""The table of the bundled drafters in docs/drafters/README.md, from their training reports and the newest CPU record.

Run: `python -m specdec.bench.drafter_table RECORDS` prints it; a test compares it with the page. RECORDS comes from
`python -m specdec.bench.decode --output RECORDS`; the last record of an arm counts.
"""

import argparse
import json
import sys
from pathlib import Path

from specdec.bench.common.journal import ended
from specdec.bundled.load import TINY_FOLDER, bundled_drafters
from specdec.common.provenance import read_records

__all__ = ["drafter_table", "main"]

_HEADINGS = ("drafter", "parameters", "tau, held-out", "acceptance by depth, held-out", "tau, demo", "speedup, demo")


def drafter_table(records: Path) -> str:
    """Markdown: a row per drafter that runs on the bundled target, in the order of their tau on the demo prompts.

    Args:
        records: JSON lines.
    """
    found = ended(read_records(records))
    rows = [record for record in found if record.get("tau") is not None and record["arm"] != "none"]
    lines = [f"| {' | '.join(_HEADINGS)} |", "|---|---:|---:|---|---:|---:|"]
    for row in sorted(rows, key=lambda row: row["tau"]):
        learnt = _learnt(row["arm"]) if row["arm"] in bundled_drafters() else ("-", "-", "-")
        figures = (row["arm"], *learnt, f"{row['tau']:.2f}", f"{row['speedup']:.2f}x")
        lines.append(f"| {' | '.join(figures)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="specdec.bench.drafter_table", description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, help="JSON-lines file of bench.decode")
    options = parser.parse_args(arguments)
    print(drafter_table(options.records))
    return 0


def _learnt(name: str) -> tuple[str, str, str]:
    """Parameters, tau and acceptance by depth at the end of training."""
    report = json.loads((TINY_FOLDER / name / "training.json").read_text())["report"]
    depths = sorted(int(key.removeprefix("acceptance_")) for key in report if key.startswith("acceptance_"))
    by_depth = " ".join(f"{report[f'acceptance_{depth}']:.2f}" for depth in depths)
    return f"{report['num_parameters'] / 1e6:.2f} M", f"{report['tau']:.2f}", by_depth


if __name__ == "__main__":
    sys.exit(main())
