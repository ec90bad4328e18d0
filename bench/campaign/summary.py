"""The page that tells what the campaign has found so far, written to be read alone: failures first."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.bench.campaign.results import log_end
from specdec.bench.campaign.running import DONE
from specdec.bench.campaign.stages import Stage
from specdec.bench.campaign.state import State, open_commands
from specdec.bench.common.tables import Record, decode_tables, groups, number, table

__all__ = ["Counts", "summarize"]

Counts = Mapping[tuple[str, str, str], tuple[int, float]]
"""By model, drafter and context (of one row): launches of a step, and an estimate of its time in ms (`launches.py`)."""

_MAX_ROWS = 12  # per op; records.jsonl has all
_MAX_TRACEBACKS = 12  # in full; the rest by name


def summarize(
    stages: Sequence[Stage], state: State, records: Sequence[Record], about: Record, folder: Path, counts: Counts
) -> str:
    """A page in Markdown.

    Args:
        stages: all of them, in order.
        state: what was done so far.
        records: of all commands, as `collect` gives them.
        about: provenance of this call; with "dry" if nothing is timed.
        folder: of the logs.
        counts: what was counted of a step.
    """
    source = [about["device"], about["driver"] and f"driver {about['driver']}", f"torch {about['torch']}"]
    source += [f"triton {about['triton']}", about["git_sha"] and f"commit {about['git_sha']}"]
    source += [about["git_dirty"] and "local changes"]
    note = f"**{about['dry']}**\n\n" if "dry" in about else ""
    page = f"# Call {len(state.calls)}\n\n{note}{', '.join(part for part in source if part)}\n"
    page += f"\n## Failures\n\n{_failures(stages, state, records, folder)}"
    page += f"\n## Left for the next call\n\n{_left(stages, state)}\n"
    devices: dict[str, list[Record]] = {}
    for record in records:
        devices.setdefault(record.get("provenance", about)["device"], []).append(record)
    for device, of_device in devices.items():
        for kind, (title, section) in _SECTIONS.items():
            found = [record for record in of_device if record["bench"] == kind]
            if text := found and section(found):
                page += f"\n## {title}{f', {device}' if len(devices) > 1 else ''}\n\n{text}"
    if steps := _show_counts(records, counts):
        page += f"\n## Steps and what was counted of them\n\n{steps}"
    return page + f"\n## Stages\n\n{_stages(stages, state)}\n## Calls\n\n{table(_calls(state))}"


def _failures(stages: Sequence[Stage], state: State, records: Sequence[Record], folder: Path) -> str:
    """What failed and why: the end of each traceback, or of the log if a command died without a word of its own."""
    text, num_shown = "", 0
    for stage in stages:
        for name in stage.commands:
            own = [record for record in records if record["command"] == name and "failure" in record]
            lost = [record["cell"] for record in records if record["command"] == name and record["bench"] == "lost"]
            end = state.commands.get(name, DONE)
            if own or end.startswith("failed"):
                text += f"**{stage.name}, {name}**: {end}\n\n"
            for record in own:
                text += f"- `{record.get('cell')}`\n"
                text += f"\n```\n{record['failure']}\n```\n\n" if num_shown < _MAX_TRACEBACKS else ""
                num_shown += 1
            if end.startswith("failed") and not own:
                text += f"```\n{log_end(folder, name)}\n```\n\n"
            text += "".join(
                f"- `{cell}` of {name} began and never ended: killed, cut off, or it hangs\n" for cell in lost
            )
    return text or "None.\n"


def _left(stages: Sequence[Stage], state: State) -> str:
    """What the next call goes on with."""
    left = {stage.name: open_commands(stage, state) for stage in stages}
    lines = [f"- {name}: {', '.join(commands)}" for name, commands in left.items() if commands]
    lines += [f"- {stage.name} cannot run here: {stage.unavailable}" for stage in stages if stage.unavailable]
    return "\n".join(lines) or "Nothing."


def _stages(stages: Sequence[Stage], state: State) -> str:
    rows = []
    for stage in stages:
        ends = [state.commands.get(name, "not begun").partition(":")[0] for name in stage.commands]
        counts = ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(ends))
        used_s = state.used_s.get(stage.name, 0.0)
        rows.append({"stage": stage.name, "commands": counts, "time": f"{used_s:.0f} of {stage.most_s:.0f} s"})
    return table(rows)


def _calls(state: State) -> list[dict[str, str]]:
    keys = ("utc", "device", "git_sha", "minutes", "end")
    return [{"call": str(i + 1), **{key: str(call[key]) for key in keys}} for i, call in enumerate(state.calls)]


def _show_machine(records: Sequence[Record]) -> str:
    text = ""
    for found in records:
        if found["measured"] == "limits":
            copy, product = found["bytes_per_s"] / 1e12, found["flops_per_s"] / 1e12
            row = {"copy, read and written": f"{copy:.3g} TB/s", "bf16 product": f"{product:.4g} TFLOP/s"}
            row |= {"kernel of a chain": f"{found['graph_gap_us']:.3g} us", "timing": found["timing"]}
            text = table([row])
    return text


def _show_tests(records: Sequence[Record]) -> str:
    rows = []
    for (stage, name), found in groups(records, "stage", "command").items():
        outcomes = [record["outcome"] for record in found]
        rows.append(
            {"stage": stage, "tests": name, **{k: str(outcomes.count(k)) for k in ("passed", "failed", "skipped")}}
        )
    return table(rows)


def _show_precompiled(records: Sequence[Record]) -> str:
    slowest = max(record["seconds"] for record in records)
    return f"{len(records)} steps, {sum(r['num_kernels'] for r in records)} kernels, at most {slowest:.0f} s a step.\n"


def _show_small_m(records: Sequence[Record]) -> str:
    measured = any(record["percent_of_bandwidth"] is not None for record in records)
    what, key = ("Percent of the copy bandwidth", "percent_of_bandwidth") if measured else ("Times in us", "p50_us")
    rows = []
    for (model, matrix), found in groups(records, "model", "matrix").items():
        by_count = {record["num_rows"]: record[key] for record in found}
        cells = {f"M = {m}": number(by_count.get(m)) for m in sorted({record["num_rows"] for record in records})}
        rows.append({"model": model, "matrix": matrix, **cells})
    return f"{what}.\n\n{table(rows)}"


def _show_kernels(records: Sequence[Record]) -> str:
    rows, left_out = [], 0
    for (op,), of_op in groups((record for record in records if "op" in record), "op").items():
        shapes = [*groups(of_op, "shape").values()]
        rows += [{"op": op, "shape": found[0]["shape"], **_comparison(found)} for found in shapes[:_MAX_ROWS]]
        left_out += len(shapes[_MAX_ROWS:])
    return table(rows) + (f"\n{left_out} more shapes are in records.jsonl.\n" if left_out else "")


def _comparison(found: Sequence[Record]) -> dict[str, str]:
    """Ours against the fastest other provider that was timed in the same way, or any if there is none."""
    ours: Record = next((record for record in found if record["provider"] == "triton"), {})
    others = [record for record in found if record is not ours and record["p50_us"]]
    captured = [record for record in others if record["timing"].startswith("CUDA-graph")]
    best = min(captured or others, key=lambda record: record["p50_us"], default=None)
    how = "" if captured else ", not captured"
    our_us = ours.get("p50_us")
    return {
        "ours, us": number(our_us),
        "best other, us": f"{number(best['p50_us'])} ({best['provider']}{how})" if best else "-",
        "other / ours": number(best["p50_us"] / our_us if best and our_us else None),
        "roofline, us": number(found[0]["roofline_us"]),
        "ours, % of roofline": number(ours.get("percent_of_roofline")),
    }


def _show_counts(records: Sequence[Record], counts: Counts) -> str:
    """Measured steps beside their estimates, and what a launch takes if the rest of the step runs at its floor."""
    rows = []
    for record in records:
        key = (record.get("model", ""), record.get("arm", ""), record.get("context", ""))
        if key not in counts or record.get("batch") != 1 or record.get("step_ms") is None:
            continue
        (launches, estimate_ms), step_ms, floor_ms = counts[key], record["step_ms"], record["floor_ms"]
        over_us = 1e3 * (step_ms - floor_ms) / launches if floor_ms else None
        figures = {
            "step, ms": step_ms,
            "estimate, ms": estimate_ms,
            "floor, ms": floor_ms,
            "us over it a launch": over_us,
        }
        rows.append(
            {"model": key[0], "arm": key[1], "launches": str(launches), **{k: number(v) for k, v in figures.items()}}
        )
    return table(rows)


def _show_hand_over(records: Sequence[Record]) -> str:
    rows = groups(records, "command").items()
    return "".join(
        f"- {name}: {len(found)} kernels, {sum('failure' in r for r in found)} wrong\n" for (name,), found in rows
    )


_SECTIONS: Mapping[str, tuple[str, Callable[[Sequence[Any]], str]]] = {
    "machine": ("Machine", _show_machine),
    "test": ("Tests", _show_tests),
    "precompile": ("Kernels of steps, compiled ahead", _show_precompiled),
    "decode": ("Decoding", decode_tables),
    "kernel": ("Kernels", _show_kernels),
    "small_m": ("Linear layers of the library", _show_small_m),
    "hand_over": ("Kernels that hand data over, against their definitions", _show_hand_over),
    "sanitizer": ("Sanitizers", lambda records: "".join(f"- {r['tool']}: {r['verdict']}\n" for r in records)),
}
