"""tree_expand: time of laying top-k candidates out on a static tree, against indexing in PyTorch.

Question: is it more than the cost of a launch?

    pytest bench/kernels/bench_tree_expand.py --benchmark-only
"""

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases
from specdec.bench.common.shapes import StepShape
from specdec.kernels.reference.tree_expand import tree_expand as reference
from specdec.kernels.tree_expand import tree_expand


def make_inputs(shape: StepShape, generator: torch.Generator) -> Call:
    """One list of candidates per depth, as long as the widest depth; node i of a depth takes candidate i."""
    device = generator.device
    levels = shape.tree.levels()
    row = [d - 1 for d, level in enumerate(levels) for _ in level]
    rank = [i for level in levels for i in range(len(level))]
    candidates = shape.random_tokens(generator, shape.batch, shape.tree.max_depth, max(map(len, levels))).long()
    root = shape.random_tokens(generator, shape.batch)
    per_node = *torch.tensor([row, rank], dtype=torch.int32, device=device), shape.tree.depth(device)[0]
    return Call(args=(candidates, root, torch.full_like(root, shape.context), *per_node))


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


OP = BenchOp.of(
    tree_expand,
    reference,
    make=make_inputs,
    others={"gather": gather},
    waits=True,
    cost=lambda shape: cost.tree_expand(batch=shape.batch, num_nodes=shape.tree.num_nodes, candidate_bytes=8),
    shapes=shapes.step_shapes(models=[shapes.LLAMA_2_7B], trees=shapes.TREES[1:], contexts=[2048]),
)
bench_tree_expand = cases(OP)
