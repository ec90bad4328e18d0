"""All measurements that need a GPU, in one command with a time budget, on a machine that needs no network.

    python -m specdec.bench.on_gpu --minutes 10 --output results            # the most telling first
    python -m specdec.bench.on_gpu --minutes 5 --output results --only machine bench_tree_attention
    python -m specdec.bench.on_gpu --dry --output /path/to/scratch          # everything, tiny, on the CPU

Each stage runs in processes of its own with a time limit and a log, and none stops another. After every stage its
records are appended to OUTPUT/records.jsonl and OUTPUT/summary.md is written anew, so a run that is killed has told
what it knew; the logs are in a folder of OUTPUT named after the start of the run.

The exit status is 1 if a stage failed. A stage that was cut off or dropped for lack of time is no failure; the summary
lists it, and `--only` runs it again.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from specdec.bench.common.provenance import append_record, provenance
from specdec.bench.common.shapes import BATCHES, CONTEXTS, MODELS, ModelShape
from specdec.bench.stages import Outcome, Stage, run_stages
from specdec.bench.summary import summarize

__all__ = ["DRY_NOTE", "collect", "main", "stages"]

DRY_NOTE = "dry run on a CPU: nothing was timed on a GPU"
_ROOT = Path(__file__).resolve().parents[1]
_BENCHMARKS = Path(__file__).resolve().parent / "kernels"
_RESERVE_S = 20.0  # to stop the last stage and to write the summary
_DRY_TEST = "test_tree_expand"
_SIZES = ("--batches", *map(str, BATCHES), "--contexts", *map(str, sorted(CONTEXTS, key=lambda size: size != 2048)))

# by what an op decides: the share of a step, then the risk of its design; the rest follows in alphabetical order
_MOST_TELLING = (
    "bench_tree_attention", "bench_lm_head_topk", "bench_skinny_linear", "bench_draft_heads", "bench_rms_norm",
    "bench_rope_kv_write", "bench_swiglu", "bench_kv_compact", "bench_accept_greedy", "bench_tree_expand",
    "bench_accept_traversal", "bench_accept_rejection", "bench_accept_typical", "bench_accept_naive",
)  # fmt: skip


def stages(folder: Path, *, dry: bool) -> list[Stage]:
    """What to run, the most telling first.

    Args:
        folder: where the commands leave their results, in files named after them.
        dry: tiny sizes on the CPU, and as few processes as possible.

    Returns:
        The stages of this machine; one that cannot run says why.
    """
    module = [sys.executable, "-m"]
    tiny = ["--dry"] if dry else []

    def measurement(name: str, least_s: float, most_s: float, *arguments: str, part: str = "") -> Stage:
        stage = name.rpartition(".")[2] + part
        command = [*module, f"specdec.bench.{name}", *arguments, "--output", str(folder / f"{stage}.jsonl")]
        return Stage(stage, {stage: command}, least_s, most_s)

    def decoding(part: str, least_s: float, most_s: float, *arguments: str) -> Stage:
        place = ["--dry"] if dry else ["--device", "cuda", "--minutes", f"{most_s / 60:g}"]
        pictures = ["--pictures", str(folder / "pictures")]
        return measurement("decode", least_s, most_s, *place, *pictures, *arguments, part=part)

    benchmarks = _benchmarks(folder, dry=dry)
    # the usual step of the smallest model first; a dry run has one stage for all of decoding
    found = [
        measurement("common.machine", 30, 120, *tiny),
        _tests(folder, dry=dry),
        measurement("small_m", 30, 240, *tiny),
        *benchmarks[:1],
        *([] if dry else [decoding("_7b", 90, 300, *_models(MODELS[:1]), "--repeats", "3")]),
        *benchmarks[1:],
        _race_check(dry=dry),
        decoding("", 60, 300),
        *([] if dry else [decoding("_all", 300, 3600, *_models(MODELS), *_SIZES, "--repeats", "3")]),
    ]
    # with no GPU to be found, each command takes the way of a machine without one
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if dry else {"TRITON_INTERPRET": ""}
    return [replace(stage, environment=hidden) for stage in found]


def _models(models: Sequence[ModelShape]) -> list[str]:
    """The shapes as an option of the decoding benchmark."""
    return ["--models", *(model.name.lower() for model in models)]


def _pytest(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={_ROOT}", *map(str, arguments)]


def _tests(folder: Path, *, dry: bool) -> Stage:
    """The tests that run on a GPU, a process per file: one that loses the GPU's context takes no other with it."""
    files = sorted([*(_ROOT / "tests").rglob("test_*_gpu.py"), *(_ROOT / "tests" / "kernels").glob("test_*.py")])
    if dry:
        files = [file for file in files if file.stem == _DRY_TEST]
    return Stage(
        name="tests",
        commands={file.stem: _pytest(file, f"--junitxml={folder / f'{file.stem}.xml'}") for file in files},
        least_s=60,
        most_s=600,
        jobs=max(1, min(8, (os.cpu_count() or 1) // 2)),
        unavailable=None if files else f"no tests at {_ROOT / 'tests'}",
    )


def _benchmarks(folder: Path, *, dry: bool) -> list[Stage]:
    """A stage per benchmark file; one for all in a dry run, where most of the time goes to starting processes."""
    value = {name: i for i, name in enumerate(_MOST_TELLING)}
    files = sorted(_BENCHMARKS.glob("bench_*.py"), key=lambda file: (value.get(file.stem, len(value)), file.stem))
    groups = {"benchmarks": files} if dry else {file.stem: [file] for file in files}
    # the settings of pyproject.toml, which an installed package is without
    options = ["-o", "python_files=bench_*.py", "-o", "python_functions=bench_*", "--benchmark-only"]
    options += ["-p", "specdec.bench.live_records", "--records"]
    return [
        Stage(name, {name: _pytest(*options, folder / f"{name}.jsonl", *group)}, 20, 300)
        for name, group in groups.items()
    ]


def _race_check(*, dry: bool) -> Stage:
    tool = "compute-sanitizer"
    watcher = [] if dry else [tool, "--tool", "racecheck", "--error-exitcode", "1"]
    command = [*watcher, sys.executable, "-m", "specdec.bench.compiled.race_check"]
    missing = None if dry or shutil.which(tool) else f"{tool} is not on the PATH"
    return Stage("race_check", {"race_check": command}, 30, 180, unavailable=missing)


def collect(folder: Path, name: str) -> list[dict[str, Any]]:
    """Read what a command left: records of its own, test results, the verdict of a race detector.

    Args:
        folder: where it left them.
        name: its name.

    Returns:
        The records, each with the name of its kind under "bench".
    """
    records: list[dict[str, Any]] = []
    if (own := folder / f"{name}.jsonl").is_file():
        records += [json.loads(line) for line in own.read_text(encoding="utf-8").splitlines()]
    if (junit := folder / f"{name}.xml").is_file():
        cases = list(ElementTree.parse(junit).iter("testcase"))
        failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        records.append(
            {
                "bench": "tests",
                "file": name,
                "num_passed": sum(len(case.findall("*")) == 0 for case in cases),
                "num_skipped": sum(case.find("skipped") is not None for case in cases),
                "failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
            }
        )
    if (log := folder / f"{name}.log").is_file():
        verdicts = [line for line in log.read_text(errors="replace").splitlines() if "RACECHECK SUMMARY" in line]
        records += [{"bench": "race_check", "verdict": line.strip(" =")} for line in verdicts]
    return records


def _keep(output: Path, run: dict[str, Any], outcome: Outcome, folder: Path) -> list[dict[str, Any]]:
    """Append the records of a stage, and one about the stage itself."""
    records = [record for name in outcome.commands for record in collect(folder, name)]
    about_stage = {"bench": "stage", **asdict(outcome)}
    here = {"provenance": provenance()}  # of a record that has none
    records = [{**here, **record, **run, "stage": outcome.stage} for record in [*records, about_stage]]
    for record in records:
        append_record(output / "records.jsonl", record)
    return records


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # unwinds, which ends the stage that runs

    started = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    folder = options.output.resolve() / started
    found = stages(folder, dry=options.dry)
    if unknown := set(options.only) - {stage.name for stage in found}:
        names = ", ".join(stage.name for stage in found)
        parser.error(f"--only: expected some of {names}, got {', '.join(sorted(unknown))}")
    chosen = [stage for stage in found if not options.only or stage.name in options.only]
    folder.mkdir(parents=True)
    run = {"run": started, "minutes": options.minutes, **({"dry": DRY_NOTE} if options.dry else {})}
    records: list[dict[str, Any]] = []
    for outcome in run_stages(chosen, 60 * options.minutes - _RESERVE_S, folder):
        records += _keep(options.output, run, outcome, folder)
        print(f"{outcome.stage}: {outcome.status}, {outcome.wall_s:.0f} s", flush=True)
        (options.output / "summary.md").write_text(summarize(records), encoding="utf-8")
    print((options.output / "summary.md").read_text(encoding="utf-8"))
    return int(any(record["bench"] == "stage" and record["status"] == "failed" for record in records))


if __name__ == "__main__":
    sys.exit(main())
