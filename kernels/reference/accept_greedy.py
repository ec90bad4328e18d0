"""Eager reference of kernels.accept_greedy: the definition, and what CPU decoding runs.

Each small tensor becomes a list once, then the walk is plain Python: for a few rows of some 64 nodes that is faster
than any chain of tensor operations.
"""

import torch

from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.walk import cut_verdict

__all__ = ["accept_greedy"]


def accept_greedy(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    target_tokens: torch.Tensor,
    *,
    max_depth: int,
    budget: torch.Tensor | None = None,
    stop_tokens: torch.Tensor | None = None,
) -> Verdict:
    """Accept the longest path from the root that the target itself would have produced.

    Shapes, dtypes and meaning are those of `specdec.kernels.accept_greedy.accept_greedy`; arguments are not checked.
    """
    parents = parent.expand(len(tokens), -1).tolist()
    paths, last = [], []
    for row, above, target in zip(tokens.tolist(), parents, target_tokens.tolist(), strict=True):
        path: list[int] = []
        child: int | None = 0
        while child is not None and len(path) <= max_depth:
            path.append(child)
            node, wanted = child, target[child]
            child = next((j for j in range(node + 1, len(row)) if above[j] == node and row[j] == wanted), None)
        paths.append(path)
        last.append(target[path[-1]])
    return cut_verdict(tokens, paths, last, max_depth=max_depth, budget=budget, stop_tokens=stop_tokens)
