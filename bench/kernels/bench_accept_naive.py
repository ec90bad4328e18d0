"""accept_naive: time of drawing the target's token at every node and walking, against softmax, cumsum and comparison.

Question: does the decision cost more than reading the logits once?

    pytest bench/kernels/bench_accept_naive.py --benchmark-only
"""

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases, compiled
from specdec.bench.common.shapes import StepShape
from specdec.bench.kernels.bench_accept_greedy import compare_paths, distinct_tokens
from specdec.kernels.accept_naive import accept_naive
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.reference.accept_naive import accept_naive as reference


def peaked_logits(shape: StepShape, tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """[B, N, V] fp32 logits: after a node its children's tokens have nearly all the mass, in random shares.

    Few tokens share the mass, so that a draw does not hang on the rounding of a sum.
    """
    batch, num_nodes = tokens.shape
    logits = torch.randn(batch, num_nodes, shape.model.vocab_size, generator=generator, device=generator.device)
    for node, parent in enumerate(shape.tree.parents()):
        share = torch.randn(batch, 1, generator=generator, device=generator.device)
        logits[:, max(parent, 0)].scatter_(1, tokens[:, node, None].long(), 25 + share)
    return logits


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """Every node has its own token, and the target wants one of a node's children."""
    device, tokens = generator.device, distinct_tokens(shape, generator)
    uniform = torch.rand(tokens.shape, generator=generator, device=device)
    logits = peaked_logits(shape, tokens, generator)
    return Call(args=(tokens, shape.tree.parent(device), logits, uniform), kwargs={"max_depth": shape.tree.max_depth})


def cumsum_and_compare(
    tokens: torch.Tensor, parent: torch.Tensor, logits: torch.Tensor, uniform: torch.Tensor, *, max_depth: int
) -> Verdict:
    """The usual eager code: a draw per row by the distribution function, then the comparison of all paths."""
    drawn = torch.searchsorted(logits.softmax(-1).cumsum(-1), uniform[..., None], right=True)[..., 0]
    return compare_paths(tokens, parent, drawn.clamp(max=logits.shape[-1] - 1).int(), max_depth=max_depth)


SHAPES = shapes.step_shapes(
    models=[shapes.LLAMA_2_7B, shapes.LLAMA_3_8B], batches=[1, 8], trees=shapes.TREES[1:3], contexts=[2048]
)
LAW_SIZES = ("batch", "num_nodes", "max_depth", "vocab_size")
OP = BenchOp.of(
    accept_naive,
    reference,
    make=make_inputs,
    others={"cumsum": cumsum_and_compare, "compile": compiled(cumsum_and_compare)},
    waits=True,
    cost=lambda shape: cost.accept_naive(**shape.sizes(*LAW_SIZES), element_bytes=4),
    shapes=SHAPES,
)
bench_accept_naive = cases(OP)
