"""The passes of a drafter that grows a static tree depth by depth, feeding itself only the nodes that have children.

A leaf is proposed but never fed, and the root has been fed with the committed text; what remains are the inner nodes.
They take the slots behind the drafter's committed text, in node order.
"""

from dataclasses import dataclass

import numpy as np
import torch

from specdec.kernels.common.words import pack_words
from specdec.trees.shape import TreeShape

__all__ = ["TreeLevel", "plan_levels"]


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """One pass: the n inner nodes of one depth.

    Attributes:
        first_slot: slot of the first of them, counted from the first one behind the committed text.
        depth: [1, n] int32, depth of each in the tree less one: the root's children are the first to be fed.
        ancestors: [1, n, W] int32 words over those slots.
        parent: [n] int64, place of each one's parent among the inputs of the pass before (0 in the first pass, whose
            parents are the root).
        candidate: [n] int64, place of each in that pass's candidates, lists of `max_rank + 1` one after the other.
    """

    first_slot: int
    depth: torch.Tensor
    ancestors: torch.Tensor
    parent: torch.Tensor
    candidate: torch.Tensor


def plan_levels(shape: TreeShape, device: torch.device) -> tuple[TreeLevel, ...]:
    """The passes that draft `shape` after the one that gives the root's children; none for a tree of depth 1."""
    inner = [node for node in range(1, shape.num_nodes) if shape.children[node]]
    seen = shape.ancestors[np.ix_(inner, inner)]
    levels, before = [], [0]
    for nodes in shape.levels[1:]:
        fed = [node for node in nodes if shape.children[node]]
        if not fed:
            break
        first_slot = inner.index(fed[0])
        stop = first_slot + len(fed)
        parents = [before.index(shape.parent[node]) for node in fed]
        ranks = [shape.rank[node] for node in fed]
        words = pack_words(torch.from_numpy(seen[None, first_slot:stop, :stop]))  # slots up to this level's last
        levels.append(
            TreeLevel(
                first_slot=first_slot,
                depth=torch.from_numpy(shape.depth[fed] - 1).to(device)[None],
                ancestors=words.to(device),
                parent=torch.tensor(parents, device=device),
                candidate=torch.tensor(parents, device=device) * (shape.max_rank + 1)
                + torch.tensor(ranks, device=device),
            )
        )
        before = fed
    return tuple(levels)
