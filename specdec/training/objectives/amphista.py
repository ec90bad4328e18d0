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
        """A network that starts from the target's LM head; `settings` are fields of `AmphistaConfig`."""
        network = AmphistaNetwork(AmphistaConfig.for_target(target.model.config, **settings))
        network.start_from(target.model.get_output_embeddings().weight.detach())
        return network

    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss, its two parts, and the share of places at which each head's first choice is the label."""
        states = self._states(batch)
        alignment, lm, report = [], [], {}
        for head in range(self.network.config.num_heads):
            ahead = head + 2  # head k = head + 1 predicts the token k + 1 places after the state
            places = batch.loss_mask[:, ahead:]
            labels = batch.labels[:, ahead:][places]
            target_probs = batch.logits[:, ahead - 1 : -1][places].float().softmax(-1)
            chosen = states[:, : places.shape[1], head][places][:, None]
            logits = self.network.logits(chosen, slice(head, head + 1))[:, 0].float()
            alignment.append(mean_cross_entropy(logits, target_probs))
            lm.append(mean_cross_entropy(logits, labels))
            report[f"accuracy_{head + 1}"] = (logits.detach().argmax(-1) == labels).sum() / max(len(labels), 1)
        parts = {"alignment": torch.stack(alignment).mean(), "lm": torch.stack(lm).mean()}
        loss = self.alignment_weight * parts["alignment"] + self.lm_weight * parts["lm"]
        return {"loss": loss, **{name: part.detach() for name, part in parts.items()}, **report}

    def _states(self, batch: TrainingBatch) -> torch.Tensor:
        """[B, T, K, C] states that enter the LM heads, after every pair of the text."""
        dtype = self.network.lm_head.dtype
        # the last place has no token after it; whatever it reads, nothing is learnt there
        following = batch.tokens.roll(-1, 1)
        embedded = self.embed(following).to(dtype) if self.network.config.reads_tokens else None
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
        return self.network(batch.hidden.to(dtype), embedded, positions, MaskedAttention())
