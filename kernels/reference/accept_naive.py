"""Eager reference of kernels.accept_naive: the definition, and what CPU decoding runs."""

import torch

from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.walk import draw, softmax_masses
from specdec.kernels.reference.accept_greedy import accept_greedy

__all__ = ["accept_naive"]


def accept_naive(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    logits: torch.Tensor,
    uniform: torch.Tensor,
    *,
    max_depth: int,
    budget: torch.Tensor | None = None,
    stop_tokens: torch.Tensor | None = None,
    upcast: bool = True,
) -> Verdict:
    """Draw the target's own token at every node and follow it through the tree.

    Shapes, dtypes and meaning are those of `specdec.kernels.accept_naive.accept_naive`; arguments are not checked.
    `upcast=False` computes in float32 instead of float64.
    """
    drawn = draw(softmax_masses(logits, upcast=upcast), uniform).int()  # y ~ p, once per node
    return accept_greedy(tokens, parent, drawn, max_depth=max_depth, budget=budget, stop_tokens=stop_tokens)
