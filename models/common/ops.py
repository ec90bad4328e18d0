"""What surrounds attention in a layer: by the kernels, or by PyTorch's own operators where something is learnt.

Equation:   norm(x); norm(x + r) and x + r; W_1 x, .., W_n x; SiLU(Gate x) * Up x
Source:     the ops `rms_norm`, `add_rms_norm` and `swiglu` of specdec.kernels, which have no backward pass
Numerics:   in half precision the kernels round as transformers' LLaMA, a normalised row before its weight; PyTorch's
            RMS norm rounds once, behind it
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from specdec.kernels.common.launch import Backend
from specdec.kernels.rms_norm import add_rms_norm, rms_norm
from specdec.kernels.swiglu import swiglu
from specdec.models.common.packing import packed

__all__ = ["add_rms_normed", "gated", "needs_pytorch", "projected", "rms_normed"]


def needs_pytorch(x: torch.Tensor, backend: Backend | None = None) -> bool:
    """Whether PyTorch's own operators run: for gradients, or in mixed precision, which casts for each one.

    So too with the reference backend, whose definitions of these ops are the slower way on a CPU.
    """
    kind = x.device.type
    if backend == "reference" or torch.is_grad_enabled():
        return True
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def rms_normed(x: torch.Tensor, norm: nn.RMSNorm, backend: Backend | None) -> torch.Tensor:
    """`norm` of x [.., C]."""
    if needs_pytorch(x, backend):
        return _torch_normed(x, norm)
    return rms_norm(x, norm.weight, eps=_eps(norm), backend=backend)


def add_rms_normed(
    x: torch.Tensor, residual: torch.Tensor, norm: nn.RMSNorm, backend: Backend | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm` of the sum of x and residual, [.., C] both, and the sum."""
    if needs_pytorch(x, backend):
        summed = residual + x
        return _torch_normed(summed, norm), summed
    return add_rms_norm(x, residual, norm.weight, eps=_eps(norm), backend=backend)


def projected(x: torch.Tensor, linears: Sequence[nn.Linear]) -> Sequence[torch.Tensor]:
    """What each of the layers makes of x [.., C]; one product of all where their weights are packed."""
    together = None if needs_pytorch(x) else packed(linears)
    if together is None:
        return [linear(x) for linear in linears]
    return F.linear(x, *together).split([linear.out_features for linear in linears], -1)


def gated(x: torch.Tensor, gate: nn.Linear, up: nn.Linear, backend: Backend | None) -> torch.Tensor:
    """SiLU(gate x) * (up x) of x [.., C]."""
    if needs_pytorch(x, backend):
        return F.silu(gate(x)) * up(x)
    together = packed((gate, up))
    return swiglu(torch.cat((gate(x), up(x)), -1) if together is None else F.linear(x, *together), backend=backend)


def _torch_normed(x: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
    """`norm` of x in the dtype of its weight, which PyTorch's fused op wants of both: in mixed precision the wider."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype)


def _eps(norm: nn.RMSNorm) -> float:
    assert norm.eps is not None  # PyTorch's default depends on the dtype; the networks name theirs
    return norm.eps
