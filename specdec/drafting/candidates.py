"""How a drafter's logits become candidate tokens: the best ones, or a sample whose law is known.

A drafter with a network calls `choose(logits, num_ranks)` wherever it needs candidates, and does not know which rule it
is. With `Best` the tree is deterministic; `Sampled` also hands back the laws it drew from, which lossless rejection
needs. A drafter that has states and the LM heads behind them calls `choose_from` instead: where the best tokens are all
that is wanted, the logits need not be written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.common.randomness import Stream, Uniforms
from specdec.kernels.common.launch import Backend
from specdec.kernels.sample_probs import WarpSettings, warp_logits
from specdec.models.common.lm_heads import LMHeads, best_of

__all__ = ["Best", "Candidates", "Choose", "DraftLaw", "Sampled", "choose_from", "wants_logps"]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Lists of candidate tokens, one list per law.

    Attributes:
        tokens: [B, M, R] int32 or int64; rank 0 is the best, or the first drawn.
        laws: [B, M, V] logits of the law that each list was drawn from; None if the lists were not drawn.
        logps: [B, M, R] float32, log-probability of each token by the drafter's own law, nats; None unless asked for.
    """

    tokens: torch.Tensor
    laws: torch.Tensor | None = None
    logps: torch.Tensor | None = None

    @classmethod
    def cat(cls, parts: Sequence["Candidates"]) -> "Candidates":
        """The lists of several calls, one after the other."""
        tokens = [part.tokens for part in parts]
        laws = [part.laws for part in parts if part.laws is not None]
        logps = [part.logps for part in parts if part.logps is not None]
        return cls(torch.cat(tokens, 1), torch.cat(laws, 1) if laws else None, torch.cat(logps, 1) if logps else None)

    def among(self, target_ids: torch.Tensor, vocab_size: int) -> "Candidates":
        """Candidates of a draft vocabulary as tokens of the target, the laws over all of its tokens.

        Args:
            target_ids: [D] int64, the target's token behind each token of the draft vocabulary.
            vocab_size: V of the target.
        """
        laws = None
        if self.laws is not None:
            laws = self.laws.new_full((*self.laws.shape[:2], vocab_size), -torch.inf)
            laws.index_copy_(2, target_ids, self.laws)
        return Candidates(target_ids[self.tokens], laws, self.logps)


class Choose(Protocol):
    """A rule that picks candidates."""

    def __call__(self, logits: torch.Tensor, num_ranks: int) -> Candidates:
        """Pick `num_ranks` tokens from each row of `logits [B, M, V]`."""
        ...


@dataclass(frozen=True, slots=True)
class Best:
    """The most probable tokens, best first; equally probable ones in the order of their numbers.

    Attributes:
        with_logps: say how probable each is, too. The tokens are the same.
    """

    with_logps: bool = False

    def __call__(self, logits: torch.Tensor, num_ranks: int) -> Candidates:
        """As `Choose`."""
        tokens = best_of(logits, num_ranks)
        if not self.with_logps:
            return Candidates(tokens)
        logits = logits.float()
        return Candidates(tokens, logps=logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True))


def wants_logps(choose: Choose) -> bool:
    """Whether trees shall say how probable their nodes are."""
    return isinstance(choose, Best) and choose.with_logps


def choose_from(choose: Choose, heads: LMHeads, states: torch.Tensor, num_ranks: int) -> Candidates:
    """Candidates that `choose` picks from the logits of `heads` on `states`.

    Args:
        choose: the rule.
        heads: LM heads.
        states: [B, M, C] states of M lists.
        num_ranks: tokens per list.
    """
    if wants_logps(choose):
        best = heads.best(states, num_ranks)
        return Candidates(best.tokens, logps=best.values - best.logsumexp[..., None])
    if isinstance(choose, Best):
        return Candidates(heads.best_tokens(states, num_ranks))
    return choose(heads.logits(states), num_ranks)


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """The law that candidates are drawn from: softmax of the drafter's logits after these warpers, as in transformers.

    Any law keeps the output exact; the closer to the target's, the more is accepted.

    Attributes:
        temperature: divides the logits, over 0.
        top_k: how many tokens to keep; None: all.
        top_p: keep the most probable tokens that together reach it; None: all.
        min_p: drop tokens with less than this share of the largest probability; None: none.
        settings: [B, 5] float32, what `warp_logits` takes, in place of the numbers: where a captured step finds those
            of each row. A repetition penalty among them does not act, as a law is none of a path.
        backend: what runs the op; by default decided by the device.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    settings: torch.Tensor | None = None
    backend: Backend | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Processed logits [B, M, V] float32."""
        settings = self.settings
        if settings is None and (self.temperature, self.top_k, self.top_p, self.min_p) != (1.0, None, None, None):
            settings = WarpSettings(self.temperature, self.top_k, self.top_p, self.min_p).on(logits.device)
        return warp_logits(logits, settings, backend=self.backend)


class Sampled:
    """Draw the candidates.

    Args:
        law: what they are drawn from.
        replacement: the tokens of a list are independent draws; otherwise each excludes those before it, and what is
            left when a law has too few tokens carries probability 0 and is never accepted.
        uniforms: the batch's random numbers.
    """

    def __init__(self, law: DraftLaw, *, replacement: bool, uniforms: Uniforms) -> None:
        self.law = law
        self.replacement = replacement
        self.uniforms = uniforms
        self._calls = 0

    def __call__(self, logits: torch.Tensor, num_ranks: int) -> Candidates:
        """As `Choose`."""
        laws = self.law(logits)
        batch_size, num_lists, vocab_size = laws.shape
        count = num_ranks if self.replacement else vocab_size
        draw = self.uniforms.draw if self.replacement else self.uniforms.exponential
        numbers = draw(Stream.DRAFT + self._calls, num_lists * count).view(batch_size, num_lists, count)
        self._calls += 1
        if self.replacement:
            running = laws.softmax(-1).double().cumsum(-1)
            # the first token whose running sum is above the goal: it has mass, even where the goal is 0
            tokens = torch.searchsorted(running, numbers.double() * running[..., -1:], right=True)
        else:
            # the order of arrival in an exponential race is that of draws without replacement
            tokens = (laws - numbers.log()).topk(num_ranks, dim=-1).indices
        return Candidates(tokens, laws)
