"""Recursive rejection: siblings are tried in turn, each against what the ones before it left of the target's law.

Equation:   at a node with target law p, draft law q and children x_1, x_2, ... in node order: p_1 = p, q_1 = q;
            x_i is accepted if uniform < p_i(x_i) / q_i(x_i), otherwise
            p_{i+1} = norm(max(0, p_i - q_i));  q_{i+1} = q with replacement, norm(q_i without x_i) without
            the next root is drawn from the law that is left at the node where the walk ends
Closed form (docs/kernels/accept_rejection.md):
            p_i = max(0, p - c_i q) / Z_i,  Z_i = sum_v max(0, p - c_i q),  c_1 = 0,  c_{i+1} = c_i + Z_i / W_i
            with W_i the mass of q on what can still be drawn: 1 with replacement
Source:     MCSS with and without replacement, algorithms 1 and 2 of "Multi-Candidate Speculative Decoding"
            (arXiv:2401.06706); one child is the rule of Leviathan et al. (arXiv:2211.17192)
Reference:  kernels/reference/accept_rejection.py

Shapes:     B requests, N nodes, node 0 the root, M draft laws, V vocabulary, E stop tokens, T = ceil(V / 4096) tiles
            tokens         [B, N]              int32
            parent         [B or 1, N]         int32, parent[j] < j; -1 for the root and for padding
            logits         [B, N, V]           fp32, fp16 or bf16, what the target samples from: already processed
            draft_logits   [B, M, V]           fp32, fp16 or bf16, what the drafter sampled from: already processed
            draft_row      [N]                 int32, law that the children of a node were drawn from; -1 none
            uniform        [B, N]              fp32 in [0, 1), for the test of each node
            uniform_final  [B]                 fp32 in [0, 1), for the next root
            budget         [B]                 int32, tokens the request may still emit; 0 marks a finished request
            stop_tokens    [E]                 int32
            path, emitted  [B, max_depth + 1]  int32, -1 padded
            num_accepted, next_root  [B]       int32
Cost:       reads logits and draft logits once, B*(N + M)*V elements, and those of the inner nodes again, mostly from
            the L2 cache; then latency: one pass over a row of each for every rejection after a node's first. Four
            launches
Padding:    as in accept_greedy; a finished request reads no logits. A node without draft law keeps its children untried
Numerics:   sums in fp32. Every mass is a sum of positive terms, so none cancels; a residual of no more than
            RESIDUAL_FLOOR of the target's mass is rounding, and the next root is then drawn from p. Tests can differ
            from exact ones where uniform lies within about 1e-6 of its threshold. NaN logits count as -inf
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.launch import Backend, LaunchConfig, batch_stride, on_device, resolve_backend
from specdec.kernels.common.primitives import (
    draw_residual,
    load_logits,
    load_parents,
    mass_outside,
    residual,
    row_law,
    softmax_tiles,
    store_verdict,
    tiles_config,
    tree_blocks,
)
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.walk import RESIDUAL_FLOOR, check_draft_laws, empty_verdict, verdict_fields
from specdec.kernels.reference.accept_rejection import accept_rejection as accept_rejection_reference

__all__ = ["accept_rejection"]


@triton.jit
def _residual_pass(
    laws, scale, V, NUM_TILES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr
):
    """Residual masses of all tiles; tiles are loaded ahead, or one program alone would wait for each."""
    offs_t = tl.arange(0, BLOCK_T)
    masses = tl.zeros([BLOCK_T], tl.float32)
    for t in tl.range(0, NUM_TILES, num_stages=STAGES):
        offs_v = t * BLOCK_V + tl.arange(0, BLOCK_V)
        left, _ = residual(laws, scale, offs_v, offs_v < V)
        masses = tl.where(offs_t == t, tl.sum(left, 0), masses)
    return masses


@triton.jit(do_not_specialize=["stride_tb", "stride_pb", "N", "M"])
def _first_residual_kernel(
    tokens_ptr,  # [B, N]
    parent_ptr,  # [B or 1, N]
    logits_ptr,  # [B, N, V]
    draft_ptr,  # [B, M, V]
    draft_row_ptr,  # [N]
    budget_ptr,  # [B] or None
    tiles,  # maxima and sums, [B, N, NUM_TILES] each
    draft_tiles,  # the same of the draft's, [B, M, NUM_TILES] each
    residual_ptr,  # [B, N, NUM_TILES]
    untried_ptr,  # [B, N, NUM_TILES]
    stride_tb,
    stride_pb,
    stride_lb,
    stride_ln,
    stride_db,
    stride_dm,
    N,
    M,
    V,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of one inner node: the residual after its first rejection, and the draft's mass outside its children."""
    t = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    if budget_ptr is not None:  # decided at compile time
        if tl.load(budget_ptr + b) <= 0:
            return
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    child_of_n = load_parents(parent_ptr + b * stride_pb, offs_n, mask_n) == n
    m = tl.load(draft_row_ptr + n).to(tl.int64)
    if (m < 0) | (m >= M) | (tl.max(child_of_n.to(tl.int32), 0) == 0):
        return

    target_lse, _ = row_law(tiles, b * N + n, NUM_TILES, BLOCK_T)
    draft_lse, _ = row_law(draft_tiles, b * M + m, NUM_TILES, BLOCK_T)
    logits_ptr += b * stride_lb + n * stride_ln
    draft_ptr += b * stride_db + m * stride_dm
    offs_v = t * BLOCK_V + tl.arange(0, BLOCK_V)
    left, q = residual((logits_ptr, draft_ptr, target_lse, draft_lse), 1.0, offs_v, offs_v < V)
    out = (b * N + n) * NUM_TILES + t
    tl.store(residual_ptr + out, tl.sum(left, 0))
    tl.store(untried_ptr + out, mass_outside(q, offs_v, tokens_ptr + b * stride_tb, child_of_n, BLOCK_N))


@triton.jit
def _try_children(
    token,  # [BLOCK_N]
    uniform,  # [BLOCK_N]
    untried,  # [BLOCK_N] the children
    laws,  # as in `residual`
    masses,  # [BLOCK_T] of p
    known,  # of the node, [NUM_TILES] each: the residual after a first rejection, mass of q outside the children
    V,
    FLOOR: tl.constexpr,
    REPLACEMENT: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The first accepted child or -1; and, if there is none, the scale and the tile masses of the law that is left."""
    BLOCK_N: tl.constexpr = token.shape[0]
    BLOCK_T: tl.constexpr = masses.shape[0]
    offs_n, offs_t = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
    target_row_ptr, draft_row_ptr, target_lse, draft_lse = laws
    target_masses = masses
    is_token = untried & (token >= 0) & (token < V)
    p_token = tl.exp(load_logits(target_row_ptr, token, is_token) - target_lse)  # [BLOCK_N]
    q_token = tl.exp(load_logits(draft_row_ptr, token, is_token) - draft_lse)
    if not REPLACEMENT:
        outside = tl.sum(tl.load(known[1] + offs_t, mask=offs_t < NUM_TILES, other=0.0), 0)

    scale = tl.full((), 0.0, tl.float32)
    z = tl.full((), 1.0, tl.float32)
    w = tl.full((), 1.0, tl.float32)
    accepted = tl.full((), -1, tl.int32)
    child = tl.min(tl.where(untried, offs_n, BLOCK_N), 0)
    while child < BLOCK_N:
        is_child = offs_n == child
        p_child = tl.sum(tl.where(is_child, p_token, 0.0), 0)
        q_child = tl.sum(tl.where(is_child, q_token, 0.0), 0)
        untried = untried & (offs_n > child)
        if tl.sum(tl.where(is_child, uniform, 0.0), 0) * q_child * z < tl.maximum(p_child - scale * q_child, 0.0) * w:
            accepted = child
            child = child * 0 + BLOCK_N
        else:
            scale += z / w
            if scale == 1.0:  # the first rejection of this node, computed before the walk
                masses = tl.load(known[0] + offs_t, mask=offs_t < NUM_TILES, other=0.0)
            else:
                masses = _residual_pass(laws, scale, V, NUM_TILES, BLOCK_T, BLOCK_V, STAGES)
            z = tl.sum(masses, 0)
            if not REPLACEMENT:
                # positive terms alone: 1 - (the mass of the rejected) would cancel where the draft is sure of itself
                w = outside + tl.sum(tl.where(untried, q_token, 0.0), 0)
            child = tl.where((z <= FLOOR) | (w <= 0.0), BLOCK_N, tl.min(tl.where(untried, offs_n, BLOCK_N), 0))
    is_rounding = z <= FLOOR
    return accepted, tl.where(is_rounding, 0.0, scale), tl.where(is_rounding, target_masses, masses)


@triton.jit(do_not_specialize=["stride_tb", "stride_pb", "stride_ub", "N", "M"])
def _accept_rejection_kernel(
    tokens_ptr,  # [B, N]
    parent_ptr,  # [B or 1, N]
    logits_ptr,  # [B, N, V]
    draft_ptr,  # [B, M, V]
    draft_row_ptr,  # [N]
    uniform_ptr,  # [B, N]
    uniform_final_ptr,  # [B]
    budget_ptr,  # [B] or None
    stop_tokens_ptr,  # [NUM_STOPS] or None
    tiles,  # maxima and sums, [B, N, NUM_TILES] each
    draft_tiles,  # the same of the draft's, [B, M, NUM_TILES] each
    residual_ptr,  # [B, N, NUM_TILES], as the next
    untried_ptr,
    verdict_ptrs,  # the fields of a `Verdict`
    stride_tb,
    stride_pb,
    stride_lb,
    stride_ln,
    stride_db,
    stride_dm,
    stride_ub,
    N,
    M,
    V,
    FLOOR: tl.constexpr,
    REPLACEMENT: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program walks one tree; the law in force at its node is max(0, p - scale q), with the masses of its tiles."""
    b = tl.program_id(0).to(tl.int64)
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    mask_n = offs_n < N
    tokens_ptr += b * stride_tb
    logits_ptr += b * stride_lb
    draft_ptr += b * stride_db
    parent = load_parents(parent_ptr + b * stride_pb, offs_n, mask_n)  # [BLOCK_N]
    token = tl.load(tokens_ptr + offs_n, mask=mask_n, other=0)
    uniform = tl.load(uniform_ptr + b * stride_ub + offs_n, mask=mask_n, other=0.0)
    limit = tl.full((), MAX_DEPTH, tl.int32)
    if budget_ptr is not None:
        limit = tl.minimum(limit, tl.load(budget_ptr + b))

    node = tl.full((), 0, tl.int32)
    depth = tl.full((), 0, tl.int32)
    path = tl.where(offs_d == 0, 0, -1)  # [BLOCK_D]
    emitted = path * 0 - 1
    row = b * N
    target_lse, masses = row_law(tiles, row, NUM_TILES, BLOCK_T)
    m = tl.full((), 0, tl.int64)
    draft_lse = tl.full((), float("inf"), tl.float32)  # q is 0 where no law was read
    scale = tl.full((), 0.0, tl.float32)
    walking = depth < limit
    while walking:
        m = tl.load(draft_row_ptr + node).to(tl.int64)
        untried = mask_n & (parent == node) & (m >= 0) & (m < M)
        m = tl.where((m >= 0) & (m < M), m, 0)
        draft_lse, _ = row_law(draft_tiles, b * M + m, NUM_TILES, BLOCK_T)
        laws = logits_ptr + node.to(tl.int64) * stride_ln, draft_ptr + m * stride_dm, target_lse, draft_lse
        known = residual_ptr + row * NUM_TILES, untried_ptr + row * NUM_TILES
        accepted, scale, masses = _try_children(
            token, uniform, untried, laws, masses, known, V, FLOOR, REPLACEMENT, NUM_TILES, BLOCK_V, STAGES
        )
        walking = accepted >= 0
        if walking:
            node, scale = accepted, scale * 0.0
            row = b * N + node
            target_lse, masses = row_law(tiles, row, NUM_TILES, BLOCK_T)
            emitted = tl.where(offs_d == depth, tl.load(tokens_ptr + node), emitted)
            depth += 1
            path = tl.where(offs_d == depth, node, path)
            walking = depth < limit

    laws = logits_ptr + node.to(tl.int64) * stride_ln, draft_ptr + m * stride_dm, target_lse, draft_lse
    last = draw_residual(masses, tl.load(uniform_final_ptr + b), laws, scale, V, BLOCK_T, BLOCK_V)
    emitted = tl.where(offs_d == depth, last, emitted)
    store_verdict(
        path, emitted, b, tokens_ptr, budget_ptr, stop_tokens_ptr, verdict_ptrs, MAX_DEPTH, NUM_STOPS, BLOCK_D
    )


def _launch_config(num_nodes: int, max_depth: int, vocab_size: int) -> LaunchConfig:
    """The walk is one program for a row, so it keeps the loads of several tiles in flight, if rows are aligned."""
    tiles = tiles_config(vocab_size).blocks
    stages = 4 if tiles["NUM_TILES"] > 1 and vocab_size % 16 == 0 else 1
    blocks = {**tiles, "STAGES": stages, **tree_blocks(num_nodes, max_depth)}
    return LaunchConfig(blocks, num_warps=16 if tiles["BLOCK_V"] >= 1024 else 1)


@library.op(fake=empty_verdict)
def accept_rejection(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_row: torch.Tensor,
    uniform: torch.Tensor,
    uniform_final: torch.Tensor,
    *,
    replacement: bool,
    max_depth: int,
    budget: torch.Tensor | None = None,
    stop_tokens: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> Verdict:
    """Accept or reject siblings in turn, each against what the ones before it left of the target's law.

    The emitted tokens have exactly the target's law if the siblings, in node order, are draws from the draft law of
    their parent: independent ones with `replacement`, otherwise one after the other without the tokens already drawn.
    The values of `draft_row` are not checked, since a look at them would stop the GPU; one of M or more counts as -1
    there.

    Args:
        tokens: [B, N] int32, tokens of the tree's nodes, contiguous in N.
        parent: [B, N] or [1, N] int32, topological, as in `accept_greedy`.
        logits: [B, N, V] float32, float16 or bfloat16, contiguous in V; the target samples from their softmax.
        draft_logits: [B, M, V] float32, float16 or bfloat16, contiguous in V; the drafter sampled from their softmax.
        draft_row: [N] int32, the draft law that a node's children were drawn from, in [0, M); -1: its children, if any,
            are not tried.
        uniform: [B, N] float32 in [0, 1), contiguous in N; independent, one for the test of each node.
        uniform_final: [B] float32 in [0, 1), for the next root.
        replacement: siblings were drawn with replacement. Without it, siblings must differ.
        max_depth: largest depth of any node (the root has depth 0); the walk goes no deeper.
        budget: [B] int32, how many tokens each request may still emit; 0 or less marks a finished one. None: no limit.
        stop_tokens: [E] int32, tokens that end the emission. None: none.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        The verdict, with B rows.

    Raises:
        TypeError: a wrong dtype.
        ValueError: as in `accept_greedy`, and an empty vocabulary or draft.
    """
    limits: dict[str, Any] = {"max_depth": max_depth, "budget": budget, "stop_tokens": stop_tokens}
    check_draft_laws(tokens, parent, logits, draft_logits, draft_row, uniform, uniform_final, **limits)
    if resolve_backend(tokens, backend) == "reference":
        arguments = tokens, parent, logits, draft_logits, draft_row, uniform, uniform_final
        return accept_rejection_reference(*arguments, replacement=replacement, **limits, upcast=False)

    (batch, num_nodes), vocab_size = tokens.shape, logits.shape[-1]
    tiles, config = tiles_config(vocab_size), _launch_config(num_nodes, max_depth, vocab_size)
    target_tiles = softmax_tiles(logits, tiles, budget=budget)[:2]
    draft_tiles = softmax_tiles(draft_logits, tiles, budget=budget)[:2]
    residuals, untried = torch.empty_like(target_tiles[0]), torch.empty_like(target_tiles[0])
    verdict = empty_verdict(tokens, max_depth)
    num_stops = 0 if stop_tokens is None else stop_tokens.shape[0]
    laws = (tokens, parent, logits, draft_logits, draft_row)
    masses, rows = (target_tiles, draft_tiles, residuals, untried), (uniform, uniform_final, budget, stop_tokens)
    strides = tokens.stride(0), batch_stride(parent), *logits.stride()[:2], *draft_logits.stride()[:2]
    sizes = num_nodes, draft_logits.shape[1], vocab_size
    flags = {"FLOOR": RESIDUAL_FLOOR, "REPLACEMENT": replacement, "MAX_DEPTH": max_depth, "NUM_STOPS": num_stops}
    with on_device(tokens):
        _first_residual_kernel[(tiles.blocks["NUM_TILES"], num_nodes, batch)](
            *laws, budget, *masses, *strides, *sizes, BLOCK_N=config.blocks["BLOCK_N"], **tiles.kwargs()
        )
        strides += (uniform.stride(0),)
        _accept_rejection_kernel[(batch,)](
            *laws, *rows, *masses, verdict_fields(verdict), *strides, *sizes, **flags, **config.kwargs()
        )
    return verdict
