"""Trees that grow best-first: a beam of paths, level by level, and then the best nodes of all levels.

Source: EAGLE-2 (arXiv:2406.16858) sections 4.1 and 4.2.
A drafter says which tokens follow a path, and what it has to remember of it; nothing here knows how it finds out. The
tree takes the most probable paths, and is no sample from any law.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.logps import logps_of_paths
from specdec.kernels.common.dynamic_tree import Beam
from specdec.kernels.common.launch import Backend
from specdec.kernels.common.topk import TopK
from specdec.kernels.tree_rerank import MAX_POOL, beam_step, tree_rerank
from specdec.trees.dynamic import DynamicTree

__all__ = ["check_pool", "grow_by_beam", "rows_of"]

State = TypeVar("State")


def check_pool(shape: DynamicTree) -> None:
    """Raise ValueError for a tree of more candidates than the ops take."""
    if shape.num_candidates > MAX_POOL:
        raise ValueError(f"depth: expected at most {MAX_POOL} candidates in all, got {shape.num_candidates}")


def grow_by_beam(
    shape: DynamicTree,
    root: torch.Tensor,
    first: TopK,
    state: State,
    extend: Callable[[int, Beam, State], tuple[TopK, State]],
    *,
    backend: Backend | None,
    with_logps: bool = False,
) -> DraftTree:
    """Grow a tree.

    Args:
        shape: its limits.
        root: [B] int32 last emitted token.
        first: the best `top_k` tokens after the root, one list: [B, 1, top_k]. Those of -inf are never taken.
        state: what the drafter remembers of the root.
        extend: given the number of a pass, from 0, the beam that it feeds (nodes of depth 1 first) and what was
            kept of the last one; gives the best tokens after each entry, [B, top_k, top_k], and what to keep.
        backend: what runs the kernels; by default decided by the device.
        with_logps: say how probable each node is.
    """
    best, width = first, shape.top_k
    beam_logps = first.values.new_zeros(root.shape[0], 1)
    parent = torch.full_like(root[:, None], -1)
    tokens, logps, parents = [], [], []
    first_index = 0
    for depth in range(shape.max_depth):
        tokens.append(best.tokens)
        parents.append(parent)
        beam = beam_step(
            best.tokens,
            best.values,
            beam_logps,
            width=width,
            first_index=first_index,
            logsumexp=best.logsumexp,
            backend=backend,
        )
        logps.append(beam.candidate_logps)
        if depth == shape.depth:
            break
        first_index += best.tokens.shape[1] * width
        best, state = extend(depth, beam, state)
        parent, beam_logps = beam.index, beam.logps
    paths = torch.cat(logps, 1)
    tree = tree_rerank(
        torch.cat(tokens, 1),
        paths,
        torch.cat(parents, 1),
        root,
        num_nodes=shape.num_nodes,
        max_depth=shape.max_depth,
        backend=backend,
    )
    return DraftTree.of(tree, shape.max_depth, logps_of_paths(tree, paths.flatten(1)) if with_logps else None)


def rows_of(values: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Of `values [B, M, X]` the rows `row [B, W]`: [B, W, X]."""
    return values.gather(1, row.long()[:, :, None].expand(-1, -1, values.shape[2]))
