"""All measurements that need a GPU, in one command with a time budget, on a machine that needs no network.

    python -m specdec.bench.on_gpu --minutes 10 --output results            # the most telling first
    python -m specdec.bench.on_gpu --minutes 5 --output results --only machine bench_tree_attention
    python -m specdec.bench.on_gpu --dry --output /path/to/scratch          # everything, tiny, on the CPU

Each stage runs in processes of its own with a time limit and a log, and none stops another; when time is short, the
last ones are dropped first. After every stage its records are appended to OUTPUT/records.jsonl and OUTPUT/summary.md is
written anew, so a run that is killed has told what it knew. The logs, and what the stage that it was killed in had
measured, are in a folder of OUTPUT named after the start of the run.

The exit status is 1 if a stage failed. A stage that was cut off or dropped for lack of time is no failure; the summary
lists it, and `--only` runs it again.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import Any

import torch

from specdec.bench.common.provenance import append_record, provenance
from specdec.bench.common.shapes import BATCHES, CONTEXTS, MODELS
from specdec.bench.common.tables import Record, decode_tables, groups, number, table

__all__ = ["Stage", "collect", "main", "plan", "run_stages", "stages", "summarize"]

DRY_NOTE = "dry run on a CPU: nothing was timed on a GPU"
_ROOT = Path(__file__).resolve().parents[1]
_RESERVE_S = 20.0  # to stop the last stage and to write the summary
_GRACE_S = 15.0  # between an interrupt and a kill
_MAX_ROWS = 12  # per op in the summary; records.jsonl has all
_SIZES = ("--batches", *map(str, BATCHES), "--contexts", *map(str, sorted(CONTEXTS, key=lambda size: size != 2048)))

# by what an op decides: the share of a step, then the risk of its design; the rest follows in alphabetical order
_MOST_TELLING = (
    *("tree_attention", "lm_head_topk", "skinny_linear", "draft_heads", "rms_norm", "rope_kv_write", "swiglu"),
    *("kv_compact", "accept_greedy", "tree_expand", "accept_traversal", "accept_rejection", "accept_typical"),
    *("accept_naive",),
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of the measurement.

    Attributes:
        name: what `--only` and reports call it.
        commands: command lines by name; a log each.
        least_s: the stage is not started with less time than that, in seconds.
        most_s: the stage gets no more time than that, in seconds.
        jobs: commands that run at the same time; 1 if anything is timed.
        unavailable: why it cannot run on this machine, or None.
    """

    name: str
    commands: Mapping[str, Sequence[str]]
    least_s: float
    most_s: float
    jobs: int = 1
    unavailable: str | None = None


def stages(folder: Path, *, dry: bool) -> list[Stage]:
    """What to run, the most telling first; `dry` has tiny sizes on the CPU, and as few processes as possible.

    The commands leave their results in the folder, in files named after them. A stage that cannot run says why.
    """

    def measure(name: str, least_s: float, most_s: float, module: str, *arguments: str) -> Stage:
        command = [sys.executable, "-m", f"specdec.bench.{module}", *arguments, *(["--dry"] if dry else [])]
        return Stage(name, {name: [*command, "--output", str(folder / f"{name}.jsonl")]}, least_s, most_s)

    def decode(name: str, least_s: float, most_s: float, *arguments: str) -> Stage:
        place = [] if dry else ["--device", "cuda", "--minutes", f"{most_s / 60:g}"]
        pictures = ["--pictures", str(folder / "pictures")]
        return measure(name, least_s, most_s, "decode", *place, *pictures, *arguments)

    models = [model.name.lower() for model in MODELS]
    usual_step = decode("decode_7b", 90, 300, "--models", models[0], "--repeats", "3")
    all_steps = decode("decode_all", 300, 3600, "--models", *models, *_SIZES, "--repeats", "3")
    benchmarks = _benchmarks(folder, dry=dry)
    tool = "compute-sanitizer"
    watcher = [] if dry else [tool, "--tool", "racecheck", "--error-exitcode", "1"]
    races = {"race_check": [*watcher, sys.executable, "-m", "specdec.bench.compiled.race_check"]}
    missing = None if dry or shutil.which(tool) else f"{tool} is not on the PATH"
    found = [
        measure("machine", 30, 120, "common.machine"),
        _tests(folder, dry=dry),
        measure("small_m", 30, 240, "small_m"),
        *[benchmarks[0], usual_step, *benchmarks[1:]],
        Stage("race_check", races, 30, 180, unavailable=missing),
        decode("decode", 60, 300),
        all_steps,
    ]
    return [stage for stage in found if not dry or stage not in (usual_step, all_steps)]


def _pytest(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={_ROOT}", *map(str, arguments)]


def _tests(folder: Path, *, dry: bool) -> Stage:
    """The tests that run on a GPU, a process per file: one that loses the GPU's context takes no other with it."""
    files = sorted([*(_ROOT / "tests").rglob("test_*_gpu.py"), *(_ROOT / "tests" / "kernels").glob("test_*.py")])
    files = [file for file in files if not dry or file.stem == "test_tree_expand"]
    commands = {file.stem: _pytest(file, f"--junitxml={folder / f'{file.stem}.xml'}") for file in files}
    jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
    return Stage("tests", commands, 60, 600, jobs, None if files else f"no tests at {_ROOT / 'tests'}")


def _benchmarks(folder: Path, *, dry: bool) -> list[Stage]:
    """A stage per benchmark file; one for all in a dry run, where most of the time goes to starting processes."""
    value = {f"bench_{name}": i for i, name in enumerate(_MOST_TELLING)}
    files = sorted((_ROOT / "bench" / "kernels").glob("bench_*.py"))
    files.sort(key=lambda file: value.get(file.stem, len(value)))
    groups = {"benchmarks": files} if dry else {file.stem: [file] for file in files}
    # the settings of pyproject.toml, which an installed package is without
    options = ["-o", "python_files=bench_*.py", "-o", "python_functions=bench_*", "--benchmark-only", "--records"]
    commands = {name: _pytest(*options, folder / f"{name}.jsonl", *group) for name, group in groups.items()}
    return [Stage(name, {name: command}, 20, 300) for name, command in commands.items()]


def plan(stages: Sequence[Stage], seconds: float) -> dict[str, float]:
    """What to run in the time that is left: the stages to keep, by name in order, each with its limit if it ran now.

    A limit is the stage's least time and what the least times of the others leave over, up to its most. A stage whose
    least time does not fit beside those before it is dropped; a shorter one after it may still be kept.
    """
    kept: list[Stage] = []
    for stage in stages:
        if stage.least_s <= seconds:
            kept.append(stage)
            seconds -= stage.least_s
    return {stage.name: min(stage.most_s, stage.least_s + seconds) for stage in kept}


def run_stages(stages: Sequence[Stage], seconds: float, folder: Path) -> Iterator[Record]:
    """Run stages one after another, planned anew before each, since a stage may leave some of its time.

    Args:
        stages: the most telling first.
        seconds: time for all of them; what uses up its own is interrupted, and killed if that does not help.
        folder: working folder of the logs; a log is named after its command.

    Yields:
        What became of every stage, also of those that were not run: a record with its name ("stage"), "status" ("done",
        "failed", "cut off" by its limit, "no time" or "unavailable"), "commands" ("done", "failed: ...", "cut off" or
        "no time" for each that was due), "detail" (why it did not run, or the end of the first log that tells of a
        failure), "limit_s" and "wall_s". No exit status and no missing program raises.
    """
    deadline = time.monotonic() + seconds
    for i, stage in enumerate(stages):
        left = deadline - time.monotonic()
        limit_s = plan(stages[i:], left).get(stage.name)
        record = {"bench": "stage", "stage": stage.name, "commands": {}, "detail": "", "limit_s": 0, "wall_s": 0}
        if stage.unavailable is not None:
            yield {**record, "status": "unavailable", "detail": stage.unavailable}
        elif limit_s is None:
            yield {**record, "status": "no time", "detail": f"{left:.0f} s left, {stage.least_s:.0f} s needed"}
        else:
            yield {**record, **_run_stage(stage, limit_s, folder)}


def _run_stage(stage: Stage, limit_s: float, folder: Path) -> Record:
    """Run the commands of a stage; returns what became of it."""
    start = time.monotonic()
    running: list[subprocess.Popen[bytes]] = []

    def run(name: str) -> str:
        left = start + limit_s - time.monotonic()
        return _run(stage.commands[name], folder / f"{name}.log", left, running) if left > 0 else "no time"

    with ThreadPoolExecutor(stage.jobs) as pool:
        try:
            commands = dict(zip(stage.commands, pool.map(run, stage.commands), strict=True))
        except BaseException:  # this process is being stopped
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                _stop(process, 0)
            raise
    failed = [name for name, status in commands.items() if status.startswith("failed")]
    status = "failed" if failed else "cut off" if {"cut off", "no time"} & {*commands.values()} else "done"
    detail = (folder / f"{failed[0]}.log").read_text(errors="replace")[-1500:] if failed else ""
    times = {"limit_s": round(limit_s, 1), "wall_s": round(time.monotonic() - start, 1)}
    return {"status": status, "commands": commands, "detail": detail, **times}


def _run(command: Sequence[str], log: Path, limit_s: float, running: list[Any]) -> str:
    """Run one command with its output in a log; returns what became of it."""
    with log.open("w") as file:
        print("$", *command, file=file, flush=True)
        try:  # in a group of its own, so that its children can be stopped with it
            process = subprocess.Popen(command, stdin=DEVNULL, stdout=file, stderr=STDOUT, start_new_session=True)
        except OSError as error:
            print(error, file=file)
            return "failed: could not be started"
    running.append(process)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _stop(process, _GRACE_S)
        return "cut off"
    return "done" if status in (0, 5) else f"failed: exit status {status}"  # 5: pytest found no test to run


def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Interrupt a process and its children, which lets pytest write what it has, then kill them."""
    for wish, patience_s in ((signal.SIGINT, grace_s), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, wish)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)


def collect(folder: Path, name: str) -> list[dict[str, Any]]:
    """Read what the command of a name left: records of its own, test results, the verdict of a race detector.

    Each record has its kind under "bench". What a command was killed in writing is not among them.
    """
    own, junit, log = (folder / f"{name}.{ending}" for ending in ("jsonl", "xml", "log"))
    records: list[dict[str, Any]] = []
    try:
        for line in own.read_text(encoding="utf-8").splitlines() if own.is_file() else ():
            records.append(json.loads(line))
        if junit.is_file():
            cases = list(ElementTree.parse(junit).iter("testcase"))
            wrong = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
            failed = [f"{case.get('classname')}::{case.get('name')}" for case in wrong]
            num_skipped = sum(case.find("skipped") is not None for case in cases)
            counts = {"num_passed": len(cases) - len(failed) - num_skipped, "num_skipped": num_skipped}
            records.append({"bench": "tests", "file": name, **counts, "failed": failed})
    except (json.JSONDecodeError, ElementTree.ParseError) as error:
        print(f"{name}: the end of its results is missing: {error}", flush=True)
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    verdicts = [line.strip(" =") for line in lines if "RACECHECK SUMMARY" in line]
    return records + [{"bench": "race_check", "verdict": verdict} for verdict in verdicts]


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; returns the exit status, 1 if any failed."""
    parser = argparse.ArgumentParser(prog="specdec.bench.on_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="time for everything (default: 10)")
    parser.add_argument("--output", type=Path, required=True, help="folder that results are appended to")
    parser.add_argument("--dry", action="store_true", help="go through everything on the CPU with tiny shapes")
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="run these stages alone")
    options = parser.parse_args(arguments)
    if options.dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # or provenance would name a GPU that nothing ran on
    elif not torch.cuda.is_available():
        parser.error("expected an NVIDIA GPU, found none; with --dry it goes through everything on the CPU")
    else:
        os.environ.pop("TRITON_INTERPRET", None)  # as everything that runs inherits it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # unwinds, which ends the stage that runs

    started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = options.output.resolve() / started
    found = stages(folder, dry=options.dry)
    if unknown := set(options.only) - {stage.name for stage in found}:
        names = ", ".join(stage.name for stage in found)
        parser.error(f"--only: expected some of {names}, got {', '.join(sorted(unknown))}")
    chosen = [stage for stage in found if not options.only or stage.name in options.only]
    folder.mkdir(parents=True)
    run: Record = {"run": started, "minutes": options.minutes, **({"dry": DRY_NOTE} if options.dry else {})}
    records: list[Record] = []
    for outcome in run_stages(chosen, 60 * options.minutes - _RESERVE_S, folder):
        for record in [*(record for name in outcome["commands"] for record in collect(folder, name)), outcome]:
            records.append({"provenance": provenance(), **record, **run, "stage": outcome["stage"]})
            append_record(options.output / "records.jsonl", records[-1])
        print(f"{outcome['stage']}: {outcome['status']}, {outcome['wall_s']:.0f} s", flush=True)
        (options.output / "summary.md").write_text(summarize(records), encoding="utf-8")
    print((options.output / "summary.md").read_text(encoding="utf-8"))
    return int(any(record["bench"] == "stage" and record["status"] == "failed" for record in records))


def summarize(records: Sequence[Record]) -> str:
    """A page in Markdown from the records of one run, in the order in which they were made."""
    latest, source = records[-1], records[-1]["provenance"]
    about = [source["device"], source["driver"] and f"driver {source['driver']}", f"torch {source['torch']}"]
    about += [f"triton {source['triton']}", source["git_sha"] and f"commit {source['git_sha']}"]
    about += [source["git_dirty"] and "local changes", f"{latest['minutes']:g} minutes"]
    note = f"**{latest['dry']}**\n\n" if "dry" in latest else ""
    page = f"# Run {latest['run']}\n\n{note}{', '.join(part for part in about if part)}\n"
    for kind, (title, section) in _SECTIONS.items():
        found = [record for record in records if record["bench"] == kind]
        if text := found and section(found):
            page += f"\n## {title}\n\n{text}"
    return page


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
    passed, skipped = (sum(record[key] for record in records) for key in ("num_passed", "num_skipped"))
    failed = [name for record in records for name in record["failed"]]
    text = f"{passed} passed, {len(failed)} failed, {skipped} skipped, in {len(records)} files.\n"
    return text + "".join(f"- failed: `{name}`\n" for name in failed)


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
    for (op,), of_op in groups((record for record in records if "failure" not in record), "op").items():
        shapes = [*groups(of_op, "shape").values()]
        rows += [{"op": op, "shape": found[0]["shape"], **_comparison(found)} for found in shapes[:_MAX_ROWS]]
        left_out += len(shapes[_MAX_ROWS:])
    text = table(rows) + (f"\n{left_out} more shapes are in records.jsonl.\n" if left_out else "")
    failed = [record for record in records if "failure" in record]
    return text + "".join(f"\n- no figure: `{r['name']}`: {r['failure'].splitlines()[0]}" for r in failed) + "\n"


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


def _show_stages(records: Sequence[Record]) -> str:
    rows, notes = [], ""
    for record in records:
        stage, status, detail = record["stage"], record["status"], record["detail"].strip()
        rows.append({"stage": stage, "outcome": status, "time": f"{record['wall_s']:g} of {record['limit_s']:g} s"})
        undone = ", ".join(f"{name} ({end})" for name, end in record["commands"].items() if end != "done")
        notes += f"\n- {stage}: {status}: {undone or detail}\n" if status != "done" else ""
        notes += f"\n```\n{detail}\n```\n" if status == "failed" else ""
    return table(rows) + notes


_SECTIONS: Mapping[str, tuple[str, Callable[[Sequence[Record]], str]]] = {
    "machine": ("Machine", _show_machine),
    "tests": ("Tests", _show_tests),
    "small_m": ("Linear layers of the library", _show_small_m),
    "kernel": ("Kernels", _show_kernels),
    "race_check": ("Races", lambda records: "".join(f"- {record['verdict']}\n" for record in records)),
    "decode": ("Decoding", decode_tables),
    "stage": ("Stages", _show_stages),
}


if __name__ == "__main__":
    sys.exit(main())
