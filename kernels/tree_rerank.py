"""Best-first draft trees: the beam of one draft pass, and the choice of the best nodes of all passes.

Equation:   beam_step    total[m, r] = min(beam_logps[m], 0) + min(logps[m, r], 0); the `width` best by (total
                         descending, m * R + r ascending)
            tree_rerank  score[i] = min(logps[i], score[parent of i]), the root's is 0; the N - 1 best by (score
                         descending, depth ascending, i ascending), laid out by (depth, i) behind the root
Source:     EAGLE-2 (arXiv:2406.16858) sections 4.1, expansion phase (the beam), and 4.2, reranking phase
Reference:  kernels/reference/tree_rerank.py (exact; a heap)

Shapes:     B requests, M lists of R candidates; candidate i = m * R + r is rank r of list m, i is its index in the pool
            tokens      [B, M, R]  int32 or int64
            logps       [B, M, R]  fp32, nats; beam_step: of the token alone, tree_rerank: of the path from the root
            beam_logps  [B, M]     fp32, log-probability of the path that list m continues
            parent      [B, M]     int32, index of the candidate whose children list m holds; -1: the root's
            root        [B]        int32, the last emitted token
            the results are described in kernels/common/dynamic_tree.py
Cost:       both read up to (token bytes + 4) * M * R; beam_step writes 4 * M * R, tree_rerank 4 * N * (4 + N / 32).
            A few kB: bound by latency, one program per request
Padding:    a candidate of -inf or NaN, below such a one or deeper than max_depth is never chosen; places without a
            candidate are padding
Numerics:   one fp32 addition (and one subtraction of logsumexp) per candidate; all comparisons are exact, on the bits
            of the fp32 numbers. A positive log-probability counts as 0
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_num_nodes, check_parent, check_tensor
from specdec.kernels.common.dynamic_tree import Beam, RerankedTree
from specdec.kernels.common.launch import Backend, LaunchConfig, on_device, resolve_backend
from specdec.kernels.common.primitives import INFINITE_COST, cost_bits, store_ancestors
from specdec.kernels.reference import tree_rerank as reference

__all__ = ["MAX_POOL", "beam_step", "tree_rerank"]

MAX_POOL = 2048
"""Most candidates of one request: all of them sit in the registers of one program."""


_STRIDES = ["stride_tb", "stride_tm", "stride_lb", "stride_lm"]  # of tokens and log-probabilities


@triton.jit(do_not_specialize=[*_STRIDES, "stride_bb", "stride_sb", "stride_sm", "first_index"])
def _beam_step_kernel(
    tokens_ptr,  # [B, M, R]
    logps_ptr,  # [B, M, R]
    beam_logps_ptr,  # [B, M]
    logsumexp_ptr,  # [B, M] or None
    index_ptr,  # [B, WIDTH]
    row_ptr,  # [B, WIDTH]
    next_tokens_ptr,  # [B, WIDTH]
    next_logps_ptr,  # [B, WIDTH]
    totals_ptr,  # [B, M, R]
    stride_tb,
    stride_tm,
    stride_lb,
    stride_lm,
    stride_bb,
    stride_sb,
    stride_sm,
    first_index,
    M: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program chooses the next beam of one request."""
    b = tl.program_id(0).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < M * R
    m = offs_p // R
    logps = tl.load(logps_ptr + b * stride_lb + m * stride_lm + offs_p % R, mask=mask_p, other=float("-inf"))
    beam_logps = tl.load(beam_logps_ptr + b * stride_bb + m, mask=mask_p, other=0.0)
    if logsumexp_ptr is not None:
        logps -= tl.load(logsumexp_ptr + b * stride_sb + m * stride_sm, mask=mask_p, other=0.0)
    totals = tl.where(beam_logps > 0, 0.0, beam_logps) + tl.where(logps > 0, 0.0, logps)  # [BLOCK_P]
    totals = tl.where(totals == totals, totals, float("-inf"))
    tl.store(totals_ptr + b * M * R + offs_p, totals, mask=mask_p)

    # one number per candidate that orders by (total, index); the best is the smallest
    keys = (cost_bits(totals).to(tl.int64) << 32) | offs_p
    offs_w = tl.arange(0, BLOCK_W)
    chosen = tl.zeros([BLOCK_W], tl.int64)
    for w in range(0, WIDTH):
        best = tl.min(keys, 0)
        chosen = tl.where(offs_w == w, best, chosen)
        keys = tl.where(keys == best, 0x7FFFFFFFFFFFFFFF, keys)

    mask_w = offs_w < WIDTH
    possible = mask_w & ((chosen >> 32) < INFINITE_COST)
    i = tl.where(possible, (chosen & 0xFFFFFFFF).to(tl.int32), 0)
    out = b * WIDTH + offs_w
    tl.store(index_ptr + out, tl.where(possible, i + first_index, -1), mask=mask_w)
    tl.store(row_ptr + out, i // R, mask=mask_w)
    token = tl.load(tokens_ptr + b * stride_tb + i // R * stride_tm + i % R, mask=mask_w, other=0)
    tl.store(next_tokens_ptr + out, token.to(tl.int32), mask=mask_w)
    # the key holds the total's bits without the sign
    logp = -(chosen >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(next_logps_ptr + out, tl.where(possible, logp, float("-inf")), mask=mask_w)


@triton.jit
def _rank_pool(
    logps_ptr, parent_ptr, stride_lm, offs_p, mask_p, M: tl.constexpr, R: tl.constexpr, MAX_DEPTH: tl.constexpr
):
    """Cost bits and depth of every candidate; the cost is infinite if it can be no node."""
    cost = tl.zeros(offs_p.shape, tl.int32)
    depth = tl.zeros(offs_p.shape, tl.int32)
    node = tl.where(mask_p, offs_p, -1)
    for _ in range(MAX_DEPTH):  # climb to the root: a candidate is no better than anything above it
        climbing = (node >= 0) & (node < M * R)  # what is no candidate never gets to the root
        m = node // R
        logps = tl.load(logps_ptr + m * stride_lm + node % R, mask=climbing, other=0.0)
        cost = tl.maximum(cost, cost_bits(logps))
        depth += climbing.to(tl.int32)
        node = tl.load(parent_ptr + m, mask=climbing, other=node)
    return tl.where(mask_p & (node < 0), cost, INFINITE_COST), depth


@triton.jit
def _choose(cost, depth, limit, MAX_DEPTH: tl.constexpr):
    """Place of every chosen candidate, from 1, in the order (depth, index); 0 if it is not chosen. And how many are."""
    limit = tl.minimum(limit, tl.sum((cost < INFINITE_COST).to(tl.int32), 0))
    # the smallest threshold with `limit` candidates up to it, bit by bit from the top
    threshold = tl.zeros_like(limit)
    for bit in range(0, 31):
        # the largest number that has the bit clear and the bits found so far
        trial = threshold + (0x3FFFFFFF >> bit)
        too_few = tl.sum((cost <= trial).to(tl.int32), 0) < limit
        threshold = tl.where(too_few, trial + 1, threshold)
    ties_left = limit - tl.sum((cost < threshold).to(tl.int32), 0)

    place = tl.zeros_like(cost)
    num_chosen = tl.zeros_like(limit)
    for d in range(1, MAX_DEPTH + 1):
        here = depth == d
        tie = here & (cost == threshold)
        # two counts in one scan: better ones in the high half, ties in the low half
        packed = ((here & (cost < threshold)).to(tl.int32) << 16) + tie.to(tl.int32)
        count = tl.cumsum(packed, 0)
        ties = tl.minimum(count & 0xFFFF, ties_left)
        chosen = (packed >= 65536) | (tie & ((count & 0xFFFF) <= ties_left))
        place = tl.where(chosen, num_chosen + (count >> 16) + ties, place)
        total = tl.sum(packed, 0)
        level_ties = tl.minimum(total & 0xFFFF, ties_left)
        num_chosen += (total >> 16) + level_ties
        ties_left -= level_ties
    return place, num_chosen


@triton.jit(do_not_specialize=[*_STRIDES, "stride_pb"])
def _tree_rerank_kernel(
    tokens_ptr,  # [B, M, R]
    logps_ptr,  # [B, M, R]
    parent_ptr,  # [B, M]
    root_ptr,  # [B]
    out_tokens_ptr,  # [B, N]
    out_parent_ptr,  # [B, N]
    out_depth_ptr,  # [B, N]
    ancestors_ptr,  # [B, N, NUM_WORDS]
    reach_ptr,  # [B]
    index_ptr,  # [B, N]
    stride_tb,
    stride_tm,
    stride_lb,
    stride_lm,
    stride_pb,
    M: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program builds the tree of one request, all candidates in registers."""
    b = tl.program_id(0).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    mask_p = offs_p < M * R
    parent_ptr += b * stride_pb
    cost, depth = _rank_pool(logps_ptr + b * stride_lb, parent_ptr, stride_lm, offs_p, mask_p, M, R, MAX_DEPTH)
    place, num_chosen = _choose(cost, depth, N - 1, MAX_DEPTH)
    chosen = place > 0

    # the node of the parent: its own place, 0 for the root
    above = tl.load(parent_ptr + offs_p // R, mask=chosen, other=-1)
    parent = tl.where(above >= 0, tl.gather(place, tl.maximum(above, 0), 0), 0)
    token = tl.load(tokens_ptr + b * stride_tb + offs_p // R * stride_tm + offs_p % R, mask=chosen, other=0)
    out = b * N + place
    tl.store(out_tokens_ptr + out, token.to(tl.int32), mask=chosen)
    tl.store(out_parent_ptr + out, parent, mask=chosen)
    tl.store(out_depth_ptr + out, depth, mask=chosen)
    tl.store(index_ptr + out, offs_p, mask=chosen)
    tl.store(reach_ptr + b, tl.max(tl.where(chosen, depth, 0), 0))

    offs_n = tl.arange(0, BLOCK_N)
    out = b * N + offs_n
    rest = (offs_n < N) & ((offs_n == 0) | (offs_n > num_chosen))  # the root and the padding
    tl.store(out_tokens_ptr + out, tl.load(root_ptr + b), mask=rest)
    tl.store(out_parent_ptr + out, -1, mask=rest)
    tl.store(out_depth_ptr + out, 0, mask=rest)
    tl.store(index_ptr + out, -1, mask=rest)
    store_ancestors(out_parent_ptr, ancestors_ptr, b, N, NUM_WORDS, MAX_DEPTH, BLOCK_N, BLOCK_W)


def _beam_config(pool_size: int, width: int) -> LaunchConfig:
    """Eight candidates per lane at most; one warp, whose reductions need no barrier, up to 256."""
    blocks = {"BLOCK_P": triton.next_power_of_2(pool_size), "BLOCK_W": triton.next_power_of_2(width)}
    return LaunchConfig(blocks, num_warps=max(1, min(8, blocks["BLOCK_P"] // 256)))


def _rerank_config(pool_size: int, num_nodes: int) -> LaunchConfig:
    """Four candidates per lane, and at most 32 ancestor words."""
    block_p, block_n = triton.next_power_of_2(pool_size), triton.next_power_of_2(num_nodes)
    block_w = triton.next_power_of_2(triton.cdiv(num_nodes, 32))
    num_warps = max(1, min(8, block_p // 128), block_n * block_w // 1024)
    return LaunchConfig({"BLOCK_P": block_p, "BLOCK_N": block_n, "BLOCK_W": block_w}, num_warps=num_warps)


def _empty_beam(tokens: torch.Tensor, logps: torch.Tensor, width: int) -> Beam:
    batch = tokens.shape[0]
    return Beam(
        index=tokens.new_empty(batch, width, dtype=torch.int32),
        row=tokens.new_empty(batch, width, dtype=torch.int32),
        tokens=tokens.new_empty(batch, width, dtype=torch.int32),
        logps=logps.new_empty(batch, width),
        candidate_logps=logps.new_empty(logps.shape),
    )


@library.op(fake=_empty_beam)
def beam_step(
    tokens: torch.Tensor,
    logps: torch.Tensor,
    beam_logps: torch.Tensor,
    *,
    width: int,
    first_index: int = 0,
    logsumexp: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> Beam:
    """Choose the best children of a beam, by the log-probability of the whole path.

    List m holds the candidates that the drafter proposes after entry m of the current beam; the first beam is the root
    alone, with log-probability 0. Of equal children the one of the lowest (list, rank) comes first.

    Args:
        tokens: [B, M, R] int32 or int64, contiguous in R; M * R <= 2048.
        logps: [B, M, R] float32, contiguous in R, log-probability of each candidate given its path, nats; logits if
            `logsumexp` is given.
        beam_logps: [B, M] float32, log-probability of each entry of the current beam, nats.
        width: children to choose, 1 to M * R.
        first_index: index of the level's first candidate in the pool; added to the indices of the result.
        logsumexp: [B, M] float32 of any strides, subtracted from `logps`. None: they are log-probabilities already.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        The next beam, with B rows.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, too many candidates, an impossible width, tensors on several devices.
    """
    batch, num_lists, num_ranks = _check_pool(tokens, logps)
    device = tokens.device
    check_tensor("beam_logps", beam_logps, shape=(batch, num_lists), dtype=torch.float32, device=device)
    if logsumexp is not None:
        shape = batch, num_lists
        check_tensor("logsumexp", logsumexp, shape=shape, dtype=torch.float32, device=device, contiguous_last=False)
    if not 1 <= width <= num_lists * num_ranks:
        raise ValueError(f"width: expected 1 to {num_lists * num_ranks}, the number of candidates, got {width}")
    if first_index < 0:
        raise ValueError(f"first_index: expected 0 or more, got {first_index}")
    if resolve_backend(tokens, backend) == "reference":
        return reference.beam_step(tokens, logps, beam_logps, width=width, first_index=first_index, logsumexp=logsumexp)

    beam = _empty_beam(tokens, logps, width)
    outputs = beam.index, beam.row, beam.tokens, beam.logps, beam.candidate_logps
    sums = (0, 0) if logsumexp is None else logsumexp.stride()
    strides = *tokens.stride()[:2], *logps.stride()[:2], beam_logps.stride(0), *sums
    numbers, config = (first_index, num_lists, num_ranks, width), _beam_config(num_lists * num_ranks, width)
    with on_device(tokens):
        _beam_step_kernel[(batch,)](
            tokens, logps, beam_logps, logsumexp, *outputs, *strides, *numbers, **config.kwargs()
        )
    return beam


@library.op(fake=RerankedTree.empty)
def tree_rerank(
    tokens: torch.Tensor,
    logps: torch.Tensor,
    parent: torch.Tensor,
    root: torch.Tensor,
    *,
    num_nodes: int,
    max_depth: int,
    backend: Backend | None = None,
) -> RerankedTree:
    """Keep the best nodes of a pool of candidates, none without its parent, and build their tree.

    The pool holds the candidates of all draft passes. A node never ranks above its parent: it counts as improbable as
    the least probable node on its path. Of equal nodes the shallowest comes first, then the one of the lowest index.

    Args:
        tokens: [B, M, R] int32 or int64, contiguous in R; M * R <= 2048. A pool without lists has R = 1.
        logps: [B, M, R] float32, contiguous in R, log-probability of the path to each candidate, nats
            (`Beam.candidate_logps`); -inf or NaN for a candidate that is none.
        parent: [B, M] int32, index in the pool (m * R + r) of the candidate whose children list m holds, -1 for the
            children of the root. Checked on the CPU only; on a GPU a list of another parent is never taken, and one
            below -1 counts as -1.
        root: [B] int32, last emitted token of every request.
        num_nodes: N, nodes of the tree, root included; 1 to 512.
        max_depth: largest depth of a node; deeper candidates are not taken.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        The tree, with B rows.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, too many candidates or nodes, a parent beyond the pool (CPU only), a
            negative depth, tensors on several devices.
    """
    batch, num_lists, num_ranks = _check_pool(tokens, logps)
    device = tokens.device
    check_tensor("parent", parent, shape=(batch, num_lists), dtype=torch.int32, device=device)
    check_parent(parent, pool_size=num_lists * num_ranks)
    check_tensor("root", root, shape=(batch,), dtype=torch.int32, device=device)
    check_num_nodes("num_nodes", num_nodes)
    if max_depth < 0:
        raise ValueError(f"max_depth: expected 0 or more, got {max_depth}")
    if resolve_backend(tokens, backend) == "reference":
        return reference.tree_rerank(tokens, logps, parent, root, num_nodes=num_nodes, max_depth=max_depth)

    tree = RerankedTree.empty(root, num_nodes)
    outputs = tree.tokens, tree.parent, tree.depth, tree.ancestors, tree.deepest, tree.index
    strides = *tokens.stride()[:2], *logps.stride()[:2], parent.stride(0)
    sizes = num_lists, num_ranks, num_nodes, tree.ancestors.shape[2], max_depth
    config = _rerank_config(num_lists * num_ranks, num_nodes)
    with on_device(tokens):
        _tree_rerank_kernel[(batch,)](tokens, logps, parent, root, *outputs, *strides, *sizes, **config.kwargs())
    return tree


def _check_pool(tokens: torch.Tensor, logps: torch.Tensor) -> tuple[int, int, int]:
    """Check the candidates; returns B, M and R."""
    check_tensor("tokens", tokens, shape=(None, None, None), dtype=(torch.int32, torch.int64))
    batch, num_lists, num_ranks = tokens.shape
    if not 1 <= num_lists * num_ranks <= MAX_POOL:
        raise ValueError(f"tokens: expected 1 to {MAX_POOL} candidates per request, got shape {list(tokens.shape)}")
    check_tensor("logps", logps, shape=(batch, num_lists, num_ranks), dtype=torch.float32, device=tokens.device)
    return batch, num_lists, num_ranks
