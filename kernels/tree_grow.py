"""The best tree of a block of candidates that one pass of parallel heads has given.

Equation:   total(r_1 .. r_d) = sum over k of min(x_k, 0), with x_k = logps[k, r_k] or, with edges and k > 0,
            edges[k - 1, r_{k-1}, r_k]; the N - 1 paths (each of them a node) of the largest total. Of equal totals the
            shallowest, then that whose parent was chosen first, then the larger x_d, then the lower rank
Source:     best-first expansion of a tree of candidates as in EAGLE-2 (arXiv:2406.16858) section 4.2, with all laws at
            hand before the first choice, so that nothing is cut to a beam
Reference:  kernels/reference/tree_grow.py (exact; a heap)

Shapes:     B requests, K positions behind the root, R candidates each
            tokens     [B, K, R]         int32 or int64
            logps      [B, K, R]         fp32, nats; logits if `logsumexp [B, K]` fp32 is given
            edges      [B, K - 1, R, R]  fp32, nats, log-probability of candidate r of position k + 1 behind candidate p
                       of position k; without them a position's law is the same behind every path
            root       [B]               int32, the last emitted token
            the result is described in kernels/common/dynamic_tree.py
Cost:       reads 4 * R * (K + (K - 1) * R) or 4 * R * K, writes and reads twice that in between, writes
            4 * N * (4 + N / 32). A few kB: bound by latency, N - 1 choices one after the other
Padding:    a candidate of -inf or NaN is never chosen, nor is what lies behind it; nodes without a path are padding
Numerics:   totals are fp32 sums in the order of the path; all comparisons are exact, on the bits of the fp32 numbers. A
            positive log-probability counts as 0
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_num_nodes, check_tensor
from specdec.kernels.common.dynamic_tree import RerankedTree
from specdec.kernels.common.launch import Backend, LaunchConfig, batch_stride, on_device, resolve_backend
from specdec.kernels.common.primitives import INFINITE_COST, cost_bits, store_ancestors
from specdec.kernels.reference import tree_grow as reference

__all__ = ["MAX_GROWN_DEPTH", "MAX_GROWN_RANKS", "tree_grow"]

MAX_GROWN_DEPTH = 32
"""Most positions of a block."""

MAX_GROWN_RANKS = 16
"""Most candidates of a position: a list is sorted by comparing each with each."""

_NOTHING = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # the key of a node without another child

_SORT_STRIDES = ["stride_lb", "stride_lk", "stride_sb", "stride_eb", "stride_ek", "stride_ep"]


@triton.jit(do_not_specialize=_SORT_STRIDES)
def _tree_grow_sort_kernel(
    logps_ptr,  # [B, K, R]
    logsumexp_ptr,  # [B, K] or None
    edges_ptr,  # [B, K - 1, R, R] or None
    sorted_ptr,  # [B, NUM_LISTS, R]
    stride_lb,
    stride_lk,
    stride_sb,
    stride_eb,
    stride_ek,
    stride_ep,
    R: tl.constexpr,
    NUM_LISTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program sorts one list: the cost of each candidate, and its rank in the lower half of the number."""
    i = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    offs_r = tl.arange(0, BLOCK_R)
    mask_r = offs_r < R
    if edges_ptr is None or i == 0:
        x = tl.load(logps_ptr + b * stride_lb + i.to(tl.int64) * stride_lk + offs_r, mask=mask_r, other=float("nan"))
        if logsumexp_ptr is not None:
            x -= tl.load(logsumexp_ptr + b * stride_sb + i)
    else:
        row = b * stride_eb + ((i - 1) // R).to(tl.int64) * stride_ek + ((i - 1) % R).to(tl.int64) * stride_ep
        x = tl.load(edges_ptr + row + offs_r, mask=mask_r, other=float("nan"))
    # NaN counts as -inf, so that of several impossible candidates the lowest rank comes first
    keys = (tl.minimum(cost_bits(x), INFINITE_COST).to(tl.int64) << 32) | offs_r
    place = tl.sum((keys[None, :] < keys[:, None]).to(tl.int32), 1)
    tl.store(sorted_ptr + (b * NUM_LISTS + i) * R + place, keys, mask=mask_r)


@triton.jit
def _offer(keys, changed, cost, depth, row, place, sorted_ptr, K: tl.constexpr, R: tl.constexpr, BLOCK_N: tl.constexpr):
    """The frontier, with the next child of each node that has changed."""
    possible = changed & (depth < K) & (place < R)
    child = tl.load(sorted_ptr + row * R + place, mask=possible, other=_NOTHING)
    bits = (cost + (child >> 32).to(tl.int32).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    key = (bits.to(tl.int64) << 32) | (depth << 24 | tl.arange(0, BLOCK_N) << 8).to(tl.int64) | (child & 0xFF)
    return tl.where(changed, tl.where(possible & (bits < INFINITE_COST), key, _NOTHING), keys)


@triton.jit
def _choose_nodes(
    sorted_ptr,  # [NUM_LISTS, R] of one request
    K: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    BY_PARENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The key of every node in the order in which they are chosen, `_NOTHING` for the root and for padding.

    Entry p of the frontier is the best child of node p that is not chosen yet. Its key is, from the top, the bits of
    its path's cost, its depth - 1, p and its rank, and so orders as the nodes do: there is one entry per parent, so
    that siblings never meet.
    """
    offs_n = tl.arange(0, BLOCK_N)
    chosen = tl.full([BLOCK_N], _NOTHING, tl.int64)
    # of every node: the cost of its path, its depth, the list of its children and the place of the best one left
    cost = tl.zeros([BLOCK_N], tl.float32)
    depth = tl.zeros([BLOCK_N], tl.int32)
    row = tl.zeros([BLOCK_N], tl.int32)
    place = tl.zeros([BLOCK_N], tl.int32)
    keys = _offer(chosen, offs_n == 0, cost, depth, row, place, sorted_ptr, K, R, BLOCK_N)
    for node in range(1, N):
        best = tl.min(keys, 0)
        found = best < _NOTHING
        new = (offs_n == node) & found
        chosen = tl.where(new, best, chosen)
        own_depth = ((best >> 24) & 0xFF).to(tl.int32) + 1
        cost = tl.where(new, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True), cost)
        depth = tl.where(new, own_depth, depth)
        children = 1 + (own_depth - 1) * R + (best & 0xFF).to(tl.int32) if BY_PARENT else own_depth
        row = tl.where(new, children, row)
        parent = (keys == best) & found
        place += parent.to(tl.int32)
        # the new node's first child, and its next sibling
        keys = _offer(keys, new | parent, cost, depth, row, place, sorted_ptr, K, R, BLOCK_N)
    return chosen


@triton.jit(do_not_specialize=["stride_tb", "stride_tk"])
def _tree_grow_kernel(
    tokens_ptr,  # [B, K, R]
    sorted_ptr,  # [B, NUM_LISTS, R]
    root_ptr,  # [B]
    out_tokens_ptr,  # [B, N]
    out_parent_ptr,  # [B, N]
    out_depth_ptr,  # [B, N]
    ancestors_ptr,  # [B, N, NUM_WORDS]
    deepest_ptr,  # [B]
    index_ptr,  # [B, N]
    stride_tb,
    stride_tk,
    K: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    NUM_LISTS: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    BY_PARENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program grows the tree of one request, its frontier in registers."""
    b = tl.program_id(0).to(tl.int64)
    chosen = _choose_nodes(sorted_ptr + b * NUM_LISTS * R, K, R, N, BY_PARENT, BLOCK_N)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    is_node = mask_n & (chosen < _NOTHING)
    above = ((chosen >> 24) & 0xFF).to(tl.int32)  # the parent's depth, and the position of the candidate
    rank = (chosen & 0xFF).to(tl.int32)
    depth = tl.where(is_node, above + 1, 0)
    token = tl.load(tokens_ptr + b * stride_tb + above.to(tl.int64) * stride_tk + rank, mask=is_node, other=0)
    out = b * N + offs_n
    tl.store(out_tokens_ptr + out, tl.where(is_node, token.to(tl.int32), tl.load(root_ptr + b)), mask=mask_n)
    tl.store(out_parent_ptr + out, tl.where(is_node, ((chosen >> 8) & 0xFFFF).to(tl.int32), -1), mask=mask_n)
    tl.store(out_depth_ptr + out, depth, mask=mask_n)
    tl.store(index_ptr + out, tl.where(is_node, above * R + rank, -1), mask=mask_n)
    tl.store(deepest_ptr + b, tl.max(depth, 0))
    store_ancestors(out_parent_ptr, ancestors_ptr, b, N, NUM_WORDS, K, BLOCK_N, BLOCK_W)


def _launch_config(num_nodes: int) -> LaunchConfig:
    """One warp, in which the minimum over the frontier needs no barrier, as long as the ancestor words fit."""
    block_n, block_w = triton.next_power_of_2(num_nodes), triton.next_power_of_2(triton.cdiv(num_nodes, 32))
    return LaunchConfig({"BLOCK_N": block_n, "BLOCK_W": block_w}, num_warps=max(1, block_n * block_w // 2048))


@library.op(fake=RerankedTree.empty)
def tree_grow(
    tokens: torch.Tensor,
    logps: torch.Tensor,
    root: torch.Tensor,
    *,
    num_nodes: int,
    edges: torch.Tensor | None = None,
    logsumexp: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> RerankedTree:
    """Grow the best tree of a block of candidates: the nodes of the largest log-probability of their path.

    Nodes come in the order in which they are chosen, so that the first n of them are the best tree of n nodes. Of equal
    ones the shallowest comes first, then the one whose parent came first, then the one that is more probable behind its
    parent, then the one of the lower rank. A node's `index` is (depth - 1) * R + rank.

    Args:
        tokens: [B, K, R] int32 or int64, contiguous in R, candidates of the K positions behind the root; K up to 32, R
            up to 16. They need not be sorted.
        logps: [B, K, R] float32, contiguous in R, log-probability of each candidate, nats; logits if `logsumexp` is
            given. -inf or NaN for one that is none.
        root: [B] int32, last emitted token of every request.
        num_nodes: N, nodes of the tree, root included; 1 to 512.
        edges: [B, K - 1, R, R] float32, contiguous in R, log-probability of candidate r of position k + 1 behind
            candidate p of position k, nats; `logps` and `logsumexp` of the first position alone are read then. None: a
            position's candidates are as probable behind any path.
        logsumexp: [B, K] float32, subtracted from `logps`. None: they are log-probabilities already.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        The tree, with B rows.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, too many positions, candidates or nodes, tensors on several devices.
    """
    batch, depth, num_ranks = _check_block(tokens)
    device = tokens.device
    check_tensor("logps", logps, shape=(batch, depth, num_ranks), dtype=torch.float32, device=device)
    check_tensor("root", root, shape=(batch,), dtype=torch.int32, device=device)
    check_num_nodes("num_nodes", num_nodes)
    if edges is not None:
        sizes = batch, depth - 1, num_ranks, num_ranks
        check_tensor("edges", edges, shape=sizes, dtype=torch.float32, device=device)
    if logsumexp is not None:
        check_tensor("logsumexp", logsumexp, shape=(batch, depth), dtype=torch.float32, device=device)
    if resolve_backend(tokens, backend) == "reference":
        return reference.tree_grow(tokens, logps, root, num_nodes=num_nodes, edges=edges, logsumexp=logsumexp)

    num_lists = depth if edges is None else 1 + (depth - 1) * num_ranks
    lists = logps.new_empty(batch, num_lists, num_ranks, dtype=torch.int64)
    tree, config = RerankedTree.empty(root, num_nodes), _launch_config(num_nodes)
    outputs = tree.tokens, tree.parent, tree.depth, tree.ancestors, tree.deepest, tree.index
    edge_strides = (0, 0, 0) if edges is None else edges.stride()[:3]
    strides = *logps.stride()[:2], batch_stride(logsumexp), *edge_strides
    block_r = triton.next_power_of_2(num_ranks)
    with on_device(tokens):
        _tree_grow_sort_kernel[(num_lists, batch)](
            logps, logsumexp, edges, lists, *strides, num_ranks, num_lists, BLOCK_R=block_r, num_warps=1
        )
        _tree_grow_kernel[(batch,)](
            tokens,
            lists,
            root,
            *outputs,
            *tokens.stride()[:2],
            depth,
            num_ranks,
            num_nodes,
            num_lists,
            tree.ancestors.shape[2],
            edges is not None,
            **config.kwargs(),
        )
    return tree


def _check_block(tokens: torch.Tensor) -> tuple[int, int, int]:
    """Check the candidates; returns B, K and R."""
    check_tensor("tokens", tokens, shape=(None, None, None), dtype=(torch.int32, torch.int64))
    batch, depth, num_ranks = tokens.shape
    if not (1 <= depth <= MAX_GROWN_DEPTH and 1 <= num_ranks <= MAX_GROWN_RANKS):
        raise ValueError(
            f"tokens: expected up to {MAX_GROWN_DEPTH} positions of up to {MAX_GROWN_RANKS} candidates, at least one "
            f"of each, got shape {list(tokens.shape)}"
        )
    return batch, depth, num_ranks
