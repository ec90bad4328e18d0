"""beam_step and tree_rerank: time of growing and cutting a best-first tree, against the usual chain of PyTorch ops.

Question: do both together stay under 12 us, without a synchronisation?

    pytest bench/kernels/bench_tree_rerank.py --benchmark-only
"""

import functools

import torch

from specdec.bench.common import cost, shapes
from specdec.bench.common.harness import BenchOp, Call, cases
from specdec.bench.common.shapes import StepShape
from specdec.kernels.common.dynamic_tree import Beam, RerankedTree
from specdec.kernels.reference import tree_rerank as reference
from specdec.kernels.tree_rerank import beam_step, tree_rerank

WIDTH = 10  # EAGLE-2's beam, and its candidates per beam entry


def make_level(shape: StepShape, generator: torch.Generator) -> Call:
    """One level of EAGLE-2: 10 candidates after each of 10 paths."""
    sizes = shape.batch, WIDTH, WIDTH
    rand = functools.partial(torch.rand, generator=generator, device=generator.device)
    tokens = shape.random_tokens(generator, *sizes)
    return Call(args=(tokens, -8 * rand(sizes), -8 * rand(sizes[:2])), kwargs={"width": WIDTH})


def make_pool(shape: StepShape, generator: torch.Generator) -> Call:
    """The pool after one pass per depth of the tree: the root's list, then 10 lists per pass."""
    max_depth, device = shape.tree.max_depth, generator.device
    logps = torch.zeros(shape.batch, 1, device=device)
    parents = [torch.full((shape.batch, 1), -1, dtype=torch.int32, device=device)]
    levels: list[torch.Tensor] = []
    for _ in range(max_depth):
        own = -8 * torch.rand(shape.batch, logps.shape[1], WIDTH, generator=generator, device=device)
        levels.append(logps[..., None] + own)
        logps, best = levels[-1].flatten(1).topk(WIDTH)
        parents.append((sum(level[0].numel() for level in levels[:-1]) + best).to(torch.int32))
    pool = torch.cat(levels, dim=1)
    tokens = shape.random_tokens(generator, *pool.shape)
    root = torch.zeros(shape.batch, dtype=torch.int32, device=device)
    return Call(
        args=(tokens, pool, torch.cat(parents[:-1], dim=1), root),
        kwargs={"num_nodes": shape.tree.num_nodes, "max_depth": max_depth},
    )


def topk_beam(tokens: torch.Tensor, logps: torch.Tensor, beam_logps: torch.Tensor, *, width: int) -> Beam:
    """The usual eager code, without a rule for ties."""
    totals = logps + beam_logps[..., None]
    best, index = totals.flatten(1).topk(width)
    return Beam(
        index=index.to(torch.int32),
        row=(index // tokens.shape[2]).to(torch.int32),
        tokens=tokens.flatten(1).gather(1, index),
        logps=best,
        candidate_logps=totals,
    )


def topk_tree(
    tokens: torch.Tensor,
    logps: torch.Tensor,
    parent: torch.Tensor,
    root: torch.Tensor,
    *,
    num_nodes: int,
    max_depth: int,
) -> RerankedTree:
    """The usual eager code, without a rule for ties: top-k, sort, search of the parents, climb to the root."""
    batch, _, num_ranks = tokens.shape
    index = logps.flatten(1).topk(num_nodes - 1).indices.sort(dim=1).values
    above = parent.gather(1, index // num_ranks)
    node = torch.where(above < 0, 0, 1 + torch.searchsorted(index, above.long()))
    parents = torch.cat([torch.full_like(node[:, :1], -1), node], dim=1)

    ancestor = torch.arange(num_nodes, device=tokens.device).expand(batch, -1)
    sees = torch.zeros(batch, num_nodes, (num_nodes + 31) // 32 * 32, dtype=torch.int64, device=tokens.device)
    depth = torch.full_like(parents, -1)
    for _ in range(max_depth + 1):
        sees.scatter_(2, ancestor.clamp(min=0)[..., None], 1)  # all paths end at the root
        depth += ancestor >= 0
        ancestor = torch.where(ancestor >= 0, parents.gather(1, ancestor.clamp(min=0)), -1)
    bits = torch.arange(32, device=tokens.device)
    return RerankedTree(
        tokens=torch.cat([root[:, None], tokens.flatten(1).gather(1, index)], dim=1),
        parent=parents.to(torch.int32),
        depth=depth.to(torch.int32),
        ancestors=(sees.unflatten(2, (-1, 32)) << bits).sum(dim=3).to(torch.int32),
        deepest=depth.amax(dim=1).to(torch.int32),
        index=torch.cat([torch.full_like(root[:, None], -1), index.to(torch.int32)], dim=1),
    )


SHAPES = shapes.step_shapes(models=[shapes.LLAMA_2_7B], trees=shapes.TREES[1:], contexts=[2048])
BEAM_STEP = BenchOp.of(
    beam_step,
    reference.beam_step,
    make=make_level,
    others={"topk": topk_beam},
    waits=True,
    cost=lambda shape: cost.beam_step(batch=shape.batch, num_candidates=WIDTH * WIDTH, num_lists=WIDTH, width=WIDTH),
    shapes=SHAPES,
)
TREE_RERANK = BenchOp.of(
    tree_rerank,
    reference.tree_rerank,
    make=make_pool,
    others={"topk": topk_tree},
    waits=True,
    cost=lambda shape: cost.tree_rerank(
        batch=shape.batch,
        num_candidates=WIDTH + (shape.tree.max_depth - 1) * WIDTH * WIDTH,
        num_lists=1 + (shape.tree.max_depth - 1) * WIDTH,
        num_nodes=shape.tree.num_nodes,
    ),
    shapes=SHAPES,
)
bench_beam_step = cases(BEAM_STEP)
bench_tree_rerank = cases(TREE_RERANK)
