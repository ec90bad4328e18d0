"""How a drafter's logits become candidate tokens: the best ones, or a sample whose law is known.

A drafter with a network calls `choose(logits, num_ranks)` wherever it needs candidates, and does not know which rule it
is. With `TopK` the tree is deterministic; a sampling rule also hands back the laws it drew from, which lossless
rejection needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Candidates", "Choose", "TopK"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Lists of candidate tokens, one list per law.

    Attributes:
        tokens: [B, M, R] int64; rank 0 is the best, or the first drawn.
        laws: [B, M, V] logits of the law that each list was drawn from; None if the lists were not drawn.
    """

    tokens: torch.Tensor
    laws: torch.Tensor | None = None

    @classmethod
    def cat(cls, parts: Sequence["Candidates"]) -> "Candidates":
        """The lists of several calls, one after the other."""
        laws = [part.laws for part in parts if part.laws is not None]
        return cls(torch.cat([part.tokens for part in parts], 1), torch.cat(laws, 1) if laws else None)


class Choose(Protocol):
    """A rule that picks candidates."""

    def __call__(self, logits: torch.Tensor, num_ranks: int) -> Candidates:
        """Pick `num_ranks` tokens from each row of `logits [B, M, V]`."""
        ...


@dataclass(frozen=True, slots=True)
class TopK:
    """The most probable tokens, best first."""

    def __call__(self, logits: torch.Tensor, num_ranks: int) -> Candidates:
        """As `Choose`."""
        return Candidates(logits.topk(num_ranks, dim=-1).indices)
