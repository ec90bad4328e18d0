"""accept_rejection: time of recursive rejection on the device, against the walk in PyTorch with its synchronisations.

Questions: does a step of 64 nodes over 128256 tokens stay under 80 us? What does a node's second rejection cost, which
is a pass of one program over the vocabulary?

    pytest bench/kernels/bench_accept_rejection.py --benchmark-only
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from specdec.bench.common import cost
from specdec.bench.common.harness import BenchOp, Call, cases
from specdec.bench.common.shapes import StepShape
from specdec.bench.kernels.bench_accept_naive import LAW_SIZES, SHAPES
from specdec.kernels.accept_rejection import accept_rejection
from specdec.kernels.reference.accept_rejection import accept_rejection as reference

_NUM_LIKELY = 16


def inner_nodes(shape: StepShape) -> list[int]:
    """Nodes that have children: those that the drafter has a law for."""
    return sorted({parent for parent in shape.tree.parents() if parent >= 0})


def make_inputs(rejecting: bool, shape: StepShape, generator: torch.Generator) -> Call:
    """Siblings drawn without replacement from a draft near the target; `rejecting` uniforms refuse almost all.

    A few tokens have nearly all the mass, so that no decision hangs on the rounding of a sum.
    """
    device, vocab_size, num_nodes = generator.device, shape.model.vocab_size, shape.tree.num_nodes
    rand = functools.partial(torch.rand, generator=generator, device=device)
    randn = functools.partial(torch.randn, generator=generator, device=device)
    inner, parents = inner_nodes(shape), shape.tree.parents()
    draft_logits = randn(shape.batch, len(inner), vocab_size)
    draft_logits[..., :: vocab_size // _NUM_LIKELY] += 25
    logits = randn(shape.batch, num_nodes, vocab_size)
    logits[..., :: vocab_size // _NUM_LIKELY] += 25
    logits[:, inner] += draft_logits / 2

    tokens = torch.zeros(shape.batch, num_nodes, dtype=torch.int32, device=device)
    draft_row = torch.full((num_nodes,), -1, dtype=torch.int32, device=device)
    for row, node in enumerate(inner):
        children = [j for j, parent in enumerate(parents) if parent == node]
        # the largest of logits plus Gumbel noise, in order, are draws without replacement
        noise = -torch.log(-torch.log(rand(shape.batch, vocab_size).clamp(1e-7, 1 - 1e-7)))
        tokens[:, children] = (draft_logits[:, row] + noise).topk(len(children), dim=-1).indices.int()
        draft_row[node] = row
    uniform = rand(shape.batch, num_nodes)
    if rejecting:
        uniform = 1 - uniform / 100
    return Call(
        args=(tokens, shape.tree.parent(device), logits, draft_logits, draft_row, uniform, rand(shape.batch)),
        kwargs={"replacement": False, "max_depth": shape.tree.max_depth},
    )


def usual_and_rejecting(
    op: Callable[..., Any], reference: Callable[..., Any], make: Callable[..., Call], cost_of: Callable[..., cost.Cost]
) -> dict[str, BenchOp]:
    """An acceptance rule of two laws, with usual uniforms and with rejecting ones."""
    return {
        kind: BenchOp.of(
            op,
            reference,
            name=f"{op.__name__}_{kind}",
            make=functools.partial(make, kind == "rejecting"),
            others={},
            waits=True,
            cost=lambda shape: cost_of(
                **shape.sizes(*LAW_SIZES), num_draft_laws=len(inner_nodes(shape)), element_bytes=4
            ),
            shapes=SHAPES,
        )
        for kind in ("usual", "rejecting")
    }


OPS = usual_and_rejecting(accept_rejection, reference, make_inputs, cost.accept_rejection)
bench_accept_rejection = cases(OPS)
