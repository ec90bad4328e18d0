"""accept_typical: time of entropies, tests and the choice of a path, against the same in PyTorch.

Question: does the decision cost more than reading the logits once, and under 10 us beyond that?

    pytest bench/kernels/bench_accept_typical.py --benchmark-only
"""

import torch

from specdec.bench.common import cost
from specdec.bench.common.harness import BenchOp, Call, cases, compiled
from specdec.bench.common.shapes import StepShape
from specdec.bench.kernels import bench_accept_naive
from specdec.bench.kernels.bench_accept_greedy import path_to, verdict_of
from specdec.kernels.accept_typical import accept_typical
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.reference.accept_typical import accept_typical as reference


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """The trees and laws of accept_naive, with the usual settings and the most probable next root."""
    call = bench_accept_naive.make_inputs(shape, generator)
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
    path = path_to(last, num_accepted, above, max_depth)
    next_root = logits[torch.arange(batch, device=tokens.device), last].argmax(-1).int()
    following = torch.cat([tokens.gather(1, path)[:, 1:], next_root[:, None]], dim=1)
    emitted = following.scatter(1, num_accepted[:, None].long(), next_root[:, None])
    return verdict_of(path, num_accepted, next_root, emitted)


OP = BenchOp.of(
    accept_typical,
    reference,
    make=make_inputs,
    others={"softmax": softmax_and_climb, "compile": compiled(softmax_and_climb)},
    waits=True,
    cost=lambda shape: cost.accept_typical(**shape.sizes(*bench_accept_naive.LAW_SIZES), element_bytes=4),
    shapes=bench_accept_naive.SHAPES,
)
bench_accept_typical = cases(OP)
