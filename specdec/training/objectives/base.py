"""The seam between the training loop and what a kind of drafter learns.

The loop runs the frozen target over the text and hands an objective the target's states and logits; the objective owns
the network in training and turns them into a loss. Nothing here knows files, data sets or schedules in steps.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from specdec.drafting.network import NetworkDrafter
from specdec.models.networks.base import DraftNetwork
from specdec.models.target.scores import Scores
from specdec.models.target.target import Target
from specdec.training.objectives.recipe import Recipe
from specdec.training.objectives.vocabulary import Vocabulary
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Objective", "TrainingBatch", "mean_cross_entropy", "most_probable", "refuse_unread"]

_ROWS_AT_ONCE = 512  # of an LM head over the whole vocabulary


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A batch of texts as the frozen target sees them.

    Its LM head runs where something is learnt, and over the tokens of `vocabulary`, when a law is asked for.

    Attributes:
        tokens: [B, T] int64, right-padded: what networks read.
        labels: [B, T] int64: what they should say at each place. The tokens themselves, or (for a run that asks for it)
            the target's most probable token there, which is what greedy decoding wants guessed.
        loss_mask: [B, T] bool, places that are learnt as labels: text of the assistant, or some of it; never padding.
        scores: what the target says at all places; column t is about token t + 1.
        hidden: [B, T, C] states that enter the target's LM head.
        taps: per entry of the objective's `tap_layers`, [B, T, C] output of that decoder layer.
        progress: how much of the training is done, from 0 to 1.
        vocabulary: the tokens that laws are over.
        best: [B, T] int64: the target's most probable token in place of each learnt one, anything elsewhere; for
            objectives that need it.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    scores: Scores
    hidden: torch.Tensor
    taps: tuple[torch.Tensor, ...] = ()
    progress: float = 0.0
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    best: torch.Tensor | None = None

    def at(self, ahead: int) -> torch.Tensor:
        """[B, T] bool: the states whose guess of the token `ahead` places later is learnt."""
        return F.pad(self.loss_mask[:, ahead:], (0, min(ahead, self.loss_mask.shape[1])))

    def law(self, columns: slice | torch.Tensor, learnt: torch.Tensor) -> torch.Tensor:
        """[N, n] float32: the target's law of the tokens after some places.

        Args:
            columns: which columns of the texts; the law at column t is that of token t + 1.
            learnt: [B, number of columns] bool, the N places among them.
        """
        return self.law_over(self.vocabulary, columns, learnt)

    @torch.no_grad()
    def law_over(self, vocabulary: Vocabulary, columns: slice | torch.Tensor, learnt: torch.Tensor) -> torch.Tensor:
        """As `law`, over another vocabulary."""
        states = self.scores.states[:, columns][learnt]
        return vocabulary.weighted(self.scores.heads.logits(states, vocabulary.tokens)).softmax(-1)


@torch.no_grad()
def most_probable(scores: Scores, loss_mask: torch.Tensor) -> torch.Tensor:
    """[B, T] int64: the target's most probable tokens in place of those that `loss_mask [B, T]` marks; 0 elsewhere."""
    learnt = loss_mask[:, 1:]
    states = scores.states[:, :-1][learnt].split(_ROWS_AT_ONCE)
    best = torch.zeros(loss_mask.shape, dtype=torch.int64, device=loss_mask.device)
    best[:, 1:][learnt] = torch.cat([scores.heads.logits(part).argmax(-1) for part in states])
    return best


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
    def new(cls, target: Target, **settings: Any) -> "Self":
        """A freshly initialised network for `target`, ready to train.

        Args:
            target: the frozen target.
            settings: keywords of this class, which are switches of the loss, and of its `new_network`.

        Raises:
            TypeError: a setting that this kind does not have.
            ValueError: a value out of its range, or a network that does not fit the target.
        """
        switches = {name: settings.pop(name) for name in inspect.signature(cls).parameters if name in settings}
        return cls(cls.new_network(target, **settings).to(target.device), target, **switches)

    @classmethod
    @abstractmethod
    def new_network(cls, target: Target, **settings: Any) -> Any:
        """The network at its initial values; `settings` are fields of its configuration."""

    @abstractmethod
    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss under `"loss"`, and its parts under names of their own, each a scalar."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Decoder layers whose outputs the loss needs."""
        return ()

    @property
    def needs_best(self) -> bool:
        """Whether the loss looks at the target's most probable tokens."""
        return False

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's input embedding of [..] tokens, frozen: [.., C]."""
        with torch.no_grad():
            return self._shared[0](tokens)

    def logits(
        self,
        batch: TrainingBatch,
        states: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits over the batch's vocabulary.

        Args:
            batch: the batch.
            states: [N, C].
            weight: [V, C] of an LM head of the network; without it the target's, which gets no gradient.
            bias: [V] of the same.

        Returns:
            [N, n] float32.
        """
        if weight is None:
            head = self._shared[1]
            weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        return batch.vocabulary.logits(states, weight, bias)

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


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of [n, V] logits with [n] tokens or [n, V] distributions; zero, not NaN, where n is 0."""
    return nn.functional.cross_entropy(logits, labels, reduction="sum") / max(logits.shape[0], 1)
