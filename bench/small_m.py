"""PyTorch's own matrix products with few rows: the linear layers of a target that scores a tree of M nodes.

Question: at which M and for which matrices does the library read the weights at less than the speed of a copy, so that
a kernel of our own (`kernels/skinny_linear.py`) has something to gain?

    python -m specdec.bench.small_m --output records.jsonl

Every time is that of a CUDA-graph replay that takes turns on copies of the weights which exceed the L2 cache. The rows
that tell most come first and every record is written at once, so that a run which is cut off has told something.
"""

import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from specdec.bench.common.cost import Machine, skinny_linear
from specdec.bench.common.journal import Journal
from specdec.bench.common.machine import limits, measure_machine, parse_options
from specdec.bench.common.shapes import MODELS, TINY, ModelShape, matrices
from specdec.bench.common.timing import Call, quantiles, time_calls

__all__ = ["NUM_ROWS", "main"]

NUM_ROWS = (1, 64, 16, 128, 8, 32, 2, 4)
"""Values of M, the most telling first: plain decoding, the usual trees, the rest."""


def measure(model: ModelShape, matrix: str, num_rows: int, dtype: torch.dtype, machine: Machine) -> dict[str, Any]:
    """Time one matrix at one M.

    Args:
        model: whose matrix.
        matrix: its name.
        num_rows: M.
        dtype: of weight and rows.
        machine: the limits to compare with.

    Returns:
        The record.
    """
    outputs, inputs = matrices(model)[matrix]
    has_gpu = torch.cuda.is_available()

    def make() -> Call:
        device = "cuda" if has_gpu else "cpu"
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
        return Call((torch.randn(num_rows, inputs, device=device, dtype=dtype), weight))

    cost = skinny_linear(num_rows=num_rows, num_outputs=outputs, num_columns=inputs, element_bytes=dtype.itemsize)
    times_us, timing = time_calls(F.linear, make, cost.num_bytes)
    p50_us = float(np.median(times_us))
    return {
        **{"bench": "small_m", "model": model.name, "matrix": matrix, "num_rows": num_rows},
        **{"outputs": outputs, "inputs": inputs, "dtype": str(dtype), **quantiles(times_us), "timing": timing},
        **{"bytes": cost.num_bytes, "flops": cost.num_flops},
        "percent_of_bandwidth": 1e8 * cost.num_bytes / machine.bytes_per_s / p50_us if has_gpu else None,
        "percent_of_roofline": 100 * cost.roofline_us(machine) / p50_us if has_gpu else None,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure all matrices at all M; returns the exit status."""
    options = parse_options("specdec.bench.small_m", __doc__, arguments)
    models, dtype = ((TINY,), torch.float32) if options.dry else (MODELS, torch.bfloat16)
    counts = NUM_ROWS[:2] if options.dry else NUM_ROWS
    cells = {
        f"{model.name} {matrix} M={num_rows}": (model, matrix, num_rows)
        for num_rows in counts
        for model in models
        for matrix in matrices(model)
    }
    machine = limits(copy_bytes=2**20, matrix_size=128) if options.dry else measure_machine()
    journal = Journal(options.output, resume=options.resume)
    for cell in journal.due(cells):
        journal.begin(cell)
        record = measure(*cells[cell], dtype, machine)
        journal.end(cell, record)
        print(f"{cell}: {record['p50_us']:.4g} us", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
