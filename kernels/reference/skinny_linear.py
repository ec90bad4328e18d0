"""Eager reference of kernels.skinny_linear: the definition, and what CPU decoding runs."""

import torch

__all__ = ["skinny_linear"]


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, *, upcast: bool = True) -> torch.Tensor:
    """Multiply rows by a weight, or H sets of rows by H weights.

    Args:
        x: [M, K] or [H, M, K].
        weight: [N, K] or [H, N, K].
        upcast: compute in float64 and round once; otherwise in the dtype of `x`.

    Returns:
        [M, N] or [H, M, N] in the dtype of `x`.
    """
    if not upcast:
        return x @ weight.mT
    return (x.double() @ weight.double().mT).to(x.dtype)
