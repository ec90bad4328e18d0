"""The kernels of a step, compiled into Triton's cache before the step runs, several processes at a time.

    python -m specdec.bench.compiled.precompile --model llama-2-7b --drafter eagle --output x.jsonl

A step that runs for the first time compiles its kernels one after another, some seconds each, while the GPU waits.
Here a step goes through tensors without data (`launch_counter.py`) and its launches are compiled as they would be on
the device (`compile_only.py`): Triton's key of a compiled kernel has its source, its specialisation, the compiler and
the architecture in it, and nothing of the device itself. No GPU is used or waited for.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from specdec.bench.common.journal import Journal
from specdec.bench.common.shapes import MODELS, TINY
from specdec.bench.compiled.compile_only import compile_only
from specdec.bench.compiled.launch_counter import count_step
from specdec.bench.decoding.simulated import DRAFTERS, random_drafter, random_target
from specdec.models.target.target import Target

__all__ = ["main"]

_SM_90 = 90


def main(arguments: list[str] | None = None) -> int:
    """Compile the step of one drafter at one model; returns the exit status."""
    models = {shape.name.lower(): shape for shape in (*MODELS, TINY)}
    parser = argparse.ArgumentParser(prog="specdec.bench.compiled.precompile", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=models, required=True)
    parser.add_argument("--drafter", choices=("none", *DRAFTERS), required=True)
    parser.add_argument("--room", type=int, default=2048 + 384, help="tokens that there is room for (default: 2432)")
    parser.add_argument("--output", type=Path, help="JSON-lines file that the record is appended to")
    options = parser.parse_args(arguments)
    if knobs.runtime.interpret:
        parser.error("expected compiled kernels, got TRITON_INTERPRET=1")
    begin = time.perf_counter()
    weights = random_target(models[options.model], max_positions=2 * options.room, device="meta", dtype=torch.bfloat16)
    target = Target(weights, backend="triton")
    drafter = None if options.drafter == "none" else random_drafter(options.drafter, target)
    found = set()
    with compile_only(_capability()) as compile_launch:

        def compile_kernel(kernel: Any, *args: Any, **settings: Any) -> None:
            found.add(compile_launch(kernel, *args, **settings).hash)

        count_step(target, drafter, context=options.room, on_launch=compile_kernel)
    seconds = time.perf_counter() - begin
    cell = f"{options.model} {options.drafter}"
    record = {"bench": "precompile", "model": options.model, "drafter": options.drafter, "seconds": seconds}
    Journal(options.output).end(cell, {**record, "num_kernels": len(found)})
    print(f"{cell}: {len(found)} kernels, {seconds:.0f} s")
    return 0


def _capability() -> int:
    """Compute capability times ten, of the GPU or else of Hopper."""
    if not torch.cuda.is_available():
        return _SM_90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


if __name__ == "__main__":
    sys.exit(main())
