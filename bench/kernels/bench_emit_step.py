"""emit_step: time of the loop's bookkeeping behind a fully accepted path, against the chain of PyTorch ops.

Question: is the end of a step more than the cost of a launch, and what do some twenty launches cost in its place?

    pytest bench/kernels/bench_emit_step.py --benchmark-only
"""

import functools

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases
from specdec.bench.common.shapes import StepShape
from specdec.kernels.emit_step import emit_step
from specdec.kernels.reference.emit_step import emit_step as reference

_NUM_STOPS = 2
_MOST_CALLS = 1 << 18


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """Every request accepts the path to the last node of the tree and has budget left; no stop token comes up."""
    device, batch, path_length = generator.device, shape.batch, len(shape.tree.path())
    room = _MOST_CALLS * path_length  # every call appends
    int32 = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    emitted = torch.arange(path_length, dtype=torch.int32, device=device).repeat(batch, 1)
    return Call(
        args=(
            int32([path_length - 1] * batch),
            emitted,
            int32([path_length - 1]),
            torch.zeros(batch, shape.tree.num_nodes, dtype=torch.bool, device=device),
            int32([-1] * _NUM_STOPS),
            torch.full((batch, room), -1, dtype=torch.int32, device=device),
            int32([0] * batch),
            int32([1] * batch),
            int32([room] * batch),
            int32([shape.context] * batch),
            int32([1, -1]),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.zeros(_MOST_CALLS, 2, batch, dtype=torch.int32, device=device),
            int32([0] * batch),
        )
    )


def chain_of_ops(
    num_accepted: torch.Tensor,
    emitted: torch.Tensor,
    deepest: torch.Tensor,
    has_nan: torch.Tensor,
    stop_tokens: torch.Tensor,
    output_: torch.Tensor,
    num_output_: torch.Tensor,
    root_: torch.Tensor,
    budget_: torch.Tensor,
    lengths_: torch.Tensor,
    progress_: torch.Tensor,
    step_: torch.Tensor,
    steps_: torch.Tensor,
    nan_rows_: torch.Tensor,
) -> None:
    """The eager way without a host synchronisation; a step past the last place would fail."""
    count = num_accepted + 1
    has_failed = has_nan.any(1) & (budget_ > 0)
    nan_rows_.bitwise_or_(has_failed)
    is_nan = has_failed.any()
    progress_[1].copy_(torch.where(is_nan & (progress_[1] < 0), step_, progress_[1]))
    places = num_output_[:, None] + torch.arange(emitted.shape[1], device=emitted.device)
    output_.scatter_(1, places, emitted)
    last = emitted.gather(1, num_accepted.clamp(min=0).long()[:, None])[:, 0]
    root_.copy_(torch.where(count > 0, last, root_))
    num_output_.add_(count)
    budget_.sub_(count)
    budget_.masked_fill_((root_[:, None] == stop_tokens).any(1), 0)
    lengths_.add_(count)
    steps_.index_copy_(0, step_[None], torch.stack((count, deepest.expand_as(count)))[None])
    step_.add_(progress_[0])
    progress_[0].copy_(budget_.any())


OP = BenchOp.of(
    emit_step,
    reference,
    make=make_inputs,
    others={"chain_of_ops": chain_of_ops},
    waits=True,
    cost=lambda shape: cost.emit_step(
        batch=shape.batch,
        num_emitted=shape.batch * len(shape.tree.path()),
        num_places=shape.tree.num_nodes,
        num_stops=_NUM_STOPS,
    ),
    outputs=lambda call, _: call.args[5:],
    shapes=shapes.step_shapes(batches=[1, 8], trees=[shapes.TREES[2]], contexts=[2048]),
)
bench_emit_step = cases(OP)
