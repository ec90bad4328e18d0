"""tree_expand: time of laying top-k candidates out on a static tree, against indexing in PyTorch.

Question: is it more than the cost of a launch?

    pytest bench/kernels/bench_tree_expand.py --benchmark-only
"""

import functools
from typing import Any

import pytest
import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, Provider
from specdec.bench.common.shapes import StepShape
from specdec.kernels.reference.tree_expand import tree_expand as tree_expand_reference
from specdec.kernels.tree_expand import tree_expand


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """One list of candidates per depth, as long as the widest depth; node i of a depth takes candidate i."""
    device = generator.device
    levels = shape.tree.levels()
    row = [d - 1 for d, level in enumerate(levels) for _ in level]
    rank = [i for level in levels for i in range(len(level))]
    candidates_shape = (shape.batch, shape.tree.max_depth, max(map(len, levels)))
    return Call(
        args=(
            torch.randint(shape.model.vocab_size, candidates_shape, generator=generator, device=device),
            torch.randint(
                shape.model.vocab_size, (shape.batch,), generator=generator, device=device, dtype=torch.int32
            ),
            torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device),
            torch.tensor(row, dtype=torch.int32, device=device),
            torch.tensor(rank, dtype=torch.int32, device=device),
            shape.tree.depth(device)[0],
        )
    )


def gather(
    candidates: torch.Tensor,
    root: torch.Tensor,
    lengths: torch.Tensor,
    row: torch.Tensor,
    rank: torch.Tensor,
    depth: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual eager code: one gather from the root and all candidates side by side."""
    slots = torch.where(row < 0, 0, 1 + row * candidates.shape[2] + rank)
    tokens = torch.cat([root[:, None].to(candidates.dtype), candidates.flatten(1)], dim=1)[:, slots]
    return tokens.to(torch.int32), lengths[:, None] + depth


OP = BenchOp(
    name="tree_expand",
    make=make_inputs,
    definition=tree_expand_reference,
    providers={
        "reference": Provider(tree_expand_reference, capturable=False),
        "gather": Provider(gather),
        "triton": Provider(functools.partial(tree_expand, backend="triton"), needs_gpu=True),
    },
    cost=lambda shape: cost.tree_expand(batch=shape.batch, num_nodes=shape.tree.num_nodes, candidate_bytes=8),
)
SHAPES = shapes.step_shapes(models=[shapes.LLAMA_2_7B], trees=shapes.TREES[1:], contexts=[2048])


@pytest.mark.parametrize("provider", OP.providers)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def bench_tree_expand(benchmark: Any, provider: str, shape: StepShape) -> None:
    """Time one provider at one shape."""
    OP.run(benchmark, provider, shape)
