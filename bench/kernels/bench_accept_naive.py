"""accept_naive: time of drawing the target's token at every node and walking, against softmax, cumsum and comparison.

Question: does the decision cost more than reading the logits once?

    pytest bench/kernels/bench_accept_naive.py --benchmark-only
"""

import functools
from typing import Any

import pytest
import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, Provider, compiled
from specdec.bench.common.shapes import StepShape
from specdec.bench.kernels.bench_accept_greedy import compare_paths
from specdec.kernels.accept_naive import accept_naive
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.reference.accept_naive import accept_naive as accept_naive_reference


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
    device, num_nodes = generator.device, shape.tree.num_nodes
    first = torch.randint(
        shape.model.vocab_size, (shape.batch, 1), generator=generator, device=device, dtype=torch.int32
    )
    tokens = (first + torch.arange(num_nodes, dtype=torch.int32, device=device)) % shape.model.vocab_size
    uniform = torch.rand(shape.batch, num_nodes, generator=generator, device=device)
    logits = peaked_logits(shape, tokens, generator)
    return Call(args=(tokens, shape.tree.parent(device), logits, uniform), kwargs={"max_depth": shape.tree.max_depth})


def cumsum_and_compare(
    tokens: torch.Tensor, parent: torch.Tensor, logits: torch.Tensor, uniform: torch.Tensor, *, max_depth: int
) -> Verdict:
    """The usual eager code: a draw per row by the distribution function, then the comparison of all paths."""
    drawn = torch.searchsorted(logits.softmax(-1).cumsum(-1), uniform[..., None], right=True)[..., 0]
    return compare_paths(tokens, parent, drawn.clamp(max=logits.shape[-1] - 1).int(), max_depth=max_depth)


OP = BenchOp(
    name="accept_naive",
    make=make_inputs,
    definition=accept_naive_reference,
    providers={
        "reference": Provider(functools.partial(accept_naive_reference, upcast=False), capturable=False),
        "cumsum": Provider(cumsum_and_compare),
        "compile": compiled(cumsum_and_compare),
        "triton": Provider(functools.partial(accept_naive, backend="triton"), needs_gpu=True),
    },
    cost=lambda shape: cost.accept_naive(
        batch=shape.batch, num_nodes=shape.tree.num_nodes, max_depth=shape.tree.max_depth,
        vocab_size=shape.model.vocab_size, element_bytes=4,
    ),
)  # fmt: skip
SHAPES = shapes.step_shapes(
    models=[shapes.LLAMA_2_7B, shapes.LLAMA_3_8B], batches=[1, 8], trees=shapes.TREES[1:3], contexts=[2048]
)


@pytest.mark.parametrize("provider", OP.providers)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_accept_naive(benchmark: Any, provider: str, shape: StepShape) -> None:
    """Time one provider at one shape."""
    OP.run(benchmark, provider, shape)
