"""Eager reference of kernels.swiglu: the definition, and what CPU decoding runs."""

import torch

__all__ = ["swiglu"]


def swiglu(gate_up: torch.Tensor, *, upcast: bool = True) -> torch.Tensor:
    """SiLU of the first half of every row, times the second half.

    Shapes, dtypes and meaning are those of `specdec.kernels.swiglu.swiglu`; arguments are not checked. Computed in
    float64 and rounded once; with `upcast=False` in the dtype of `gate_up`, as in transformers.
    """
    gate, up = (gate_up.double() if upcast else gate_up).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
