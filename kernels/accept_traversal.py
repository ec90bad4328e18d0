"""Traversal verification: whole drafted paths are judged from their leaves up.

Equation:   at a node with target law p, draft law q and children x_1, x_2, ... in node order: p_1 = p, q_1 = q, and w_1
            is what the node arrives with: 1 at the root, otherwise w_{x_i} = min(1, w_i p_i(x_i) / q_i(x_i));
            p_{i+1} = norm(max(0, w_i p_i - q_i)), r_i its mass before norm;  q_{i+1} = norm(q_i without x_i)
            w_{i+1} = r_i / (r_i + 1 - w_i)
            The first node in post-order whose uniform lies below its last w is accepted, with the path to it; the next
            root is drawn from that node's last p
Closed form (docs/kernels/accept_traversal.md):
            p_i = max(0, p - c_i q) / Z_i,  Z_i = sum_v max(0, p - c_i q),  r_i = w_i Z_{i+1} / Z_i
            c_1 = 0,  c_{i+1} = c_i + Z_i / (w_i W_i),  W_i the mass of q without x_1, ..., x_{i-1}
Source:     Weng et al. 2025, "Traversal Verification" (arXiv:2505.12398), algorithm 1; on a chain block verification
            (Sun et al. 2024, arXiv:2403.10444)
Reference:  kernels/reference/accept_traversal.py

Shapes:     B requests, N nodes, node 0 the root, M draft laws, V vocabulary, E stop tokens, T = ceil(V / 4096) tiles,
            L steps of up to K nodes
            tokens         [B, N]              int32
            parent         [1, N]              int32, parent[j] < j; -1 for the root and for padding
            logits         [B, N, V]           fp32, fp16 or bf16, what the target samples from: already processed
            draft_logits   [B, M, V]           fp32, fp16 or bf16, what the drafter sampled from: already processed
            draft_row      [N]                 int32, law that the children of a node were drawn from; -1 none
            uniform        [B, N]              fp32 in [0, 1), for the test of each node
            uniform_final  [B]                 fp32 in [0, 1), for the next root
            order          [N]                 int32, the nodes in post-order
            steps          [L, K]              int32, nodes that are judged at once; -1 padded
            budget         [B]                 int32, tokens the request may still emit; 0 marks a finished request
            stop_tokens    [E]                 int32
            path, emitted  [B, max_depth + 1]  int32, -1 padded
            num_accepted, next_root  [B]       int32
Cost:       reads logits and draft logits once, B*(N + M)*V elements; then for every node but the root a tile-parallel
            pass over both laws of its parent, 2*B*(N - 1)*V elements, mostly from the L2 cache. L + 3 launches
Padding:    a padding node is never accepted; a finished request reads no logits. Children of a node without draft law
            have weight 0
Numerics:   sums in fp32; the guards are the reference's. Weights can differ from exact ones by about 1e-6, relative to
            the mass they were made of, and decisions where a uniform lies in that gap. NaN logits count as -inf
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_tensor
from specdec.kernels.common.launch import Backend, LaunchConfig, on_device, resolve_backend
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
from specdec.kernels.reference.accept_traversal import accept_traversal as accept_traversal_reference

__all__ = ["accept_traversal"]

_CHUNK = 4096
"""Elements of the largest tile in the last kernel."""


@triton.jit
def _refuse(state_ptr, size, at, mask, next_z, FLOOR: tl.constexpr):
    """w, c and Z of a node once its child `at` was refused, and whether p changed; `next_z` is Z after the child."""
    w = tl.load(state_ptr + size + at, mask=mask, other=0.0)
    c = tl.load(state_ptr + 2 * size + at, mask=mask, other=0.0)
    z = tl.load(state_ptr + 3 * size + at, mask=mask, other=1.0)
    next_c = tl.load(state_ptr + 4 * size + at, mask=mask, other=-1.0)
    is_drawn = next_c >= 0.0  # -1: it cannot have been drawn
    mass = w * next_z / z
    refused = mass + (1.0 - w)
    left = tl.where(refused > FLOOR, mass / tl.maximum(refused, FLOOR), 1.0)
    is_law = is_drawn & (mass > FLOOR)  # a smaller residual is rounding: the law stays
    return tl.where(is_drawn, left, w), tl.where(is_law, next_c, c), tl.where(is_law, next_z, z), is_law


@triton.jit
def _refuse_child(
    at,
    child,
    state_ptr,
    law_ptr,
    residual_ptr,
    size,
    FLOOR: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """State of a node once its child was refused: w, c, Z, and the child whose residual p is now, -1 for none."""
    offs_t = tl.arange(0, BLOCK_T)
    masses = tl.load(residual_ptr + at * NUM_TILES + offs_t, mask=offs_t < NUM_TILES, other=0.0)
    w, c, z, is_law = _refuse(state_ptr, size, at, True, tl.sum(masses, 0), FLOOR)
    return w, c, z, tl.where(is_law, child, tl.load(law_ptr + at))


@triton.jit(do_not_specialize=["start", "stride_tb", "size", "N", "M"])
def _judge_children_kernel(
    steps_ptr,  # [L, K] nodes, -1 padded
    tokens_ptr,  # [B, N]
    parent_ptr,  # [N]
    logits_ptr,  # [B, N, V]
    draft_ptr,  # [B, M, V]
    draft_row_ptr,  # [N]
    budget_ptr,  # [B] or None
    tiles,  # maxima and sums, [B, N, NUM_TILES] each
    draft_tiles,  # the same of the draft's, [B, M, NUM_TILES] each
    state_ptr,  # [5, B, N] per child: the w it arrives with; w, c, Z of its parent before it; c after it or -1
    law_ptr,  # [B, N] per child: the sibling whose residual its parent's p is before it, -1 for none
    residual_ptr,  # [B, N, NUM_TILES] per child: its parent's Z after it
    untried_ptr,  # [B, N, NUM_TILES] per node: mass of q outside its children
    start,
    stride_tb,
    stride_lb,
    stride_ln,
    stride_db,
    stride_dm,
    size,
    N,
    M,
    V,
    FLOOR: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of the residual after one child; each program works out where its parent has got to by then."""
    t = tl.program_id(0)
    child = tl.load(steps_ptr + start + tl.program_id(1))
    b = tl.program_id(2).to(tl.int64)
    if budget_ptr is not None:  # decided at compile time
        if tl.load(budget_ptr + b) <= 0:
            return
    offs_n, offs_t = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
    parent = load_parents(parent_ptr, offs_n, offs_n < N)  # [BLOCK_N]
    n = tl.max(tl.where(offs_n == child, parent, -1), 0).to(tl.int64)
    if n < 0:
        return
    siblings = parent == n
    before = tl.max(tl.where(siblings & (offs_n < child), offs_n, -1), 0)
    m = tl.load(draft_row_ptr + n).to(tl.int64)
    has_law = (m >= 0) & (m < M)
    m = tl.where(has_law, m, 0)

    untried_ptr += (b * N + n) * NUM_TILES
    tokens_ptr += b * stride_tb
    logits_ptr += b * stride_lb + n * stride_ln
    draft_ptr += b * stride_db + m * stride_dm
    at = b * N + child
    target_lse, _ = row_law(tiles, b * N + n, NUM_TILES, BLOCK_T)
    draft_lse, _ = row_law(draft_tiles, b * M + m, NUM_TILES, BLOCK_T)
    token = tl.load(tokens_ptr + offs_n, mask=siblings, other=-1)  # [BLOCK_N]
    is_token = siblings & has_law & (token >= 0) & (token < V)
    q_token = tl.exp(load_logits(draft_ptr, token, is_token) - draft_lse)
    p_child = tl.sum(tl.exp(load_logits(logits_ptr, token, is_token & (offs_n == child)) - target_lse), 0)
    q_child = tl.sum(tl.where(offs_n == child, q_token, 0.0), 0)
    if before < 0:
        w = tl.load(state_ptr + b * N + n, mask=n > 0, other=1.0)
        c, z, law = w * 0.0, w * 0.0 + 1.0, before
        left = z  # the mass that q was normalised by
    else:
        w, c, z, law = _refuse_child(
            b * N + before, before, state_ptr, law_ptr, residual_ptr, size, FLOOR, NUM_TILES, BLOCK_T
        )
        # positive terms alone: 1 - (the mass of the children before) would cancel where the draft is sure of itself
        outside = tl.load(untried_ptr + offs_t, mask=offs_t < NUM_TILES, other=0.0)
        left = tl.sum(outside, 0) + tl.sum(tl.where(offs_n >= child, q_token, 0.0), 0)

    is_drawn = (q_child > 0.0) & (w > 0.0)  # after a w of 0 nothing changes any more
    arrival = w * tl.maximum(p_child - c * q_child, 0.0) * left / tl.maximum(z * q_child, 1.2e-38)
    next_c = tl.minimum(c + z / tl.maximum(w * left, 1.2e-38), 3.0e38)  # finite, as 0 q must be 0
    if t == 0:
        tl.store(state_ptr + at, tl.where(is_drawn, tl.minimum(arrival, 1.0), 0.0))
        tl.store(state_ptr + size + at, w)
        tl.store(state_ptr + 2 * size + at, c)
        tl.store(state_ptr + 3 * size + at, z)
        tl.store(state_ptr + 4 * size + at, tl.where(is_drawn, next_c, -1.0))
        tl.store(law_ptr + at, law)
    if has_law & (w > 0.0):
        offs_v = t * BLOCK_V + tl.arange(0, BLOCK_V)
        mass, q = residual((logits_ptr, draft_ptr, target_lse, draft_lse), next_c, offs_v, offs_v < V)
        tl.store(residual_ptr + at * NUM_TILES + t, tl.sum(mass, 0))
        if before < 0:
            tl.store(untried_ptr + t, mass_outside(q, offs_v, tokens_ptr, siblings, BLOCK_N))


@triton.jit
def _first_accepted(
    order_ptr,  # [N]
    uniform_ptr,  # [N] of the row
    state_ptr,  # [5, B, N]
    residual_ptr,  # [B, N, NUM_TILES]
    parent,  # [BLOCK_N]
    row,  # b * N
    end,  # N, or 0 for a finished row
    size,
    N,
    FLOOR: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The first node in post-order whose uniform lies below its weight; the root if there is none before it."""
    offs_c, offs_n, offs_t = tl.arange(0, BLOCK_C), tl.arange(0, parent.shape[0]), tl.arange(0, BLOCK_T)
    accepted = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    while start < end:
        node = tl.load(order_ptr + start + offs_c, mask=start + offs_c < N, other=0)  # [BLOCK_C]
        node = tl.where((node >= 0) & (node < N), node, 0)
        # a node without parent is the root or padding
        above = tl.max(tl.where(node[:, None] == offs_n[None, :], parent[None, :], -1), 1)
        last = tl.max(tl.where(node[:, None] == parent[None, :], offs_n[None, :], -1), 1)  # child
        has_child = (above >= 0) & (last >= 0)
        at = row + last
        mask = has_child[:, None] & (offs_t[None, :] < NUM_TILES)
        masses = tl.load(residual_ptr + at[:, None] * NUM_TILES + offs_t[None, :], mask=mask, other=0.0)
        w, _, _, _ = _refuse(state_ptr, size, at, has_child, tl.sum(masses, 1), FLOOR)
        arrival = tl.load(state_ptr + row + node, mask=above >= 0, other=0.0)
        w = tl.where(has_child & (arrival > 0.0), w, arrival)  # after a w of 0 nothing changes any more
        is_accepted = tl.load(uniform_ptr + node) < w
        place = tl.min(tl.where(is_accepted, offs_c, BLOCK_C), 0)
        if place < BLOCK_C:
            accepted = tl.sum(tl.where(offs_c == place, node, 0), 0)
            start = end
        else:
            start += BLOCK_C
    return accepted


@triton.jit(do_not_specialize=["stride_tb", "stride_ub", "size", "N", "M"])
def _accept_traversal_kernel(
    tokens_ptr,  # [B, N]
    parent_ptr,  # [N]
    logits_ptr,  # [B, N, V]
    draft_ptr,  # [B, M, V]
    draft_row_ptr,  # [N]
    uniform_ptr,  # [B, N]
    uniform_final_ptr,  # [B]
    order_ptr,  # [N]
    budget_ptr,  # [B] or None
    stop_tokens_ptr,  # [NUM_STOPS] or None
    tiles,  # maxima and sums, [B, N, NUM_TILES] each
    draft_tiles,  # the same of the draft's, [B, M, NUM_TILES] each
    state_ptr,  # [5, B, N]
    law_ptr,  # [B, N]
    residual_ptr,  # [B, N, NUM_TILES]
    verdict_ptrs,  # the fields of a `Verdict`
    stride_ub,
    stride_tb,
    stride_lb,
    stride_ln,
    stride_db,
    stride_dm,
    size,
    N,
    M,
    V,
    FLOOR: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program accepts a node of one tree and draws the next root from the law that is left there."""
    b = tl.program_id(0).to(tl.int64)
    offs_n, offs_t, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    parent = load_parents(parent_ptr, offs_n, offs_n < N)  # [BLOCK_N]
    end = N
    if budget_ptr is not None:
        end = tl.where(tl.load(budget_ptr + b) > 0, N, 0)
    tokens_ptr += b * stride_tb
    uniform_ptr += b * stride_ub
    node = _first_accepted(
        order_ptr, uniform_ptr, state_ptr, residual_ptr, parent, b * N, end, size, N, FLOOR, NUM_TILES, BLOCK_T, BLOCK_C
    )

    target_lse, masses = row_law(tiles, b * N + node, NUM_TILES, BLOCK_T)
    m = tl.load(draft_row_ptr + node).to(tl.int64)
    draft_lse = tl.full((), float("inf"), tl.float32)  # q is 0 where no law was read
    c = tl.full((), 0.0, tl.float32)
    last = tl.max(tl.where(parent == node, offs_n, -1), 0)
    if (last >= 0) & (m >= 0) & (m < M) & (end > 0):
        draft_lse, _ = row_law(draft_tiles, b * M + m, NUM_TILES, BLOCK_T)
        _, c, _, law = _refuse_child(
            b * N + last, last, state_ptr, law_ptr, residual_ptr, size, FLOOR, NUM_TILES, BLOCK_T
        )
        if (law >= 0) & (law < N):
            at = (b * N + law) * NUM_TILES
            masses = tl.load(residual_ptr + at + offs_t, mask=offs_t < NUM_TILES, other=0.0)
    m = tl.where((m >= 0) & (m < M), m, 0)

    logits_ptr += b * stride_lb + node.to(tl.int64) * stride_ln
    draft_ptr += b * stride_db + m * stride_dm
    laws = logits_ptr, draft_ptr, target_lse, draft_lse
    token = draw_residual(masses, tl.load(uniform_final_ptr + b), laws, c, V, BLOCK_T, BLOCK_V)

    depth, above = node * 0, tl.max(tl.where(offs_n == node, parent, -1), 0)
    while above >= 0:
        depth, above = depth + 1, tl.max(tl.where(offs_n == above, parent, -1), 0)
    path = tl.where(offs_d == 0, 0, -1)  # [BLOCK_D]
    emitted = tl.where(offs_d == depth, token, -1)
    while depth > 0:
        path = tl.where(offs_d == depth, node, path)
        depth -= 1
        emitted = tl.where(offs_d == depth, tl.load(tokens_ptr + node), emitted)
        node = tl.max(tl.where(offs_n == node, parent, -1), 0)
    store_verdict(
        path, emitted, b, tokens_ptr, budget_ptr, stop_tokens_ptr, verdict_ptrs, MAX_DEPTH, NUM_STOPS, BLOCK_D
    )


def _launch_config(num_nodes: int, max_depth: int, vocab_size: int) -> LaunchConfig:
    """The last kernel looks at as many nodes at once as fit into its registers with their children and tiles."""
    tiles = tiles_config(vocab_size).blocks
    blocks = {**tiles, **tree_blocks(num_nodes, max_depth)}
    blocks["BLOCK_C"] = max(1, min(blocks["BLOCK_N"], _CHUNK // max(blocks["BLOCK_N"], tiles["BLOCK_T"])))
    return LaunchConfig(blocks, num_warps=8 if tiles["BLOCK_V"] >= 2048 else 1)


@library.op(fake=empty_verdict)
def accept_traversal(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_row: torch.Tensor,
    uniform: torch.Tensor,
    uniform_final: torch.Tensor,
    order: torch.Tensor,
    steps: torch.Tensor,
    *,
    max_depth: int,
    budget: torch.Tensor | None = None,
    stop_tokens: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> Verdict:
    """Accept the path to one node of a drawn tree, judged as a whole.

    The emitted tokens have exactly the target's law if the children of every node, in node order, are draws without
    replacement from its draft law, made for that node anew. The values of `draft_row`, `order` and `steps` are not
    checked, since a look at them would stop the GPU; nothing outside the tensors is read, whatever they are.

    Args:
        tokens: [B, N] int32, tokens of the tree's nodes, contiguous in N; siblings must differ.
        parent: [1, N] int32, topological, as in `accept_greedy`.
        logits: [B, N, V] float32, float16 or bfloat16, contiguous in V; the target samples from their softmax.
        draft_logits: [B, M, V] float32, float16 or bfloat16, contiguous in V; the drafter sampled from their softmax.
        draft_row: [N] int32, the draft law that a node's children were drawn from, in [0, M); otherwise its children,
            if any, are never accepted.
        uniform: [B, N] float32 in [0, 1), contiguous in N; independent, one for the test of each node.
        uniform_final: [B] float32 in [0, 1), for the next root.
        order: [N] int32, the nodes in post-order: children before parents, and of two siblings the earlier one with all
            that is below it before the later one.
        steps: [L, K] int32, contiguous in K: every node but the root and padding once, in a later row than its parent
            and than its sibling before it; the rest -1. L is the number of launches.
        max_depth: largest depth of any node (the root has depth 0).
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
    (batch, num_nodes), vocab_size = tokens.shape, logits.shape[-1]
    check_tensor("parent", parent, shape=(1, num_nodes))
    check_tensor("order", order, shape=(num_nodes,), dtype=torch.int32, device=tokens.device)
    check_tensor("steps", steps, shape=(None, None), dtype=torch.int32, device=tokens.device)
    if resolve_backend(tokens, backend) == "reference":
        arguments = tokens, parent, logits, draft_logits, draft_row, uniform, uniform_final, order, steps
        return accept_traversal_reference(*arguments, **limits, upcast=False)

    tiles, config = tiles_config(vocab_size), _launch_config(num_nodes, max_depth, vocab_size)
    target_tiles = softmax_tiles(logits, tiles, budget=budget)[:2]
    draft_tiles = softmax_tiles(draft_logits, tiles, budget=budget)[:2]
    residuals, untried = torch.empty_like(target_tiles[0]), torch.empty_like(target_tiles[0])
    # zeros: a node that no step judges, which no tree has, is not accepted
    state, law = residuals.new_zeros(5, batch, num_nodes), tokens.new_empty(batch, num_nodes)
    verdict = empty_verdict(tokens, max_depth)
    num_stops = 0 if stop_tokens is None else stop_tokens.shape[0]
    tree = tokens, parent, logits, draft_logits, draft_row
    judged = target_tiles, draft_tiles, state, law, residuals
    rows = uniform, uniform_final, order, budget, stop_tokens
    strides = tokens.stride(0), *logits.stride()[:2], *draft_logits.stride()[:2]
    sizes = batch * num_nodes, num_nodes, draft_logits.shape[1], vocab_size, RESIDUAL_FLOOR
    blocks = {**tiles.kwargs(), "BLOCK_N": config.blocks["BLOCK_N"]}
    with on_device(tokens):
        for step in range(steps.shape[0]):
            _judge_children_kernel[(tiles.blocks["NUM_TILES"], steps.shape[1], batch)](
                steps, *tree, budget, *judged, untried, step * steps.stride(0), *strides, *sizes, **blocks
            )
        outputs, limit = verdict_fields(verdict), {"MAX_DEPTH": max_depth, "NUM_STOPS": num_stops}
        _accept_traversal_kernel[(batch,)](
            *tree, *rows, *judged, outputs, uniform.stride(0), *strides, *sizes, **limit, **config.kwargs()
        )
    return verdict
