"""Root mean square normalisation, alone or behind the addition of a residual stream.

Equation:   rms_norm(x)_c = w_c * x_c / sqrt(mean_c(x_c^2) + eps)
            add_rms_norm(x, r) = (rms_norm(x + r), x + r)
Source:     Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467) equation 4, with LLaMA's eps
            under the root
Reference:  kernels/reference/rms_norm.py

Shapes:     C model width; all leading dimensions are rows
            x, residual     [..., C]  fp16, bf16 or fp32
            weight          [C]       as x
            normed, summed  [..., C]  as x
Cost:       rms_norm reads and writes each row once; add_rms_norm reads two and writes two. Bandwidth-bound, and bound
            by the launch for the rows of one decoding step
Edges:      a row of zeros gives zeros; a row with inf or NaN gives NaN
Numerics:   all arithmetic in fp32, so bf16 needs no other path in the interpreter. Rounded as in LlamaRMSNorm: the
            sum x + r to the dtype of x, the normalised row to the dtype of x, then its product with the weight
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import FLOAT_DTYPES, check_tensor
from specdec.kernels.common.launch import (
    Backend,
    LaunchConfig,
    early_start,
    on_device,
    resolve_backend,
    wait_for_launch,
)
from specdec.kernels.reference import rms_norm as reference

__all__ = ["MAX_WIDTH", "add_rms_norm", "rms_norm"]

MAX_WIDTH = 32768
"""Widest row that one program keeps in registers."""


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [M, C]
    residual_ptr,  # [M, C] or None
    weight_ptr,  # [C]
    normed_ptr,  # [M, C]
    summed_ptr,  # [M, C], written with a residual only
    stride_xm,
    stride_rm,
    C,
    eps,
    EARLY: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program normalises one row, which it reads once."""
    wait_for_launch(EARLY)
    m = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    x = tl.load(x_ptr + m * stride_xm + offs_c, mask=mask_c, other=0.0).to(tl.float32)  # [BLOCK_C]
    # asked for before the reduction, so that its latency hides behind it
    weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + m * stride_rm + offs_c, mask=mask_c, other=0.0).to(tl.float32)
        summed = x.to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + m * C + offs_c, summed, mask=mask_c)
        x = summed.to(tl.float32)

    mean_square = tl.sum(x * x, 0) / C
    normed = x * tl.rsqrt(mean_square + tl.cast(eps, tl.float32))
    normed = normed.to(normed_ptr.dtype.element_ty).to(tl.float32)
    tl.store(normed_ptr + m * C + offs_c, (normed * weight).to(normed_ptr.dtype.element_ty), mask=mask_c)


def _launch_config(width: int) -> LaunchConfig:
    """At most 32 elements per thread up to 16384, so that a row and its weight fit the registers."""
    block_c = triton.next_power_of_2(width)
    return LaunchConfig(blocks={"BLOCK_C": block_c}, num_warps=max(1, min(16, block_c // 512)))


@library.op(fake=lambda x: x.new_empty(x.shape))
def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, backend: Backend | None = None) -> torch.Tensor:
    """Normalise every row by its root mean square.

    Args:
        x: [..., C] float32, float16 or bfloat16, contiguous in C.
        weight: [C], dtype of `x`.
        eps: added to the mean square.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        [..., C], dtype of `x`, contiguous.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, a width over `MAX_WIDTH`, tensors on several devices.
    """
    _check(x, weight)
    if resolve_backend(x, backend) == "reference":
        return reference.rms_norm(x, weight, eps=eps, upcast=False)
    return _launch(x, None, weight, eps)[0]


@library.op(fake=lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)))
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float, backend: Backend | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual stream, then normalise every row of the sum.

    Args:
        x: [..., C] float32, float16 or bfloat16, contiguous in C.
        residual: [..., C], shape and dtype of `x`, contiguous in C.
        weight: [C], dtype of `x`.
        eps: added to the mean square.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        The normalised sum and the sum `x + residual`, both [..., C] in the dtype of `x`, contiguous.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, a width over `MAX_WIDTH`, tensors on several devices.
    """
    _check(x, weight)
    check_tensor("residual", residual, shape=tuple(x.shape), dtype=x.dtype, device=x.device)
    if resolve_backend(x, backend) == "reference":
        return reference.add_rms_norm(x, residual, weight, eps=eps, upcast=False)
    return _launch(x, residual, weight, eps)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    check_tensor("x", x, dtype=FLOAT_DTYPES)
    if x.ndim == 0 or not 0 < x.shape[-1] <= MAX_WIDTH:
        raise ValueError(f"x: expected a last dimension of 1 to {MAX_WIDTH}, got shape {list(x.shape)}")
    check_tensor("weight", weight, shape=(x.shape[-1],), dtype=x.dtype, device=x.device)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum and, with a residual, the sum."""
    width = x.shape[-1]
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = normed if residual is None else torch.empty_like(normed)
    x = x.reshape(-1, width)
    residual = None if residual is None else residual.reshape(-1, width)
    tensors = x, residual, weight, normed, summed
    strides = x.stride(0), 0 if residual is None else residual.stride(0)
    with on_device(x):
        _rms_norm_kernel[(x.shape[0],)](
            *tensors, *strides, width, eps, **early_start(), **_launch_config(width).kwargs()
        )
    return normed, summed
