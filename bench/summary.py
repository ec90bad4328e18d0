"""A page in Markdown from the records of one run: machine, tests, library baselines, kernels, what is missing."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["summarize"]

_OURS = "triton"
_MAX_ROWS = 12  # per op; records.jsonl has all

Record = Mapping[str, Any]


def summarize(records: Sequence[Record]) -> str:
    """Write the page.

    Args:
        records: those of one run, in the order in which they were made.

    Returns:
        Markdown. Every figure in it is in a record, with its provenance.
    """
    by_kind: dict[str, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record["bench"], []).append(record)
    sections = [
        _heading(by_kind["stage"]),
        _machine(by_kind.get("machine", [])),
        _tests(by_kind.get("tests", [])),
        _small_m(by_kind.get("small_m", [])),
        _kernels(by_kind.get("kernel", [])),
        _races(by_kind.get("race_check", [])),
        _decode(by_kind.get("decode", [])),
        _stages(by_kind["stage"]),
    ]
    return "\n".join(section for section in sections if section)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3g}"


def _heading(stages: Sequence[Record]) -> str:
    latest = stages[-1]
    source = latest["provenance"]
    found = [source["device"], source["driver"] and f"driver {source['driver']}", f"torch {source['torch']}"]
    found += [f"triton {source['triton']}", source["git_sha"] and f"commit {source['git_sha']}"]
    found += [source["git_dirty"] and "local changes", f"{latest['minutes']:g} minutes"]
    lines = [f"# Run {latest['run']}", "", *([f"**{latest['dry']}**", ""] if "dry" in latest else [])]
    return "\n".join([*lines, ", ".join(part for part in found if part), ""])


def _machine(records: Sequence[Record]) -> str:
    limits = [record for record in records if record["measured"] == "limits"]
    if not limits:
        return ""
    found = limits[-1]
    return "## Machine\n\n" + _table(
        ["copy, read and written", "bf16 product", "kernel of a chain", "timing"],
        [
            [
                f"{found['bytes_per_s'] / 1e12:.3g} TB/s",
                f"{found['flops_per_s'] / 1e12:.4g} TFLOP/s",
                f"{found['graph_gap_us']:.3g} us",
                found["timing"],
            ]
        ],
    )


def _tests(records: Sequence[Record]) -> str:
    if not records:
        return ""
    passed, skipped = (sum(record[key] for record in records) for key in ("num_passed", "num_skipped"))
    failed = [name for record in records for name in record["failed"]]
    text = f"## Tests\n\n{passed} passed, {len(failed)} failed, {skipped} skipped, in {len(records)} files.\n"
    return text + "".join(f"- failed: `{name}`\n" for name in failed)


def _small_m(records: Sequence[Record]) -> str:
    if not records:
        return ""
    key = "percent_of_bandwidth"
    measured = any(record[key] is not None for record in records)
    what = "Percent of the copy bandwidth" if measured else "Times in us"
    counts = sorted({record["num_rows"] for record in records})
    cells = {(record["model"], record["matrix"], record["num_rows"]): record for record in records}
    rows = []
    for model, matrix in dict.fromkeys((record["model"], record["matrix"]) for record in records):
        found = [cells.get((model, matrix, count)) for count in counts]
        rows.append(
            [model, matrix, *[_number(cell[key if measured else "p50_us"] if cell else None) for cell in found]]
        )
    header = ["model", "matrix", *[f"M = {count}" for count in counts]]
    return f"## Linear layers of the library\n\n{what}.\n\n{_table(header, rows)}"


def _kernels(records: Sequence[Record]) -> str:
    if not records:
        return ""
    by_op: dict[str, dict[str, list[Record]]] = {}
    failed = [record for record in records if "failure" in record]
    for record in [record for record in records if "failure" not in record]:
        by_op.setdefault(record["op"], {}).setdefault(record["shape"], []).append(record)
    rows, left_out = [], 0
    for op, by_shape in by_op.items():
        for shape, found in list(by_shape.items())[:_MAX_ROWS]:
            rows.append([op, shape, *_comparison(found)])
        left_out += max(0, len(by_shape) - _MAX_ROWS)
    header = ["op", "shape", "ours, us", "best other, us", "other / ours", "roofline, us", "ours, % of roofline"]
    text = f"## Kernels\n\n{_table(header, rows)}"
    text += f"\n{left_out} more shapes are in records.jsonl.\n" if left_out else ""
    return text + "".join(f"\n- no figure: `{r['name']}`: {r['failure'].splitlines()[0]}" for r in failed) + "\n"


def _comparison(found: Sequence[Record]) -> list[str]:
    """Ours against the fastest other provider that was timed in the same way, or any if there is none."""
    ours = next((record for record in found if record["provider"] == _OURS), None)
    others = [record for record in found if record["provider"] != _OURS and record["p50_us"]]
    captured = [record for record in others if record["timing"].startswith("CUDA-graph")]
    best = min(captured or others, key=lambda record: record["p50_us"], default=None)
    our_us = ours["p50_us"] if ours else None
    best_us = best["p50_us"] if best else None
    how = "" if captured or not best else ", not captured"
    return [
        _number(our_us),
        f"{_number(best_us)} ({best['provider']}{how})" if best else "-",
        _number(best_us / our_us) if best_us and our_us else "-",
        _number(found[0]["roofline_us"]),
        _number(ours["percent_of_roofline"] if ours else None),
    ]


def _races(records: Sequence[Record]) -> str:
    return "## Races\n\n" + "".join(f"- {record['verdict']}\n" for record in records) if records else ""


def _decode(records: Sequence[Record]) -> str:
    if not records:
        return ""
    cells: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        key = tuple(record[name] for name in ("model", "dtype", "batch", "context", "acceptance"))
        cells.setdefault(key, []).append(record)
    header = ["arm", "tokens per s", "speedup", "tau", "speedup / tau", "step, ms", "% of its floor", "text"]
    text = "## Decoding\n"
    for (model, dtype, batch, context, acceptance), found in cells.items():
        text += f"\n{model}, {dtype}, batch {batch}, context {context}, greedy, **{acceptance}**\n\n"
        text += _table(header, [_decode_row(record) for record in found])
    return text


def _decode_row(record: Record) -> list[str]:
    keys = ("tokens_per_second", "speedup", "tau", "efficiency", "step_ms", "percent_of_floor")
    if "missing" in record:
        return [record["arm"], *["-"] * len(keys), record["missing"]]
    text = "identical" if record["identical"] else f"{len(record['divergences'])} near-ties"
    return [record["arm"], *(_number(record.get(key)) for key in keys), text]


def _stages(records: Sequence[Record]) -> str:
    rows = [[r["stage"], r["status"], f"{r['wall_s']:g} of {r['limit_s']:g} s"] for r in records]
    text = f"## Stages\n\n{_table(['stage', 'outcome', 'time'], rows)}"
    for record in records:
        if record["status"] in ("no time", "unavailable"):
            text += f"\n- {record['stage']} was skipped: {record['detail']}\n"
        elif record["status"] == "cut off":
            unfinished = [name for name, status in record["commands"].items() if status in ("cut off", "no time")]
            text += f"\n- {record['stage']} was cut off, unfinished: {', '.join(unfinished)}\n"
        elif record["status"] == "failed":
            failed = [
                f"{name} ({status})" for name, status in record["commands"].items() if status.startswith("failed")
            ]
            text += f"\n- {record['stage']} failed: {', '.join(failed)}\n\n```\n{record['detail'].strip()}\n```\n"
    return text
