"""rms_norm and add_rms_norm: time per call for the rows of one step, against PyTorch's fused op and torch.compile.

Question: what does the glue around 2 x num_layers norms cost in a step, beyond its launches?

    pytest bench/kernels/bench_rms_norm.py --benchmark-only
"""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, Provider, compiled
from specdec.bench.common.shapes import StepShape
from specdec.kernels.reference import rms_norm as reference
from specdec.kernels.rms_norm import add_rms_norm, rms_norm

EPS = 1e-5


def make_inputs(num_streams: int, shape: StepShape, generator: torch.Generator) -> Call:
    """One or two streams of [B, N, C] and a weight near one."""
    width = shape.model.hidden_size
    randn = functools.partial(torch.randn, generator=generator, device=generator.device, dtype=shape.dtype)
    streams = [randn(shape.batch, shape.tree.num_nodes, width) for _ in range(num_streams)]
    return Call(args=(*streams, 1 + 0.1 * randn(width)), kwargs={"eps": EPS})


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """PyTorch's own op."""
    return F.rms_norm(x, weight.shape, weight, eps)


def torch_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's own op behind an addition."""
    summed = x + residual
    return F.rms_norm(summed, weight.shape, weight, eps), summed


def norm_cost(shape: StepShape, *, residual: bool) -> cost.Cost:
    """Cost at a shape."""
    return cost.rms_norm(
        num_rows=shape.batch * shape.tree.num_nodes,
        width=shape.model.hidden_size,
        element_bytes=shape.dtype.itemsize,
        residual=residual,
    )


eager_rms_norm = functools.partial(reference.rms_norm, upcast=False)
eager_add_rms_norm = functools.partial(reference.add_rms_norm, upcast=False)

RMS_NORM = BenchOp(
    name="rms_norm",
    make=functools.partial(make_inputs, 1),
    definition=reference.rms_norm,
    providers={
        "reference": Provider(eager_rms_norm),
        "torch": Provider(torch_rms_norm),
        "compile": compiled(eager_rms_norm),
        "triton": Provider(functools.partial(rms_norm, backend="triton"), needs_gpu=True),
    },
    cost=functools.partial(norm_cost, residual=False),
)
ADD_RMS_NORM = BenchOp(
    name="add_rms_norm",
    make=functools.partial(make_inputs, 2),
    definition=reference.add_rms_norm,
    providers={
        "reference": Provider(eager_add_rms_norm),
        "torch": Provider(torch_add_rms_norm),
        "compile": compiled(eager_add_rms_norm),
        "triton": Provider(functools.partial(add_rms_norm, backend="triton"), needs_gpu=True),
    },
    cost=functools.partial(norm_cost, residual=True),
)
SHAPES = shapes.step_shapes(
    models=[shapes.LLAMA_2_7B, shapes.VICUNA_13B], batches=[1, 8], trees=shapes.TREES[:3], contexts=[2048]
)


@pytest.mark.parametrize("provider", RMS_NORM.providers)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_rms_norm(benchmark: Any, provider: str, shape: StepShape) -> None:
    """Time one provider at one shape."""
    RMS_NORM.run(benchmark, provider, shape)


@pytest.mark.parametrize("provider", ADD_RMS_NORM.providers)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_add_rms_norm(benchmark: Any, provider: str, shape: StepShape) -> None:
    """Time one provider at one shape."""
    ADD_RMS_NORM.run(benchmark, provider, shape)
