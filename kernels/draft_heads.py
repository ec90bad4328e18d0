"""Residual blocks of draft heads: all heads in one launch, or one head on several states side by side.

Equation:   draft_heads:        out[k, b] = x[b] + SiLU(W_k x[b] + b_k)            (or x[k, b], an input per head)
            draft_heads_concat: out[m] = R c + r + SiLU(W c + b),  c = parts[0][m] .. parts[P - 1][m] side by side
Source:     Medusa (arXiv:2401.10774) section 2.1.1; Hydra (arXiv:2402.05109) section 3 and the authors' residual block,
            which maps the wider input back by a learned R
Reference:  kernels/reference/draft_heads.py

Shapes:     K heads, B or M rows, C model width, P parts
            x                       [B, C] or [K, B, C]  fp16, bf16 or fp32
            weight, bias            [K, C, C], [K, C]    as x
            parts                   P times [M, C]       as x
            weight, bias            [C, P * C], [C]      as x; residual_weight and residual_bias the same
            out                     [K, B, C] or [M, C]  as x
Cost:       reads K*C*C (concat: 2*P*C*C) elements of weights, twice as many flops per row; bound by the weights' bytes
            up to about 180 rows on an H200
Edges:      no rows or no heads give an empty result; inf and NaN stay in their row
Numerics:   products, sums, bias, SiLU and residual in fp32 (fp32 inputs in full precision, never TF32), one rounding at
            the end where eager PyTorch rounds three times. Splits of the columns are added in their order

The kernel of draft_heads is that of skinny_linear, which adds bias, SiLU and residual to a product.
"""

import math
from collections.abc import Sequence
from typing import Any

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
    weight_first_tiles,
)
from specdec.kernels.reference import draft_heads as reference
from specdec.kernels.skinny_linear import _launch_linear

__all__ = ["MAX_PARTS", "draft_heads", "draft_heads_concat"]

MAX_PARTS = 16
"""Most parts of one concatenation."""


@triton.jit
def _concat_dots(
    parts_ptr,  # P pointers to [M, C]
    gate_rows,  # [BLOCK_N] pointers to rows of W
    residual_rows,  # [BLOCK_N] pointers to rows of R
    offs_x,
    mask_m,
    mask_n,
    first,
    last,
    C,
    NUM_PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Both products over blocks of columns; a block lies in one part, the last of a part may be cut."""
    offs_k = tl.arange(0, BLOCK_K)
    blocks_per_part = tl.cdiv(C, BLOCK_K)
    gate = tl.zeros([mask_n.shape[0], mask_m.shape[0]], tl.float32)
    residual = tl.zeros_like(gate)
    for block in range(first, last):
        part = block // blocks_per_part
        cols = (block - part * blocks_per_part) * BLOCK_K + offs_k
        mask_k = cols < C
        x_ptr = parts_ptr[0]
        for p in tl.static_range(1, NUM_PARTS):
            x_ptr = tl.where(part == p, parts_ptr[p], x_ptr)
        mask_w = mask_n[:, None] & mask_k[None, :]
        x = tl.load(x_ptr + offs_x[None, :] + cols[:, None], mask=mask_k[:, None] & mask_m[None, :], other=0.0)
        w = tl.load(gate_rows[:, None] + part * C + cols[None, :], mask=mask_w, other=0.0)
        r = tl.load(residual_rows[:, None] + part * C + cols[None, :], mask=mask_w, other=0.0)
        x = x.to(tl.float32) if UPCAST else x
        w = w.to(tl.float32) if UPCAST else w
        r = r.to(tl.float32) if UPCAST else r
        gate = tl.dot(w, x, gate, input_precision="ieee")
        residual = tl.dot(r, x, residual, input_precision="ieee")
    return gate, residual


@triton.jit(do_not_specialize=["M"])
def _draft_heads_concat_kernel(
    parts_ptr,  # NUM_PARTS times [M, C]
    weight_ptr,  # [C, P * C]
    bias_ptr,  # [C]
    residual_weight_ptr,  # [C, P * C]
    residual_bias_ptr,  # [C] or None
    out_ptr,  # [M, C]
    partial_ptr,  # [tiles, SPLITS, 2, BLOCK_N, BLOCK_M] fp32
    arrivals_ptr,  # [tiles] int32, zeros, as they are afterwards
    stride_xm,
    stride_wn,
    stride_rn,
    M,
    C,
    NUM_PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program computes BLOCK_N outputs for BLOCK_M rows, or one split of the two sums behind them."""
    split = tl.program_id(2)
    start_m = tl.program_id(0).to(tl.int64) * BLOCK_M
    start_n = tl.program_id(1).to(tl.int64) * BLOCK_N
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask_m = start_m + offs_m < M
    mask_n = start_n + offs_n < C

    num_blocks = NUM_PARTS * tl.cdiv(C, BLOCK_K)
    first, last = split_columns(split, num_blocks, SPLITS, 1)
    offs_x = start_m * stride_xm + offs_m * stride_xm
    gate_rows = weight_ptr + start_n * stride_wn + offs_n * stride_wn
    residual_rows = residual_weight_ptr + start_n * stride_rn + offs_n * stride_rn
    gate, residual = _concat_dots(
        parts_ptr, gate_rows, residual_rows, offs_x, mask_m, mask_n, first, last, C, NUM_PARTS, UPCAST, BLOCK_K
    )
    if SPLITS > 1:
        tile = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        gate_ptr = partial_ptr + tile * (2 * SPLITS * BLOCK_N * BLOCK_M)
        residual_ptr = gate_ptr + SPLITS * BLOCK_N * BLOCK_M
        publish_split(gate, gate_ptr, split, BLOCK_N, BLOCK_M)
        publish_split(residual, residual_ptr, split, BLOCK_N, BLOCK_M)
        if not arrives_last(arrivals_ptr + tile, SPLITS):
            return
        gate = add_splits(gate_ptr, SPLITS, BLOCK_N, BLOCK_M)
        residual = add_splits(residual_ptr, SPLITS, BLOCK_N, BLOCK_M)

    cols = start_n + offs_n
    gate += tl.load(bias_ptr + cols, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    if residual_bias_ptr is not None:
        residual += tl.load(residual_bias_ptr + cols, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + (start_m + offs_m)[None, :] * C + cols[:, None]
    out = residual + silu(gate)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@library.op(fake=lambda x, weight: x.new_empty(weight.shape[0], *x.shape[-2:]))
def draft_heads(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, backend: Backend | None = None
) -> torch.Tensor:
    """Residual block of every head: x + SiLU(x W_k^T + b_k).

    Args:
        x: [B, C], the same for all heads, or [K, B, C]; float32, float16 or bfloat16, contiguous in C.
        weight: [K, C, C], dtype of `x`, contiguous in its last dimension.
        bias: [K, C], dtype of `x`, contiguous in C.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        [K, B, C], dtype of `x`, contiguous.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, tensors on several devices.
    """
    check_tensor("weight", weight, shape=(None, None, None), dtype=FLOAT_DTYPES)
    num_heads, width = weight.shape[:2]
    like_weight: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
    check_tensor("weight", weight, shape=(num_heads, width, width))
    shared = isinstance(x, torch.Tensor) and x.ndim == 2
    check_tensor("x", x, shape=(None, width) if shared else (num_heads, None, width), **like_weight)
    check_tensor("bias", bias, shape=(num_heads, width), **like_weight)
    if resolve_backend(x, backend) == "reference":
        return reference.draft_heads(x, weight, bias, upcast=False)
    batch = x.shape[-2]
    out = torch.empty(num_heads, batch, width, **like_weight)
    if out.numel() == 0:
        return out
    _launch_linear(x.expand(num_heads, -1, -1), weight, out, bias)
    return out


@library.op(fake=lambda parts: parts[0].new_empty(parts[0].shape))
def draft_heads_concat(
    parts: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual_weight: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Residual block on parts side by side: R cat(parts) + r + SiLU(W cat(parts) + b), without the concatenation.

    Args:
        parts: 1 to 16 tensors [M, C], float32, float16 or bfloat16, contiguous in C.
        weight: W, [C, P * C], dtype of the parts, contiguous in its last dimension.
        bias: b, [C], dtype of the parts.
        residual_weight: R, like `weight`; None for the identity, which takes exactly one part.
        residual_bias: r, like `bias`, or None.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        [M, C], dtype of the parts, contiguous.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, no parts or too many, the identity of more than one part, a bias of the
            identity, tensors on several devices.
    """
    _check_concat(parts, weight, bias, residual_weight, residual_bias)
    if residual_weight is None:
        return draft_heads(parts[0], weight[None], bias[None], backend=backend)[0]
    if resolve_backend(parts[0], backend) == "reference":
        return reference.draft_heads_concat(parts, weight, bias, residual_weight, residual_bias, upcast=False)
    num_rows, width = parts[0].shape
    out = parts[0].new_empty(num_rows, width)
    if out.numel() == 0:
        return out

    # one stride for all parts: those cut from wider tensors are copied, a few rows each
    if len({part.stride(0) for part in parts}) > 1:
        parts = [part.contiguous() for part in parts]
    config = weight_first_tiles(num_rows, out.element_size(), num_weights=2)
    block_m, block_n = config.blocks["BLOCK_M"], config.blocks["BLOCK_N"]
    grid = triton.cdiv(num_rows, block_m), triton.cdiv(width, block_n)
    splits = choose_splits(grid[1], len(parts) * width)
    tensors = tuple(parts), weight, bias, residual_weight, residual_bias, out
    strides = parts[0].stride(0), weight.stride(0), residual_weight.stride(0)
    sizes = num_rows, width, len(parts), splits
    with on_device(out), split_workspace(math.prod(grid), splits, 2 * block_m * block_n, out.device) as workspace:
        _draft_heads_concat_kernel[(*grid, splits)](
            *tensors, *workspace, *strides, *sizes, UPCAST=needs_upcast(out), **config.kwargs()
        )
    return out


def _check_concat(
    parts: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor,
    residual_weight: torch.Tensor | None,
    residual_bias: torch.Tensor | None,
) -> None:
    """Check the arguments of `draft_heads_concat`."""
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"parts: expected 1 to {MAX_PARTS} tensors, got {len(parts)}")
    check_tensor("parts[0]", parts[0], shape=(None, None), dtype=FLOAT_DTYPES)
    num_rows, width = parts[0].shape
    like: dict[str, Any] = {"dtype": parts[0].dtype, "device": parts[0].device}
    for i, part in enumerate(parts):
        check_tensor(f"parts[{i}]", part, shape=(num_rows, width), **like)
    check_tensor("weight", weight, shape=(width, len(parts) * width), **like)
    check_tensor("bias", bias, shape=(width,), **like)
    if residual_weight is not None:
        check_tensor("residual_weight", residual_weight, shape=(width, len(parts) * width), **like)
        if residual_bias is not None:
            check_tensor("residual_bias", residual_bias, shape=(width,), **like)
    elif len(parts) != 1:
        raise ValueError(f"residual_weight: expected a tensor for {len(parts)} parts, got None")
    elif residual_bias is not None:
        raise ValueError("residual_bias: expected None without residual_weight, got a tensor")
