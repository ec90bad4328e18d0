"""What the ops of a best-first draft tree return: the beam of one draft pass, and the tree that is kept at the end."""

from dataclasses import dataclass

import torch

__all__ = ["Beam", "MergedTree", "RerankedTree"]


@dataclass(frozen=True, slots=True)
class Beam:
    """The candidates of one level that the next draft pass expands, best first.

    A place that no candidate fills (fewer than `width` are possible) has index -1, row 0, the token of the level's
    first candidate and log-probability -inf: a drafter may run it, and whatever it proposes is never kept.

    Attributes:
        index: [B, width] int32, index of the candidate in the pool.
        row: [B, width] int32, which list the candidate comes from: the entry of the previous beam that is its parent.
        tokens: [B, width] int32.
        logps: [B, width] float32, log-probability of the whole path, nats.
        candidate_logps: [B, M, R] float32, the same for every candidate of the level: what the pool takes.
    """

    index: torch.Tensor
    row: torch.Tensor
    tokens: torch.Tensor
    logps: torch.Tensor
    candidate_logps: torch.Tensor


@dataclass(frozen=True, slots=True)
class RerankedTree:
    """The nodes that were kept of a pool of candidates, each behind its parent; the root first.

    `tree_rerank` lays them out by depth, then by their place in the pool; `tree_grow` in the order it chose them.
    A padding node (the pool had fewer candidates) has parent -1, depth 0 and the token of the root, and sees itself.

    Attributes:
        tokens: [B, N] int32.
        parent: [B, N] int32, `parent[i] < i`; -1 for the root and for padding.
        depth: [B, N] int32, 0 for the root.
        ancestors: [B, N, ceil(N / 32)] int32, bit j % 32 of word j // 32: node j lies on the path from the root to this
            node, which is part of it.
        deepest: [B] int32, depth of the deepest node.
        index: [B, N] int32, index of the node in the pool; -1 for the root and for padding.
    """

    tokens: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    ancestors: torch.Tensor
    deepest: torch.Tensor
    index: torch.Tensor

    @classmethod
    def empty(cls, root: torch.Tensor, num_nodes: int) -> "RerankedTree":
        """Memory for a tree per entry of `root [B]`."""
        batch = root.shape[0]
        return cls(
            tokens=root.new_empty(batch, num_nodes),
            parent=root.new_empty(batch, num_nodes),
            depth=root.new_empty(batch, num_nodes),
            ancestors=root.new_empty(batch, num_nodes, (num_nodes + 31) // 32),
            deepest=root.new_empty(batch),
            index=root.new_empty(batch, num_nodes),
        )


@dataclass(frozen=True, slots=True)
class MergedTree(RerankedTree):
    """The best nodes of what several drafters propose, in the order of their choice, and what each size is worth.

    Attributes:
        index: [B, N] int32, first candidate of the pool that stands for the node; -1 for the root and for padding.
        gains: [G, B, L] float32, entry n: draft tokens that a tree of the best n draft nodes of a group of drafters is
            expected to have accepted, the sum of their reach; 0 at n = 0.
    """

    gains: torch.Tensor
