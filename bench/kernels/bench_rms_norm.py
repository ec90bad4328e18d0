"""rms_norm and add_rms_norm: time per call for the rows of one step, against PyTorch's fused op and torch.compile.

Question: what does the glue around 2 x num_layers norms cost in a step, beyond its launches?

    pytest bench/kernels/bench_rms_norm.py --benchmark-only
"""

import functools

import torch
import torch.nn.functional as F

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases, compiled, eager
from specdec.bench.common.shapes import StepShape
from specdec.kernels.reference import rms_norm as reference
from specdec.kernels.rms_norm import add_rms_norm, rms_norm

EPS = 1e-5


def make_inputs(num_streams: int, shape: StepShape, generator: torch.Generator) -> Call:
    """One or two streams of [B, N, C] and a weight near one."""
    size = (shape.batch, shape.tree.num_nodes, shape.model.hidden_size)
    streams = [shape.normal(generator, *size) for _ in range(num_streams)]
    return Call(args=(*streams, 1 + 0.1 * shape.normal(generator, size[-1])), kwargs={"eps": EPS})


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """PyTorch's own op."""
    return F.rms_norm(x, weight.shape, weight, eps)


def torch_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's own op behind an addition."""
    summed = x + residual
    return F.rms_norm(summed, weight.shape, weight, eps), summed


SIZES = ("num_rows", "width", "element_bytes")
SHAPES = shapes.step_shapes(
    models=[shapes.LLAMA_2_7B, shapes.VICUNA_13B], batches=[1, 8], trees=shapes.TREES[:3], contexts=[2048]
)
RMS_NORM = BenchOp.of(
    rms_norm,
    reference.rms_norm,
    make=functools.partial(make_inputs, 1),
    others={"torch": torch_rms_norm, "compile": compiled(eager(reference.rms_norm))},
    cost=lambda shape: cost.rms_norm(**shape.sizes(*SIZES)),
    shapes=SHAPES,
)
ADD_RMS_NORM = BenchOp.of(
    add_rms_norm,
    reference.add_rms_norm,
    make=functools.partial(make_inputs, 2),
    others={"torch": torch_add_rms_norm, "compile": compiled(eager(reference.add_rms_norm))},
    cost=lambda shape: cost.rms_norm(**shape.sizes(*SIZES), residual=True),
    shapes=SHAPES,
)
bench_rms_norm = cases(RMS_NORM)
bench_add_rms_norm = cases(ADD_RMS_NORM)
