"""skinny_linear: time of the target's linear layers on the rows of one step, against cuBLAS and torch.compile.

Question: at which matrices and numbers of rows does cuBLAS leave bandwidth unused, so that this kernel is worth having?

    pytest bench/kernels/bench_skinny_linear.py --benchmark-only
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, Provider, compiled
from specdec.bench.common.shapes import ModelShape, StepShape
from specdec.kernels.reference.skinny_linear import skinny_linear as skinny_linear_reference
from specdec.kernels.skinny_linear import skinny_linear

# outputs and inputs of a decoder layer's matrices
MATRICES: dict[str, Callable[[ModelShape], tuple[int, int]]] = {
    "qkv": lambda model: ((model.num_heads + 2 * model.num_kv_heads) * model.head_dim, model.hidden_size),
    "o": lambda model: (model.hidden_size, model.num_heads * model.head_dim),
    "gate_up": lambda model: (2 * model.intermediate_size, model.hidden_size),
    "down": lambda model: (model.hidden_size, model.intermediate_size),
}


def make_inputs(matrix: str, shape: StepShape, generator: torch.Generator) -> Call:
    """A row per request and node, and a weight that keeps their size."""
    num_outputs, num_columns = MATRICES[matrix](shape.model)
    randn = functools.partial(torch.randn, generator=generator, device=generator.device, dtype=shape.dtype)
    weight = randn(num_outputs, num_columns) * num_columns**-0.5
    return Call(args=(randn(shape.batch * shape.tree.num_nodes, num_columns), weight))


def linear_cost(matrix: str, shape: StepShape) -> cost.Cost:
    """Cost at a shape."""
    num_outputs, num_columns = MATRICES[matrix](shape.model)
    return cost.skinny_linear(
        num_rows=shape.batch * shape.tree.num_nodes,
        num_outputs=num_outputs,
        num_columns=num_columns,
        element_bytes=shape.dtype.itemsize,
    )


cublas = functools.partial(skinny_linear_reference, upcast=False)

OPS = {
    matrix: BenchOp(
        name=f"skinny_linear_{matrix}",
        make=functools.partial(make_inputs, matrix),
        definition=skinny_linear_reference,
        providers={
            "reference": Provider(cublas),
            "compile": compiled(cublas),
            "triton": Provider(functools.partial(skinny_linear, backend="triton"), needs_gpu=True),
        },
        cost=functools.partial(linear_cost, matrix),
    )
    for matrix in MATRICES
}
SHAPES = shapes.step_shapes(batches=[1], contexts=[2048])


@pytest.mark.parametrize("provider", ["reference", "compile", "triton"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("matrix", MATRICES)
def bench_skinny_linear(benchmark: Any, matrix: str, provider: str, shape: StepShape) -> None:
    """Time one provider at one shape."""
    OPS[matrix].run(benchmark, provider, shape)
