"""skinny_linear: time of the target's linear layers on the rows of one step, against cuBLAS and torch.compile.

Question: at which matrices and numbers of rows does cuBLAS leave bandwidth unused, so that this kernel is worth having?

    pytest bench/kernels/bench_skinny_linear.py --benchmark-only
"""

import functools

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases, compiled, eager
from specdec.bench.common.shapes import StepShape, matrices
from specdec.kernels.reference.skinny_linear import skinny_linear as reference
from specdec.kernels.skinny_linear import skinny_linear


def make_inputs(matrix: str, shape: StepShape, generator: torch.Generator) -> Call:
    """A row per request and node, and a weight that keeps their size."""
    num_outputs, num_columns = matrices(shape.model)[matrix]
    weight = shape.normal(generator, num_outputs, num_columns) * num_columns**-0.5
    return Call(args=(shape.normal(generator, shape.batch * shape.tree.num_nodes, num_columns), weight))


def linear_cost(matrix: str, shape: StepShape) -> cost.Cost:
    """Cost at a shape."""
    num_outputs, num_columns = matrices(shape.model)[matrix]
    sizes = shape.sizes("num_rows", "element_bytes")
    return cost.skinny_linear(**sizes, num_outputs=num_outputs, num_columns=num_columns)


OPS = {
    matrix: BenchOp.of(
        skinny_linear,
        reference,
        name=f"skinny_linear_{matrix}",
        make=functools.partial(make_inputs, matrix),
        others={"compile": compiled(eager(reference))},
        cost=functools.partial(linear_cost, matrix),
        shapes=shapes.step_shapes(batches=[1], contexts=[2048]),
    )
    for matrix in ("qkv", "o", "gate_up", "down")
}
bench_skinny_linear = cases(OPS)
