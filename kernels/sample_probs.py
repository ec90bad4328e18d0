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
            settings   [B or 1, 5]   fp32, the numbers of each row (`WarpSettings`); no launch depends on their values
            tokens     [B, N]        int32, of the nodes
            parent     [B or 1, N]   int32, -1 for the root and for padding
            history    [B, H]        int32, tokens before the tree; -1 is padding
            row_ids    [B]           int32, names of the requests; the draws of a request depend on its name
            step       [1]           int32, counts the calls
            processed  [B, N, V]     fp32
            sampled    [B, N]        int32
Random:     E_v = -log(1 - u), u from word v % 4096 // 1024 of Philox with the key seed and the counter
            (v // 4096 * 1024 + v % 1024, row id, step, node): nothing depends on the place in the batch
Cost:       warp_logits reads the logits and writes fp32 once, and reads them twice more for top-k and top-p together,
            in the cache (kernels/common/kept_set.py); sample_race reads once: bandwidth-bound
Edges:      equal logits are kept or dropped together (transformers' top-p drops some of them). The largest logit is
            always kept. NaN counts as -inf; a row without a finite logit yields token 0
Numerics:   fp32; of equal scores the lowest id wins. The bound of top-k is exact, those of top-p and min-p are in fp32
"""

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_tensor
from specdec.kernels.common.kept_set import FOUND_SIZE, FilterWork, clear_found, filter_rows_
from specdec.kernels.common.launch import Backend, batch_stride, on_device, resolve_backend
from specdec.kernels.common.primitives import TILE, key_token, load_logits, load_parents, tiles_config, token_key
from specdec.kernels.common.walk import check_logits, check_walk
from specdec.kernels.reference import sample_probs as reference

__all__ = ["WarpSettings", "sample_probs", "sample_race", "warp_logits"]


@dataclass(frozen=True, slots=True)
class WarpSettings:
    """What is asked of the logits of a row; the defaults ask for nothing.

    On the device they are data, five numbers a row, so that a captured step serves any values and rows of one batch may
    differ. There nobody looks at the values: whoever writes others than these checks them.

    Attributes:
        temperature: divides the logits, over 0.
        top_k: how many tokens to keep, and those equal to the last; None: all.
        top_p: keep the most probable tokens that together reach it, and those equal to the last; None or 1: all.
        min_p: drop tokens with less than this share of the largest probability; None: none.
        repetition_penalty: over 0; 1 is none.

    Raises:
        ValueError: a number out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature: expected more than 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: expected 1 or more, got {self.top_k}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}: expected 0 to 1, got {value}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty: expected more than 0, got {self.repetition_penalty}")

    def on(self, device: torch.device | str) -> torch.Tensor:
        """[1, 5] float32, for all rows, in the order of the attributes; a top-k of 0 keeps all tokens."""
        top_k = min(self.top_k or 0, 2**24)  # float32 holds no larger whole numbers, and no vocabulary is larger
        row = [self.temperature, top_k, 1.0 if self.top_p is None else self.top_p, self.min_p or 0.0]
        return torch.tensor([[*row, self.repetition_penalty]], dtype=torch.float32, device=device)


@triton.jit
def _penalise(row_ptr, processed_row_ptr, token, start, end, temperature, penalty):
    """Write the penalised logits of tokens from `start` to `end`; writing one token twice writes the same value."""
    mask = (token >= start) & (token < end)
    x = load_logits(row_ptr, token, mask)
    tl.store(processed_row_ptr + token, tl.where(x < 0.0, x * penalty, x / penalty) / temperature, mask=mask)


@triton.jit(do_not_specialize=["stride_tb", "stride_pb", "stride_hb", "stride_sb", "N", "H"])
def _scale_kernel(
    logits_ptr,  # [B, N, V]
    tokens_ptr,  # [B, N] or None
    parent_ptr,  # [B or 1, N]
    history_ptr,  # [B, H] or None
    settings_ptr,  # [B or 1, 5] or None
    processed_ptr,  # [B, N, V]
    largest_ptr,  # [B, N, T], of each tile; as what follows None without settings
    found_ptr,  # [B, N, FOUND_SIZE]
    mass_ptr,  # [B, N, 2]
    stride_lb,
    stride_ln,
    stride_tb,
    stride_pb,
    stride_hb,
    stride_sb,
    N,
    H,
    V,
    FOUND_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program processes one tile, but for the filters: it divides by the temperature, and penalises."""
    t = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row = b * N + n
    start = t * BLOCK_V
    offs_v = start + tl.arange(0, BLOCK_V)
    row_ptr = logits_ptr + b * stride_lb + n * stride_ln
    processed_row_ptr = processed_ptr + row * V
    x = load_logits(row_ptr, offs_v, offs_v < V)
    if settings_ptr is None:
        tl.store(processed_row_ptr + offs_v, x, mask=offs_v < V)
    else:
        temperature = tl.load(settings_ptr + b * stride_sb)
        penalty = tl.load(settings_ptr + b * stride_sb + 4)
        x = x / temperature
        tl.store(processed_row_ptr + offs_v, x, mask=offs_v < V)
        if (history_ptr is not None) or (tokens_ptr is not None):
            if penalty != 1.0:
                tl.debug_barrier()  # what is penalised was stored by other threads
                end = tl.minimum(start + BLOCK_V, V)
                if history_ptr is not None:
                    for first in range(0, H, BLOCK_H):
                        offs_h = first + tl.arange(0, BLOCK_H)
                        known = tl.load(history_ptr + b * stride_hb + offs_h, mask=offs_h < H, other=-1)
                        _penalise(row_ptr, processed_row_ptr, known, start, end, temperature, penalty)
                if tokens_ptr is not None:
                    node = n
                    while node >= 0:
                        token = tl.load(tokens_ptr + b * stride_tb + node)
                        _penalise(row_ptr, processed_row_ptr, token, start, end, temperature, penalty)
                        node = load_parents(parent_ptr + b * stride_pb, node, True).to(tl.int64)
                tl.debug_barrier()
                x = tl.load(processed_row_ptr + offs_v, mask=offs_v < V, other=float("-inf"))
        tl.store(largest_ptr + row * tl.num_programs(0) + t, tl.max(x, 0))
        if t == 0:
            clear_found(found_ptr + row * FOUND_SIZE)
            tl.store(mass_ptr + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int64))


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
            repetition penalty of each row, as `WarpSettings.on` writes them. None: nothing is done.
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
    work = None if settings is None else FilterWork.of(processed)
    places = (None, None, None) if work is None else (work.largest, work.found, work.masses)
    tiles = tiles_config(vocab_size)
    strides = *logits.stride()[:2], *(batch_stride(tensor) for tensor in (tokens, parent, history, settings))
    num_history = 0 if history is None else history.shape[1]
    with on_device(logits):
        _scale_kernel[(tiles.blocks["NUM_TILES"], num_nodes, batch)](
            *(logits, tokens, parent, history, settings, processed, *places),
            *(*strides, num_nodes, num_history, vocab_size),
            *(FOUND_SIZE, tiles.blocks["BLOCK_V"], 1024),
            num_warps=tiles.num_warps,
        )
        if settings is not None and work is not None:
            filter_rows_(processed, settings, work)
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
        shape = None, len(fields(WarpSettings))
        check_tensor("settings", settings, shape=shape, dtype=torch.float32, device=logits.device)
        if settings.shape[0] not in (1, batch):
            raise ValueError(f"settings: expected {batch} rows or 1, got shape {list(settings.shape)}")
    if (tokens is None) != (parent is None):
        raise ValueError(f"parent: expected {'a tensor' if parent is None else 'None'}, as tokens, got the other")
    if tokens is not None and parent is not None:
        check_tensor("tokens", tokens, shape=(batch, num_nodes), dtype=torch.int32, device=logits.device)
        check_walk(tokens, parent, max_depth=0, budget=None, stop_tokens=None)
    if history is not None:
        check_tensor("history", history, shape=(batch, None), dtype=torch.int32, device=logits.device)
