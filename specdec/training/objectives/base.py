"""The seam between the training loop and what a kind of drafter learns.

The loop runs the frozen target over the text and hands an objective the target's states and logits; the objective owns
the network in training and turns them into a loss. Nothing here knows files, data sets or schedules in steps.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from specdec.drafting.network import NetworkDrafter
from specdec.models.networks.base import DraftNetwork
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Objective", "Recipe", "TrainingBatch", "refuse_unread"]


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A batch of texts as the frozen target sees them.

    Attributes:
        tokens: [B, T] int64, right-padded: what networks read.
        labels: [B, T] int64: what they should say at each place. The tokens themselves, or (for a run that asks for it)
            the target's most probable token there, which is what greedy decoding wants guessed.
        loss_mask: [B, T] bool, places that may be learnt as labels: text of the assistant, never padding.
        hidden: [B, T, C] states that enter the target's LM head.
        logits: [B, T, V] the target's logits; row t predicts token t + 1.
        taps: per entry of the objective's `tap_layers`, [B, T, C] output of that decoder layer.
        progress: how much of the training is done, from 0 to 1.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor
    taps: tuple[torch.Tensor, ...] = ()
    progress: float = 0.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the paper trains: what the optimiser gets. Epochs and batch are defaults that a run may replace.

    Attributes:
        clip_value: element-wise limit of gradients (EAGLE, Falcon); None to clip the norm to `clip_norm` instead.
        final_lr_ratio: learning rate at the end, as a part of the peak.
    """

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: str = "cosine"
    final_lr_ratio: float = 0.0
    warmup_ratio: float = 0.1
    epochs: int = 1
    batch_size: int = 32
    clip_norm: float = 1.0
    clip_value: float | None = None


class Objective(nn.Module, ABC):
    """Loss of one kind of drafter. Its only parameters are those of the network in training.

    Args:
        network: what is trained.
        target: the frozen target; shares its embedding and LM head.

    Attributes:
        recipe: how the paper trains; a kind with several variants sets that of its network on the instance.
    """

    drafter_class: ClassVar[type[NetworkDrafter]]
    recipe: Recipe

    def __init__(self, network: DraftNetwork, target: Target) -> None:
        super().__init__()
        self.network = network
        # in a tuple they are no submodules: checkpoints and optimiser see the network alone
        self._shared = (target.model.get_input_embeddings(), target.model.get_output_embeddings())

    @classmethod
    @abstractmethod
    def new(cls, target: Target, **settings: Any) -> "Self":
        """A freshly initialised network for `target`, ready to train.

        Args:
            target: the frozen target.
            settings: fields of the network's configuration, and switches of the loss.

        Raises:
            TypeError: a setting that this kind does not have.
        """

    @abstractmethod
    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss under `"loss"`, and its parts under names of their own, each a scalar."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Decoder layers whose outputs the loss needs."""
        return ()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's input embedding of [..] tokens, frozen: [.., C]."""
        with torch.no_grad():
            return self._shared[0](tokens)

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's LM head on [.., C]; its own weights get no gradient."""
        weight, bias = self._shared[1].weight.detach(), self._shared[1].bias
        return nn.functional.linear(hidden.to(weight.dtype), weight, None if bias is None else bias.detach())

    def drafter(self, shape: TreeShape | DynamicTree | None = None) -> NetworkDrafter:
        """A drafter around the network as it is now."""
        return self.drafter_class(
            self.network, self.drafter_class.default_tree(self.network.config) if shape is None else shape
        )


def refuse_unread(objective: Objective, names: Sequence[str], variant: str) -> None:
    """Refuse settings of the loss that one variant of a kind does not read.

    Args:
        objective: the objective, with its settings as attributes of their names.
        names: the settings in question.
        variant: what does not read them, for the message.

    Raises:
        ValueError: one of them differs from its default.
    """
    parameters = inspect.signature(type(objective).__init__).parameters
    for name in names:
        if (given := getattr(objective, name)) != (default := parameters[name].default):
            raise ValueError(
                f"{name}: expected nothing but {default!r} with {variant}, which does not read it, got {given!r}"
            )
