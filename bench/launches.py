"""Launches and bytes of one decoding step, by drafter and phase, at the sizes of real models; needs no GPU.

    python -m specdec.bench.launches                      # count, compare with the committed table, print it
    python -m specdec.bench.launches --update             # write the table, its picture and docs/performance.md
    python -m specdec.bench.launches --json               # {model: {drafter: {"launches": n, "bytes": n}}}
    python -m specdec.bench.launches --drafters eagle --models llama-2-7b --by-name    # what is launched how often

One row of 2048 tokens, bfloat16, greedy, the drafters of `bench.decode` with their default trees. What counts as a
launch and which bytes are meant: `specdec.bench.compiled.launch_counter`. No time here was measured: the floor is what
the weights, keys and values take that a step must read, and the estimate from counts adds all other bytes and
LAUNCH_US for every launch.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.bench.common.cost import H200
from specdec.bench.common.pictures import draw_lanes
from specdec.bench.common.shapes import MODELS, ModelShape
from specdec.bench.compiled.launch_counter import StepLaunches, count_step
from specdec.bench.decoding.simulated import DRAFTERS, random_drafter, random_target
from specdec.models.target.target import Target

__all__ = ["LAUNCH_US", "Row", "count", "count_steps", "main", "markdown", "picture", "read_table", "table_text"]

CONTEXT = 2048
LAUNCH_US = 3.0
"""Microseconds that a launch takes beside its bytes: start, tail and gap in a CUDA graph. Assumed, not measured."""

PHASES = ("draft", "score", "verify", "commit")
_TABLE = Path(__file__).parent / "compiled" / "tables" / "launches.json"
_DOCS = Path(__file__).parents[1] / "docs"
_PICTURE = _DOCS / "pictures" / "launches.svg"
_PAGE = _DOCS / "performance.md"
_MARKS = ("<!-- launches -->\n", "\n<!-- /launches -->")
_PICTURED = MODELS[0]


@dataclass(frozen=True, slots=True)
class Row:
    """The step of one drafter at one model.

    Attributes:
        nodes: of the largest tree, root included.
        launches: by phase.
        bytes: what all launches read and write.
        state_bytes: weights, keys and values among them.
    """

    nodes: int
    launches: dict[str, int]
    bytes: int
    state_bytes: int

    @classmethod
    def of(cls, num_nodes: int, step: StepLaunches) -> "Row":
        """The row of a counted step; what is launched before the first phase counts with it."""
        launches = {phase: step.num_launches(phase) for phase in PHASES}
        launches[PHASES[0]] += step.num_launches() - sum(launches.values())
        return cls(num_nodes, launches, step.num_bytes(), step.state_bytes)

    @property
    def num_launches(self) -> int:
        """Of the whole step."""
        return sum(self.launches.values())

    @property
    def floor_ms(self) -> float:
        """Time below which no implementation of these passes can come, in ms."""
        return 1e3 * self.state_bytes / H200.bytes_per_s

    @property
    def estimate_ms(self) -> float:
        """Estimate from counts of the time of the step, in ms."""
        return 1e3 * self.bytes / H200.bytes_per_s + 1e-3 * LAUNCH_US * self.num_launches


def count_steps(model: ModelShape, drafters: Sequence[str]) -> dict[str, tuple[int, StepLaunches]]:
    """Nodes of the tree and launches of a step, by drafter; "none" is plain decoding."""
    weights = random_target(model, max_positions=2 * CONTEXT, device="meta", dtype=torch.bfloat16)
    target = Target(weights, backend="triton")
    found = {}
    for name in drafters:
        drafter = None if name == "none" else random_drafter(name, target)
        step = count_step(target, drafter, context=CONTEXT)
        found[name] = (1 if drafter is None else drafter.shape.num_nodes, step)
    return found


def count(models: Sequence[ModelShape] = MODELS, drafters: Sequence[str] = ("none", *DRAFTERS)) -> dict[str, Any]:
    """Rows by model and drafter."""
    found = {}
    for model in models:
        found[model.name] = {name: Row.of(*counted) for name, counted in count_steps(model, drafters).items()}
    return found


def read_table() -> dict[str, dict[str, Row]]:
    """The committed table."""
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    return {model: {name: Row(**row) for name, row in rows.items()} for model, rows in table.items()}


def table_text(table: Mapping[str, Mapping[str, Row]]) -> str:
    """The table as JSON, a line per drafter."""
    models = []
    for model, rows in table.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(asdict(row))}" for name, row in rows.items())
        models.append(f" {json.dumps(model)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(models) + "\n}\n"


def markdown(rows: Mapping[str, Row]) -> str:
    """A table of one model for people."""
    lines = [
        f"| drafter | nodes | {' | '.join(PHASES)} | launches | GB | floor, ms | estimate from counts, ms |",
        f"|---|{'---:|' * (len(PHASES) + 5)}",
    ]
    for name, row in rows.items():
        phases = " | ".join(str(row.launches[phase]) for phase in PHASES)
        figures = f"{row.bytes / 1e9:.1f} | {row.floor_ms:.2f} | {row.estimate_ms:.2f}"
        lines.append(f"| {name} | {row.nodes} | {phases} | {row.num_launches} | {figures} |")
    return "\n".join(lines)


def picture(model: str, rows: Mapping[str, Row]) -> str:
    """The launches of all drafters at one model, a lane each, as an SVG."""
    lanes = {}
    for name, row in rows.items():
        begin, lane = 0, []
        for phase in PHASES:
            lane.append((phase, float(begin), float(begin + row.launches[phase])))
            begin += row.launches[phase]
        lanes[f"{name} {row.num_launches}"] = lane
    return draw_lanes(lanes, f"Launches of one step, {model}, one row of {CONTEXT} tokens, greedy", unit="launches")


def main(arguments: list[str] | None = None) -> int:
    """Count; returns the exit status, 1 if the committed table says something else."""
    parser = argparse.ArgumentParser(
        prog="specdec.bench.launches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    by_name = {model.name.lower(): model for model in MODELS}
    names = ("none", *DRAFTERS)
    parser.add_argument("--models", nargs="+", choices=by_name, default=list(by_name), metavar="MODEL")
    parser.add_argument("--drafters", nargs="+", choices=names, default=list(names), metavar="DRAFTER")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="print launches and bytes as JSON")
    what.add_argument("--by-name", action="store_true", help="print operators and kernels by launches")
    what.add_argument(
        "--update", action="store_true", help="write the committed table, of everything, its picture and its page"
    )
    options = parser.parse_args(arguments)
    models = [by_name[name] for name in options.models]
    if options.by_name:
        for model in models:
            for name, (_, step) in count_steps(model, options.drafters).items():
                print(f"{model.name}, {name}: {step.num_launches()}")
                print("\n".join(f"  {number:>5} {operator}" for operator, number in step.by_name().items()))
        return 0
    if options.update:
        table = count()
        _TABLE.write_text(table_text(table), encoding="utf-8")
        _PICTURE.parent.mkdir(exist_ok=True)
        _PICTURE.write_text(picture(_PICTURED.name, table[_PICTURED.name]), encoding="utf-8")
        before, _, rest = _PAGE.read_text(encoding="utf-8").partition(_MARKS[0])
        after = rest.partition(_MARKS[1].lstrip())[2]
        rows = markdown(table[_PICTURED.name])
        _PAGE.write_text(f"{before}{_MARKS[0]}{rows}{_MARKS[1]}{after}", encoding="utf-8")
        print(f"wrote {_TABLE.name}, {_PICTURE.name} and the table in {_PAGE.name}")
        return 0
    table = count(models, options.drafters)
    if options.json:
        figures = {
            of: {name: {"launches": row.num_launches, "bytes": row.bytes} for name, row in rows.items()}
            for of, rows in table.items()
        }
        print(json.dumps(figures, indent=1))
        return 0
    for of, rows in table.items():
        print(f"\n{of}\n\n{markdown(rows)}")
    committed = read_table()
    changed = [
        f"{of}, {name}: {committed.get(of, {}).get(name)} in the table, counted {row}"
        for of, rows in table.items()
        for name, row in rows.items()
        if committed.get(of, {}).get(name) != row
    ]
    print("\n".join(["", *changed, "--update writes what was counted"] if changed else ["", "as committed"]))
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
