"""A rehearsal of the campaign on the CPU: three short calls, the first of them killed, and a look at the archives."""

import json
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from specdec.bench.campaign.results import LIMIT_BYTES
from specdec.common.provenance import read_records

__all__ = ["inspect", "rehearse"]

_KILLED_IN = "kernels"
_SECONDS = (600.0, 25.0, 600.0)  # the first is killed before; the second is too short for everything
_RESULTS = {"machine", "test", "kernel", "small_m", "hand_over", "decode"}


def rehearse(output: Path) -> int:
    """Make three calls and check what they leave; returns the exit status, 1 if anything is missing.

    Args:
        output: a folder of the rehearsal alone; what is in it is deleted.
    """
    output = output.resolve() / "dry"
    shutil.rmtree(output, ignore_errors=True)
    problems = []
    for number, seconds in enumerate(_SECONDS, start=1):
        status = _call(output, seconds, kill_in=_KILLED_IN if number == 1 else None)
        print(f"call {number}: exit status {status}", flush=True)
        if number > 1 and status != 0:
            problems.append(f"call {number}: exit status {status}")
        if number == 2:  # as on another machine, to which only the archives were carried
            for entry in output.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.suffix != ".gz":
                    entry.unlink()
    problems += inspect(output, len(_SECONDS))
    print((output / "summary.md").read_text(encoding="utf-8"))
    print("\n".join(problems) or "the archives hold everything", flush=True)
    return int(bool(problems))


def _call(output: Path, seconds: float, *, kill_in: str | None) -> int:
    """Make a call; kill it once the named command has ended a cell or two. What that runs is left to the next call."""
    command = [sys.executable, "-m", "specdec.bench.on_gpu", "--cpu", "--output", str(output)]
    process = subprocess.Popen([*command, "--minutes", str(seconds / 60)], stdout=subprocess.DEVNULL)
    results = output / "work" / f"{kill_in}.jsonl"
    while process.poll() is None:
        if kill_in and sum("cell" in record for record in read_records(results)) > 1:
            process.kill()
        time.sleep(0.1)
    return process.wait()


def inspect(output: Path, num_calls: int) -> list[str]:
    """What the archives of a rehearsal lack, a line each."""
    problems = []
    for number in range(1, num_calls + 1):
        archive = output / f"{number}.tar.gz"
        if not archive.is_file():
            problems.append(f"{archive.name}: missing")
            continue
        if archive.stat().st_size > LIMIT_BYTES:
            problems.append(f"{archive.name}: larger than {LIMIT_BYTES} bytes")
        with tarfile.open(archive) as file:
            names = file.getnames()
            lacks = [name for name in ("records.jsonl", "summary.md", "state.json") if name not in names]
            problems += [f"{archive.name}: no {name}" for name in lacks]
            content = {name: _text(file, name) for name in ("records.jsonl", "state.json")}
        if not lacks:
            is_last = number == num_calls
            problems += [f"{archive.name}: {problem}" for problem in _inspect_call(content, names, is_last=is_last)]
    return problems


def _text(archive: tarfile.TarFile, name: str) -> str:
    found = archive.extractfile(name) if name in archive.getnames() else None
    return "" if found is None else found.read().decode()


def _inspect_call(content: dict[str, str], names: list[str], *, is_last: bool) -> list[str]:
    """What one archive lacks: the first is of a call that was killed, the last has every result once."""
    state: dict[str, Any] = json.loads(content["state.json"])
    records = [json.loads(line) for line in content["records.jsonl"].splitlines()]
    problems = []
    if state["calls"][0]["end"] != "killed":
        problems.append(f"the first call ended as {state['calls'][0]['end']}, not killed")
    if not records:
        problems.append("no records")
    if any("dry" not in record for record in records):
        problems.append("a record does not say that nothing was timed")
    if not is_last:
        return problems
    problems += [f"{name} is {end}" for name, end in state["commands"].items() if end != "done"]
    problems += [f"no log of {name}" for name in state["commands"] if f"work/{name}.log" not in names]
    if not any(name.endswith(".svg") for name in names):
        problems.append("no picture")
    kinds = {record["bench"] for record in records}
    if kinds != _RESULTS:
        problems.append(f"records of {sorted(kinds)}, expected {sorted(_RESULTS)}")
    cells = [(record["command"], record["cell"]) for record in records if "cell" in record]
    if len(cells) != len({*cells}):
        problems.append("a cell is there twice")
    return problems
