"""Language-model heads with the k best tokens and the log-sum-exp of every row, exact to the last tie.

Equation:   logits[b, j] = weight[j] h[j, b] + bias[j],  h = x, or h = down x for heads of low rank
            tokens[b, j] = the k first tokens in the order (logit descending, token ascending), values their logits
            logsumexp[b, j] = log sum_v exp(logits[b, j, v])
Source:     log-sum-exp by tiles as in online softmax (Milakov and Gimelshein, arXiv:1805.02867); the k best by a merge
            of tiles, each tile's best first (docs/kernels/lm_head_topk.md has the proof)
Reference:  kernels/reference/lm_head_topk.py

Shapes:     K heads, B rows, C model width, V vocabulary, r rank, T = ceil(V / 128) tiles
            x            [K, B, C]       fp16, bf16 or fp32
            weight       [K or 1, V, C]  as x; one weight may serve all heads. [K or 1, V, r] with `down`
            down         [K, r, C]       as x
            bias         [K or 1, V]     as x, a row for every weight; may be left out
            values, tokens      [B, K, k]  fp32, int32
            logsumexp, has_nan  [B, K]     fp32 in nats, bool
Cost:       reads the weights once, 2*K*B*V*C flops; bound by the weights' bytes up to about 180 rows on an H200. From
            193 rows on (k = 1; 129 otherwise) the weights are read again, from the L2 cache. The
            logits of one call pass through memory in fp32 unless k = 1; they stay in the L2 cache up to some 100 rows
Edges:      a NaN logit counts as -inf and sets has_nan; -0.0 equals 0.0 and comes back as 0.0; a row of -inf gives
            tokens 0 to k - 1; a +inf makes the log-sum-exp +inf
Numerics:   logits accumulated and kept in fp32 (fp32 inputs in full precision, never TF32), on request rounded to the
            dtype of x before they are compared; h of low-rank heads always is. Which tokens win is exact for those
            logits. All sums have a fixed order
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import FLOAT_DTYPES, check_tensor
from specdec.kernels.common.launch import Backend, LaunchConfig, needs_upcast, on_device, resolve_backend
from specdec.kernels.common.primitives import key_token, token_key
from specdec.kernels.common.topk import TopK
from specdec.kernels.common.weight_first import weight_first_dot
from specdec.kernels.reference.lm_head_topk import lm_head_topk as lm_head_topk_reference
from specdec.kernels.skinny_linear import MAX_ROWS, skinny_linear

__all__ = ["MAX_K", "MAX_VOCAB", "lm_head_topk"]

MAX_K = 32
"""Most tokens that one call returns of a row."""

MAX_VOCAB = 1 << 18
"""Largest vocabulary."""

_BLOCK_V = 128


@triton.jit
def _finite_or_zero(value):
    """An offset that exp can take off values whose maximum is `value`, also where that is infinite."""
    return tl.where(tl.abs(value) == float("inf"), 0.0, value)


@triton.jit
def _key_value(key):
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _two_dots(
    x_rows,  # [BLOCK_M] pointers to rows of x
    more_rows,  # [MORE_M] pointers to further rows
    weight_rows,  # [BLOCK_N] pointers to the rows of the weight
    mask_m,
    mask_more,
    mask_v,
    C,
    UPCAST: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Products of one weight tile with two blocks of rows: [BLOCK_N, BLOCK_M] and [BLOCK_N, MORE_M] in fp32."""
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([mask_v.shape[0], mask_m.shape[0]], tl.float32)
    more = tl.zeros([mask_v.shape[0], mask_more.shape[0]], tl.float32)
    for start in range(0, C, BLOCK_K):
        cols = start + offs_k
        mask_k = cols < C
        w = tl.load(weight_rows[:, None] + cols[None, :], mask=mask_v[:, None] & mask_k[None, :], other=0.0)
        x = tl.load(x_rows[None, :] + cols[:, None], mask=mask_k[:, None] & mask_m[None, :], other=0.0)
        y = tl.load(more_rows[None, :] + cols[:, None], mask=mask_k[:, None] & mask_more[None, :], other=0.0)
        w = w.to(tl.float32) if UPCAST else w
        x = x.to(tl.float32) if UPCAST else x
        y = y.to(tl.float32) if UPCAST else y
        acc = tl.dot(w, x, acc, input_precision="ieee")
        more = tl.dot(w, y, more, input_precision="ieee")
    return acc, more


@triton.jit
def _finish_rows(
    logits,  # [BLOCK_N, BLOCK_M] fp32, without bias and not rounded
    row,  # [BLOCK_M] k * B + b
    mask_m,
    mask_v,
    bias_ptr,  # of this weight, or None
    logits_ptr,
    tile_ptrs,  # maximum, token, sum and NaN
    num_heads,
    batch,
    V,
    dtype: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
):
    """Store the logits of a tile, if anybody wants them, and their maximum and sum."""
    BLOCK_N: tl.constexpr = logits.shape[0]
    tile_max_ptr, tile_token_ptr, tile_sum_ptr, tile_nan_ptr = tile_ptrs
    tile = tl.program_id(1)
    start_v = tile * BLOCK_N
    offs_v = tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + start_v + offs_v, mask=mask_v, other=0.0)  # [BLOCK_N]
        logits += bias.to(tl.float32)[:, None]
    if IS_ROUNDED:
        logits = logits.to(dtype).to(tl.float32)

    out_row = row % batch * num_heads + row // batch
    slots = out_row * tl.num_programs(1) + tile
    is_nan = logits != logits
    tl.store(tile_nan_ptr + slots, tl.max((is_nan & mask_v[:, None]).to(tl.int32), 0) > 0, mask=mask_m)
    logits = tl.where(is_nan | ~mask_v[:, None], float("-inf"), logits)
    if logits_ptr is not None:
        logits_ptrs = logits_ptr + out_row[None, :] * V + start_v + offs_v[:, None]
        tl.store(logits_ptrs, logits, mask=mask_v[:, None] & mask_m[None, :])

    # the lowest token of the maximum is a real one even if all are -inf: those beyond V have higher numbers
    maximum = tl.max(logits, 0)  # [BLOCK_M]
    token = start_v + tl.min(tl.where(logits == maximum[None, :], offs_v[:, None], BLOCK_N), 0)
    tl.store(tile_max_ptr + slots, maximum, mask=mask_m)
    tl.store(tile_token_ptr + slots, token, mask=mask_m)
    total = tl.sum(tl.exp(logits - _finite_or_zero(maximum)[None, :]), 0)
    tl.store(tile_sum_ptr + slots, total, mask=mask_m)


@triton.jit(do_not_specialize=["rows_per_weight", "num_heads", "batch"])
def _lm_head_tiles_kernel(
    x_ptr,  # [H, M, C]: [K, B, C], or [1, K * B, C] if the heads share their weight
    weight_ptr,  # [H, V, C]
    bias_ptr,  # [H, V] or None
    logits_ptr,  # [B, K, V] or None
    tile_ptrs,  # [B, K, T] each: maximum fp32, its lowest token int32, sum of exp(logit - maximum) fp32, any NaN bool
    stride_xh,
    stride_xm,
    stride_wh,
    stride_wv,
    stride_bh,
    rows_per_weight,
    num_heads,
    batch,
    V,
    C,
    UPCAST: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MORE_M: tl.constexpr,  # rows of a second block, which sees the same weight tile; 0: none
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program computes the logits of BLOCK_N tokens for BLOCK_M + MORE_M rows, and their maximum and sum."""
    h = tl.program_id(2).to(tl.int64)
    # the row blocks of a weight tile run side by side, so that the tile is read from memory once
    start_m = tl.program_id(0) * (BLOCK_M + MORE_M)
    start_v = tl.program_id(1) * BLOCK_N
    offs_m = tl.arange(0, BLOCK_M)
    offs_v = tl.arange(0, BLOCK_N)
    mask_m = start_m + offs_m < rows_per_weight
    mask_v = start_v + offs_v < V

    x_ptr += h * stride_xh + start_m.to(tl.int64) * stride_xm
    x_rows = x_ptr + offs_m * stride_xm
    weight_rows = weight_ptr + h * stride_wh + start_v.to(tl.int64) * stride_wv + offs_v * stride_wv
    if bias_ptr is not None:
        bias_ptr += h * stride_bh
    row = h * rows_per_weight + start_m
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    if MORE_M == 0:
        logits = weight_first_dot(x_rows, weight_rows, mask_m, mask_v, 0, C, C, UPCAST, BLOCK_K)
    else:
        offs_more = BLOCK_M + tl.arange(0, MORE_M)
        mask_more = start_m + offs_more < rows_per_weight
        more_rows = x_ptr + offs_more * stride_xm
        logits, more = _two_dots(x_rows, more_rows, weight_rows, mask_m, mask_more, mask_v, C, UPCAST, BLOCK_K)
        out = bias_ptr, logits_ptr, tile_ptrs
        _finish_rows(more, row + offs_more, mask_more, mask_v, *out, num_heads, batch, V, dtype, IS_ROUNDED)
    out = bias_ptr, logits_ptr, tile_ptrs
    _finish_rows(logits, row + offs_m, mask_m, mask_v, *out, num_heads, batch, V, dtype, IS_ROUNDED)


@triton.jit
def _lm_head_merge_kernel(
    logits_ptr,  # [rows, V]
    tile_max_ptr,  # [rows, T]
    tile_token_ptr,  # [rows, T]
    tile_sum_ptr,  # [rows, T]
    tile_nan_ptr,  # [rows, T]
    values_ptr,  # [rows, TOP]
    tokens_ptr,  # [rows, TOP]
    logsumexp_ptr,  # [rows]
    has_nan_ptr,  # [rows]
    V,
    T,
    TOP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program merges the tiles of one row: the best token, then its tile's next best, TOP times."""
    NONE: tl.constexpr = -0x8000000000000000  # below the key of every token
    row = tl.program_id(0).to(tl.int64)
    offs_t = tl.arange(0, BLOCK_T)
    offs_v = tl.arange(0, BLOCK_V)
    mask_t = offs_t < T
    maximum = tl.load(tile_max_ptr + row * T + offs_t, mask=mask_t, other=float("-inf"))
    first = tl.load(tile_token_ptr + row * T + offs_t, mask=mask_t, other=0)
    keys = tl.where(mask_t, token_key(maximum, first), NONE)

    total = tl.load(tile_sum_ptr + row * T + offs_t, mask=mask_t, other=0.0)
    offset = _finite_or_zero(tl.max(maximum, 0))
    # a tile of -inf has the sum 0, which its factor could turn into NaN
    total = tl.where(total > 0.0, total * tl.exp(_finite_or_zero(maximum) - offset), 0.0)
    tl.store(logsumexp_ptr + row, offset + tl.log(tl.sum(total, 0)))
    is_nan = tl.load(tile_nan_ptr + row * T + offs_t, mask=mask_t, other=0).to(tl.int32)
    tl.store(has_nan_ptr + row, tl.max(is_nan, 0) > 0)

    for place in range(0, TOP):
        best = tl.max(keys, 0)
        token = key_token(best)
        tl.store(values_ptr + row * TOP + place, _key_value(best))
        tl.store(tokens_ptr + row * TOP + place, token)
        if TOP > 1:
            tile = token // BLOCK_V
            vocab = tile * BLOCK_V + offs_v
            logits = tl.load(logits_ptr + row * V + vocab, mask=vocab < V, other=float("-inf"))
            # all up to `best` has been returned, whichever tile it came from; what lies beyond V comes after all of V
            key = token_key(logits, vocab)
            following = tl.max(tl.where(key < best, key, NONE), 0)
            keys = tl.where(offs_t == tile, following, keys)


def _launch_config(num_rows: int, itemsize: int, k: int) -> LaunchConfig:
    """Tiles of 128 tokens for `num_rows` rows of x per weight; docs/kernels/lm_head_topk.md lists what they compile to.

    The stages of two programs of up to 64 rows fit into the shared memory of one SM, and those of one of up to 192.
    """
    block_m = min(max(16, triton.next_power_of_2(num_rows)), 128)
    blocks = {"BLOCK_M": block_m, "MORE_M": 0, "BLOCK_N": _BLOCK_V, "BLOCK_K": 64}
    if itemsize == 4:  # no tensor cores in full fp32: small tiles keep the operands in registers
        return LaunchConfig({**blocks, "BLOCK_M": min(block_m, 32), "BLOCK_K": 32}, 4, num_stages=2)
    if num_rows > block_m and k == 1:  # with the logits' addresses two blocks of rows would spill on sm_80
        blocks["MORE_M"] = 64
    return LaunchConfig(blocks, num_warps=8, num_stages=4)


def _merge_config(num_tiles: int) -> LaunchConfig:
    """One warp needs no barriers in its reductions, but holds no more than some 32 keys per lane."""
    block_t = triton.next_power_of_2(num_tiles)
    return LaunchConfig({"BLOCK_V": _BLOCK_V, "BLOCK_T": block_t}, num_warps=1 if block_t <= 512 else 4)


def _empty_topk(x: torch.Tensor, k: int) -> TopK:
    """Room for the result."""
    lead, fp32 = (x.shape[1], x.shape[0]), torch.float32
    return TopK(
        values=x.new_empty(*lead, k, dtype=fp32),
        tokens=x.new_empty(*lead, k, dtype=torch.int32),
        logsumexp=x.new_empty(lead, dtype=fp32),
        has_nan=x.new_empty(lead, dtype=torch.bool),
    )


@library.op(fake=_empty_topk)
def lm_head_topk(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    k: int,
    down: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    rounded: bool = False,
    backend: Backend | None = None,
) -> TopK:
    """Logits of K heads, their k best tokens and their log-sum-exp.

    Heads with weights of their own, heads that share one weight (then it is read once for all of them) and low-rank
    heads run in the same launch. k = 1 is greedy decoding's choice: the lowest token among equal logits.

    Args:
        x: [K, B, C] float32, float16 or bfloat16, contiguous in C; states of B rows for each of K heads.
        weight: [K, V, C] or [1, V, C], dtype of `x`, contiguous in C; with `down` the last dimension is r.
        k: tokens per row, 1 <= k <= 32 and k <= V.
        down: [K, r, C], dtype of `x`, contiguous in C: heads of low rank, logits = weight (down x).
        bias: [K, V] or [1, V], as many as `weight` has heads, dtype of `x`, contiguous in V: added to the logits.
        rounded: round the logits to the dtype of `x` first of all, as a linear layer does; its ties then are ties here.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        The best tokens, with B rows of K heads; see `TopK`.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, a `k` out of range, a vocabulary over 2**18, tensors on several devices.
    """
    _check(x, weight, k, down, bias)
    num_heads, batch, _ = x.shape
    if resolve_backend(x, backend) == "reference":
        return lm_head_topk_reference(x, weight, k=k, down=down, bias=bias, rounded=rounded, upcast=False)
    best = _empty_topk(x, k)
    if batch == 0 or num_heads == 0:
        return best
    h = x if down is None else _project(x, down)
    if weight.shape[0] == 1:
        h = h.reshape(1, num_heads * batch, h.shape[2])
    _launch(h, weight, bias, best, rounded=rounded)
    return best


def _check(x: torch.Tensor, weight: torch.Tensor, k: int, down: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    """Check the arguments of `lm_head_topk`."""
    check_tensor("x", x, shape=(None, None, None), dtype=FLOAT_DTYPES)
    num_heads, _, width = x.shape
    check_tensor("weight", weight, shape=(None, None, None), dtype=x.dtype, device=x.device)
    if weight.shape[0] not in (1, num_heads):
        raise ValueError(f"weight: expected 1 or {num_heads} heads as in x, got shape {list(weight.shape)}")
    rank = weight.shape[2]
    if down is not None:
        check_tensor("down", down, shape=(num_heads, rank, width), dtype=x.dtype, device=x.device)
    elif rank != width:
        raise ValueError(f"weight: expected a last dimension of {width} as in x, got shape {list(weight.shape)}")
    if bias is not None:
        check_tensor("bias", bias, shape=tuple(weight.shape[:2]), dtype=x.dtype, device=x.device)
    if weight.shape[1] > MAX_VOCAB:
        raise ValueError(f"weight: expected a vocabulary of at most {MAX_VOCAB}, got {weight.shape[1]}")
    if not 1 <= k <= min(MAX_K, weight.shape[1]):
        raise ValueError(f"k: expected 1 to {min(MAX_K, weight.shape[1])}, got {k}")


def _project(x: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Down times x, [K, B, r]: little work, which a split of the columns spreads over the GPU."""
    if x.shape[1] <= MAX_ROWS:
        return skinny_linear(x, down, backend="triton")
    return torch.bmm(x, down.mT)


def _launch(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, best: TopK, *, rounded: bool) -> None:
    """Fill `best` from h [H, M, C], weight [H, V, C] and bias [H, V], where H * M = K * B."""
    num_weights, vocab_size, width = weight.shape
    batch, num_heads, k = best.values.shape
    config = _launch_config(h.shape[1], h.element_size(), k)
    num_tiles = triton.cdiv(vocab_size, _BLOCK_V)
    # the second best of a tile is looked up in the logits; the best is known without them
    logits = best.logsumexp.new_empty(batch, num_heads, vocab_size) if k > 1 else None
    tile_max = best.logsumexp.new_empty(batch, num_heads, num_tiles)
    tile_token = best.tokens.new_empty(tile_max.shape)
    tiles = tile_max, tile_token, torch.empty_like(tile_max), best.has_nan.new_empty(tile_max.shape)
    rows_per_program = config.blocks["BLOCK_M"] + config.blocks["MORE_M"]
    strides = *h.stride()[:2], *weight.stride()[:2], 0 if bias is None else bias.stride(0)
    sizes = h.shape[1], num_heads, batch, vocab_size, width
    flags = {"UPCAST": needs_upcast(h), "IS_ROUNDED": rounded}
    with on_device(h):
        _lm_head_tiles_kernel[(triton.cdiv(h.shape[1], rows_per_program), num_tiles, num_weights)](
            h, weight, bias, logits, tiles, *strides, *sizes, **flags, **config.kwargs()
        )
        results = best.values, best.tokens, best.logsumexp, best.has_nan
        _lm_head_merge_kernel[(batch * num_heads,)](
            logits, *tiles, *results, V=vocab_size, T=num_tiles, TOP=k, **_merge_config(num_tiles).kwargs()
        )
