"""Eager reference of kernels.rms_norm: the definition, and what CPU decoding runs."""

import torch

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, upcast: bool = True) -> torch.Tensor:
    """Normalise every row by its root mean square.

    Shapes, dtypes and meaning are those of `specdec.kernels.rms_norm.rms_norm`; arguments are not checked. Computed in
    float64 and rounded once; with `upcast=False` with the roundings of LlamaRMSNorm, which normalises in float32,
    rounds to the dtype of `x` and multiplies by the weight.
    """
    h = x.to(torch.float64 if upcast else torch.float32)
    h = h * torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + eps)
    return (weight.double() * h).to(x.dtype) if upcast else weight * h.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, upcast: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual stream, then normalise every row of the sum.

    Shapes, dtypes and meaning are those of `specdec.kernels.rms_norm.add_rms_norm`; arguments are not checked. Computed
    in float64, each result rounded once; with `upcast=False` the sum is rounded to the dtype of `x` first.
    """
    if not upcast:
        summed = x + residual
        return rms_norm(summed, weight, eps=eps, upcast=False), summed
    summed = x.double() + residual.double()
    normed = rms_norm(summed, weight.double(), eps=eps)
    return normed.to(x.dtype), summed.to(x.dtype)
