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
"""

import torch

from specdec.kernels.common import library
from specdec.kernels.common.check import check_num_nodes, check_parent, check_tensor
from specdec.kernels.common.dynamic_tree import MergedTree, RerankedTree
from specdec.kernels.common.launch import Backend, resolve_backend
from specdec.kernels.reference.tree_merge import tree_merge as tree_merge_reference

__all__ = ["MAX_POOL", "tree_merge"]

MAX_POOL = 512
"""Most candidates of one request: each is compared with each."""


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
    raise NotImplementedError("tree_merge: the kernel is being written")
