"""What generation samples from: logits processed at every node of a tree, and one token drawn from each.

Equation:   warp_logits, in this order, as in transformers:
              repetition penalty r: x_v -> x_v r if x_v < 0, else x_v / r, for every v in the row's history or on the
              path from the root to the node;  temperature: x / T
              top-k: keep v if fewer than k tokens have a larger logit
              top-p: keep v if the probability of the tokens with a larger logit is under p
              min-p: keep v if p_v >= m max_w p_w;  what is not kept becomes -inf
            sample_race: argmax_v x_v - log E_v with independent E_v ~ Exp(1), which has the law softmax(x)
Source:     Keskar et al. (arXiv:1909.05858) section 4.1, penalty; Fan et al. (arXiv:1805.04833), top-k; Holtzman et al.
            (arXiv:1904.09751), top-p; Minh et al. (arXiv:2407.01082), min-p; Salmon et al., "Parallel random numbers:
            as easy as 1, 2, 3" (SC 2011), Philox4x32-10
Reference:  kernels/reference/sample_probs.py

Shapes:     B requests, N nodes, V vocabulary, H tokens of history
            logits     [B, N, V]     fp32, fp16 or bf16
            settings   [B or 1, 5]   fp32, the numbers below of each row (kernels/common/warp_settings.py); no launch
                                     depends on their values
            tokens     [B, N]        int32, of the nodes
            parent     [B or 1, N]   int32, -1 for the root and for padding
            history    [B, H]        int32, tokens before the tree; -1 is padding
            row_ids    [B]           int32, names of the requests; the draws of a request depend on its name
            step       [1]           int32, counts the calls
            processed  [B, N, V]     fp32
            sampled    [B, N]        int32
Random:     E_v = -log(1 - u), u from word v % 4096 // 1024 of Philox with the key seed and the counter
            (v // 4096 * 1024 + v % 1024, row id, step, node): nothing depends on the place in the batch
Cost:       warp_logits reads the logits and writes fp32 once, sample_race reads once: bandwidth-bound. Each search, for
            top-k and for top-p, passes over the row 16 times more, in the cache
Edges:      equal logits are kept or dropped together (transformers' top-p drops some of them). The largest logit is
            always kept. NaN counts as -inf; a row without a finite logit yields token 0
Numerics:   fp32; of equal scores the lowest id wins. The bound of top-k is exact, those of top-p and min-p are in fp32
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_tensor
from specdec.kernels.common.launch import Backend, LaunchConfig, batch_stride, on_device, resolve_backend
from specdec.kernels.common.primitives import TILE, key_token, load_logits, load_parents, order_key, token_key
from specdec.kernels.common.walk import check_logits, check_walk
from specdec.kernels.common.warp_settings import NUM_WARP_SETTINGS
from specdec.kernels.reference import sample_probs as reference

__all__ = ["sample_probs", "sample_race", "warp_logits"]


@triton.jit
def _scale_kernel(
    logits_ptr,  # [B, N, V]
    settings_ptr,  # [B or 1, 5] or None
    processed_ptr,  # [B, N, V]
    stride_lb,
    stride_ln,
    stride_sb,
    N,
    V,
    BLOCK_V: tl.constexpr,
):
    """One program divides one tile by the temperature."""
    n = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    x = load_logits(logits_ptr + b * stride_lb + n * stride_ln, offs_v, offs_v < V)
    if settings_ptr is not None:
        x = x / tl.load(settings_ptr + b * stride_sb)
    tl.store(processed_ptr + (b * N + n) * V + offs_v, x, mask=offs_v < V)


@triton.jit
def _penalise(row_ptr, processed_row_ptr, token, mask, V, temperature, penalty):
    """Write the penalised logits of tokens; writing one token twice writes the same value."""
    mask = mask & (token >= 0) & (token < V)
    x = load_logits(row_ptr, token, mask)
    tl.store(processed_row_ptr + token, tl.where(x < 0.0, x * penalty, x / penalty) / temperature, mask=mask)


@triton.jit(do_not_specialize=["stride_tb", "stride_pb", "stride_hb", "stride_sb", "N", "H"])
def _penalise_kernel(
    logits_ptr,  # [B, N, V]
    tokens_ptr,  # [B, N] or None
    parent_ptr,  # [B or 1, N]
    history_ptr,  # [B, H] or None
    settings_ptr,  # [B or 1, 5]
    processed_ptr,  # [B, N, V]
    stride_lb,
    stride_ln,
    stride_tb,
    stride_pb,
    stride_hb,
    stride_sb,
    N,
    H,
    V,
    BLOCK_H: tl.constexpr,
):
    """One program takes a block of the history; the first one of a node also climbs to the root."""
    block = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    temperature = tl.load(settings_ptr + b * stride_sb)
    penalty = tl.load(settings_ptr + b * stride_sb + 4)
    if penalty == 1.0:
        return
    row_ptr = logits_ptr + b * stride_lb + n * stride_ln
    processed_row_ptr = processed_ptr + (b * N + n) * V
    if history_ptr is not None:
        offs_h = block * BLOCK_H + tl.arange(0, BLOCK_H)
        known = tl.load(history_ptr + b * stride_hb + offs_h, mask=offs_h < H, other=-1)
        _penalise(row_ptr, processed_row_ptr, known, offs_h < H, V, temperature, penalty)
    if tokens_ptr is not None:
        node = tl.where(block == 0, n, -1)
        while node >= 0:
            token = tl.load(tokens_ptr + b * stride_tb + node)
            _penalise(row_ptr, processed_row_ptr, token, True, V, temperature, penalty)
            node = load_parents(parent_ptr + b * stride_pb, node, True).to(tl.int64)


@triton.jit
def _search(row_ptr, row_max, goal, V, BY_MASS: tl.constexpr, BLOCK_V: tl.constexpr):
    """Least key t such that the tokens with a key over t weigh less than `goal`.

    The key is found two bits at a time: one pass over the row weighs what is over the largest key with digit 0, 1 and
    2, lane by lane, so that lanes are added up once per pass. What weighs nothing, or is below an earlier bound, can
    only move t where it has no effect.
    """
    base = tl.full((), -(2**31), tl.int64)
    for step in range(0, 16):
        one = tl.full((), 1, tl.int64) << (30 - 2 * step)
        bound0, bound1, bound2 = base + one - 1, base + 2 * one - 1, base + 3 * one - 1
        over0 = tl.zeros([BLOCK_V], tl.float32)
        over1 = tl.zeros([BLOCK_V], tl.float32)
        over2 = tl.zeros([BLOCK_V], tl.float32)
        for first in range(0, V, BLOCK_V):
            offs_v = first + tl.arange(0, BLOCK_V)
            x = tl.load(row_ptr + offs_v, mask=offs_v < V, other=float("-inf"))
            key = order_key(x)
            weight = tl.exp(x - row_max) if BY_MASS else tl.full([BLOCK_V], 1.0, tl.float32)
            over0 += tl.where(key > bound0.to(tl.int32), weight, 0.0)
            over1 += tl.where(key > bound1.to(tl.int32), weight, 0.0)
            over2 += tl.where(key > bound2.to(tl.int32), weight, 0.0)
        digit = (tl.sum(over0, 0) >= goal).to(tl.int64) + (tl.sum(over1, 0) >= goal).to(tl.int64)
        base += (digit + (tl.sum(over2, 0) >= goal).to(tl.int64)) * one
    return base.to(tl.int32)


@triton.jit(do_not_specialize=["stride_sb", "N"])
def _filter_kernel(
    processed_ptr,  # [B, N, V], in place
    settings_ptr,  # [B or 1, 5]
    stride_sb,
    N,
    V,
    BLOCK_V: tl.constexpr,
):
    """One program filters one row, which it alone reads and writes."""
    n = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    top_k = tl.load(settings_ptr + b * stride_sb + 1)
    top_p = tl.load(settings_ptr + b * stride_sb + 2)
    min_p = tl.load(settings_ptr + b * stride_sb + 3)
    if (top_k <= 0.0) & (top_p >= 1.0) & (min_p <= 0.0):
        return
    row_ptr = processed_ptr + (b * N + n) * V
    lanes = tl.full([BLOCK_V], float("-inf"), tl.float32)
    for first in range(0, V, BLOCK_V):
        offs_v = first + tl.arange(0, BLOCK_V)
        lanes = tl.maximum(lanes, tl.load(row_ptr + offs_v, mask=offs_v < V, other=float("-inf")))
    largest = tl.max(lanes, 0)
    row_max = tl.where(largest == float("-inf"), 0.0, largest)

    kept_from = tl.full((), -(2**31), tl.int32)
    if top_k > 0.0:
        kept_from = _search(row_ptr, row_max, top_k, V, False, BLOCK_V)
    if top_p < 1.0:
        mass = tl.zeros([BLOCK_V], tl.float32)
        for first in range(0, V, BLOCK_V):
            offs_v = first + tl.arange(0, BLOCK_V)
            x = tl.load(row_ptr + offs_v, mask=offs_v < V, other=float("-inf"))
            mass += tl.where(order_key(x) >= kept_from, tl.exp(x - row_max), 0.0)
        goal = top_p * tl.sum(mass, 0)
        by_mass = _search(row_ptr, row_max, goal, V, True, BLOCK_V)
        kept_from = tl.maximum(kept_from, tl.minimum(by_mass, order_key(largest)))

    for first in range(0, V, BLOCK_V):
        offs_v = first + tl.arange(0, BLOCK_V)
        x = tl.load(row_ptr + offs_v, mask=offs_v < V, other=float("-inf"))
        kept = (order_key(x) >= kept_from) & (tl.exp(x - row_max) >= min_p)
        tl.store(row_ptr + offs_v, tl.where(kept, x, float("-inf")), mask=offs_v < V)


@triton.jit(do_not_specialize=["seed", "N"])
def _race_tile_kernel(
    logits_ptr,  # [B, N, V]
    row_ids_ptr,  # [B]
    step_ptr,  # [1]
    key_ptr,  # [B, N, T]
    stride_lb,
    stride_ln,
    N,
    V,
    seed,
    LANES: tl.constexpr,
):
    """One program runs the race of one tile; a token's key is its score, then the lower id."""
    t = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, LANES)
    zero = lane * 0
    words = tl.philox(
        seed, t * LANES + lane, zero + tl.load(row_ids_ptr + b), zero + tl.load(step_ptr), zero + n.to(tl.int32)
    )
    row_ptr = logits_ptr + b * stride_lb + n * stride_ln
    best = tl.full([LANES], -(2**63), tl.int64)
    for j in tl.static_range(4):
        offs_v = (t * 4 + j) * LANES + lane
        x = load_logits(row_ptr, offs_v, offs_v < V)
        u = tl.minimum((words[j].to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
        # -log(1 - u); a token of small probability wins by a small one, which 1 - u would round away
        series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
        exponential = tl.where(u < 0.015625, series, -tl.log(1.0 - u))
        key = token_key(x - tl.log(exponential), offs_v)
        best = tl.maximum(best, tl.where(offs_v < V, key, -(2**63)))
    tl.store(key_ptr + (b * N + n) * tl.num_programs(0) + t, tl.max(best, 0))


@triton.jit(do_not_specialize=["num_rows"])
def _race_winner_kernel(
    key_ptr,  # [num_rows, T]
    sampled_ptr,  # [num_rows]
    num_rows,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program finds the winners of BLOCK_R rows."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_t = tl.arange(0, BLOCK_T)
    mask = (rows < num_rows)[:, None] & (offs_t < NUM_TILES)[None, :]
    offsets = rows.to(tl.int64)[:, None] * NUM_TILES + offs_t[None, :]
    key = tl.max(tl.load(key_ptr + offsets, mask=mask, other=-(2**63)), 1)
    tl.store(sampled_ptr + rows, key_token(key), mask=rows < num_rows)


def _empty_samples(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.new_empty(logits.shape[:2], dtype=torch.int32), logits.new_empty(logits.shape, dtype=torch.float32)


def _launch_config(vocab_size: int) -> LaunchConfig:
    """The search is one program for a row: many warps, and two bits a pass, so that it stays bound by the cache."""
    block_v = min(TILE, triton.next_power_of_2(vocab_size))
    return LaunchConfig(blocks={"BLOCK_V": block_v}, num_warps=max(4, min(16, block_v // 256)))


@library.op(fake=lambda logits: logits.new_empty(logits.shape, dtype=torch.float32))
def warp_logits(
    logits: torch.Tensor,
    settings: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    parent: torch.Tensor | None = None,
    history: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Process the logits of every node as transformers processes those of one sequence.

    The repetition penalty of a node counts the tokens of its row's history and of its own path from the root, itself
    included; `tokens`, `parent` and `history` are read for it alone.

    Args:
        logits: [B, N, V] float32, float16 or bfloat16, contiguous in V.
        settings: [B, 5] or [1, 5] float32, contiguous in the last dimension: temperature, top-k, top-p, min-p and
            repetition penalty of each row, as `kernels.common.warp_settings` writes them. None: nothing is done.
        tokens: [B, N] int32, tokens of the tree's nodes, contiguous in N; None: no path counts.
        parent: [B, N] or [1, N] int32, topological, as in `accept_greedy`; with `tokens`.
        history: [B, H] int32, contiguous in H, tokens before the tree; others than 0 to V - 1 are ignored. None: none.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        [B, N, V] float32, contiguous; -inf outside the kept set.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, a tree of more than 512 nodes, parents that are not topological (CPU only),
            an empty vocabulary, tensors on several devices.
    """
    _check_warp(logits, settings, tokens, parent, history)
    if resolve_backend(logits, backend) == "reference":
        return reference.warp_logits(logits, settings, tokens, parent, history, upcast=False)

    batch, num_nodes, vocab_size = logits.shape
    processed = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    config = _launch_config(vocab_size)
    block_v = config.blocks["BLOCK_V"]
    stride_sb = batch_stride(settings)
    with on_device(logits):
        _scale_kernel[(triton.cdiv(vocab_size, block_v), num_nodes, batch)](
            *(logits, settings, processed), *logits.stride()[:2], stride_sb, num_nodes, vocab_size, block_v, num_warps=4
        )
        if settings is not None and (history is not None or tokens is not None):
            num_history, block_h = 0 if history is None else history.shape[1], 1024
            tensors = logits, tokens, parent, history if num_history else None, settings, processed
            strides = *logits.stride()[:2], *(batch_stride(tensor) for tensor in (tokens, parent, history)), stride_sb
            _penalise_kernel[(max(1, triton.cdiv(num_history, block_h)), num_nodes, batch)](
                *tensors, *strides, num_nodes, num_history, vocab_size, BLOCK_H=block_h, num_warps=4
            )
        if settings is not None:
            _filter_kernel[(num_nodes, batch)](processed, settings, stride_sb, num_nodes, vocab_size, **config.kwargs())
    return processed


@library.op(fake=lambda logits: logits.new_empty(logits.shape[:2], dtype=torch.int32))
def sample_race(
    logits: torch.Tensor, row_ids: torch.Tensor, step: torch.Tensor, *, seed: int, backend: Backend | None = None
) -> torch.Tensor:
    """Draw one token per node by an exponential race.

    Its random numbers are functions of seed, request, step, node and token: the same in any batch, and replayable.

    Args:
        logits: [B, N, V] float32, float16 or bfloat16, contiguous in V; the law is their softmax.
        row_ids: [B] int32, names of the requests.
        step: [1] int32, on the device, so that a captured graph draws anew at each replay.
        seed: key of the generator, 0 to 2^63 - 1.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        [B, N] int32.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, an empty vocabulary, a seed out of range, tensors on several devices.
    """
    check_logits("logits", logits, (None, None, None))
    batch, num_nodes, vocab_size = logits.shape
    check_tensor("row_ids", row_ids, shape=(batch,), dtype=torch.int32, device=logits.device)
    check_tensor("step", step, shape=(1,), dtype=torch.int32, device=logits.device)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed: expected 0 to 2**63 - 1, got {seed}")
    if resolve_backend(logits, backend) == "reference":
        return reference.sample_race(logits, row_ids, step, seed=seed, upcast=False)

    num_rows, num_tiles = batch * num_nodes, triton.cdiv(vocab_size, TILE)
    keys = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=logits.device)
    sampled = torch.empty(batch, num_nodes, dtype=torch.int32, device=logits.device)
    tensors = logits, row_ids, step, keys
    with on_device(logits):
        _race_tile_kernel[(num_tiles, num_nodes, batch)](
            *tensors, *logits.stride()[:2], num_nodes, vocab_size, seed, LANES=TILE // 4, num_warps=4
        )
        _race_winner_kernel[(triton.cdiv(num_rows, 32),)](
            keys, sampled, num_rows, num_tiles, triton.next_power_of_2(num_tiles), BLOCK_R=32, num_warps=4
        )
    return sampled


@library.op(fake=_empty_samples)
def sample_probs(
    logits: torch.Tensor,
    row_ids: torch.Tensor,
    step: torch.Tensor,
    settings: torch.Tensor | None,
    tokens: torch.Tensor | None,
    parent: torch.Tensor | None,
    history: torch.Tensor | None,
    *,
    seed: int,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`warp_logits`, then `sample_race`: process the logits of every node and draw one token from each.

    Args:
        logits: [B, N, V], as all that follows as in `warp_logits` and `sample_race`.
        row_ids: [B] int32, names of the requests.
        step: [1] int32, counts the calls.
        settings: [B, 5] or [1, 5] float32, or None.
        tokens: [B, N] int32, tokens of the tree's nodes, or None.
        parent: [B, N] or [1, N] int32, with `tokens`.
        history: [B, H] int32, tokens before the tree, or None.
        seed: key of the generator, 0 to 2^63 - 1.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        Tokens [B, N] int32 and processed logits [B, N, V] float32.

    Raises:
        TypeError: a wrong dtype.
        ValueError: as for `warp_logits` and `sample_race`.
    """
    processed = warp_logits(logits, settings, tokens, parent, history, backend=backend)
    return sample_race(processed, row_ids, step, seed=seed, backend=backend), processed


def _check_warp(
    logits: torch.Tensor,
    settings: torch.Tensor | None,
    tokens: torch.Tensor | None,
    parent: torch.Tensor | None,
    history: torch.Tensor | None,
) -> None:
    check_logits("logits", logits, (None, None, None))
    batch, num_nodes, _ = logits.shape
    if settings is not None:
        check_tensor("settings", settings, shape=(None, NUM_WARP_SETTINGS), dtype=torch.float32, device=logits.device)
        if settings.shape[0] not in (1, batch):
            raise ValueError(f"settings: expected {batch} rows or 1, got shape {list(settings.shape)}")
    if (tokens is None) != (parent is None):
        raise ValueError(f"parent: expected {'a tensor' if parent is None else 'None'}, as tokens, got the other")
    if tokens is not None and parent is not None:
        check_tensor("tokens", tokens, shape=(batch, num_nodes), dtype=torch.int32, device=logits.device)
        check_walk(tokens, parent, max_depth=0, budget=None, stop_tokens=None)
    if history is not None:
        check_tensor("history", history, shape=(batch, None), dtype=torch.int32, device=logits.device)
