"""Attention of the nodes of a draft tree over the prefix and over their own ancestors.

Equation:   out[b, i, h] = sum over s of softmax_s(scale * q[b, i, h] . k[b, s, h // G]) * v[b, s, h // G],
            s over the slots that node i sees: s < lengths[b] (the prefix) and s = lengths[b] + j where bit j of
            ancestors[b, i] is set. With a window, prefix slot s is seen only if lengths[b] + depth[b, i] - s < window
Source:     SpecInfer (arXiv:2305.09781) section 4, topology-aware causal mask; FlashDecoding's split over the keys
            (Dao, Haziza, Massa, Sizov, 2023) with the merge by log-sum-exp done by the last program to arrive
Reference:  kernels/reference/tree_attention.py

Shapes:     B requests, N nodes that ask, T nodes whose keys are cached, S slots, HQ query heads, HK key heads,
            G = HQ / HK, D head dim, W = ceil(T / 32) words
            q          [B, N, HQ, D]   fp16, bf16 or fp32
            k_cache    [B, S, HK, D]   as q; slots count from 0, node j of row b is in slot lengths[b] + j
            v_cache    [B, S, HK, D]   as q
            lengths    [B]             int32, tokens of the prefix; lengths[b] + T <= S
            ancestors  [B or 1, N, W]  int32, bit j % 32 of word j // 32: node i sees node j
            depth      [B or 1, N]     int32, read with a window only
Cost:       reads 2 * HK * D * sum(lengths + T) elements, does 4 * HQ * N * D * sum(lengths + T) flops; bandwidth-bound
            up to about 180 rows N * G on an H200
Edges:      a node that sees nothing gets zeros. Slots from lengths[b] + T on are never read; tree slots that a node
            does not see must be finite (0 * NaN is NaN)
Numerics:   scores, softmax and sums in fp32; probabilities rounded to the dtype of v before their product with it; one
            rounding at the end. fp32 inputs are multiplied in full precision, never TF32. Every sum has a fixed order,
            so a call repeats bit by bit; another B or S may choose another split of the keys and round differently
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_tensor
from specdec.kernels.common.launch import (
    Backend,
    LaunchConfig,
    batch_stride,
    early_start,
    needs_upcast,
    on_device,
    resolve_backend,
    wait_for_launch,
)
from specdec.kernels.common.limits import MAX_NODES, NUM_SMS
from specdec.kernels.common.scratch import arrival_counters
from specdec.kernels.common.weight_first import arrives_last
from specdec.kernels.reference.tree_attention import tree_attention as tree_attention_reference

__all__ = ["tree_attention"]

_MAX_HEAD_DIM = 256
_MAX_SPLITS = 16
_MIN_KEYS_PER_SPLIT = 256
_LOG2_E = 1.4426950408889634


@triton.jit
def _ancestor_bits(words_ptrs, j, T, mask_m, BLOCK_N: tl.constexpr):
    """Whether each row sees nodes j..j+BLOCK_N-1, from one or two words per row; [BLOCK_M, BLOCK_N]."""
    offs_n = tl.arange(0, BLOCK_N)
    words = tl.load(words_ptrs + j // 32, mask=mask_m, other=0)[:, None]
    if BLOCK_N == 64:
        high = tl.load(words_ptrs + j // 32 + 1, mask=mask_m & (j + 32 < T), other=0)[:, None]
        words = tl.where(offs_n[None, :] < 32, words, high)
    return (words >> (offs_n % 32)[None, :] & 1) != 0


@triton.jit
def _softmax_step(s, m_i, l_i):
    """Weights of one tile of scores, the factor of all tiles before it, and the new running maximum and sum."""
    m_new = tl.maximum(m_i, tl.max(s, 1))
    # a row that has seen nothing keeps m = -inf, and -inf - -inf would be NaN
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - m_safe)
    p = tl.exp2(s - m_safe[:, None])
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def _merge_splits(
    partial_ptr, lse_ptr, num_splits, mask_m, mask_d, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Weigh the outputs of the splits by their log-sum-exp, in the order of the splits."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask = mask_m[:, None] & mask_d[None, :]
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in range(0, num_splits):
        rows = split * BLOCK_M + offs_m
        # .cg reads the L2, where other programs' stores are; a line in this SM's L1 may be stale
        lse = tl.load(lse_ptr + rows, mask=mask_m, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(partial_ptr + rows[:, None] * D + offs_d[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m_i, lse)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - m_safe)
        weight = tl.exp2(lse - m_safe)
        l_i = l_i * alpha + weight
        acc = acc * alpha[:, None] + part * weight[:, None]
        m_i = m_new
    return acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]


@triton.jit(do_not_specialize=["N", "T", "stride_ab", "stride_an", "stride_db"])
def _tree_attention_kernel(
    q_ptr,  # [B, N, HQ, D]
    k_ptr,  # [B, S, HK, D]
    v_ptr,  # [B, S, HK, D]
    lengths_ptr,  # [B]
    ancestors_ptr,  # [B or 1, N, W]
    depth_ptr,  # [B or 1, N]
    out_ptr,  # [B, N, HQ, D]
    partial_ptr,  # [B, HK * row blocks, SPLITS, BLOCK_M, D] fp32, normalised output of a split
    lse_ptr,  # [B, HK * row blocks, SPLITS, BLOCK_M] fp32, base 2
    arrivals_ptr,  # [B, HK * row blocks] int32, zeros, as they are afterwards
    stride_qb,
    stride_qn,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_ab,
    stride_an,
    stride_db,
    stride_ob,
    stride_on,
    stride_oh,
    N,
    T,
    scale_log2,
    G: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    UPCAST: tl.constexpr,  # compute in fp32: the interpreter multiplies the bits of bf16
    EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program folds one split of the keys into BLOCK_M rows (node, query head) of one key head."""
    wait_for_launch(EARLY)
    split = tl.program_id(0)
    b = tl.program_id(2).to(tl.int64)
    num_blocks = tl.cdiv(N * G, BLOCK_M)
    hk = tl.program_id(1) // num_blocks

    length = tl.load(lengths_ptr + b)
    first_slot = tl.maximum(length - WINDOW + 1, 0) if WINDOW else 0  # the root sees back furthest
    # the tiles of the tree start at its first node, so that a word of bits never crosses a tile
    prefix_tiles = tl.cdiv(length - first_slot, BLOCK_N)
    num_tiles = prefix_tiles + tl.cdiv(T, BLOCK_N)
    tiles_per_split = tl.cdiv(num_tiles, tl.num_programs(0))
    num_splits = tl.cdiv(num_tiles, tiles_per_split)
    if split >= num_splits:  # a short row needs fewer
        return
    begin = split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, num_tiles)

    rows = tl.program_id(1) % num_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    node = rows // G
    hq = hk * G + rows % G
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_m = node < N
    mask_d = offs_d < D
    mask_md = mask_m[:, None] & mask_d[None, :]
    q_ptrs = q_ptr + b * stride_qb + (node * stride_qn + hq * stride_qh)[:, None] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=mask_md, other=0.0)
    q = q.to(tl.float32) if UPCAST else q
    k_ptr += b * stride_kb + hk.to(tl.int64) * stride_kh
    v_ptr += b * stride_vb + hk.to(tl.int64) * stride_vh
    words_ptrs = ancestors_ptr + b * stride_ab + node * stride_an
    if WINDOW:
        oldest = length + 1 - WINDOW + tl.load(depth_ptr + b * stride_db + node, mask=mask_m, other=0)

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(begin, end):
        j = (tile - prefix_tiles) * BLOCK_N  # node in the first slot of the tile; negative in the prefix
        slots = length + j + offs_n
        mask_n = (slots >= first_slot) & (slots < length + T)
        start = tl.cast(length + j, tl.int64)
        k_ptrs = k_ptr + start * stride_ks + (offs_n[None, :] * stride_ks + offs_d[:, None])
        v_ptrs = v_ptr + start * stride_vs + (offs_n[:, None] * stride_vs + offs_d[None, :])
        k = tl.load(k_ptrs, mask=mask_n[None, :] & mask_d[:, None], other=0.0)  # [BLOCK_D, BLOCK_N]
        v = tl.load(v_ptrs, mask=mask_n[:, None] & mask_d[None, :], other=0.0)  # [BLOCK_N, BLOCK_D]
        k = k.to(tl.float32) if UPCAST else k
        v = v.to(tl.float32) if UPCAST else v

        s = tl.dot(q, k, input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        s = tl.where(mask_n[None, :], s, float("-inf"))
        if WINDOW:
            s = tl.where((slots[None, :] >= oldest[:, None]) | (j >= 0), s, float("-inf"))
        if j >= 0:
            s = tl.where(_ancestor_bits(words_ptrs, j, T, mask_m, BLOCK_N), s, float("-inf"))

        p, alpha, m_i, l_i = _softmax_step(s, m_i, l_i)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")

    l_i = tl.where(l_i == 0.0, 1.0, l_i)  # zeros for a row that has seen nothing
    acc /= l_i[:, None]
    out_ptrs = out_ptr + b * stride_ob + (node * stride_on + hq * stride_oh)[:, None] + offs_d[None, :]
    if num_splits == 1:
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_md)
        return

    # whoever arrives last merges all splits: no second launch, and nobody waits
    group = b * tl.num_programs(1) + tl.program_id(1)
    partial_ptr += group * tl.num_programs(0) * BLOCK_M * D
    lse_ptr += group * tl.num_programs(0) * BLOCK_M
    offs_p = split * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(partial_ptr + offs_p[:, None] * D + offs_d[None, :], acc, mask=mask_md)
    tl.store(lse_ptr + offs_p, m_i + tl.log2(l_i), mask=mask_m)
    if arrives_last(arrivals_ptr + group, num_splits):
        acc = _merge_splits(partial_ptr, lse_ptr, num_splits, mask_m, mask_d, D, BLOCK_M, BLOCK_D)
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_md)


def _launch_config(num_rows: int, head_dim: int, itemsize: int) -> LaunchConfig:
    """Tiles for `num_rows` = N * G packed rows; docs/kernels/tree_attention.md lists what they compile to.

    BLOCK_N must be 32 or 64, one or two words of ancestor bits. 16 and 32 rows are too few for wgmma and use mma.sync.
    """
    block_m = min(max(16, triton.next_power_of_2(num_rows)), 128)
    block_d = max(16, triton.next_power_of_2(head_dim))
    if itemsize == 4:  # no tensor cores in full fp32: small tiles keep the operands in registers
        block_m = min(block_m, 32 if block_d <= 128 else 16)
    elif block_d > 128:
        block_m = min(block_m, 64)
    # more than 64 rows, 64 rows of 256, or float32 rows of 256 would spill with four warps
    num_warps = 8 if block_m == 128 or block_m * block_d > 8192 or itemsize * block_d > 512 else 4
    if itemsize == 4 or block_d > 128:
        block_n, num_stages = 32, 2
    else:
        block_n, num_stages = (64, 3) if num_warps == 4 else (32, 4)
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d}
    return LaunchConfig(blocks, num_warps=num_warps, num_stages=num_stages)


def _num_splits(num_programs: int, num_rows: int, capacity: int) -> int:
    """Splits of the keys that fill the GPU once, given `num_programs` without a split and `capacity` cache slots.

    Few rows need more programs per SM, because each keeps fewer bytes in flight. Every split writes and reads back its
    partial output, so a split is never made for fewer than 256 keys.
    """
    programs_per_sm = 3 if num_rows <= 16 else 2 if num_rows <= 32 else 1
    wanted = NUM_SMS * programs_per_sm // num_programs
    return max(1, min(wanted, _MAX_SPLITS, triton.cdiv(capacity, _MIN_KEYS_PER_SPLIT)))


@library.op(fake=lambda q: q.new_empty(q.shape))
def tree_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    *,
    scale: float,
    num_tree_nodes: int | None = None,
    depth: torch.Tensor | None = None,
    window: int | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Attention of N tree nodes over the prefix and over their ancestors in the tree.

    Node i of row b sees the cache slots 0..lengths[b]-1 (the prefix) and those tree slots lengths[b]+j whose bit j of
    ancestors[b, i] is set. A tree of one node is plain decoding. The keys and values of the tree nodes must already be
    in the cache.

    Args:
        q: [B, N, HQ, D] fp16, bf16 or fp32; N <= 512, D <= 256.
        k_cache: [B, S, HK, D] as `q`; HQ is a multiple of HK.
        v_cache: [B, S, HK, D] as `q`.
        lengths: [B] int32, tokens of the prefix, tree not counted; lengths[b] + T <= S, which is not checked because
            the lengths live on the device.
        ancestors: [B or 1, N, ceil(T / 32)] int32, bit j % 32 of word j // 32 set if node i sees tree slot j. A first
            dimension of 1 shares one tree among all rows. A node normally sees itself.
        scale: factor of the scores, usually 1 / sqrt(D).
        num_tree_nodes: T, tree slots in use, N <= T <= 512; N if not given. Larger than N when a drafter scores one
            level of its tree at a time.
        depth: [B or 1, N] int32, distance from the root (root 0); needed with `window`.
        window: sliding window in tokens: prefix slot s is seen only if lengths[b] + depth[b, i] - s < window. The
            tree is not windowed.
        backend: "triton", "reference" or None for the default of the device.

    Returns:
        [B, N, HQ, D], contiguous, in the dtype of `q`; zeros for a node that sees nothing.

    Raises:
        TypeError: an argument of another dtype.
        ValueError: a shape, stride or device that does not fit, or `window` without `depth`.
    """
    num_tree_nodes = _check(q, k_cache, v_cache, lengths, ancestors, num_tree_nodes, depth, window)
    if q.shape[0] == 0:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    if resolve_backend(q, backend) == "reference":
        options: dict[str, Any] = {"num_tree_nodes": num_tree_nodes, "depth": depth, "window": window}
        return tree_attention_reference(q, k_cache, v_cache, lengths, ancestors, scale=scale, **options, upcast=False)

    batch, num_nodes, num_heads, head_dim = q.shape
    capacity, kv_heads = k_cache.shape[1:3]
    num_rows = num_nodes * (num_heads // kv_heads)
    config = _launch_config(num_rows, head_dim, q.element_size())
    block_m = config.blocks["BLOCK_M"]
    groups = kv_heads * triton.cdiv(num_rows, block_m)
    num_splits = _num_splits(batch * groups, num_rows, capacity)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    merged = groups if num_splits > 1 else 0  # one split writes `out` itself
    partial = torch.empty(batch, merged, num_splits, block_m, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, merged, num_splits, block_m, dtype=torch.float32, device=q.device)
    tensors = q, k_cache, v_cache, lengths, ancestors, depth, out, partial, lse
    strides = [stride for tensor in (q, k_cache, v_cache) for stride in tensor.stride()[:3]]
    strides += [batch_stride(ancestors), ancestors.stride(1), batch_stride(depth), *out.stride()[:3]]
    sizes = num_nodes, num_tree_nodes, scale * _LOG2_E, num_heads // kv_heads, head_dim, window or 0
    with on_device(q), arrival_counters(batch * merged, q.device) as arrivals:
        _tree_attention_kernel[(num_splits, groups, batch)](
            *tensors, arrivals, *strides, *sizes, UPCAST=needs_upcast(q), **early_start(), **config.kwargs()
        )
    return out


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    num_tree_nodes: int | None,
    depth: torch.Tensor | None,
    window: int | None,
) -> int:
    """Check the arguments of `tree_attention`; returns T."""
    check_tensor("q", q, shape=(None, None, None, None), dtype=(torch.float16, torch.bfloat16, torch.float32))
    batch, num_nodes, num_heads, head_dim = q.shape
    check_tensor("k_cache", k_cache, shape=(batch, None, None, head_dim), dtype=q.dtype, device=q.device)
    check_tensor("v_cache", v_cache, shape=tuple(k_cache.shape), dtype=q.dtype, device=q.device)
    check_tensor("lengths", lengths, shape=(batch,), dtype=torch.int32, device=q.device)
    capacity, kv_heads = k_cache.shape[1:3]
    if kv_heads == 0 or num_heads == 0:
        raise ValueError(f"k_cache: expected at least one head, as of q, got {kv_heads}, and {num_heads} of q")
    if num_heads % kv_heads != 0:
        raise ValueError(f"q: expected a multiple of the {kv_heads} heads of k_cache, got {num_heads} heads")
    if not 1 <= head_dim <= _MAX_HEAD_DIM:
        raise ValueError(f"q: expected a head dimension of 1 to {_MAX_HEAD_DIM}, got {head_dim}")
    tree_size = num_nodes if num_tree_nodes is None else num_tree_nodes
    if not 1 <= num_nodes <= tree_size <= min(MAX_NODES, capacity):
        raise ValueError(
            f"num_tree_nodes: expected 1 <= N <= num_tree_nodes <= {min(MAX_NODES, capacity)}, "
            f"got N = {num_nodes} and num_tree_nodes = {tree_size}"
        )
    _check_per_node("ancestors", ancestors, (batch, num_nodes, (tree_size + 31) // 32), q.device)
    if window is None:
        return tree_size
    if window < 1:
        raise ValueError(f"window: expected at least 1, got {window}")
    if depth is None:
        raise ValueError("depth: expected a tensor because window is given, got None")
    _check_per_node("depth", depth, (batch, num_nodes), q.device)
    return tree_size


def _check_per_node(name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Check a tensor of the tree, whose first dimension may be 1 for one tree in all rows."""
    shared = isinstance(tensor, torch.Tensor) and tensor.ndim == len(shape) and tensor.shape[0] == 1
    check_tensor(name, tensor, shape=(1, *shape[1:]) if shared else shape, dtype=torch.int32, device=device)
