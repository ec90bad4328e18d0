"""Eager reference of kernels.tree_expand: the definition, not a fast path."""

import torch

__all__ = ["tree_expand"]


def tree_expand(
    candidates: torch.Tensor,
    root: torch.Tensor,
    lengths: torch.Tensor | None,
    row: torch.Tensor,
    rank: torch.Tensor,
    depth: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay the candidates out on the nodes of a static tree.

    Shapes, dtypes and meaning are those of `specdec.kernels.tree_expand.tree_expand`; arguments are not checked. Raises
    an IndexError for a `row` or `rank` beyond the candidates.
    """
    tokens = root[:, None].repeat(1, row.shape[0])
    drawn = row >= 0
    tokens[:, drawn] = candidates[:, row[drawn], rank[drawn]].to(torch.int32)
    return tokens, root.new_empty(len(root), 0) if lengths is None else lengths[:, None] + depth
