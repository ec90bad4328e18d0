"""Which tokens the laws of a training step are over: the whole vocabulary, or candidates that stand for all of it.

Equation:   q(v) = exp(z_v + w_v) / sum over candidates u of exp(z_u + w_u);  w = 0 for tokens that are always among
            them, w = log(R / r) for r tokens drawn from the R others, each of which stands for R / r of these
Source:     sampled softmax (Jean et al., arXiv:1412.2007), with uniform draws; the target's law is estimated alike

A vocabulary of 49,152 tokens makes the LM head the largest part of a training step of a small network. Always among the
candidates are the labels of the step and the most frequent tokens of the texts, where nearly all of any law lies.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["Vocabulary", "draw_candidates"]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a step's laws.

    Attributes:
        tokens: [n] int64 distinct ids, in any order; None for the whole vocabulary in its order.
        log_weights: [n] float32, w of the equation; None where all are 0.
        places: [V] int64 place of every token among `tokens`, -1 for those that are not there; None where `tokens` is.
    """

    tokens: torch.Tensor | None = None
    log_weights: torch.Tensor | None = None
    places: torch.Tensor | None = None

    @classmethod
    def of(cls, tokens: torch.Tensor, vocab_size: int, log_weights: torch.Tensor | None = None) -> "Vocabulary":
        """These tokens of `vocab_size`."""
        places = torch.full((vocab_size,), -1, dtype=torch.int64, device=tokens.device)
        places[tokens] = torch.arange(len(tokens), device=tokens.device)
        return cls(tokens, log_weights, places)

    def logits(self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[N, n] float32 logits, weights included, of an LM head [V, C] with bias [V] on states [N, C]."""
        return self.weighted(self.products(states, weight, bias))

    def products(self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As `logits`, without the weights of its tokens and in the dtype of `weight`."""
        if self.tokens is not None:
            weight, bias = weight[self.tokens], None if bias is None else bias[self.tokens]
        return F.linear(states.to(weight.dtype), weight, bias)

    def weighted(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, n] logits of its tokens in float32, with their weights."""
        return logits.float() if self.log_weights is None else logits.float() + self.log_weights

    def labels(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N] ids as places in the logits; all must be among `tokens`."""
        return tokens if self.places is None else self.places[tokens]

    def first_choice(self, logits: torch.Tensor) -> torch.Tensor:
        """[N] id of the most probable token of logits that `logits` or `weighted` gave."""
        best = (logits if self.log_weights is None else logits - self.log_weights).argmax(-1)
        return best if self.tokens is None else self.tokens[best]


def draw_candidates(always: torch.Tensor, count: int, vocab_size: int) -> Vocabulary:
    """Fill up with random tokens, at least a quarter of `count` of them; the whole vocabulary if that is no more.

    Args:
        always: [m] int64 ids that have to be there, in any order, perhaps repeated.
        count: how many candidates to have.
        vocab_size: V.
    """
    always = always.unique()
    num_drawn = max(count - len(always), count // 4)
    if len(always) + num_drawn >= vocab_size:
        return Vocabulary()
    is_other = torch.ones(vocab_size, dtype=torch.bool, device=always.device)
    is_other[always] = False
    others = is_other.nonzero()[:, 0]
    drawn = others[torch.randperm(len(others), device=always.device)[:num_drawn]]
    log_weights = torch.zeros(len(always) + num_drawn, device=always.device)
    log_weights[len(always) :] = math.log(len(others) / num_drawn)
    return Vocabulary.of(torch.cat((always, drawn)), vocab_size, log_weights)
