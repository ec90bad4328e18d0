"""Eager reference of kernels.tree_attention: the definition, and what CPU decoding runs.

Attention itself is PyTorch's; what is defined here is who sees whom. Every row of the batch runs by itself over the
slots it can see, so the slots beyond are never read.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["tree_attention"]


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

    Args:
        q: [B, N, HQ, D].
        k_cache: [B, S, HK, D].
        v_cache: [B, S, HK, D].
        lengths: [B] int32.
        ancestors: [B or 1, N, W] int32.
        scale: factor of the scores.
        num_tree_nodes: T, nodes whose keys and values are in the cache; N if not given.
        depth: [B or 1, N] int32, needed with `window`.
        window: how many positions a node sees, its own included; None for all.
        upcast: compute in float64 and round once; otherwise in the dtype of `q`.

    Returns:
        [B, N, HQ, D] in the dtype of `q`.
    """
    batch, num_nodes, num_heads, _ = q.shape
    num_tree_nodes = num_nodes if num_tree_nodes is None else num_tree_nodes
    q, k_cache, v_cache = q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2)  # [B, heads, ..., D]

    # plain decoding, one node that sees itself and the whole prefix, needs no mask
    masked = num_tree_nodes > 1 or window is not None
    if masked:
        tree_mask = _unpack_bits(ancestors, num_tree_nodes).expand(batch, -1, -1)  # [B, N, T]
    rows = []
    for b, length in enumerate(lengths.tolist()):
        first = 0 if window is None else max(0, length + 1 - window)  # the root sees back furthest
        mask = None
        if masked:
            prefix_mask = tree_mask.new_ones(num_nodes, length - first)
            if window is not None and depth is not None:
                age = length + depth.expand(batch, -1)[b, :, None] - torch.arange(first, length, device=q.device)
                prefix_mask = age < window
            mask = torch.cat([prefix_mask, tree_mask[b]], dim=1)  # [N, s]
        num_slots = length + num_tree_nodes - first
        # on a CPU a view costs a tenth of the attention of a small model: none is made for a batch of one
        row = [x if batch == 1 else x.narrow(0, b, 1) for x in (q, k_cache, v_cache)]
        inputs = [row[0], row[1].narrow(2, first, num_slots), row[2].narrow(2, first, num_slots)]
        if upcast:
            inputs = [x.double() for x in inputs]
        attended = scaled_dot_product_attention(
            *inputs, attn_mask=mask, scale=scale, enable_gqa=num_heads != k_cache.shape[1]
        )
        rows.append(attended.transpose(1, 2).to(q.dtype))
    return rows[0] if batch == 1 else torch.cat(rows)


def _unpack_bits(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """[..., W] int32 words -> [..., num_bits] bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 1).bool().flatten(-2)[..., :num_bits]
