"""What Medusa heads learn: the text that follows, each head one token further ahead than the one before.

Equation:   loss = sum over heads k = 1 .. K of  decay^k mean over t of CE(head_k(h_t), label_{t+k+1})
Source:     Medusa (arXiv:2401.10774) section 2.2.1, with lambda_k = 0.8^k; the authors' training code
"""

from typing import Any, ClassVar

import torch

from specdec.drafters.medusa import Medusa
from specdec.drafting.network import NetworkDrafter
from specdec.models.networks.medusa import MedusaConfig, MedusaHeads
from specdec.models.target.target import Target
from specdec.training.objectives.base import Objective, TrainingBatch, mean_cross_entropy
from specdec.training.objectives.recipe import Recipe, check_decay

__all__ = ["MedusaObjective"]


class MedusaObjective(Objective):
    """Loss of Medusa-1: cross-entropy, weighted by head.

    Args:
        network: what is trained.
        target: the frozen target.
        decay: head k weighs decay ** k; 1 for equal weights, as in the authors' first code.

    Raises:
        ValueError: a decay outside (0, 1].
    """

    drafter_class: ClassVar[type[NetworkDrafter]] = Medusa
    # one epoch of ShareGPT on 4 GPUs x 8 x 4 accumulated
    recipe: Recipe = Recipe(learning_rate=1e-3, schedule="cosine", warmup_ratio=0.1, epochs=1, batch_size=128)
    network: MedusaHeads

    def __init__(self, network: MedusaHeads, target: Target, *, decay: float = 0.8) -> None:
        super().__init__(network, target)
        check_decay(decay)
        self.decay = decay

    @classmethod
    def new_network(cls, target: Target, **settings: Any) -> MedusaHeads:
        """Heads that repeat the target's own guess to begin with; `settings` are fields of `MedusaConfig`."""
        network = MedusaHeads(MedusaConfig.for_target(target.model.config, **settings))
        if network.config.vocab_size is not None:
            network.start_from(target.model.get_output_embeddings().weight)
        return network

    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss, and each head's cross-entropy as `"head_1"`, ..."""
        network = self.network
        # the state at t has told t + 1 to the target; the first head guesses t + 2
        learnt = [batch.at(head + 2) for head in range(network.config.num_heads)]
        somewhere = torch.stack(learnt).any(0)
        states = network.states(batch.hidden[somewhere].to(network.block_weight.dtype), network.config.num_heads)
        loss = states.new_zeros((), dtype=torch.float32)
        parts = {}
        for head, places in enumerate(learnt):
            weight = None if network.config.vocab_size is None else network.lm_head[head]
            logits = self.logits(batch, states[places[somewhere], head], weight)
            labels = batch.vocabulary.labels(batch.labels[:, head + 2 :][batch.loss_mask[:, head + 2 :]])
            cross_entropy = mean_cross_entropy(logits, labels)
            parts[f"head_{head + 1}"] = cross_entropy.detach()
            loss = loss + self.decay ** (head + 1) * cross_entropy
        return {"loss": loss, **parts}
