"""Eager reference of kernels.accept_rejection: the definition, and what CPU decoding runs.

It is the papers' algorithm as they print it: laws over the vocabulary that are subtracted and normalised again after
every rejection. Laws are built for the nodes that the walk visits, and for no others.
"""

from collections.abc import Iterator, Sequence

import torch

from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.walk import RESIDUAL_FLOOR, cut_verdict, draw, softmax_masses

__all__ = ["accept_rejection", "sibling_tries"]


def accept_rejection(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_row: torch.Tensor,
    uniform: torch.Tensor,
    uniform_final: torch.Tensor,
    *,
    replacement: bool,
    max_depth: int,
    budget: torch.Tensor | None = None,
    stop_tokens: torch.Tensor | None = None,
    upcast: bool = True,
) -> Verdict:
    """Accept or reject siblings in turn, each against what the ones before it left of the target's law.

    Shapes, dtypes and meaning are those of `specdec.kernels.accept_rejection.accept_rejection`; arguments are not
    checked. `upcast=False` computes in float32 instead of float64.
    """
    batch, vocab_size = tokens.shape[0], logits.shape[-1]
    token_rows, uniforms, rows = tokens.tolist(), uniform.tolist(), draft_row.tolist()
    parents = parent.expand(batch, -1).tolist()
    budgets = [max_depth + 1] * batch if budget is None else budget.tolist()
    paths: list[list[int]] = []
    laws = []

    def law(scores: torch.Tensor) -> torch.Tensor:
        masses = softmax_masses(scores, upcast=upcast)
        return masses / masses.sum().clamp(min=1)

    for b in range(batch):
        path, p = ([0], law(logits[b, 0])) if budgets[b] > 0 else ([], law(logits[b, 0]))
        while 0 < len(path) <= max_depth and rows[path[-1]] >= 0:
            children = [j for j, above in enumerate(parents[b]) if above == path[-1]]
            q = law(draft_logits[b, rows[path[-1]]])
            siblings = [token_rows[b][j] for j in children]
            accepted = None
            for child, (ratio, residual) in zip(
                children, sibling_tries(p, q, siblings, replacement=replacement), strict=False
            ):
                if uniforms[b][child] < ratio:
                    accepted = child
                    break
                p = residual
            if accepted is None:
                break
            path.append(accepted)
            p = law(logits[b, accepted])
        paths.append(path)
        laws.append(p)

    last = draw(torch.stack(laws) if laws else logits.new_empty(0, vocab_size), uniform_final).tolist()
    return cut_verdict(tokens, paths, last, max_depth=max_depth, budget=budget, stop_tokens=stop_tokens)


def sibling_tries(
    p: torch.Tensor, q: torch.Tensor, siblings: Sequence[int], *, replacement: bool
) -> Iterator[tuple[float, torch.Tensor]]:
    """The tests of one node's children, in order, as long as all are rejected.

    Args:
        p: [V] the target's law p_1.
        q: [V] the draft's law q_1.
        siblings: tokens x_1, x_2, ... of the children.
        replacement: q_i = q; otherwise q_{i+1} is q_i without x_i, normalised.

    Yields:
        p_i(x_i) / q_i(x_i), with which x_i is accepted (1 or more: always), and p_{i+1} = norm(max(0, p_i - q_i)),
        the law of what follows if it is not. No more tests once the residual is no more than rounding, which leaves p_1
        itself, or once nothing is left to draw from.
    """
    target, left = p, 1.0
    for token in siblings:
        p_token, q_token = p[token].item(), q[token].item()
        ratio = p_token / q_token if q_token > 0 else float(p_token > 0)
        residual = (p - q).clamp(min=0)
        mass = residual.sum()
        left *= mass.item()
        if left <= RESIDUAL_FLOOR:
            yield ratio, target
            return
        p = residual / mass
        yield ratio, p
        if not replacement:
            q = q.clone()
            q[token] = 0
            if not q.any():
                return
            q = q / q.sum()
