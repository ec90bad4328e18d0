"""The best tokens of a language-model head and what drafting needs beside them."""

from dataclasses import dataclass

import torch

__all__ = ["TopK"]


@dataclass(frozen=True, slots=True)
class TopK:
    """The k largest logits of every row of every head, best first; equal logits in the order of their token ids.

    Attributes:
        values: [B, K, k] fp32, logits.
        tokens: [B, K, k] int32, their token ids.
        logsumexp: [B, K] fp32, over the whole vocabulary; `values - logsumexp` are log-probabilities in nats.
        has_nan: [B, K] bool, the row had a NaN logit; it counts as -inf.
    """

    values: torch.Tensor
    tokens: torch.Tensor
    logsumexp: torch.Tensor
    has_nan: torch.Tensor
