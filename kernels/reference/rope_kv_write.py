"""Eager reference of kernels.rope_kv_write: the definition, and what CPU decoding runs."""

import torch

__all__ = ["rope_kv_write"]


def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_table: torch.Tensor,
    slots: torch.Tensor,
    k_cache_: torch.Tensor,
    v_cache_: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    upcast: bool = True,
) -> torch.Tensor:
    """Rotate queries and keys to their positions, and write keys and values to their slots of the cache.

    Shapes, dtypes and meaning are those of `specdec.kernels.rope_kv_write.rope_kv_write`; arguments are not checked. An
    index error is raised for a slot out of range. Computed in float64 and rounded once; with `upcast=False`
    with the roundings of transformers' LLaMA, which rounds the table to the dtype of `q` and computes in that dtype.
    """
    dtype = torch.float64 if upcast else q.dtype
    starts = torch.zeros_like(slots[:, :1]) if lengths is None else lengths[:, None]
    places = (starts + positions).clamp(max=cos_sin_table.shape[0] - 1).long()
    cos, sin = cos_sin_table[places].to(dtype)[..., None, :].chunk(2, dim=-1)  # [B or 1, N, 1, D / 2]
    rotated_k = _rotate(k.to(dtype), cos, sin).to(k.dtype)
    written = (slots >= 0).expand(q.shape[:2])
    row = torch.arange(q.shape[0], device=q.device)[:, None].expand_as(written)[written]
    slot = (starts + slots).expand(q.shape[:2])[written].long()
    k_cache_[row, slot] = rotated_k[written]
    v_cache_[row, slot] = v[written]
    return _rotate(q.to(dtype), cos, sin).to(q.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[d], x[d + D / 2]) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
