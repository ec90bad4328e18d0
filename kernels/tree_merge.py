"""The best tree of what several drafters propose, and what trees of the best nodes are worth to every group of them.

Equation:   reach[i] = min(chance[i], 1) * reach[parent[i]], the root's is 1. Candidates with the same tokens on their
            path from the root are one node, whose reach is the largest of theirs and whose index the first of them; a
            node's children are those of any of its candidates.
            The N - 1 nodes of the largest reach, of equal reach the shallowest, then the one of the lowest index
            gains[n] = sum of the n largest reaches
Source:     a tree's expected accepted tokens are the sum of the reach of its nodes: Sequoia (arXiv:2402.12374) section
            3.1, OPT-Tree (arXiv:2406.17276) section 3.2; the merging of several proposals is SpecInfer's
            (arXiv:2305.09781), section 3
Reference:  kernels/reference/tree_merge.py (exact but for gains; a trie)

Shapes:     B requests, M candidates each, G groups of drafters
            tokens  [B, M]  int32
            parent  [B, M]  int32, place in the pool of the candidate behind which it stands, an earlier place; -1: the
                            root
            chance  [B, M]  fp32, probability that it is accepted if its parent was
            member  [M]     int32, 0 to 30, the drafter that proposes it
            root    [B]     int32, the last emitted token
            groups  [G]     int32, bit m: drafter m belongs to the group. The tree is that of group 0
            the result is described in kernels/common/dynamic_tree.py
Cost:       reads 4 * (3 * B + G) * M, writes 4 * B * (N * (4 + N / 32) + G * L); about 11 * G * M * M integer
            operations. A few kB: bound by latency, one program per request and group
Padding:    what is no candidate stands for no node; nodes without a candidate are padding. Behind the last node, gains
            stay what all nodes are worth
Numerics:   reach is an fp32 product in the order of the path, rounded at each step, and all comparisons are exact, on
            the bits of the fp32 numbers; gains are fp32 sums in an order of their own. Paths are compared by 64-bit
            hashes: of M candidates two different ones are taken for one with a probability of about M * M / 2^65. Then
            a node has the parent or the reach of another path, a worse proposal and never a wrong text, since what a
            step emits depends on the tree that was scored alone
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_num_nodes, check_parent, check_tensor
from specdec.kernels.common.dynamic_tree import MergedTree, RerankedTree
from specdec.kernels.common.launch import Backend, LaunchConfig, on_device, resolve_backend
from specdec.kernels.common.primitives import store_ancestors
from specdec.kernels.reference.tree_merge import tree_merge as tree_merge_reference

__all__ = ["MAX_DRAFTERS", "MAX_POOL", "tree_merge"]

MAX_DRAFTERS = 31
"""Most drafters: the bits of an int32 without its sign."""

MAX_POOL = 512
"""Most candidates of one request: each is compared with each."""

_NOTHING = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # the key of what is no node
_ONE = tl.constexpr(0x3F800000)  # bits of 1.0, the largest reach


@triton.jit
def _path_of(path_above, token):
    """64-bit hash of a path, from that of its parent, 0 for the root: a permutation for every token."""
    x = (path_above + 0x9E3779B97F4A7C15) ^ token.to(tl.uint64)
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    return x ^ (x >> 33)


@triton.jit
def _walk_down(token, parent, own, MAX_DEPTH: tl.constexpr):
    """Reach, depth and path of every candidate, a level at a time; the reach is 0 of what can be no node."""
    is_first = parent < 0
    reach = tl.where(is_first & (MAX_DEPTH > 0), own, 0.0)
    depth = tl.full(own.shape, 1, tl.int32)
    path = _path_of(tl.zeros(own.shape, tl.uint64), token)
    above = tl.maximum(parent, 0)
    own = tl.where(is_first, 0.0, own)
    for d in range(2, MAX_DEPTH + 1):
        product = own * tl.gather(reach, above, 0)
        is_new = (reach == 0.0) & (product > 0.0)
        path = tl.where(is_new, _path_of(tl.gather(path, above, 0), token), path)
        depth = tl.where(is_new, d, depth)
        reach = tl.where(is_new, product, reach)
    return reach, depth, path


@triton.jit
def _merge_equal(path, reach, M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr):
    """Of every candidate, the first one with its path, and the largest reach of all of them."""
    offs_t = tl.arange(0, BLOCK_T)
    first = tl.full([BLOCK_M], BLOCK_M - 1, tl.int32)
    largest = tl.zeros([BLOCK_M], tl.float32)
    for begin in range(0, M, BLOCK_T):
        j = begin + offs_t  # [BLOCK_T]
        their_reach = tl.gather(reach, j, 0)
        is_same = (tl.gather(path, j, 0)[:, None] == path[None, :]) & (their_reach > 0.0)[:, None]
        first = tl.minimum(first, tl.min(tl.where(is_same, j[:, None], BLOCK_M - 1), 0))
        largest = tl.maximum(largest, tl.max(tl.where(is_same, their_reach[:, None], 0.0), 0))
    return first, largest


@triton.jit
def _place_of(key, M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr):
    """How many keys are lower than each."""
    offs_t = tl.arange(0, BLOCK_T)
    place = tl.zeros([BLOCK_M], tl.int32)
    for begin in range(0, M, BLOCK_T):
        theirs = tl.gather(key, begin + offs_t, 0)
        place += tl.sum((theirs[:, None] < key[None, :]).to(tl.int32), 0)
    return place


@triton.jit
def _store_gains(row_ptr, place, reach, is_node, num_found, L: tl.constexpr, BLOCK_L: tl.constexpr):
    """Store what the best n nodes are worth; the row itself holds reaches by place in between."""
    tl.store(row_ptr + place, reach, mask=is_node & (place < L))
    tl.debug_barrier()  # what one thread stored another reads
    offs_l = tl.arange(0, BLOCK_L)
    worth = tl.load(row_ptr + offs_l, mask=(offs_l > 0) & (offs_l <= num_found) & (offs_l < L), other=0.0)
    tl.debug_barrier()  # and has read before the next one stores
    tl.store(row_ptr + offs_l, tl.cumsum(worth, 0), mask=offs_l < L)


@triton.jit(do_not_specialize=["stride_tb", "stride_pb", "stride_cb"])
def _tree_merge_kernel(
    tokens_ptr,  # [B, M]
    parent_ptr,  # [B, M]
    chance_ptr,  # [B, M]
    member_ptr,  # [M]
    root_ptr,  # [B]
    groups_ptr,  # [G]
    out_tokens_ptr,  # [B, N]
    out_parent_ptr,  # [B, N]
    out_depth_ptr,  # [B, N]
    ancestors_ptr,  # [B, N, NUM_WORDS]
    deepest_ptr,  # [B]
    index_ptr,  # [B, N]
    gains_ptr,  # [G, B, L]
    stride_tb,
    stride_pb,
    stride_cb,
    M: tl.constexpr,
    N: tl.constexpr,
    L: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """One program merges the candidates of one group of drafters for one request, all of them in registers."""
    b = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    token = tl.load(tokens_ptr + b * stride_tb + offs_m, mask=mask_m, other=0)
    parent = tl.load(parent_ptr + b * stride_pb + offs_m, mask=mask_m, other=-1)
    chance = tl.load(chance_ptr + b * stride_cb + offs_m, mask=mask_m, other=0.0)
    member = tl.load(member_ptr + offs_m, mask=mask_m, other=-1)
    is_drafter = (member >= 0) & (member < 31)
    is_taken = is_drafter & (((tl.load(groups_ptr + g) >> tl.where(is_drafter, member, 0)) & 1) > 0)
    is_taken = is_taken & (parent < offs_m) & (chance > 0.0)  # NaN is not above 0
    own = tl.where(is_taken, tl.where(chance > 1.0, 1.0, chance), 0.0)
    parent = tl.where(is_taken, parent, -1)
    reach, depth, path = _walk_down(token, parent, own, MAX_DEPTH)
    first, reach = _merge_equal(path, reach, M, BLOCK_M, BLOCK_T)

    # one number per node that orders by (reach descending, depth, index)
    is_node = (first == offs_m) & (reach > 0.0)
    cost = _ONE - reach.to(tl.int32, bitcast=True)
    key = tl.where(is_node, (cost.to(tl.int64) << 32) | (depth << 16 | offs_m).to(tl.int64), _NOTHING)
    place = 1 + _place_of(key, M, BLOCK_M, BLOCK_T)
    num_found = tl.sum(is_node.to(tl.int32), 0)
    _store_gains(gains_ptr + (g * tl.num_programs(0) + b) * L, place, reach, is_node, num_found, L, BLOCK_L)

    if g == 0:
        # the node of the parent: the place of the first candidate with its path
        node_above = tl.gather(tl.gather(place, first, 0), tl.maximum(parent, 0), 0)
        chosen = is_node & (place < N)
        out = b * N + place
        tl.store(out_tokens_ptr + out, token, mask=chosen)
        tl.store(out_parent_ptr + out, tl.where(parent < 0, 0, node_above), mask=chosen)
        tl.store(out_depth_ptr + out, depth, mask=chosen)
        tl.store(index_ptr + out, offs_m, mask=chosen)
        tl.store(deepest_ptr + b, tl.max(tl.where(chosen, depth, 0), 0))
        offs_n = tl.arange(0, BLOCK_N)
        out = b * N + offs_n
        rest = (offs_n < N) & ((offs_n == 0) | (offs_n > num_found))  # the root and the padding
        tl.store(out_tokens_ptr + out, tl.load(root_ptr + b), mask=rest)
        tl.store(out_parent_ptr + out, -1, mask=rest)
        tl.store(out_depth_ptr + out, 0, mask=rest)
        tl.store(index_ptr + out, -1, mask=rest)
        store_ancestors(out_parent_ptr, ancestors_ptr, b, N, NUM_WORDS, MAX_DEPTH, BLOCK_N, BLOCK_W)


def _launch_config(pool_size: int, num_nodes: int, num_gains: int) -> LaunchConfig:
    """A candidate per lane, two in the largest pool, compared with tiles of 16; at most 32 ancestor words."""
    block_m, block_n = triton.next_power_of_2(pool_size), triton.next_power_of_2(num_nodes)
    blocks = {
        "BLOCK_M": block_m,
        "BLOCK_T": min(16, block_m),
        "BLOCK_N": block_n,
        "BLOCK_W": triton.next_power_of_2(triton.cdiv(num_nodes, 32)),
        "BLOCK_L": triton.next_power_of_2(num_gains),
    }
    return LaunchConfig(blocks, num_warps=max(1, min(8, block_m // 32), block_n * blocks["BLOCK_W"] // 1024))


def _empty_tree(root: torch.Tensor, groups: torch.Tensor, num_nodes: int, num_gains: int) -> MergedTree:
    """Memory for the result."""
    tree = RerankedTree.empty(root, num_nodes)
    gains = root.new_empty(groups.shape[0], root.shape[0], num_gains, dtype=torch.float32)
    return MergedTree(tree.tokens, tree.parent, tree.depth, tree.ancestors, tree.deepest, tree.index, gains)


@library.op(fake=_empty_tree)
def tree_merge(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    chance: torch.Tensor,
    member: torch.Tensor,
    root: torch.Tensor,
    groups: torch.Tensor,
    *,
    num_nodes: int,
    num_gains: int,
    max_depth: int,
    backend: Backend | None = None,
) -> MergedTree:
    """Merge the candidates of several drafters, and keep the best nodes.

    Nodes come in the order in which they are chosen, so that the first n of them are the best tree of n nodes. What it
    is worth is in `gains`, for every group of drafters as if the others had proposed nothing.

    Args:
        tokens: [B, M] int32, contiguous in M, candidates of all drafters; M is 1 to 512.
        parent: [B, M] int32, contiguous in M, place in the pool of the candidate behind which each stands, an earlier
            one; -1 for the root. Checked on the CPU only; on a GPU a candidate of another parent is none.
        chance: [B, M] float32, contiguous in M, how often such a candidate is right if its parent is. Above 1 counts as
            1; 0, negative or NaN is no candidate, nor is what stands behind it.
        member: [M] int32, number of the drafter that proposes each candidate, 0 to 30.
        root: [B] int32, last emitted token of every request.
        groups: [G] int32, at least one; bit m is set if drafter m belongs to the group. The tree is that of group 0.
        num_nodes: N, nodes of the tree, root included; 1 to 512.
        num_gains: L, entries of `gains`, 1 or more: trees of 0 to L - 1 draft nodes.
        max_depth: largest depth of a node; deeper candidates are not taken.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        The tree, with B rows, and the gains [G, B, L].

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, too many candidates or nodes, no group, a parent that is no earlier place
            (CPU only), no gains, a negative depth, tensors on several devices.
    """
    check_tensor("tokens", tokens, shape=(None, None), dtype=torch.int32)
    batch, pool_size = tokens.shape
    device = tokens.device
    if not 1 <= pool_size <= MAX_POOL:
        raise ValueError(f"tokens: expected 1 to {MAX_POOL} candidates per request, got {pool_size}")
    check_tensor("parent", parent, shape=(batch, pool_size), dtype=torch.int32, device=device)
    check_parent(parent)
    check_tensor("chance", chance, shape=(batch, pool_size), dtype=torch.float32, device=device)
    check_tensor("member", member, shape=(pool_size,), dtype=torch.int32, device=device)
    check_tensor("root", root, shape=(batch,), dtype=torch.int32, device=device)
    check_tensor("groups", groups, shape=(None,), dtype=torch.int32, device=device)
    if groups.shape[0] == 0:
        raise ValueError("groups: expected at least one, got 0")
    check_num_nodes("num_nodes", num_nodes)
    if num_gains < 1:
        raise ValueError(f"num_gains: expected 1 or more, got {num_gains}")
    if max_depth < 0:
        raise ValueError(f"max_depth: expected 0 or more, got {max_depth}")
    sizes = {"num_nodes": num_nodes, "num_gains": num_gains, "max_depth": max_depth}
    if resolve_backend(tokens, backend) == "reference":
        return tree_merge_reference(tokens, parent, chance, member, root, groups, **sizes)

    tree, config = _empty_tree(root, groups, num_nodes, num_gains), _launch_config(pool_size, num_nodes, num_gains)
    tensors = tokens, parent, chance, member, root, groups
    outputs = tree.tokens, tree.parent, tree.depth, tree.ancestors, tree.deepest, tree.index, tree.gains
    strides = tokens.stride(0), parent.stride(0), chance.stride(0)
    numbers = pool_size, num_nodes, num_gains, tree.ancestors.shape[2], min(max_depth, pool_size)
    with on_device(tokens):
        _tree_merge_kernel[(batch, groups.shape[0])](*tensors, *outputs, *strides, *numbers, **config.kwargs())
    return tree
