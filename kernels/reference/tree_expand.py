"""Eager reference of kernels.tree_expand: the definition, not a fast path."""

import torch

__all__ = ["tree_expand"]


def tree_expand(
    candidates: torch.Tensor,
    root: torch.Tensor,
    lengths: torch.Tensor,
    row: torch.Tensor,
    rank: torch.Tensor,
    depth: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay the candidates out on the nodes of a static tree.

    Args:
        candidates: [B, M, R] int32 or int64, token ids.
        root: [B] int32.
        lengths: [B] int32.
        row: [N] int32, in [0, M), or -1 for a node that takes the root's token.
        rank: [N] int32, in [0, R) where `row` is not -1.
        depth: [N] int32.

    Returns:
        tokens [B, N] int32 and positions [B, N] int32.

    Raises:
        IndexError: a `row` or `rank` beyond the candidates.
    """
    tokens = root[:, None].repeat(1, row.shape[0])
    drawn = row >= 0
    tokens[:, drawn] = candidates[:, row[drawn], rank[drawn]].to(torch.int32)
    positions = lengths[:, None] + depth[None, :]
    return tokens, positions
