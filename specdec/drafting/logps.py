"""How probable the nodes of a grown tree are behind their parents, from the pool that it was grown from.

Shapes: [B, N] float32, nats, 0 at the root and at padding; B rows, N nodes
"""

import torch

from specdec.kernels.common.dynamic_tree import RerankedTree
from specdec.kernels.common.topk import TopK

__all__ = ["logps_of_pairs", "logps_of_paths", "logps_of_product"]


def logps_of_paths(tree: RerankedTree, paths: torch.Tensor) -> torch.Tensor:
    """Those of a pool whose entries know how probable their whole path is.

    Args:
        tree: what was kept of it.
        paths: [B, P] float32 log-probability of every entry's path, nats.
    """
    own = _taken(tree, paths)
    return own - own.gather(1, tree.parent.clamp(min=0).long())


def logps_of_product(tree: RerankedTree, best: TopK) -> torch.Tensor:
    """Those of laws that are the same behind every path.

    Args:
        tree: grown from `best`.
        best: [B, K, R] of every position behind the root.
    """
    return _taken(tree, (best.values - best.logsumexp[..., None]).flatten(1))


def logps_of_pairs(tree: RerankedTree, logps: torch.Tensor) -> torch.Tensor:
    """Those of laws that depend on the candidate before.

    Args:
        tree: grown from `logps`.
        logps: [B, K, R, R] float32 of candidate r behind candidate p of the position before, [:, k, p, r], nats; of the
            first position [:, 0, 0], behind the root.
    """
    num_ranks = logps.shape[3]
    index = tree.index.clamp(min=0).long()
    before = index.gather(1, tree.parent.clamp(min=0).long()) % num_ranks  # 0 behind the root
    place = (index // num_ranks * num_ranks + before) * num_ranks + index % num_ranks
    return logps.flatten(1).gather(1, place).masked_fill(tree.index < 0, 0)


def _taken(tree: RerankedTree, pool: torch.Tensor) -> torch.Tensor:
    """Of `pool [B, P]` the entries that are nodes: [B, N], 0 at the root and at padding."""
    return pool.gather(1, tree.index.clamp(min=0).long()).masked_fill(tree.index < 0, 0)
