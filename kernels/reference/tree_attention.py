"""Eager reference of kernels.tree_attention: the definition, and what CPU decoding runs.

Attention itself is PyTorch's; what is defined here is who sees whom. Every row of the batch runs by itself over the
slots it can see, so the slots beyond are never read and a row does not depend on its companions.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from specdec.kernels.common.words import unpack_words

__all__ = ["VisibleSlots", "attend_to", "tree_attention", "visible_slots"]


@dataclass(frozen=True, slots=True)
class VisibleSlots:
    """The cache slots that the nodes of one row see.

    Attributes:
        first: the first slot that any node sees.
        count: slots from there to the end of the tree.
        mask: [N, count] bool, which of them each node sees; None if every node sees all.
    """

    first: int
    count: int
    mask: torch.Tensor | None


def visible_slots(
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    num_tree_nodes: int,
    depth: torch.Tensor | None = None,
    window: int | None = None,
) -> list[VisibleSlots]:
    """Who sees whom, row by row; the same in all layers of one window. Arguments as in `tree_attention`."""
    # plain decoding, one node that sees itself and the whole prefix, needs no mask
    if num_tree_nodes == 1 and window is None:
        return [VisibleSlots(0, length + 1, None) for length in lengths.tolist()]
    batch = lengths.shape[0]
    tree_mask = unpack_words(ancestors, num_tree_nodes).expand(batch, -1, -1)  # [B, N, T]
    rows = []
    for b, length in enumerate(lengths.tolist()):
        first = 0 if window is None else max(0, length + 1 - window)  # the root sees back furthest
        prefix_mask = tree_mask.new_ones(tree_mask.shape[1], length - first)
        if window is not None and depth is not None:
            slots = torch.arange(first, length, device=lengths.device)
            prefix_mask = length + depth.expand(batch, -1)[b, :, None] - slots < window
        mask = torch.cat([prefix_mask, tree_mask[b]], dim=1)  # [N, s]
        rows.append(VisibleSlots(first, length + num_tree_nodes - first, mask))
    return rows


def attend_to(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    visible: list[VisibleSlots],
    *,
    scale: float,
    upcast: bool = True,
) -> torch.Tensor:
    """Attention to the visible slots of each row, with the heads before the nodes as transformers has them.

    Args:
        q: [B, HQ, N, D].
        k_cache: [B, HK, S, D].
        v_cache: [B, HK, S, D].
        visible: per row, what its nodes see.
        scale: factor of the scores.
        upcast: compute in float64 and round once; otherwise in the dtype of `q`.

    Returns:
        [B, N, HQ, D] in the dtype of `q`.
    """
    batch, num_heads = q.shape[:2]
    grouped = num_heads != k_cache.shape[1]
    attended = []
    for b, row in enumerate(visible):
        # views are not free for the small models that a CPU runs: none is made for a batch of one
        query, keys, values = (
            (q, k_cache, v_cache) if batch == 1 else (x.narrow(0, b, 1) for x in (q, k_cache, v_cache))
        )
        keys, values = keys.narrow(2, row.first, row.count), values.narrow(2, row.first, row.count)
        if upcast:
            query, keys, values = query.double(), keys.double(), values.double()
        out = scaled_dot_product_attention(query, keys, values, attn_mask=row.mask, scale=scale, enable_gqa=grouped)
        attended.append(out.transpose(1, 2).to(q.dtype))
    return attended[0] if batch == 1 else torch.cat(attended)


def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    scale: float,
    num_tree_nodes: int | None = None,
    depth: torch.Tensor | None = None,
    window: int | None = None,
    upcast: bool = True,
) -> torch.Tensor:
    """Attention of N tree nodes over the prefix and over their ancestors in the tree.

    Shapes, dtypes and meaning are those of `specdec.kernels.tree_attention.tree_attention`; arguments are not checked.
    Computed in float64 and rounded once; with `upcast=False` in the dtype of `q`.
    """
    num_tree_nodes = q.shape[1] if num_tree_nodes is None else num_tree_nodes
    visible = visible_slots(lengths, ancestors, num_tree_nodes, depth, window)
    q, k_cache, v_cache = q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    return attend_to(q, k_cache, v_cache, visible, scale=scale, upcast=upcast)
