"""Linear layers on few rows: the weight streams through the tensor cores once, its tile as the first operand.

Equation:   out[h, m, n] = sum_k x[h, m, k] * weight[h, n, k]
Source:     a swap of the operands, as in CUTLASS' advice for small M (NVIDIA/cutlass issues 1176 and 1794); split-K
            with the sum done by the last program to arrive, as in stream-K (Osama et al., arXiv:2301.03598)
Reference:  kernels/reference/skinny_linear.py

Shapes:     H matrices side by side (the dimension may be left out), M rows, N outputs, K inputs
            x       [H, M, K]  fp16, bf16 or fp32; M <= 128
            weight  [H, N, K]  as x
            out     [H, M, N]  as x
Cost:       reads H*(N*K + M*K) and writes H*M*N elements, 2*H*M*N*K flops; bound by the weight's bytes up to about 180
            rows on an H200
Edges:      no rows or no outputs give an empty result, K = 0 gives zeros; inf and NaN stay in their row
Numerics:   products and sums in fp32 (fp32 inputs in full precision, never TF32), one rounding at the end. The splits
            are added in the order of their columns, so a call repeats bit by bit; the number of splits depends on the
            weight alone, so it does not change with M
"""

import math

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import FLOAT_DTYPES, check_tensor
from specdec.kernels.common.launch import Backend, needs_upcast, on_device, resolve_backend
from specdec.kernels.common.weight_first import (
    add_splits,
    arrives_last,
    choose_splits,
    publish_split,
    silu,
    split_columns,
    split_workspace,
    weight_first_dot,
    weight_first_tiles,
)
from specdec.kernels.reference.skinny_linear import skinny_linear as skinny_linear_reference

__all__ = ["MAX_ROWS", "skinny_linear"]

MAX_ROWS = 128
"""Most rows of x; with more, the arithmetic costs more than the weight's bytes and other tiles are better."""


@triton.jit(do_not_specialize=["M"])
def _skinny_linear_kernel(
    x_ptr,  # [H, M, K]
    weight_ptr,  # [H, N, K]
    bias_ptr,  # [H, N] or None
    out_ptr,  # [H, M, N]
    partial_ptr,  # [tiles, SPLITS, BLOCK_N, BLOCK_M] fp32
    arrivals_ptr,  # [tiles] int32, zeros, as they are afterwards
    stride_xh,
    stride_xm,
    stride_wh,
    stride_wn,
    stride_bh,
    stride_oh,
    stride_om,
    M,
    N,
    K,
    SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program multiplies BLOCK_N rows of one weight, over one split of its columns, with BLOCK_M rows of x.

    With a bias it goes on to a draft head's x + SiLU(product + bias), for which N = K.
    """
    h = (tl.program_id(2) // SPLITS).to(tl.int64)
    split = tl.program_id(2) % SPLITS
    # the row blocks of a weight tile run side by side, so that the tile is read from memory once
    start_m = tl.program_id(0).to(tl.int64) * BLOCK_M
    start_n = tl.program_id(1).to(tl.int64) * BLOCK_N
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask_m = start_m + offs_m < M
    mask_n = start_n + offs_n < N

    first, last = split_columns(split, K, SPLITS, BLOCK_K)
    x_rows = x_ptr + h * stride_xh + start_m * stride_xm + offs_m * stride_xm
    weight_rows = weight_ptr + h * stride_wh + start_n * stride_wn + offs_n * stride_wn
    acc = weight_first_dot(x_rows, weight_rows, mask_m, mask_n, first, last, K, UPCAST, BLOCK_K)
    if SPLITS > 1:
        tile = (h * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        partial_ptr += tile * (SPLITS * BLOCK_N * BLOCK_M)
        publish_split(acc, partial_ptr, split, BLOCK_N, BLOCK_M)
        if not arrives_last(arrivals_ptr + tile, SPLITS):
            return
        acc = add_splits(partial_ptr, SPLITS, BLOCK_N, BLOCK_M)

    mask = mask_n[:, None] & mask_m[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + h * stride_bh + start_n + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        residual = tl.load(x_rows[None, :] + start_n + offs_n[:, None], mask=mask, other=0.0).to(tl.float32)
        acc = residual + silu(acc + bias[:, None])
    out_ptrs = out_ptr + h * stride_oh + start_m * stride_om + offs_m[None, :] * stride_om + start_n + offs_n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@library.op(fake=lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[-2]))
def skinny_linear(x: torch.Tensor, weight: torch.Tensor, *, backend: Backend | None = None) -> torch.Tensor:
    """Multiply few rows by a weight, or H sets of rows by H weights in one launch.

    Args:
        x: [M, K] or [H, M, K] float32, float16 or bfloat16, contiguous in K; M <= 128.
        weight: [N, K] or [H, N, K], dtype of `x`, contiguous in K.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        [M, N] or [H, M, N], dtype of `x`, contiguous.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, more than 128 rows, tensors on several devices.
    """
    check_tensor("x", x, dtype=FLOAT_DTYPES)
    if x.ndim not in (2, 3) or x.shape[-2] > MAX_ROWS:
        raise ValueError(f"x: expected shape [M, K] or [H, M, K] with M <= {MAX_ROWS}, got {list(x.shape)}")
    check_tensor("weight", weight, shape=(*x.shape[:-2], None, x.shape[-1]), dtype=x.dtype, device=x.device)
    out = torch.empty(*x.shape[:-1], weight.shape[-2], dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if resolve_backend(x, backend) == "reference":
        return skinny_linear_reference(x, weight, upcast=False)
    stacked = (x, weight, out) if x.ndim == 3 else (x[None], weight[None], out[None])
    _launch_linear(*stacked)
    return out


def _launch_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Launch the kernel, here and for the heads of `draft_heads`; nothing is checked.

    Args:
        x: [H, M, K], any M.
        weight: [H, N, K].
        out: [H, M, N], contiguous, not empty; filled with x W^T, or with x + SiLU(x W^T + bias) if there is a bias.
        bias: [H, N], with N = K, or None.
    """
    num_matrices, num_outputs, num_columns = weight.shape
    config = weight_first_tiles(x.shape[1], x.element_size())
    block_m, block_n = config.blocks["BLOCK_M"], config.blocks["BLOCK_N"]
    grid = (triton.cdiv(x.shape[1], block_m), triton.cdiv(num_outputs, block_n), num_matrices)
    splits = choose_splits(grid[1] * num_matrices, num_columns)
    strides = *x.stride()[:2], *weight.stride()[:2], 0 if bias is None else bias.stride(0), *out.stride()[:2]
    sizes = x.shape[1], num_outputs, num_columns, splits
    with on_device(x), split_workspace(math.prod(grid), splits, block_m * block_n, x.device) as workspace:
        _skinny_linear_kernel[(*grid[:2], num_matrices * splits)](
            x, weight, bias, out, *workspace, *strides, *sizes, UPCAST=needs_upcast(x), **config.kwargs()
        )
