"""What a target says at the places of a pass: all logits, or no more of them than somebody asks for.

Greedy decoding wants the best token of every place and whether a logit was NaN. Where the op `lm_head_topk` runs, it
finds both while it multiplies, and [B, M, V] logits never pass through memory. Whoever asks for the logits gets them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from specdec.kernels.common.topk import TopK
from specdec.models.common.lm_heads import LMHeads

__all__ = ["PrefillOutput", "Scores", "TargetOutput"]


class Scores:
    """Logits of an LM head on states, written when they are first asked for.

    Args:
        heads: the LM head.
        states: [B, M, C] what enters it.
    """

    def __init__(self, heads: LMHeads, states: torch.Tensor) -> None:
        self.heads = heads
        self.states = states

    @classmethod
    def of(cls, logits: torch.Tensor) -> "Scores":
        """Scores whose logits [B, M, V] are there already."""
        return cls(LMHeads.of(nn.Identity(), backend=None), logits)

    @classmethod
    def side_by_side(cls, scores: "Sequence[Scores]") -> "Scores":
        """[B, M + M' + ..]: the places of several scores of the same rows, all of one LM head or all of logits."""
        return cls(scores[0].heads, torch.cat([part.states for part in scores], 1))

    def at(self, places: torch.Tensor) -> "Scores":
        """[B, 1]: one place [B] int64 of every row."""
        rows = torch.arange(places.shape[0], device=places.device)
        return Scores(self.heads, self.states[rows, places][:, None])

    @cached_property
    def logits(self) -> torch.Tensor:
        """[B, M, V] in the dtype of the states, computed once."""
        return self.heads.logits(self.states)

    @cached_property
    def best(self) -> torch.Tensor:
        """[B, M] int32: the most probable token of every place, the lowest among equals."""
        if self._unwritten is not None:
            return self._unwritten.tokens[..., 0]
        # on a CPU one pass over a copy takes a fifth of the time of one over half precision
        logits = self.logits.float() if self.logits.device.type == "cpu" else self.logits
        return logits.argmax(-1).int()

    @cached_property
    def has_nan(self) -> torch.Tensor:
        """[B, M] or [B, 1] bool: whether a logit of the place, or of any place of the row, is NaN."""
        if self._unwritten is not None:
            return self._unwritten.has_nan
        if "best" in vars(self) or self.logits.device.type == "cpu":  # a NaN is the best of all
            return torch.isnan(self.logits.gather(2, self.best.long()[..., None]))[..., 0]
        # a sum is NaN if a summand is; in fp32 finite logits cannot overflow it to inf - inf
        return torch.isnan(self.logits.sum((1, 2), dtype=torch.float32))[:, None]

    @cached_property
    def _unwritten(self) -> TopK | None:
        """The best tokens, found without logits; None if those are there or have to be written."""
        return None if "logits" in vars(self) else self.heads.best_unwritten(self.states)


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one scoring pass gives.

    Attributes:
        scores: what the LM head says at every node: its logits, or as little of them as is asked for.
        hidden: [B, N, C] the state that enters the LM head (after the final norm).
        taps: per entry of `tap_layers`, [B, N, C] output of that decoder layer (no norm).
    """

    scores: Scores
    hidden: torch.Tensor
    taps: tuple[torch.Tensor, ...] = ()

    @property
    def logits(self) -> torch.Tensor:
        """[B, N, V] in the model's dtype, one row per node; written when first asked for."""
        return self.scores.logits


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """What the target says about a chunk of the prompt, tokens `first .. first + T - 1` of every row.

    Attributes:
        scores: what the LM head says at each row's last prompt token, the one place of it; once the last chunk was
            run. Before that a row whose last token is still to come has the scores of another place.
        hidden: [B, T, C] states of the chunk's tokens, right-padded; rows are valid up to their length.
        taps: as in `TargetOutput`, [B, T, C].
        first: where the chunk begins; 0 for the first one, and for a prompt that is run in one piece.
    """

    scores: Scores
    hidden: torch.Tensor
    taps: tuple[torch.Tensor, ...] = ()
    first: int = 0

    @property
    def logits(self) -> torch.Tensor:
        """[B, V] at each row's last prompt token; written when first asked for."""
        return self.scores.logits[:, 0]

    def last_hidden(self, lengths: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """[B, C] state of each row's last prompt token where it is in this chunk, elsewhere `before [B, C]`.

        Every row's is in one chunk, so that whoever asks at all of them has it at the end. `lengths` is [B].
        """
        rows, place = torch.arange(self.hidden.shape[0], device=self.hidden.device), lengths.long() - 1 - self.first
        is_here = (place >= 0) & (place < self.hidden.shape[1])
        return torch.where(is_here[:, None], self.hidden[rows, place.clamp(0, self.hidden.shape[1] - 1)], before)
