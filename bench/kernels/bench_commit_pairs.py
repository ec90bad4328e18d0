"""commit_pairs: time of taking in the pairs of a fully accepted path, against gathers and copies in PyTorch.

Question: is it more than the cost of a launch?

    pytest bench/kernels/bench_commit_pairs.py --benchmark-only
"""

import functools

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases
from specdec.bench.common.shapes import StepShape
from specdec.kernels.commit_pairs import commit_pairs
from specdec.kernels.reference.commit_pairs import commit_pairs as reference


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """The path to the last node of the tree, accepted in full by every request."""
    batch, device, path = shape.batch, generator.device, shape.tree.path()
    int32 = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    features, states = (shape.normal(generator, batch, n, shape.model.hidden_size) for n in (len(path), path[-1] + 1))
    nodes, last = int32([path] * batch), torch.zeros(batch, dtype=torch.int64, device=device)
    pending = features, nodes.clone(), int32([0] * batch), last
    return Call(args=(*pending, states, nodes, nodes.clone(), int32([len(path) - 1] * batch)))


def gather_copy(
    features_: torch.Tensor,
    tokens_: torch.Tensor,
    counts_: torch.Tensor,
    last_: torch.Tensor,
    states: torch.Tensor,
    path: torch.Tensor,
    emitted: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    """The eager way."""
    nodes = path.clamp(min=0).long()[:, :, None].expand(-1, -1, states.shape[2])
    features_.copy_(states.gather(1, nodes))
    tokens_.copy_(emitted.clamp(min=0))
    counts_.copy_(num_accepted + 1)
    last_.copy_(num_accepted.clamp(min=0))


def pairs_cost(shape: StepShape) -> cost.Cost:
    """Cost at a shape."""
    path_length, width = len(shape.tree.path()), shape.model.hidden_size
    return cost.commit_pairs(path_length=path_length, width=width, **shape.sizes("element_bytes", "batch"))


OP = BenchOp.of(
    commit_pairs,
    reference,
    make=make_inputs,
    others={"gather_copy": gather_copy},
    cost=pairs_cost,
    outputs=lambda call, _: call.args[:4],
    shapes=shapes.step_shapes(batches=[1, 8], trees=[shapes.TREES[2]], contexts=[2048]),
)
bench_commit_pairs = cases(OP)
