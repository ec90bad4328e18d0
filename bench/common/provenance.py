"""Where a number comes from: source, machine, software, command and time. No record goes without it."""

import functools
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import triton

__all__ = ["append_record", "provenance"]

_SOURCE = Path(__file__).resolve().parents[1]


def provenance() -> dict[str, Any]:
    """Describe this run.

    Returns:
        A JSON-able dictionary: `git_sha` and `git_dirty` (None outside a git checkout), `device`, `driver` and
        `sm_clock_max` (None without a GPU), `cpu`, `python`, `torch`, `cuda` (None in a CPU build), `triton`, `argv`
        (the program without its folder) and `utc`.
    """
    return {
        **_fixed(),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record, with provenance unless it has one, to a JSON-lines file.

    Args:
        path: the file; it and its folder are created.
        record: anything JSON can hold.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**record, "provenance": record.get("provenance") or provenance()}) + "\n")


@functools.cache
def _fixed() -> dict[str, Any]:
    """What does not change while the process runs."""
    has_gpu = torch.cuda.is_available()
    status = _output("git", "-C", str(_SOURCE), "status", "--porcelain")
    gpu_query = ("nvidia-smi", f"--id={_gpu_uuid()}", "--format=csv,noheader") if has_gpu else None
    return {
        "git_sha": _output("git", "-C", str(_SOURCE), "rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "driver": _output(*gpu_query, "--query-gpu=driver_version") if gpu_query else None,
        "sm_clock_max": _output(*gpu_query, "--query-gpu=clocks.max.sm") if gpu_query else None,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": str(triton.__version__),
    }


def _gpu_uuid() -> str:
    """Name of the current GPU that nvidia-smi understands whatever CUDA_VISIBLE_DEVICES hides."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _output(*command: str) -> str | None:
    """What a command prints, stripped; None if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
