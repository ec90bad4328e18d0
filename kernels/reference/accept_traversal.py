"""Eager reference of kernels.accept_traversal: the definition, and what CPU decoding runs.

It is the paper's algorithm 1 with laws over the vocabulary that are subtracted and normalised again after every child.
No weight depends on a decision, and what a node makes of its own arrival weight, laws and children asks for nothing
that happens below it: so the nodes of one depth are computed at once, with a loop over the places of their children.
tests/loop/test_traversal.py has the recursion of the paper, node by node, and proves the law by enumeration.
"""

from collections.abc import Iterator

import torch

from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.walk import RESIDUAL_FLOOR, cut_verdict, draw, softmax_masses

__all__ = ["accept_traversal", "traversal_weights"]


def accept_traversal(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_row: torch.Tensor,
    uniform: torch.Tensor,
    uniform_final: torch.Tensor,
    order: torch.Tensor,
    steps: torch.Tensor,
    *,
    max_depth: int,
    budget: torch.Tensor | None = None,
    stop_tokens: torch.Tensor | None = None,
    upcast: bool = True,
) -> Verdict:
    """Accept the path to one node of a drawn tree, judged as a whole.

    Shapes, dtypes and meaning are those of `specdec.kernels.accept_traversal.accept_traversal`; arguments are not
    checked. `steps` is not needed here, and `upcast=False` computes in float32 instead of float64.
    """
    weight, law = traversal_weights(tokens, parent, logits, draft_logits, draft_row, upcast=upcast)
    is_accepted = uniform < weight
    is_accepted[:, 0] = True  # the root was emitted long ago, and is the last in post-order
    accepted = order[is_accepted[:, order].int().argmax(1)]  # [B]
    last = draw(law[torch.arange(len(tokens), device=tokens.device), accepted], uniform_final)

    above = parent[0].tolist()
    paths = [[node] for node in accepted.tolist()]
    for path in paths:
        while above[path[0]] >= 0:
            path.insert(0, above[path[0]])
    return cut_verdict(tokens, paths, last.tolist(), max_depth=max_depth, budget=budget, stop_tokens=stop_tokens)


def traversal_weights(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_row: torch.Tensor,
    *,
    upcast: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is known of every node before anything is drawn; the arguments are those of `accept_traversal`.

    Returns:
        Weights [B, N], with which each node is accepted once those before it in post-order were refused.
        Laws [B, N, V], what the next root follows if the node is accepted.
    """
    law, draft_laws = (_probs(scores, upcast=upcast) for scores in (logits, draft_logits))
    tiny = torch.finfo(torch.float32).tiny
    weight = law.new_zeros(tokens.shape)  # padding stays at 0
    weight[:, 0] = 1
    for nodes, places in _levels(parent[0].tolist()):
        p, w, rows = law[:, nodes], weight[:, nodes], draft_row[nodes]  # [B, n, V], [B, n], [n]
        q = torch.where((rows >= 0)[:, None], draft_laws[:, rows.clamp(min=0)], 0.0)
        for children in places:
            m = len(children)  # nodes that have this child; p, q and w of the others are final
            token = tokens[:, children, None].long()
            p_token, q_token = p[:, :m].gather(-1, token)[..., 0], q[:, :m].gather(-1, token)[..., 0]
            is_drawn = q_token > 0  # a law of too few tokens fills its list with others
            arrival = (w[:, :m] * p_token / q_token.clamp(min=tiny)).clamp(max=1)
            weight[:, children] = torch.where(is_drawn, arrival, 0.0)

            residual = (w[:, :m, None] * p[:, :m] - q[:, :m]).clamp(min=0)
            mass = residual.sum(-1)
            is_law = is_drawn & (mass > RESIDUAL_FLOOR)  # a smaller residual is rounding: the law stays
            p[:, :m] = torch.where(is_law[..., None], residual / mass.clamp(min=tiny)[..., None], p[:, :m])
            refused = mass + (1 - w[:, :m])
            left = torch.where(refused > RESIDUAL_FLOOR, mass / refused.clamp(min=tiny), 1.0)
            w[:, :m] = torch.where(is_drawn, left, w[:, :m])
            q[:, :m] = q[:, :m].scatter(-1, token, 0.0)
            q[:, :m] /= q[:, :m].sum(-1, keepdim=True).clamp(min=tiny)
        weight[:, nodes], law[:, nodes] = w, p
    return weight, law


def _levels(parent: list[int]) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Per depth the nodes with children, those with the most first; and per place the child of each that has one."""
    children: list[list[int]] = [[] for _ in parent]
    for node, above in enumerate(parent):
        if above >= 0:
            children[above].append(node)
    nodes = [0]
    while nodes := sorted((node for node in nodes if children[node]), key=lambda node: -len(children[node])):
        yield nodes, [[children[n][i] for n in nodes if i < len(children[n])] for i in range(len(children[nodes[0]]))]
        nodes = [child for node in nodes for child in children[node]]


def _probs(scores: torch.Tensor, *, upcast: bool) -> torch.Tensor:
    masses = softmax_masses(scores, upcast=upcast)
    return masses / masses.sum(-1, keepdim=True).clamp(min=1)
