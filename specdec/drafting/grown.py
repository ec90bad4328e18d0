"""Trees that grow best-first from one pass of heads that draft a block: every law is there before the first choice.

Source: the best paths of a product of laws, as JetSpec (arXiv:2606.18394) and DDTree choose them; exact, by the op
`specdec.kernels.tree_grow`, without a beam. The tree takes the most probable paths, and is no sample from any law.

What a drafter does with it:
    product   a position's law is the same behind every path: `dflash`, `peagle`, and `dspark` without a Markov head.
              `grow_product(shape, root, heads.best(states[:, : shape.max_depth], shape.top_k), backend=...)`, with
              states [B, K, C] of the positions 1 .. K behind the root, and tokens of the target
    lattice   it depends on the candidate before: DFlash2. `grow_lattice` takes the laws behind every candidate
A `DynamicTree` bounds such a tree in depth, nodes and candidates of a position; `shape_for_block` cuts it to the block.
Laws that depend on the whole path grow by `specdec.drafting.beam`.
"""

import torch

from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.logps import logps_of_pairs, logps_of_product
from specdec.kernels.common.launch import Backend
from specdec.kernels.common.topk import TopK
from specdec.kernels.tree_grow import MAX_GROWN_DEPTH, MAX_GROWN_RANKS, tree_grow
from specdec.trees.dynamic import DynamicTree

__all__ = ["grow_lattice", "grow_product", "shape_for_block"]


def shape_for_block(shape: DynamicTree, max_depth: int) -> DynamicTree:
    """A tree no deeper than a block drafts, as its depth is a limit, not a number of passes.

    Args:
        shape: limits of the tree.
        max_depth: positions behind the root that the network drafts.

    Raises:
        ValueError: more candidates of a position than the op takes.
    """
    if shape.top_k > MAX_GROWN_RANKS:
        raise ValueError(f"top_k: expected at most {MAX_GROWN_RANKS} with parallel heads, got {shape.top_k}")
    return shape.cut(min(max_depth, MAX_GROWN_DEPTH))


def grow_product(
    shape: DynamicTree, root: torch.Tensor, best: TopK, *, backend: Backend | None, with_logps: bool = False
) -> DraftTree:
    """Grow a tree from laws that are the same behind every path.

    Args:
        shape: its limits.
        root: [B] int32 last emitted token.
        best: the best `top_k` tokens of every position behind the root, [B, K, top_k] with K up to `max_depth`, tokens
            of the target. Those of -inf are never taken.
        backend: what runs the kernel; by default decided by the device.
        with_logps: say how probable each node is.
    """
    tree = tree_grow(
        best.tokens, best.values, root, num_nodes=shape.num_nodes, logsumexp=best.logsumexp, backend=backend
    )
    return DraftTree.of(tree, shape.max_depth, logps_of_product(tree, best) if with_logps else None)


def grow_lattice(
    shape: DynamicTree,
    root: torch.Tensor,
    tokens: torch.Tensor,
    logps: torch.Tensor,
    *,
    backend: Backend | None,
    with_logps: bool = False,
) -> DraftTree:
    """Grow a tree from laws that depend on the candidate before.

    Args:
        shape: its limits.
        root: [B] int32 last emitted token.
        tokens: [B, K, R] candidates of every position, tokens of the target.
        logps: [B, K, R, R] float32 log-probability of candidate r behind candidate p of the position before,
            [:, k, p, r], nats; of the first position [:, 0, 0], behind the root.
        backend: what runs the kernel; by default decided by the device.
        with_logps: say how probable each node is.
    """
    first, edges = logps[:, :, 0], logps[:, 1:]
    tree = tree_grow(tokens, first, root, num_nodes=shape.num_nodes, edges=edges, backend=backend)
    return DraftTree.of(tree, shape.max_depth, logps_of_pairs(tree, logps) if with_logps else None)
