"""Eager reference of kernels.draft_heads: the definition, and what CPU decoding runs."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

__all__ = ["draft_heads", "draft_heads_concat"]


def draft_heads(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, upcast: bool = True) -> torch.Tensor:
    """Residual block of every head: x + SiLU(x W_k^T + b_k).

    Shapes, dtypes and meaning are those of `specdec.kernels.draft_heads.draft_heads`; arguments are not checked.
    Computed in float64 and rounded once; with `upcast=False` in the dtype of `x`.
    """
    dtype = torch.float64 if upcast else x.dtype
    state = x.to(dtype).expand(weight.shape[0], -1, -1)
    gate = F.silu(torch.baddbmm(bias.to(dtype)[:, None], state, weight.to(dtype).mT))
    return (state + gate).to(x.dtype)


def draft_heads_concat(
    parts: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual_weight: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    *,
    upcast: bool = True,
) -> torch.Tensor:
    """Residual block on parts side by side: R cat(parts) + r + SiLU(W cat(parts) + b).

    Shapes, dtypes and meaning are those of `specdec.kernels.draft_heads.draft_heads_concat`; arguments are not checked.
    Computed in float64 and rounded once; with `upcast=False` in the dtype of the parts.
    """
    x = torch.cat(list(parts), dim=-1)
    dtype = torch.float64 if upcast else x.dtype
    state = x.to(dtype)
    gate = F.silu(F.linear(state, weight.to(dtype), bias.to(dtype)))
    if residual_weight is not None:
        state = F.linear(state, residual_weight.to(dtype), None if residual_bias is None else residual_bias.to(dtype))
    return (state + gate).to(x.dtype)
