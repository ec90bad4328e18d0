"""Amphista's training: every head learns the target's distribution and the token that follows.

Equation:   L = lambda1 L_alignment + lambda2 L_lm, both mean over the heads, and per head over its places:
            L_alignment = -sum_v p_{t+1+k}(v) log q_k(v);  L_lm = -log q_k(x_{t+1+k})
            q_k: head k after the pair (h_t, x_{t+1});  p_{t+1+k}: the target's distribution of token t + 1 + k
Source:     Amphista (arXiv:2406.13170) section 3.3, equations 7 to 9, and section 4.1
"""

from typing import Any, ClassVar

import torch

from specdec.drafters.amphista import Amphista
from specdec.models.networks.amphista import AmphistaConfig, AmphistaNetwork
from specdec.models.networks.layer import MaskedAttention
from specdec.models.target.target import Target
from specdec.training.objectives.base import Objective, TrainingBatch, mean_cross_entropy
from specdec.training.objectives.recipe import Recipe, check_weights

__all__ = ["AmphistaObjective"]


class AmphistaObjective(Objective):
    """The two cross-entropies of every head.

    Args:
        network: what is trained.
        target: the frozen target.
        alignment_weight: lambda1, of the cross-entropy with the target's distribution.
        lm_weight: lambda2, of the cross-entropy with the token itself.

    Raises:
        ValueError: a negative weight, or both zero.
    """

    drafter_class: ClassVar[type[Amphista]] = Amphista
    recipe = Recipe(learning_rate=1e-3, betas=(0.9, 0.999), schedule="cosine", epochs=4)
    network: AmphistaNetwork

    def __init__(
        self, network: AmphistaNetwork, target: Target, *, alignment_weight: float = 1.0, lm_weight: float = 1.0
    ) -> None:
        super().__init__(network, target)
        check_weights({"alignment_weight": alignment_weight, "lm_weight": lm_weight})
        self.alignment_weight = alignment_weight
        self.lm_weight = lm_weight

    @classmethod
    def new_network(cls, target: Target, **settings: Any) -> AmphistaNetwork:
        """A network that starts from the target's LM head, or shares it; `settings` are fields of `AmphistaConfig`."""
        network = AmphistaNetwork(AmphistaConfig.for_target(target.model.config, **settings))
        network.start_from(target.model.get_output_embeddings().weight.detach())
        return network

    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss, its two parts, and the share of places at which each head's first choice is the label."""
        network = self.network
        # head k = head + 1 predicts the token k + 1 places after the state
        learnt = [batch.at(head + 2) for head in range(network.config.num_heads)]
        somewhere = torch.stack(learnt).any(0)
        states = self._states(batch, somewhere)
        alignment, lm, report = [], [], {}
        for head, guesses in enumerate(learnt):
            ahead = head + 2
            places = batch.loss_mask[:, ahead:]
            labels = batch.labels[:, ahead:][places]
            logits = self.logits(batch, *network.before_lm_head(states[guesses[somewhere]], head))
            alignment.append(mean_cross_entropy(logits, batch.law(slice(ahead - 1, -1), places)))
            lm.append(mean_cross_entropy(logits, batch.vocabulary.labels(labels)))
            right = batch.vocabulary.first_choice(logits.detach()) == labels
            report[f"accuracy_{head + 1}"] = right.sum() / max(len(labels), 1)
        parts = {"alignment": torch.stack(alignment).mean(), "lm": torch.stack(lm).mean()}
        loss = self.alignment_weight * parts["alignment"] + self.lm_weight * parts["lm"]
        return {"loss": loss, **{name: part.detach() for name, part in parts.items()}, **report}

    def _states(self, batch: TrainingBatch, places: torch.Tensor) -> torch.Tensor:
        """[N, K, C] states that enter the LM heads, after the pairs of the text that `places [B, T]` marks."""
        dtype = self.network.mlp_weight.dtype
        # the last place has no token after it; whatever it reads, nothing is learnt there
        following = batch.tokens.roll(-1, 1)
        embedded = self.embed(following).to(dtype) if self.network.config.reads_tokens else None
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
        first, second = self.network.adapt(batch.hidden.to(dtype), embedded, positions, MaskedAttention())
        return self.network.lm_states(first[places], second[places])
