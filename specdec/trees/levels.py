"""The passes of a drafter that grows a static tree depth by depth, feeding itself the nodes that it has proposed.

The root has been fed with the committed text, and the deepest nodes are never fed. Nodes without children may be left
out too, unless their keys and values are wanted later. What is fed takes the slots behind the drafter's committed text,
in node order.
"""

from dataclasses import dataclass

import numpy as np
import torch

from specdec.kernels.common.words import pack_words
from specdec.trees.shape import TreeShape

__all__ = ["TreeLevel", "plan_levels"]


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """One pass: the n nodes of one depth that are fed, of which m have children and so a list of candidates each.

    Attributes:
        first_slot: slot of the first of them, counted from the first one behind the committed text.
        depth: [1, n] int32, depth of each in the tree less one: the root's children are the first to be fed.
        ancestors: [1, n, W] int32 words over those slots.
        parent: [n] int64, place of each one's parent among the lists of the pass before (0 in the first pass, whose
            parents are the root).
        candidate: [n] int64, place of each in those lists, of `max_rank + 1` tokens and one after the other.
        inner: [m] int64, places of those with children.
    """

    first_slot: int
    depth: torch.Tensor
    ancestors: torch.Tensor
    parent: torch.Tensor
    candidate: torch.Tensor
    inner: torch.Tensor


def plan_levels(shape: TreeShape, device: torch.device, *, leaves: bool = False) -> tuple[TreeLevel, ...]:
    """The passes that draft `shape` after the one that gives the root's children; none for a tree of depth 1.

    Args:
        shape: the tree.
        device: where the tables go.
        leaves: feed every node but the deepest, and not those with children alone.
    """

    def table(values: object) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=torch.int64, device=device)

    levels, before = [], [0]
    slots: list[int] = []
    for nodes in shape.levels[1:-1]:
        fed = [node for node in nodes if leaves or shape.children[node]]
        first_slot = len(slots)
        slots += fed
        parents = [before.index(shape.parent[node]) for node in fed]
        ranks = [shape.rank[node] for node in fed]
        seen = shape.ancestors[np.ix_(fed, slots)]
        before = [node for node in fed if shape.children[node]]
        levels.append(
            TreeLevel(
                first_slot=first_slot,
                depth=torch.from_numpy(shape.depth[fed] - 1).to(device)[None],
                ancestors=pack_words(torch.from_numpy(seen)).to(device)[None],
                parent=table(parents),
                candidate=table(parents) * (shape.max_rank + 1) + table(ranks),
                inner=table([fed.index(node) for node in before]),
            )
        )
    return tuple(levels)
