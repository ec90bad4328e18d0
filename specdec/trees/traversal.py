"""A tree's topology as traversal verification needs it, `specdec.kernels.accept_traversal`.

A path is accepted as a whole and judged from its end: a node is decided after all that is below it and below its
earlier siblings, which is post-order. The weights with which nodes are accepted go the other way: a node's comes from
its parent's and from the siblings before it, so nodes that are as many such steps from the root are judged at once.
"""

from dataclasses import dataclass

import numpy as np
import torch

from specdec.trees.shape import TreeShape

__all__ = ["TraversalTables"]


@dataclass(frozen=True, slots=True)
class TraversalTables:
    """Tables of a tree on the device. A step must not copy them there: it could not be captured.

    Attributes:
        order: [N] int32, the nodes in post-order.
        steps: [L, K] int32, per step the nodes that are judged at once, -1 padded; none for the root alone.
    """

    order: torch.Tensor
    steps: torch.Tensor

    @classmethod
    def of(cls, shape: TreeShape, device: torch.device) -> "TraversalTables":
        """The tables of a tree."""
        step = [0] * shape.num_nodes
        for node, children in enumerate(shape.children):
            for place, child in enumerate(children):
                step[child] = step[node] + place + 1
        nodes = [[node for node in range(1, shape.num_nodes) if step[node] == i] for i in range(1, max(step) + 1)]
        steps = np.full((len(nodes), max(map(len, nodes), default=0)), -1, dtype=np.int32)
        for row, listed in zip(steps, nodes, strict=True):
            row[: len(listed)] = listed
        order = np.array(_post_order(shape), dtype=np.int32)
        return cls(torch.from_numpy(order).to(device), torch.from_numpy(steps).to(device))


def _post_order(shape: TreeShape) -> list[int]:
    """All nodes, children before parents, and siblings with all below them in node order."""
    reversed_order, left = [], [0]
    while left:
        reversed_order.append(left.pop())
        left += shape.children[reversed_order[-1]]
    return reversed_order[::-1]
