"""Where a number comes from: source, machine, software, command and time. No record goes without it."""

import functools
import json
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton

from specdec.common.source import command_output, source_commit

__all__ = ["append_record", "provenance", "read_records"]


def provenance() -> dict[str, Any]:
    """Describe this run.

    Returns:
        A JSON-able dictionary: `git_sha` and `git_dirty` (outside a git checkout what SPECDEC_GIT_SHA says and whether
        SPECDEC_GIT_DIRTY is 1, None without them), `device`, `driver` and `sm_clock_max` (None without a GPU), `cpu`
        (its model where the system tells), `threads` (that PyTorch computes with), `python`, `torch`, `cuda` (None in a
        CPU build), `triton`, `transformers`, `argv` (absolute paths without their folders) and `utc`.
    """
    return {
        **_fixed(),
        "threads": torch.get_num_threads(),
        "argv": [Path(sys.argv[0]).name, *map(_without_folders, sys.argv[1:])],
        "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record, with provenance unless it has one, to a JSON-lines file.

    Args:
        path: the file; it and its folder are created. If whoever wrote it last was killed within a line, that line
            stays by itself.
        record: anything JSON can hold.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({**record, "provenance": record.get("provenance") or provenance()}) + "\n"
    with path.open("ab+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        file.write((b"\n" if file.read(1) not in (b"", b"\n") else b"") + line.encode())


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file, if it exists, without lines that somebody was killed in writing."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


@functools.cache
def _fixed() -> dict[str, Any]:
    """What does not change while the process runs."""
    has_gpu = torch.cuda.is_available()
    gpu_query = ("nvidia-smi", f"--id={_gpu_uuid()}", "--format=csv,noheader") if has_gpu else None
    return {
        **source_commit(),
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "driver": command_output(*gpu_query, "--query-gpu=driver_version") if gpu_query else None,
        "sm_clock_max": command_output(*gpu_query, "--query-gpu=clocks.max.sm") if gpu_query else None,
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": str(triton.__version__),
        "transformers": version("transformers"),
    }


def _cpu_model() -> str:
    """What the processor is called."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _without_folders(argument: str) -> str:
    """An argument, or the value of an `--option=value`, by its name alone if it is an absolute path."""
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else argument


def _gpu_uuid() -> str:
    """Name of the current GPU that nvidia-smi understands whatever CUDA_VISIBLE_DEVICES hides."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
