"""Typical acceptance: a node stays if the target finds its token probable enough where it stands. Lossy.

Equation:   p_n = softmax(logits[n]),  H_n = - sum_v p_n(v) log p_n(v)
            node j with parent n is accepted if p_n(tokens[j]) > min(threshold, alpha exp(-H_n))
            of the paths from the root with all nodes accepted, the longest; then the one with the largest
            sum of log p; then the one whose last node is lowest
            the next root is argmax logits at its last node, or a draw from p there
Source:     Medusa (arXiv:2401.10774) section 2.3.1, typical acceptance
Reference:  kernels/reference/accept_typical.py

Shapes:     B requests, N nodes, node 0 the root, V vocabulary, E stop tokens, T = ceil(V / 4096) tiles
            tokens         [B, N]              int32
            parent         [B or 1, N]         int32, parent[j] < j; -1 for the root and for padding
            logits         [B, N, V]           fp32, fp16 or bf16
            uniform        [B]                 fp32 in [0, 1), or None for the argmax
            budget         [B]                 int32, tokens the request may still emit; 0 marks a finished request
            stop_tokens    [E]                 int32
            path, emitted  [B, max_depth + 1]  int32, -1 padded
            num_accepted, next_root  [B]       int32
Cost:       reads the logits once, B*N*V elements; the rest is small. Bandwidth-bound; three launches
Padding:    as in accept_greedy; a finished request reads no logits
Numerics:   sums in fp32; H in nats. A test can differ from the exact one where p lies within about 1e-6 of its bound.
            NaN logits count as -inf
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_tensor
from specdec.kernels.common.launch import Backend, LaunchConfig, batch_stride, on_device, resolve_backend
from specdec.kernels.common.primitives import (
    load_logits,
    load_parents,
    pick,
    pick_tile,
    softmax_tiles,
    store_verdict,
    tile_masses,
    tiles_config,
    tree_blocks,
)
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.walk import check_logits, check_walk, empty_verdict, verdict_fields
from specdec.kernels.reference.accept_typical import accept_typical as accept_typical_reference

__all__ = ["accept_typical"]


@triton.jit(do_not_specialize=["stride_tb", "stride_pb", "N"])
def _typical_scores_kernel(
    tokens_ptr,  # [B, N]
    parent_ptr,  # [B or 1, N]
    logits_ptr,  # [B, N, V]
    budget_ptr,  # [B] or None
    tiles,  # maxima, sums and moments, [B, N, NUM_TILES] each
    score_ptr,  # [B, N]
    stride_tb,
    stride_pb,
    stride_lb,
    stride_ln,
    N,
    V,
    threshold,
    alpha,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One program judges one node: log p of its token at its parent if that is enough, otherwise -inf."""
    j = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    n = load_parents(parent_ptr + b * stride_pb, j, True).to(tl.int64)
    if budget_ptr is not None:
        n = tl.where(tl.load(budget_ptr + b) > 0, n, -1)
    score = tl.full((), float("-inf"), tl.float32)
    if n >= 0:
        row_max, masses = tile_masses(tiles, b * N + n, NUM_TILES, BLOCK_T)
        offs_t = tl.arange(0, BLOCK_T)
        mask_t = offs_t < NUM_TILES
        row = (b * N + n) * NUM_TILES
        # sum (x - M) e^(x - M): the tiles' own moments, moved from m_t to M
        shift = tl.load(tiles[0] + row + offs_t, mask=mask_t, other=0.0) - row_max
        shift = tl.where(masses > 0.0, shift, 0.0)  # 0 * -inf is NaN, its limit is 0
        moment = tl.load(tiles[2] + row + offs_t, mask=mask_t, other=0.0) * tl.exp(shift) + shift * masses
        moment = tl.sum(tl.where(masses > 0.0, moment, 0.0), 0)
        total = tl.sum(masses, 0)
        total = tl.where(total > 0.0, total, 1.0)
        entropy = tl.log(total) - moment / total

        token = tl.load(tokens_ptr + b * stride_tb + j)
        x = load_logits(logits_ptr + b * stride_lb + n * stride_ln, token, (token >= 0) & (token < V))
        logp = x - row_max - tl.log(total)
        if tl.exp(logp) > tl.minimum(threshold, alpha * tl.exp(-entropy)):
            score = logp
    tl.store(score_ptr + b * N + j, score)


@triton.jit(do_not_specialize=["stride_tb", "stride_pb", "N"])
def _accept_typical_kernel(
    tokens_ptr,  # [B, N]
    parent_ptr,  # [B or 1, N]
    logits_ptr,  # [B, N, V]
    uniform_ptr,  # [B] or None
    budget_ptr,  # [B] or None
    stop_tokens_ptr,  # [NUM_STOPS] or None
    tiles,  # maxima and sums, [B, N, NUM_TILES] each
    score_ptr,  # [B, N]
    verdict_ptrs,  # the fields of a `Verdict`
    stride_tb,
    stride_pb,
    stride_lb,
    stride_ln,
    N,
    V,
    MAX_DEPTH: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program finds the best path of one tree, all nodes at once, and the token after it."""
    b = tl.program_id(0).to(tl.int64)
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    mask_n = offs_n < N
    tokens_ptr += b * stride_tb
    parent = load_parents(parent_ptr + b * stride_pb, offs_n, mask_n)  # [BLOCK_N]
    score = tl.load(score_ptr + b * N + offs_n, mask=mask_n & (parent >= 0), other=float("-inf"))

    # every node climbs to the root, which is above itself and has no part in a sum
    is_root = offs_n == 0
    above = tl.where(parent >= 0, parent, 0)
    score = tl.where(is_root, 0.0, score)
    total, node, depth = score, above, tl.where(is_root, 0, 1)
    for _ in range(1, MAX_DEPTH):
        total += tl.gather(score, node, 0)
        depth += (node > 0).to(tl.int32)
        node = tl.gather(above, node, 0)
    reached = (total > float("-inf")) & (node == 0) & (depth <= MAX_DEPTH)

    depth = tl.where(reached, depth, -1)
    deepest = tl.max(depth, 0)
    total = tl.where(depth == deepest, total, float("-inf"))
    last = tl.min(tl.where(total == tl.max(total, 0), offs_n, BLOCK_N - 1), 0)

    path = tl.where(offs_d == deepest, last, -1)  # [BLOCK_D]
    emitted = tl.full([BLOCK_D], -1, tl.int32)
    node = last
    for d in range(1, MAX_DEPTH + 1):
        at = deepest - d
        emitted = tl.where(offs_d == at, tl.load(tokens_ptr + node), emitted)
        node = tl.sum(tl.where(offs_n == node, above, 0), 0)
        path = tl.where(offs_d == at, node, path)

    row_max, masses = tile_masses(tiles, b * N + last, NUM_TILES, BLOCK_T)
    if uniform_ptr is None:
        offs_t = tl.arange(0, BLOCK_T)
        m = tl.load(tiles[0] + (b * N + last) * NUM_TILES + offs_t, mask=offs_t < NUM_TILES, other=float("-inf"))
        tile = tl.min(tl.where(m == row_max, offs_t, BLOCK_T), 0) % BLOCK_T  # the first; 0 if there is none
    else:
        tile, goal = pick_tile(masses, tl.load(uniform_ptr + b), BLOCK_T)
    offs_v = tl.arange(0, BLOCK_V)
    row_ptr = logits_ptr + b * stride_lb + last.to(tl.int64) * stride_ln
    x = load_logits(row_ptr, tile * BLOCK_V + offs_v, tile * BLOCK_V + offs_v < V)
    if uniform_ptr is None:
        token = tl.min(tl.where(x == row_max, offs_v, BLOCK_V), 0) % BLOCK_V
    else:
        token = pick(tl.exp(x - row_max), goal, BLOCK_V)
    emitted = tl.where(offs_d == deepest, tile * BLOCK_V + token, emitted)
    store_verdict(
        path, emitted, b, tokens_ptr, budget_ptr, stop_tokens_ptr, verdict_ptrs, MAX_DEPTH, NUM_STOPS, BLOCK_D
    )


def _launch_config(num_nodes: int, max_depth: int, vocab_size: int) -> LaunchConfig:
    """The walk holds the tree and one vocabulary tile in registers."""
    tiles = tiles_config(vocab_size)
    return LaunchConfig({**tiles.blocks, **tree_blocks(num_nodes, max_depth)}, num_warps=tiles.num_warps)


@library.op(fake=empty_verdict)
def accept_typical(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    logits: torch.Tensor,
    uniform: torch.Tensor | None,
    *,
    max_depth: int,
    threshold: float,
    alpha: float,
    budget: torch.Tensor | None = None,
    stop_tokens: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> Verdict:
    """Accept the longest path of tokens that the target finds typical.

    Lossy: the emitted tokens do not have the target's law, and at a low temperature are not its greedy choice either.
    The choice of the path does not look at `budget` and `stop_tokens`, which only cut it.

    Args:
        tokens: [B, N] int32, tokens of the tree's nodes, contiguous in N.
        parent: [B, N] or [1, N] int32, topological, as in `accept_greedy`.
        logits: [B, N, V] float32, float16 or bfloat16, contiguous in V; the target's.
        uniform: [B] float32 in [0, 1), draws the next root from the target's law; None takes its most probable token.
        max_depth: largest depth of any node (the root has depth 0); deeper nodes are not accepted.
        threshold: epsilon, a probability that is always enough.
        alpha: delta, factor of exp(-entropy); the usual one is sqrt(threshold).
        budget: [B] int32, how many tokens each request may still emit; 0 or less marks a finished one. None: no limit.
        stop_tokens: [E] int32, tokens that end the emission. None: none.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        The verdict, with B rows.

    Raises:
        TypeError: a wrong dtype.
        ValueError: as in `accept_greedy`, an empty vocabulary, a number out of range.
    """
    check_walk(tokens, parent, max_depth=max_depth, budget=budget, stop_tokens=stop_tokens)
    (batch, num_nodes), device = tokens.shape, tokens.device
    check_logits("logits", logits, (batch, num_nodes, None), device)
    if uniform is not None:
        check_tensor("uniform", uniform, shape=(batch,), dtype=torch.float32, device=device)
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold: expected 0 to 1, got {threshold}")
    if not alpha >= 0:
        raise ValueError(f"alpha: expected 0 or more, got {alpha}")
    limits: dict[str, Any] = {"max_depth": max_depth, "budget": budget, "stop_tokens": stop_tokens}
    if resolve_backend(tokens, backend) == "reference":
        rule = {"threshold": threshold, "alpha": alpha, **limits}
        return accept_typical_reference(tokens, parent, logits, uniform, **rule, upcast=False)

    config = _launch_config(num_nodes, max_depth, logits.shape[-1])
    tiles = softmax_tiles(logits, config, budget=budget, moment=True)
    score = torch.empty(batch, num_nodes, dtype=torch.float32, device=device)
    verdict = empty_verdict(tokens, max_depth)
    num_stops = 0 if stop_tokens is None else stop_tokens.shape[0]
    tree = tokens, parent, logits
    sizes = tokens.stride(0), batch_stride(parent), *logits.stride()[:2], num_nodes, logits.shape[-1]
    blocks = {name: config.blocks[name] for name in ("NUM_TILES", "BLOCK_T")}
    verdict_args = budget, stop_tokens, tiles[:2], score, verdict_fields(verdict)
    with on_device(tokens):
        _typical_scores_kernel[(num_nodes, batch)](
            *tree, budget, tiles, score, *sizes, threshold, alpha, **blocks, num_warps=1
        )
        _accept_typical_kernel[(batch,)](
            *tree, uniform, *verdict_args, *sizes, MAX_DEPTH=max_depth, NUM_STOPS=num_stops, **config.kwargs()
        )
    return verdict
