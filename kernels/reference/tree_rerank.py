"""Eager reference of kernels.tree_rerank: the definition, and what CPU decoding runs.

Best-first search in plain Python: a heap of the candidates whose parent is in the tree, the best one first.
"""

import heapq
import math
from collections.abc import Sequence

import torch

from specdec.kernels.common.dynamic_tree import Beam, RerankedTree

__all__ = ["beam_step", "tree_of_nodes", "tree_rerank"]


def beam_step(
    tokens: torch.Tensor,
    logps: torch.Tensor,
    beam_logps: torch.Tensor,
    *,
    width: int,
    first_index: int = 0,
    logsumexp: torch.Tensor | None = None,
) -> Beam:
    """Choose the best children of a beam.

    Shapes, dtypes and meaning are those of `specdec.kernels.tree_rerank.beam_step`; arguments are not checked.
    """
    batch, _, num_ranks = tokens.shape
    own = logps if logsumexp is None else logps - logsumexp[..., None]
    totals = beam_logps.clamp(max=0)[..., None] + own.clamp(max=0)
    totals = totals.masked_fill(totals.isnan(), -math.inf)

    places = []  # (candidate, total) of every place, row by row
    for row_totals in totals.flatten(1).tolist():
        possible = [i for i, total in enumerate(row_totals) if total > -math.inf]
        best = sorted(possible, key=lambda i: -row_totals[i])[:width]  # ties stay in order
        places.append([(i, row_totals[i]) for i in best] + [(-1, -math.inf)] * (width - len(best)))
    chosen = torch.tensor([[i for i, _ in row] for row in places], device=tokens.device).view(batch, width)
    candidate = chosen.clamp(min=0)  # an empty place shows the first candidate
    return Beam(
        index=torch.where(chosen >= 0, chosen + first_index, -1).to(torch.int32),
        row=(candidate // num_ranks).to(torch.int32),
        tokens=tokens.flatten(1).gather(1, candidate.long()).to(torch.int32),
        logps=totals.new_tensor([[total for _, total in row] for row in places]).view(batch, width),
        candidate_logps=totals,
    )


def tree_rerank(
    tokens: torch.Tensor,
    logps: torch.Tensor,
    parent: torch.Tensor,
    root: torch.Tensor,
    *,
    num_nodes: int,
    max_depth: int,
) -> RerankedTree:
    """Keep the best nodes of a pool of candidates, none without its parent.

    Shapes, dtypes and meaning are those of `specdec.kernels.tree_rerank.tree_rerank`; arguments are not checked.
    """
    num_ranks = tokens.shape[2]
    nodes = []  # of every request
    for pool_tokens, pool_logps, lists in zip(
        tokens.flatten(1).tolist(), logps.flatten(1).tolist(), parent.tolist(), strict=True
    ):
        chosen = sorted(_best_first(pool_logps, lists, num_ranks, num_nodes - 1, max_depth))
        node_of = {-1: 0} | {i: node for node, (_, i) in enumerate(chosen, 1)}
        nodes.append([(pool_tokens[i], node_of[lists[i // num_ranks]], depth, i) for depth, i in chosen])
    return tree_of_nodes(nodes, root, num_nodes)


def tree_of_nodes(
    nodes: Sequence[Sequence[tuple[int, int, int, int]]], root: torch.Tensor, num_nodes: int
) -> RerankedTree:
    """The tree of every request.

    Args:
        nodes: per request (token, parent, depth, index) of nodes 1, 2, ..., each behind its parent; at most
            `num_nodes - 1`. The rest is padding.
        root: [B] int32, token of node 0 and of the padding.
        num_nodes: N, nodes of the result, root included.
    """
    batch, num_words = root.shape[0], (num_nodes + 31) // 32
    numbers: list[list[object]] = [[], [], [], []]  # tokens, parents, depths and indices of every request
    words: list[list[list[int]]] = []
    deepest: list[int] = []
    for root_token, row in zip(root.tolist(), nodes, strict=True):
        padding = [(root_token, -1, 0, -1)] * (num_nodes - 1 - len(row))
        tokens, parents, depths, indices = zip((root_token, -1, 0, -1), *row, *padding, strict=True)
        paths: list[int] = []  # bit j of a node's path: node j lies on it
        for node, above in enumerate(parents):
            paths.append(1 << node | (paths[above] if above >= 0 else 0))
        for rows, values in zip(numbers, (tokens, parents, depths, indices), strict=True):
            rows.append(values)
        words.append([[path >> 32 * w & 0xFFFFFFFF for w in range(num_words)] for path in paths])
        deepest.append(max(depths))

    table = torch.tensor(numbers, dtype=torch.int64).view(4, batch, num_nodes).to(root)
    token, parent, depth, index = (values.clone() for values in table)  # the results of an op share no memory
    # through int64: bit 31 of a word is the sign of an int32
    ancestors = torch.tensor(words, dtype=torch.int64).view(batch, num_nodes, num_words).to(root)
    deepest_nodes = torch.tensor(deepest, dtype=torch.int64).to(root)
    return RerankedTree(token, parent, depth, ancestors, deepest_nodes, index)


def _best_first(
    logps: list[float], parent: list[int], num_ranks: int, limit: int, max_depth: int
) -> list[tuple[int, int]]:
    """(depth, index in the pool) of the nodes that best-first search adds to the root; `limit` at most."""
    children: dict[int, list[int]] = {}
    for m, above in enumerate(parent):
        children.setdefault(above, []).extend(range(m * num_ranks, (m + 1) * num_ranks))

    heap: list[tuple[float, int, int]] = []  # (-log-probability, depth, index): of equal ones, the shallowest first

    def reach(children_of: int, cost: float, depth: int) -> None:
        for i in children.get(children_of, ()):
            child_cost = max(-logps[i], cost)  # a child is never better than its parent
            if depth <= max_depth and child_cost < math.inf and not math.isnan(logps[i]):
                heapq.heappush(heap, (child_cost, depth, i))

    reach(-1, 0.0, 1)
    chosen: list[tuple[int, int]] = []
    while heap and len(chosen) < limit:
        cost, depth, i = heapq.heappop(heap)
        chosen.append((depth, i))
        reach(i, cost, depth + 1)
    return chosen
