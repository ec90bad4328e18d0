"""Eager reference of kernels.skinny_linear: the definition, and what CPU decoding runs."""

import torch

__all__ = ["skinny_linear"]


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, *, upcast: bool = True) -> torch.Tensor:
    """Multiply rows by a weight, or H sets of rows by H weights.

    Shapes, dtypes and meaning are those of `specdec.kernels.skinny_linear.skinny_linear`; arguments are not checked.
    Computed in float64 and rounded once; with `upcast=False` in the dtype of `x`.
    """
    if not upcast:
        return x @ weight.mT
    return (x.double() @ weight.double().mT).to(x.dtype)
