"""Eager reference of kernels.accept_typical: the definition, and what CPU decoding runs."""

import math

import torch

from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.walk import cut_verdict, draw, softmax_masses

__all__ = ["accept_typical"]


def accept_typical(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    logits: torch.Tensor,
    uniform: torch.Tensor | None,
    *,
    max_depth: int,
    threshold: float,
    alpha: float,
    budget: torch.Tensor | None = None,
    stop_tokens: torch.Tensor | None = None,
    upcast: bool = True,
) -> Verdict:
    """Accept the longest path of tokens that the target finds typical.

    Shapes, dtypes and meaning are those of `specdec.kernels.accept_typical.accept_typical`; arguments are not checked.
    `upcast=False` computes in float32 instead of float64.
    """
    batch, num_nodes = tokens.shape
    parents = parent.expand(batch, -1)
    p = softmax_masses(logits, upcast=upcast)
    p = p / p.sum(-1, keepdim=True).clamp(min=1)
    entropy = -torch.xlogy(p, p).sum(-1)  # H
    bound = (alpha * (-entropy).exp()).clamp(max=threshold)

    above = parents.clamp(min=0).long()
    has_parent = (parents >= 0) & (tokens >= 0)
    token = tokens.where(has_parent, 0).long()
    p_token = p[torch.arange(batch, device=p.device)[:, None], above, token]
    accepted = (has_parent & (p_token > bound.gather(1, above))).tolist()
    logps = p_token.log().tolist()

    paths = []
    for b, row in enumerate(parents.tolist()):
        found = {0: (0, 0.0)}  # accepted nodes: depth, sum of log p
        for j in range(1, num_nodes):
            if accepted[b][j] and row[j] in found and found[row[j]][0] < max_depth:
                depth, total = found[row[j]]
                found[j] = depth + 1, total + logps[b][j]
        last = max(found, key=lambda j: (*found[j], -j))
        path = [last]
        while path[-1] > 0:
            path.append(row[path[-1]])
        paths.append(path[::-1])

    ends = torch.tensor([path[-1] for path in paths], dtype=torch.int64, device=p.device)
    laws = p[torch.arange(batch, device=p.device), ends]
    if uniform is None:
        scores = logits[torch.arange(batch, device=p.device), ends].float()
        last_tokens = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).argmax(-1)
    else:
        last_tokens = draw(laws, uniform)
    return cut_verdict(tokens, paths, last_tokens.tolist(), max_depth=max_depth, budget=budget, stop_tokens=stop_tokens)
