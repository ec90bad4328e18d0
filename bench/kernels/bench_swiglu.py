"""swiglu: time per layer for the rows of one step, against eager PyTorch and torch.compile.

Question: what does it cost beyond its launch?

    pytest bench/kernels/bench_swiglu.py --benchmark-only
"""

import functools
from typing import Any

import pytest
import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, Provider, compiled
from specdec.bench.common.shapes import StepShape
from specdec.kernels.reference.swiglu import swiglu as swiglu_reference
from specdec.kernels.swiglu import swiglu


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """Gate and up of every node."""
    sizes = shape.batch, shape.tree.num_nodes, 2 * shape.model.intermediate_size
    return Call(args=(torch.randn(sizes, generator=generator, device=generator.device, dtype=shape.dtype),))


eager_swiglu = functools.partial(swiglu_reference, upcast=False)

OP = BenchOp(
    name="swiglu",
    make=make_inputs,
    definition=swiglu_reference,
    providers={
        "reference": Provider(eager_swiglu),
        "compile": compiled(eager_swiglu),
        "triton": Provider(functools.partial(swiglu, backend="triton"), needs_gpu=True),
    },
    cost=lambda shape: cost.swiglu(
        num_rows=shape.batch * shape.tree.num_nodes,
        width=shape.model.intermediate_size,
        element_bytes=shape.dtype.itemsize,
    ),
)
SHAPES = shapes.step_shapes(
    models=[shapes.LLAMA_2_7B, shapes.LLAMA_3_8B], batches=[1, 8], trees=shapes.TREES[:3], contexts=[2048]
)


@pytest.mark.parametrize("provider", OP.providers)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_swiglu(benchmark: Any, provider: str, shape: StepShape) -> None:
    """Time one provider at one shape."""
    OP.run(benchmark, provider, shape)
