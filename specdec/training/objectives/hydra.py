"""What Hydra heads learn: the text that follows, or what the target thinks will follow.

Equation:   loss = sum over heads i of  mean over t of  a CE(head_i(t), label_{t+1+i}) + b CE(head_i(t), p_{t+i}),
            head_i(t) fed with the text's own tokens x_{t+1} .. x_{t+i};  p_s = softmax of the target's logits at s
Source:     Hydra (arXiv:2402.05109) sections 3.1, 5 and A.1: a = 1, b = 0 for Hydra, a = 0, b = 1 for Hydra++
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from specdec.common.checks import check_at_least
from specdec.drafters.hydra import Hydra
from specdec.drafting.network import NetworkDrafter
from specdec.models.networks.hydra import HydraConfig, HydraNetwork
from specdec.models.networks.layer import MaskedAttention
from specdec.models.target.target import Target
from specdec.training.objectives.base import Objective, TrainingBatch, mean_cross_entropy
from specdec.training.objectives.recipe import Recipe

__all__ = ["HydraObjective", "HydraPlusPlusObjective"]


class HydraObjective(Objective):
    """Loss of Hydra heads.

    Args:
        network: what is trained.
        target: the frozen target.
        lm_weight: weight of the cross-entropy with the labels; by default 1 for Hydra and 0 for Hydra++.
        teacher_weight: weight of the cross-entropy with the target's distribution at temperature 1; by default 0 and 1.
        noise_alpha: strength of uniform noise on the target's states, alpha / sqrt(T C) at most; the paper tried 75.

    Raises:
        ValueError: a negative setting, or nothing to learn.
    """

    drafter_class: ClassVar[type[NetworkDrafter]] = Hydra
    recipe: Recipe = Recipe(learning_rate=1e-3, weight_decay=0.1, final_lr_ratio=0.33, warmup_ratio=0.05)
    new_config: ClassVar[Callable[..., HydraConfig]] = HydraConfig.for_target
    default_weights: ClassVar[tuple[float, float]] = (1.0, 0.0)
    network: HydraNetwork

    def __init__(
        self,
        network: HydraNetwork,
        target: Target,
        *,
        lm_weight: float | None = None,
        teacher_weight: float | None = None,
        noise_alpha: float = 0.0,
    ) -> None:
        super().__init__(network, target)
        given = (lm_weight, teacher_weight)
        weights = (default if one is None else one for one, default in zip(given, self.default_weights, strict=True))
        self.lm_weight, self.teacher_weight = weights
        self.noise_alpha = noise_alpha
        names = ("lm_weight", "teacher_weight", "noise_alpha")
        check_at_least(0, {name: getattr(self, name) for name in names})
        if self.lm_weight == self.teacher_weight == 0:
            raise ValueError("teacher_weight: expected more than 0 when lm_weight is 0, got 0")

    @classmethod
    def new_network(cls, target: Target, **settings: Any) -> HydraNetwork:
        """Heads that begin with the target's LM head, or share it; `settings` are those of its `new_config`."""
        network = HydraNetwork(cls.new_config(target.model.config, **settings))
        head = target.model.get_output_embeddings()
        network.start_from(head.weight, head.bias)
        return network

    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss, and its two parts (each summed over the heads, without its weight) where they count."""
        states, embeddings = self._inputs(batch)
        zero = states.new_zeros((), dtype=torch.float32)
        parts = {"lm": zero, "teacher": zero}
        for head in range(self.network.config.num_heads):
            place = head + 2  # how far ahead the head guesses
            count = max(batch.tokens.shape[1] - place, 0)
            keep = batch.loss_mask[:, place:]
            seen = [states[:, :count], *(embeddings[:, first : first + count] for first in range(1, place))]
            own, read = self.network.lm_head(head), self.network.states(head, [part[keep] for part in seen])
            logits = self.logits(batch, read, *(() if own is None else (own.weight, own.bias)))
            if self.lm_weight:
                labels = batch.vocabulary.labels(batch.labels[:, place:][keep])
                parts["lm"] = parts["lm"] + mean_cross_entropy(logits, labels)
            if self.teacher_weight:
                target_probs = batch.law(slice(place - 1, place - 1 + count), keep)
                parts["teacher"] = parts["teacher"] + mean_cross_entropy(logits, target_probs)
        weights = {"lm": self.lm_weight, "teacher": self.teacher_weight}
        loss = sum((weight * parts[name] for name, weight in weights.items()), start=zero)
        return {"loss": loss, **{name: parts[name].detach() for name, weight in weights.items() if weight}}

    def _inputs(self, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T, C] states that the heads read and [B, T, C] embeddings of the tokens, in the network's dtype."""
        dtype = next(self.network.parameters()).dtype
        hidden = batch.hidden.to(dtype)
        if self.training and self.noise_alpha:
            bound = self.noise_alpha / (hidden.shape[1] * hidden.shape[2]) ** 0.5
            hidden = hidden + torch.empty_like(hidden).uniform_(-bound, bound)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        # texts are padded on the right, so that causal attention sees no padding
        return self.network.encode(hidden, positions, MaskedAttention()), self.embed(batch.tokens).to(dtype)


class HydraPlusPlusObjective(HydraObjective):
    """Loss of Hydra++ heads: distillation from the target."""

    recipe: Recipe = Recipe(learning_rate=1e-3, weight_decay=0.1, final_lr_ratio=0.33, warmup_ratio=0.005, epochs=10)
    new_config: ClassVar[Callable[..., HydraConfig]] = HydraConfig.plus_plus
    default_weights: ClassVar[tuple[float, float]] = (0.0, 1.0)
