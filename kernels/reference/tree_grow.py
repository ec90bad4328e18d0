"""Eager reference of kernels.tree_grow: the definition, and what CPU decoding runs.

Best-first search in plain Python: a heap with the best child that is not yet chosen of every chosen node.
"""

import ctypes
import heapq
import math

import torch

from specdec.kernels.common.dynamic_tree import RerankedTree
from specdec.kernels.reference.tree_rerank import tree_of_nodes

__all__ = ["tree_grow"]


def tree_grow(
    tokens: torch.Tensor,
    logps: torch.Tensor,
    root: torch.Tensor,
    *,
    num_nodes: int,
    edges: torch.Tensor | None = None,
    logsumexp: torch.Tensor | None = None,
) -> RerankedTree:
    """Grow the best tree of a block of candidates.

    Shapes, dtypes and meaning are those of `specdec.kernels.tree_grow.tree_grow`; arguments are not checked.
    """
    num_ranks = tokens.shape[2]
    first = logps if logsumexp is None else logps - logsumexp[..., None]
    # list 0 holds the root's children; without edges list k holds those of every node of depth k, with edges list
    # 1 + (k - 1) R + p those of candidate p at depth k
    lists = first if edges is None else torch.cat([first[:, :1], edges.flatten(1, 2)], 1)
    costs = (-lists).nan_to_num(nan=math.inf, posinf=math.inf, neginf=0.0).clamp(min=0)
    costs, ranks = costs.sort(dim=2, stable=True)  # the most probable first, of equal ones the lowest rank
    max_depth, by_parent = tokens.shape[1], edges is not None
    requests = zip(tokens.tolist(), costs.tolist(), ranks.tolist(), strict=True)
    nodes = [
        [
            (of_position[depth - 1][rank], parent, depth, (depth - 1) * num_ranks + rank)
            for depth, parent, rank in _best_first(own_costs, own_ranks, num_nodes - 1, max_depth, by_parent)
        ]
        for of_position, own_costs, own_ranks in requests
    ]
    return tree_of_nodes(nodes, root, num_nodes)


def _best_first(
    costs: list[list[float]], ranks: list[list[int]], limit: int, max_depth: int, by_parent: bool
) -> list[tuple[int, int, int]]:
    """(depth, parent, rank) of the nodes that best-first search adds to the root, best first; `limit` at most.

    Args:
        costs: of every list, ascending; infinite for what is no candidate.
        ranks: whose costs these are.
        limit: nodes to choose.
        max_depth: K, the largest depth.
        by_parent: whether the list of a node's children depends on the node's rank.
    """
    num_ranks = len(ranks[0])
    heap: list[tuple[float, int, int, int]] = []  # cost of the path, depth, parent, place in the parent's list
    totals, lists = [0.0], [0]  # of every chosen node: the cost of its path, the list of its children

    def reach(depth: int, parent: int, place: int) -> None:
        # a sum of two float32 in float64, rounded to float32, is their sum in float32
        cost = ctypes.c_float(totals[parent] + costs[lists[parent]][place]).value
        if cost < math.inf:
            heapq.heappush(heap, (cost, depth, parent, place))

    if limit > 0:
        reach(1, 0, 0)
    chosen: list[tuple[int, int, int]] = []
    while heap and len(chosen) < limit:
        cost, depth, parent, place = heapq.heappop(heap)
        rank = ranks[lists[parent]][place]
        chosen.append((depth, parent, rank))
        totals.append(cost)
        lists.append(1 + (depth - 1) * num_ranks + rank if by_parent else depth)
        if depth < max_depth:
            reach(depth + 1, len(chosen), 0)
        if place + 1 < num_ranks:
            reach(depth, parent, place + 1)
    return chosen
