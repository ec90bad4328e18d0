"""Eager reference of kernels.tree_merge: the definition, and what CPU decoding runs.

A trie in plain Python: equal paths are one node, and of a few dozen candidates nothing is faster on a CPU.
"""

from collections.abc import Sequence
from ctypes import c_float
from itertools import accumulate

import torch

from specdec.kernels.common.dynamic_tree import MergedTree
from specdec.kernels.reference.tree_rerank import tree_of_nodes

__all__ = ["tree_merge"]

_ROOT = -1


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
) -> MergedTree:
    """Merge the candidates of several drafters, and keep the best nodes.

    Shapes, dtypes and meaning are those of `specdec.kernels.tree_merge.tree_merge`; arguments are not checked.
    """
    members, masks = member.tolist(), groups.tolist()
    pools = list(zip(tokens.tolist(), parent.tolist(), chance.tolist(), strict=True))
    gains: list[list[list[float]]] = [[] for _ in masks]
    nodes = []
    for pool in pools:
        for place, mask in enumerate(masks):
            trie = _trie(*pool, [mask >> one & 1 for one in members], max_depth)
            best = sorted(range(len(trie)), key=lambda node: (-trie[node][3], trie[node][2], trie[node][4]))
            worth = [*accumulate((trie[node][3] for node in best[: num_gains - 1]), initial=0.0)]
            gains[place].append(worth + worth[-1:] * (num_gains - len(worth)))
            if place == 0:
                node_of = {_ROOT: 0} | {node: number for number, node in enumerate(best[: num_nodes - 1], 1)}
                kept = [trie[node] for node in best[: num_nodes - 1]]
                nodes.append([(token, node_of[above], depth, index) for token, above, depth, _, index in kept])
    tree = tree_of_nodes(nodes, root, num_nodes)
    worths = torch.tensor(gains, dtype=torch.float32).view(len(masks), len(pools), num_gains).to(chance.device)
    return MergedTree(tree.tokens, tree.parent, tree.depth, tree.ancestors, tree.deepest, tree.index, worths)


def _trie(
    tokens: Sequence[int], parent: Sequence[int], chance: Sequence[float], taken: Sequence[int], max_depth: int
) -> list[tuple[int, int, int, float, int]]:
    """(token, node above or -1, depth, reach, first candidate) of every different path of the candidates taken."""
    found: dict[tuple[int, int], int] = {}
    nodes: list[tuple[int, int, int, float, int]] = []
    node_of, reach_of = [_ROOT] * len(tokens), [0.0] * len(tokens)
    for index, (token, above, own, is_taken) in enumerate(zip(tokens, parent, chance, taken, strict=True)):
        if not is_taken or not own > 0:
            continue
        # the product of two float32, rounded to float32
        reach = c_float(min(own, 1.0) * (1.0 if above < 0 else reach_of[above])).value
        if not reach > 0:  # nor is anything behind what is not taken
            continue
        depth, node_above = (1, _ROOT) if above < 0 else (nodes[node_of[above]][2] + 1, node_of[above])
        if depth > max_depth:
            continue
        node = found.setdefault((node_above, token), len(nodes))
        if node == len(nodes):
            nodes.append((token, node_above, depth, reach, index))
        elif reach > nodes[node][3]:
            nodes[node] = (*nodes[node][:3], reach, nodes[node][4])
        node_of[index], reach_of[index] = node, reach
    return nodes
