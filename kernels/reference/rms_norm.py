"""Eager reference of kernels.rms_norm: the definition, and what CPU decoding runs."""

import torch

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, upcast: bool = True) -> torch.Tensor:
    """Normalise every row by its root mean square.

    Args:
        x: [..., C].
        weight: [C].
        eps: added to the mean square.
        upcast: compute in float64 and round once; otherwise with the roundings of LlamaRMSNorm, which normalises in
            float32, rounds to the dtype of `x` and multiplies by the weight.

    Returns:
        [..., C], dtype of `x`.
    """
    h = x.to(torch.float64 if upcast else torch.float32)
    h = h * torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + eps)
    return (weight.double() * h).to(x.dtype) if upcast else weight * h.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, upcast: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual stream, then normalise every row of the sum.

    Args:
        x: [..., C].
        residual: [..., C].
        weight: [C].
        eps: added to the mean square.
        upcast: compute in float64 and round each result once; otherwise round the sum to the dtype of `x` first.

    Returns:
        The normalised sum and the sum, both [..., C] in the dtype of `x`.
    """
    if not upcast:
        summed = x + residual
        return rms_norm(summed, weight, eps=eps, upcast=False), summed
    summed = x.double() + residual.double()
    normed = rms_norm(summed, weight.double(), eps=eps)
    return normed.to(x.dtype), summed.to(x.dtype)
