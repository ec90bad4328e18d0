"""Eager reference of kernels.swiglu: the definition, and what CPU decoding runs."""

import torch

__all__ = ["swiglu"]


def swiglu(gate_up: torch.Tensor, *, upcast: bool = True) -> torch.Tensor:
    """SiLU of the first half of every row, times the second half.

    Args:
        gate_up: [..., 2 * F], gate then up.
        upcast: compute in float64 and round once; otherwise in the dtype of `gate_up`, as transformers does.

    Returns:
        [..., F], dtype of `gate_up`.
    """
    gate, up = (gate_up.double() if upcast else gate_up).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
