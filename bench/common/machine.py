"""The machine itself: what it is, and the limits that kernels are held against.

Questions: how fast is a large copy, a large matrix product, and how far apart are two small kernels of a CUDA graph?

    python -m specdec.bench.common.machine --output records.jsonl

Without a GPU it stops, unless `--dry` asks for small sizes on the CPU, which measure nothing of interest.
"""

import argparse
import functools
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.bench.common.cost import Machine
from specdec.bench.common.timing import WARMUP_ROUNDS, Call, elapsed_us, time_calls
from specdec.common.provenance import append_record

__all__ = ["describe_machine", "device_is_lost", "graph_gap_us", "limits", "main", "measure_machine"]
__all__ += ["parse_options", "require_gpu"]

_REPETITIONS = 20
_CHAIN = 25  # times the calls of a round: a graph of 1000 kernels
_PACKAGES = ("torch", "triton", "transformers", "numpy", "pytest", "pytest-benchmark", "hypothesis", "safetensors")


def require_gpu(command: str) -> None:
    """Raise RuntimeError, in the name of `command`, if there is no GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"{command}: expected an NVIDIA GPU, found none")


def device_is_lost() -> bool:
    """Whether an error took the GPU's context with it: nothing runs on it in this process any more."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # of which every error of an accelerator is one
        return True
    return False


@functools.cache
def measure_machine() -> Machine:
    """Measure the limits of the current GPU: a copy of 1 GiB and a bfloat16 product of 8192 x 8192 random numbers.

    Returns:
        Medians of 20 repetitions each.

    Raises:
        RuntimeError: there is no GPU.
    """
    require_gpu("measure_machine")
    return limits(copy_bytes=2**30, matrix_size=8192)


def limits(*, copy_bytes: int, matrix_size: int) -> Machine:
    """Time a copy and a bfloat16 matrix product, on the GPU if there is one.

    Args:
        copy_bytes: size of the source; as much is read as written.
        matrix_size: rows and columns of both factors, which are random: zeros are faster.

    Returns:
        Rates from medians of 20 repetitions each.
    """
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    source = torch.empty(copy_bytes, dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    a, b = (torch.randn(matrix_size, matrix_size, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy_us = [elapsed_us(lambda: target.copy_(source)) for _ in range(WARMUP_ROUNDS + _REPETITIONS)]
    product_us = [elapsed_us(lambda: torch.mm(a, b)) for _ in range(WARMUP_ROUNDS + _REPETITIONS)]
    return Machine(
        name=torch.cuda.get_device_name() if has_gpu else "cpu",
        bytes_per_s=2 * copy_bytes / (1e-6 * float(np.median(copy_us[WARMUP_ROUNDS:]))),
        flops_per_s=2 * matrix_size**3 / (1e-6 * float(np.median(product_us[WARMUP_ROUNDS:]))),
    )


def graph_gap_us() -> tuple[float, str]:
    """Time per kernel in a chain of kernels of one element, each of which needs the one before.

    Returns:
        Median in us, and how it was taken.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def chain(x: torch.Tensor) -> None:
        for _ in range(_CHAIN):
            x.add_(1)

    times_us, timing = time_calls(chain, lambda: Call((torch.zeros(1, device=device),)), touched_bytes=4)
    return float(np.median(times_us)) / _CHAIN, timing


def describe_machine() -> dict[str, Any]:
    """GPU, tools and package versions: what provenance does not say of a machine."""
    found: dict[str, Any] = {"packages": {name: _version(name) for name in _PACKAGES}}
    found["tools"] = {tool: shutil.which(tool) is not None for tool in ("compute-sanitizer", "ncu", "nvcc")}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "capability": f"{properties.major}.{properties.minor}",
            "num_sms": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "nvidia_smi": _nvidia_smi(),
        }
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> str | None:
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def parse_options(command: str, doc: str, arguments: list[str] | None) -> argparse.Namespace:
    """`--dry`, `--output` and `--resume` of a command that needs a GPU, described by the docstring of its module.

    Raises:
        RuntimeError: there is no GPU, and the run is not dry.
    """
    parser = argparse.ArgumentParser(prog=command, description=doc.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="small sizes, on the CPU if there is no GPU")
    parser.add_argument("--output", type=Path, required=True, help="JSON-lines file that the records are appended to")
    parser.add_argument("--resume", action="store_true", help="only what the file does not have yet")
    options = parser.parse_args(arguments)
    if not options.dry:
        require_gpu(command)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Describe and measure the machine; returns the exit status."""
    options = parse_options("specdec.bench.common.machine", __doc__, arguments)
    append_record(options.output, {"bench": "machine", "measured": "environment", **describe_machine()})
    machine = limits(copy_bytes=2**20, matrix_size=128) if options.dry else measure_machine()
    gap_us, timing = graph_gap_us()
    found = {"bytes_per_s": machine.bytes_per_s, "flops_per_s": machine.flops_per_s, "graph_gap_us": gap_us}
    append_record(options.output, {"bench": "machine", "measured": "limits", **found, "timing": timing})
    copy, product = machine.bytes_per_s / 1e12, machine.flops_per_s / 1e12
    print(f"copy {copy:.3g} TB/s, product {product:.3g} TFLOP/s, {gap_us:.3g} us per kernel of a chain ({timing})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
