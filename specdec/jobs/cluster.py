"""A Ray cluster: how it is reached, and what of it one of several workers gets. Needs the extra `ray`."""

import logging
import os
import re
import subprocess
import sys
from typing import Any

import ray

__all__ = ["connect", "shares"]

CONNECT_SECONDS = 20
_PROBE = """
import sys
import ray
try:
    ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
except Exception as error:
    sys.exit(" ".join(str(error).split()))
"""


def connect(address: str | None = None) -> None:
    """Connect to Ray.

    Args:
        address: as for `ray.init`: `"auto"` for the cluster that this machine belongs to, `"host:port"`, or `"local"`
            for workers on this machine alone; by default what `RAY_ADDRESS` says, and `"local"` where it is not set.

    Raises:
        ConnectionError: nothing answers there within 20 s, or not as it should.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        _probe(address)
    dashboard = False if address == "local" else None
    ray.init(address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    logging.getLogger("ray.data.exceptions").setLevel(logging.CRITICAL)  # traces of what is raised here


def _probe(address: str) -> None:
    """See from another process whether Ray answers: a connection that does not come about cannot be given up."""
    message = f"--ray: expected the address of a Ray cluster, got {address!r}, "
    try:
        run = subprocess.run(
            [sys.executable, "-c", _PROBE, address], capture_output=True, text=True, timeout=CONNECT_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        why = _last_line(error.stderr)
        raise ConnectionError(f"{message}which does not answer within {CONNECT_SECONDS} s{why and ': '}{why}") from None
    if run.returncode:
        raise ConnectionError(f"{message}which refuses: {_last_line(run.stderr)}")


def _last_line(told: str | bytes | None) -> str:
    """What a process has said last, without what Ray's C++ puts in front: time, process and place."""
    text = told.decode(errors="replace") if isinstance(told, bytes) else told or ""
    lines = [re.sub(r"^\[[^]]*\] ?(\S+:\d+: )?", "", line) for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def shares(count: int | None, option: str) -> tuple[int, dict[str, Any]]:
    """How many workers there are, and what each of them takes of the cluster that is connected.

    Args:
        count: one per GPU by default, or one per machine where there are none.
        option: its name, for the message.

    Returns:
        their number, and what each takes as Ray has it: a GPU, or its share of the CPUs.

    Raises:
        ValueError: more workers than there are GPUs, or CPUs.
    """
    resources = ray.cluster_resources()
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
    num_workers = count or gpus or sum(node["Alive"] for node in ray.nodes())
    if num_workers > (gpus or cpus):
        kind = "GPUs" if gpus else "CPUs"
        raise ValueError(f"{option}: expected at most {gpus or cpus}, as the cluster has {kind}, got {num_workers}")
    return num_workers, {"num_gpus": 1} if gpus else {"num_cpus": cpus // num_workers}
