"""accept_traversal: time of judging whole paths on the device, against the definition in PyTorch.

Questions: does a step of 64 nodes over 128256 tokens stay under 100 us? What do many siblings cost, each of which is a
launch of its own, beside many depths?

    pytest bench/kernels/bench_accept_traversal.py --benchmark-only
"""

import functools
from typing import Any

import pytest
import torch

from specdec.bench.common import cost
from specdec.bench.common.harness import BenchOp, Call, Provider
from specdec.bench.common.shapes import StepShape
from specdec.bench.kernels import bench_accept_rejection
from specdec.kernels.accept_traversal import accept_traversal
from specdec.kernels.reference.accept_traversal import accept_traversal as accept_traversal_reference
from specdec.trees.shape import TreeShape
from specdec.trees.traversal import TraversalTables


def make_inputs(rejecting: bool, shape: StepShape, generator: torch.Generator) -> Call:
    """Those of accept_rejection; the tree's siblings are ranked in node order."""
    call = bench_accept_rejection.make_inputs(rejecting, shape, generator)
    parents = shape.tree.parents()
    rank = [sum(above == parents[node] for above in parents[:node]) if node else -1 for node in range(len(parents))]
    tables = TraversalTables.of(TreeShape(tuple(parents), tuple(rank)), generator.device)
    return Call(args=(*call.args, tables.order, tables.steps), kwargs={"max_depth": shape.tree.max_depth})


def traversal_cost(shape: StepShape) -> cost.Cost:
    """Cost at a shape."""
    return cost.accept_traversal(
        batch=shape.batch, num_nodes=shape.tree.num_nodes,
        num_draft_laws=len(bench_accept_rejection.inner_nodes(shape)), max_depth=shape.tree.max_depth,
        vocab_size=shape.model.vocab_size, element_bytes=4,
    )  # fmt: skip


OPS = {
    name: BenchOp(
        name=f"accept_traversal_{name}",
        make=functools.partial(make_inputs, name == "rejecting"),
        definition=accept_traversal_reference,
        providers={
            "reference": Provider(functools.partial(accept_traversal_reference, upcast=False), capturable=False),
            "triton": Provider(functools.partial(accept_traversal, backend="triton"), needs_gpu=True),
        },
        cost=traversal_cost,
    )
    for name in ("usual", "rejecting")
}


@pytest.mark.parametrize("provider", ["reference", "triton"])
@pytest.mark.parametrize("shape", bench_accept_rejection.SHAPES, ids=str)
@pytest.mark.parametrize("kind", OPS)
def bench_accept_traversal(benchmark: Any, kind: str, provider: str, shape: StepShape) -> None:
    """Time one provider at one shape."""
    OPS[kind].run(benchmark, provider, shape)
