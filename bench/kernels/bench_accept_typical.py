"""accept_typical: time of entropies, tests and the choice of a path, against the same in PyTorch.

Question: does the decision cost more than reading the logits once, and under 10 us beyond that?

    pytest bench/kernels/bench_accept_typical.py --benchmark-only
"""

import functools
from typing import Any

import pytest
import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, Provider, compiled
from specdec.bench.common.shapes import StepShape
from specdec.bench.kernels.bench_accept_naive import make_inputs as make_naive_inputs
from specdec.kernels.accept_typical import accept_typical
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.reference.accept_typical import accept_typical as accept_typical_reference


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """The trees and laws of accept_naive, with the usual settings and the most probable next root."""
    call = make_naive_inputs(shape, generator)
    return Call(args=(*call.args[:3], None), kwargs={**call.kwargs, "threshold": 0.09, "alpha": 0.3})


def softmax_and_climb(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    logits: torch.Tensor,
    _uniform: None,
    *,
    max_depth: int,
    threshold: float,
    alpha: float,
) -> Verdict:
    """The usual eager code, for all nodes at once: softmax, entropy, and sums along all root paths."""
    batch = tokens.shape[0]
    logps = logits.log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    above = parent.clamp(min=0).long().expand(batch, -1)
    logp = logps[torch.arange(batch, device=tokens.device)[:, None], above, tokens.long()]
    bound = (alpha * (-entropy.gather(1, above)).exp()).clamp(max=threshold)
    score = torch.where((parent >= 0) & (logp.exp() > bound), logp, float("-inf"))
    score[:, 0] = 0

    total, ancestor = score, above
    depth = (parent >= 0).int().expand(batch, -1)
    for _ in range(1, max_depth):
        total = total + score.gather(1, ancestor)
        depth = depth + (ancestor > 0).int()
        ancestor = above.gather(1, ancestor)
    depth = torch.where(total > float("-inf"), depth, -1)
    num_accepted = depth.amax(1)
    last = torch.where(depth == num_accepted[:, None], total, float("-inf")).argmax(1)

    nodes = [last]
    for _ in range(max_depth):
        nodes.append(above.gather(1, nodes[-1][:, None])[:, 0])
    climb = torch.stack(nodes, dim=1)  # from the last node up, then the root again and again
    steps = torch.arange(max_depth + 1, device=tokens.device)
    on_path = steps <= num_accepted[:, None]
    path = climb.gather(1, (num_accepted[:, None] - steps).clamp(min=0).long())
    next_root = logits[torch.arange(batch, device=tokens.device), last].argmax(-1).int()
    following = torch.cat([tokens.gather(1, path)[:, 1:], next_root[:, None]], dim=1)
    emitted = torch.where(steps == num_accepted[:, None], next_root[:, None], following)
    return Verdict(
        path=torch.where(on_path, path, -1).int(),
        num_accepted=num_accepted.int(),
        next_root=next_root,
        emitted=torch.where(on_path, emitted, -1),
    )


OP = BenchOp(
    name="accept_typical",
    make=make_inputs,
    definition=accept_typical_reference,
    providers={
        "reference": Provider(functools.partial(accept_typical_reference, upcast=False), capturable=False),
        "softmax": Provider(softmax_and_climb),
        "compile": compiled(softmax_and_climb),
        "triton": Provider(functools.partial(accept_typical, backend="triton"), needs_gpu=True),
    },
    cost=lambda shape: cost.accept_typical(
        batch=shape.batch, num_nodes=shape.tree.num_nodes, max_depth=shape.tree.max_depth,
        vocab_size=shape.model.vocab_size, element_bytes=4,
    ),
)  # fmt: skip
SHAPES = shapes.step_shapes(
    models=[shapes.LLAMA_2_7B, shapes.LLAMA_3_8B], batches=[1, 8], trees=shapes.TREES[1:3], contexts=[2048]
)


@pytest.mark.parametrize("provider", OP.providers)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_accept_typical(benchmark: Any, provider: str, shape: StepShape) -> None:
    """Time one provider at one shape."""
    OP.run(benchmark, provider, shape)
