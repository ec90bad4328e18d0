"""What the trainer runs at each step: the frozen target, or what it said before, and the objective after it."""

from typing import Any, Literal

import torch
from torch import nn

from specdec.models.target.scores import Scores, TargetOutput
from specdec.models.target.target import Target
from specdec.training.objectives.base import Objective, TrainingBatch, most_probable
from specdec.training.objectives.recipe import Run
from specdec.training.objectives.vocabulary import Vocabulary, draw_candidates

__all__ = ["Labels", "TrainingStep"]

Labels = Literal["text", "target"]


class TrainingStep(nn.Module):
    """Target and objective as one module for the trainer; its parameters are the network's alone.

    Args:
        objective: what is learnt.
        target: the frozen target, in eval mode from here on.
        labels: whether drafters should guess the text, or the target's most probable token at each place.
        run: how many places and candidates a step has.
        frequent: [n] int64 tokens that are always among the candidates.

    Attributes:
        progress: how much of the training is done, from 0 to 1.
    """

    def __init__(self, objective: Objective, target: Target, labels: Labels, run: Run, frequent: torch.Tensor) -> None:
        super().__init__()
        self.objective = objective
        self.labels = labels
        self.run = run
        self.progress = 0.0
        target.model.eval()
        self._places = target.tap(objective.tap_layers)
        self._frozen = (target, frequent.to(target.device))  # in a tuple they are none of its state
        self.register_state_dict_post_hook(_drop_aliases)  # type: ignore[no-untyped-call]

    @property
    def target(self) -> Target:
        """The frozen target."""
        return self._frozen[0]

    def forward(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        hidden: torch.Tensor | None = None,
        best: torch.Tensor | None = None,
        taps: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """The loss and its parts.

        Args:
            input_ids: [B, T] texts, right-padded.
            loss_mask: [B, T] what may be learnt of them.
            hidden: [B, T, C] the target's states, where they were kept; else it reads the texts.
            best: [B, T] its most probable tokens at learnable places, kept with them.
            taps: [number of taps, B, T, C] outputs of its layers, kept with them.
        """
        target, run = self.target, self.run
        if hidden is None:
            output = target.read(input_ids)
            tapped = tuple(output.taps[place] for place in self._places)
        else:
            hidden = hidden.to(target.dtype)
            output = TargetOutput(Scores(target.lm_heads, hidden), hidden, ())
            tapped = () if taps is None else tuple(taps.to(target.dtype))
        if self.training and run.num_places is not None:
            loss_mask = some_places(loss_mask, run.num_places)
        if best is None and (self.labels == "target" or self.objective.needs_best):
            best = most_probable(output.scores, loss_mask)
        labels = input_ids
        if self.labels == "target":
            assert best is not None
            labels = best
        vocabulary = Vocabulary()
        if self.training and run.num_candidates is not None:
            asked = [labels[loss_mask], *([] if best is None else [best[loss_mask]]), self._frozen[1]]
            vocabulary = draw_candidates(torch.cat(asked), run.num_candidates, target.vocab_size)
        batch = TrainingBatch(
            tokens=input_ids,
            labels=labels,
            loss_mask=loss_mask,
            scores=output.scores,
            hidden=output.hidden,
            taps=tapped,
            progress=self.progress if self.training else 1.0,
            vocabulary=vocabulary,
            best=best,
        )
        return self.objective(batch)


def some_places(loss_mask: torch.Tensor, count: int) -> torch.Tensor:
    """[B, T] bool: `count` random ones of each text's places, all where it has no more."""
    lots = torch.rand(loss_mask.shape, device=loss_mask.device).masked_fill(~loss_mask, -1.0)
    chosen = torch.zeros_like(loss_mask)
    chosen.scatter_(1, lots.topk(min(count, lots.shape[1]), 1).indices, True)
    return chosen & loss_mask


def _drop_aliases(module: nn.Module, tensors: dict[str, torch.Tensor], prefix: str, metadata: Any) -> None:
    """Keep each tensor under one name: a draft model's embedding may be its LM head too."""
    del module, prefix, metadata
    seen = set()
    for name, tensor in list(tensors.items()):
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place in seen:
            del tensors[name]
        seen.add(place)
