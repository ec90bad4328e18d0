"""Eager reference of kernels.accept_greedy: the definition, and what CPU decoding runs.

Each small tensor becomes a list once, then the walk is plain Python: for a few rows of some 64 nodes that is faster
than any chain of tensor operations.
"""

import torch

from specdec.kernels.common.verdict import Verdict

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
    batch = tokens.shape[0]
    token_rows, target_rows = tokens.tolist(), target_tokens.tolist()
    parent_rows = parent.expand(batch, -1).tolist()
    budgets = [max_depth + 1] * batch if budget is None else budget.tolist()
    stops = set() if stop_tokens is None else set(stop_tokens.tolist())

    paths, counts, next_roots, emissions = [], [], [], []
    for row, target, parents, limit in zip(token_rows, target_rows, parent_rows, budgets, strict=True):
        path = _walk(row, parents, target, min(limit, max_depth + 1), stops)
        emitted = [target[node] for node in path]
        counts.append(len(path) - 1)
        next_roots.append(emitted[-1] if emitted else row[0])
        padding = [-1] * (max_depth + 1 - len(path))
        paths.append(path + padding)
        emissions.append(emitted + padding)

    return Verdict(
        path=tokens.new_tensor(paths).view(batch, max_depth + 1),
        num_accepted=tokens.new_tensor(counts),
        next_root=tokens.new_tensor(next_roots),
        emitted=tokens.new_tensor(emissions).view(batch, max_depth + 1),
    )


def _walk(tokens: list[int], parent: list[int], target: list[int], limit: int, stops: set[int]) -> list[int]:
    """Nodes of the accepted path, the root first, `limit` at most; each emits the target's token at it."""
    if limit <= 0:
        return []
    path = [0]
    while len(path) < limit and target[path[-1]] not in stops:
        node = path[-1]
        children = (j for j in range(node + 1, len(tokens)) if parent[j] == node)
        child = next((j for j in children if tokens[j] == target[node]), None)
        if child is None:
            break
        path.append(child)
    return path
