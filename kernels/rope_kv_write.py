"""Rotary positions of one layer's queries and keys, and its keys and values written into the cache.

Equation:   with t = min(lengths[b] + positions[b, n], P - 1), s = lengths[b] + slots[b, n],
            cos, sin = cos_sin_table[t] (D / 2 cosines, then D / 2 sines) and x = (x1, x2) in halves,
            rotate(x) = (x1 * cos - x2 * sin, x2 * cos + x1 * sin)
            out[b, n, h] = rotate(q[b, n, h]);  k_cache[b, s] = rotate(k[b, n]);  v_cache[b, s] = v[b, n]
Source:     Su et al., "RoFormer" (arXiv:2104.09864) equation 34, in the half-split convention of transformers' LLaMA
            (`apply_rotary_pos_emb`)
Reference:  kernels/reference/rope_kv_write.py

Shapes:     B requests, N tokens, HQ query heads, HK key heads, D head dim (even), P positions, S slots
            q                   [B, N, HQ, D]  fp16, bf16 or fp32
            k, v                [B, N, HK, D]  as q
            positions           [B or 1, N]    int32, counted from lengths
            cos_sin_table       [P, D]         fp32 or as q; any scaling of the frequencies is in the table
            slots               [B or 1, N]    int32, slot of each token in its row, from lengths; -1: not written
            lengths             [B]            int32, where positions and slots count from; 0 if None
            k_cache_, v_cache_  [B, S, HK, D]  as q, changed in place
            out                 [B, N, HQ, D]  as q
Cost:       reads and writes (HQ + 2 * HK) * D elements per token, reads a row of the table; bandwidth-bound, and
            bound by the launch for the tokens of one decoding step
Edges:      no other slot is touched. Two tokens of a row with one slot: either may win
Numerics:   every rounding is that of transformers' LLaMA: the table to the dtype of q, each product, the sum. So no
            product may be fused with the sum. Values are copied bit by bit
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import FLOAT_DTYPES, check_tensor
from specdec.kernels.common.launch import (
    Backend,
    LaunchConfig,
    batch_stride,
    early_start,
    on_device,
    resolve_backend,
    wait_for_launch,
)
from specdec.kernels.reference.rope_kv_write import rope_kv_write as rope_kv_write_reference

__all__ = ["rope_kv_write"]

_MAX_HEAD_DIM = 256


@triton.jit
def _rotate_heads(x_ptr, out_ptr, cos, sin, offs_x, offs_out, mask, HALF: tl.constexpr, DTYPE: tl.constexpr):
    """Rotate [BLOCK_H, BLOCK_D] pairs, with every result rounded to the dtype of the model."""
    x1 = tl.load(x_ptr + offs_x, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offs_x + HALF, mask=mask, other=0.0).to(tl.float32)
    x1_cos, x2_sin = (x1 * cos).to(DTYPE).to(tl.float32), (x2 * sin).to(DTYPE).to(tl.float32)
    x2_cos, x1_sin = (x2 * cos).to(DTYPE).to(tl.float32), (x1 * sin).to(DTYPE).to(tl.float32)
    tl.store(out_ptr + offs_out, (x1_cos - x2_sin).to(DTYPE), mask=mask)
    tl.store(out_ptr + offs_out + HALF, (x2_cos + x1_sin).to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["N", "P", "stride_pb", "stride_lb"])
def _rope_kv_write_kernel(
    q_ptr,  # [B, N, HQ, D]
    k_ptr,  # [B, N, HK, D]
    v_ptr,  # [B, N, HK, D]
    positions_ptr,  # [B or 1, N]
    table_ptr,  # [P, D]
    slots_ptr,  # [B or 1, N]
    lengths_ptr,  # [B] or None
    k_cache_ptr,  # [B, S, HK, D]
    v_cache_ptr,  # [B, S, HK, D]
    out_ptr,  # [B, N, HQ, D]
    stride_qb,
    stride_qn,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_pb,
    stride_tp,
    stride_lb,
    stride_kcb,
    stride_kcs,
    stride_kch,
    stride_vcb,
    stride_vcs,
    stride_vch,
    N,
    P,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program does BLOCK_H heads of one token: query heads, or key and value heads behind those."""
    wait_for_launch(EARLY)
    HALF: tl.constexpr = D // 2
    NUM_Q_BLOCKS: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HALF
    dtype = out_ptr.dtype.element_ty

    length = 0
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + b)
    position = tl.minimum(length + tl.load(positions_ptr + b * stride_pb + n), P - 1)
    row_ptr = table_ptr + position.to(tl.int64) * stride_tp + offs_d
    cos = tl.load(row_ptr, mask=mask_d, other=0.0).to(dtype).to(tl.float32)[None, :]
    sin = tl.load(row_ptr + HALF, mask=mask_d, other=0.0).to(dtype).to(tl.float32)[None, :]

    if block < NUM_Q_BLOCKS:
        h = (block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)
        mask = (h < HQ) & mask_d[None, :]
        offs_q = b * stride_qb + n * stride_qn + h * stride_qh + offs_d[None, :]
        offs_out = ((b * N + n) * HQ + h) * D + offs_d[None, :]
        _rotate_heads(q_ptr, out_ptr, cos, sin, offs_q, offs_out, mask, HALF, dtype)
    else:
        h = ((block - NUM_Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]).to(tl.int64)
        offset = tl.load(slots_ptr + b * stride_lb + n)
        slot = (length + offset).to(tl.int64)
        mask = (h < HK) & mask_d[None, :] & (offset >= 0)
        offs_k = b * stride_kb + n * stride_kn + h * stride_kh + offs_d[None, :]
        offs_kc = b * stride_kcb + slot * stride_kcs + h * stride_kch + offs_d[None, :]
        _rotate_heads(k_ptr, k_cache_ptr, cos, sin, offs_k, offs_kc, mask, HALF, dtype)
        offs_v = b * stride_vb + n * stride_vn + h * stride_vh + offs_d[None, :]
        offs_vc = b * stride_vcb + slot * stride_vcs + h * stride_vch + offs_d[None, :]
        v1 = tl.load(v_ptr + offs_v, mask=mask, other=0.0)
        v2 = tl.load(v_ptr + offs_v + HALF, mask=mask, other=0.0)
        tl.store(v_cache_ptr + offs_vc, v1, mask=mask)
        tl.store(v_cache_ptr + offs_vc + HALF, v2, mask=mask)


def _launch_config(num_kv_heads: int, head_dim: int) -> LaunchConfig:
    """Up to 1024 pairs per program, eight per lane: 16 bytes at a time of 16-bit elements. No more heads than keys."""
    block_d = triton.next_power_of_2(head_dim // 2)
    block_h = min(triton.next_power_of_2(num_kv_heads), max(1, 1024 // block_d))
    num_warps = max(1, block_h * block_d // 256)
    return LaunchConfig({"BLOCK_H": block_h, "BLOCK_D": block_d}, num_warps=num_warps, fuses_products=False)


@library.op(fake=lambda q: q.new_empty(q.shape))
def rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_table: torch.Tensor,
    slots: torch.Tensor,
    k_cache_: torch.Tensor,
    v_cache_: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Rotate queries and keys to their positions, and write keys and values to their slots of the cache.

    Given `lengths`, positions and slots count from there: for the nodes of a tree they are constant tables, depths and
    the nodes' own numbers.

    Args:
        q: [B, N, HQ, D] float32, float16 or bfloat16, contiguous in D; D even, at most 256.
        k: [B, N, HK, D] as `q`.
        v: [B, N, HK, D] as `q`.
        positions: [B, N] or [1, N] int32, 0 or more; one past the table takes its last row.
        cos_sin_table: [P, D] float32 or as `q`: D / 2 cosines, then D / 2 sines, of every position; P at least 1.
        slots: [B, N] or [1, N] int32, slot of every token in its row, below S, which is not checked because they live
            on the device; -1 writes nothing.
        k_cache_: [B, S, HK, D] as `q`, changed in place.
        v_cache_: [B, S, HK, D] as `q`, changed in place.
        lengths: [B] int32, what is added to positions and slots; None adds nothing.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        The rotated queries, [B, N, HQ, D], contiguous, in the dtype of `q`.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, an odd or too large head dimension, tensors on several devices.
    """
    _check(q, k, v, positions, cos_sin_table, slots, k_cache_, v_cache_, lengths)
    if resolve_backend(q, backend) == "reference":
        return rope_kv_write_reference(
            q, k, v, positions, cos_sin_table, slots, k_cache_, v_cache_, lengths=lengths, upcast=False
        )

    batch, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    config = _launch_config(num_kv_heads, head_dim)
    block_h = config.blocks["BLOCK_H"]
    num_blocks = triton.cdiv(num_heads, block_h) + triton.cdiv(num_kv_heads, block_h)
    if batch * num_tokens == 0:
        return out
    tensors = q, k, v, positions, cos_sin_table, slots, lengths, k_cache_, v_cache_, out
    strides = [stride for tensor in (q, k, v) for stride in tensor.stride()[:3]]
    strides += [batch_stride(positions), cos_sin_table.stride(0), batch_stride(slots)]
    strides += [*k_cache_.stride()[:3], *v_cache_.stride()[:3]]
    sizes = num_tokens, cos_sin_table.shape[0], num_heads, num_kv_heads, head_dim
    with on_device(q):
        _rope_kv_write_kernel[(num_tokens, num_blocks, batch)](
            *tensors, *strides, *sizes, **early_start(), **config.kwargs()
        )
    return out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_table: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor | None,
) -> None:
    """Check the arguments of `rope_kv_write`."""
    check_tensor("q", q, shape=(None, None, None, None), dtype=FLOAT_DTYPES)
    batch, num_tokens, _, head_dim = q.shape
    if head_dim % 2 or not 2 <= head_dim <= _MAX_HEAD_DIM:
        raise ValueError(f"q: expected an even head dimension of 2 to {_MAX_HEAD_DIM}, got {head_dim}")
    check_tensor("k", k, shape=(batch, num_tokens, None, head_dim), dtype=q.dtype, device=q.device)
    if k.shape[2] == 0 or q.shape[2] == 0:
        raise ValueError(f"k: expected at least one head, as of q, got {k.shape[2]}, and {q.shape[2]} of q")
    check_tensor("v", v, shape=k.shape, dtype=q.dtype, device=q.device)
    for name, tensor in (("positions", positions), ("slots", slots)):
        check_tensor(name, tensor, shape=(None, num_tokens), dtype=torch.int32, device=q.device)
        if tensor.shape[0] not in (1, batch):
            raise ValueError(f"{name}: expected {batch} rows or 1, got shape {list(tensor.shape)}")
    dtypes = tuple(dict.fromkeys((torch.float32, q.dtype)))
    check_tensor("cos_sin_table", cos_sin_table, shape=(None, head_dim), dtype=dtypes, device=q.device)
    if cos_sin_table.shape[0] == 0:
        raise ValueError("cos_sin_table: expected at least one position, got none")
    if lengths is not None:
        check_tensor("lengths", lengths, shape=(batch,), dtype=torch.int32, device=q.device)
    check_tensor("k_cache_", k_cache, shape=(batch, None, k.shape[2], head_dim), dtype=q.dtype, device=q.device)
    check_tensor("v_cache_", v_cache, shape=k_cache.shape, dtype=q.dtype, device=q.device)
