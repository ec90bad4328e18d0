"""kv_compact: time of committing a fully accepted path in all layers, against one gather and scatter in PyTorch.

Question: is a commit more than the cost of a launch?

    pytest bench/kernels/bench_kv_compact.py --benchmark-only
"""

import functools

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases
from specdec.bench.common.shapes import StepShape
from specdec.kernels.kv_compact import kv_compact
from specdec.kernels.reference.kv_compact import kv_compact as reference


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """The path to the last node of the tree, accepted in full by every request."""
    model, device, path = shape.model, generator.device, shape.tree.path()
    capacity = shape.context + shape.tree.num_nodes
    cache = shape.normal(generator, model.num_layers, 2, shape.batch, capacity, model.num_kv_heads, model.head_dim)
    int32 = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    return Call(args=(cache, *(int32([value] * shape.batch) for value in (shape.context, path, len(path) - 1))))


def gather_scatter(cache_: torch.Tensor, lengths: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """The eager way without a host synchronisation: nodes that were not accepted are copied onto themselves."""
    steps = torch.arange(1, path.shape[1], device=path.device)
    nodes = torch.where(steps <= num_accepted[:, None], path[:, 1:], steps)
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    cache_[:, :, rows, lengths[:, None] + steps] = cache_[:, :, rows, lengths[:, None] + nodes]


def compact_cost(shape: StepShape) -> cost.Cost:
    """Cost at a shape."""
    path = shape.tree.path()
    return cost.kv_compact(
        num_moved=shape.batch * sum(node != j for j, node in enumerate(path)),
        path_length=len(path),
        **shape.sizes("num_layers", "num_kv_heads", "head_dim", "element_bytes", "batch"),
    )


OP = BenchOp.of(
    kv_compact,
    reference,
    make=make_inputs,
    others={"gather_scatter": gather_scatter},
    waits=True,
    cost=compact_cost,
    outputs=lambda call, _: call.args[0],
    shapes=shapes.step_shapes(batches=[1, 8], trees=[shapes.TREES[2]], contexts=[2048]),
)
bench_kv_compact = cases(OP)
