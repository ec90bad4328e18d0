"""FastMTP's loss: one layer behind the target guesses several tokens, each time fed with its own state.

Equation:   L = sum_k a_k CE_k,  a_k = beta^k / sum_j beta^j,  k = 0 .. K - 1
            CE_k: mean over a text of the cross-entropy of guess k + 1, of the token k + 2 behind its place
Source:     FastMTP (arXiv:2509.18362), equation 2, on texts that the target wrote; K = 3 and beta = 0.6 as speculators
Choices:    a place sees in its k-th run what a draft of k tokens sees, the true pairs up to itself and its own runs;
            the paper runs the k-th guesses of all places as one causal text. The target's law may take the place of
            tokens (`teacher_weight`), of which a small corpus has too few
"""

from typing import Any

import torch

from specdec.common.checks import check_at_least
from specdec.drafters.mtp import Mtp
from specdec.models.networks.mtp import MtpConfig, MtpNetwork
from specdec.models.target.target import Target
from specdec.training.objectives.base import Objective, TrainingBatch, mean_cross_entropy
from specdec.training.objectives.eagle import EAGLE_RECIPES, unrolled
from specdec.training.objectives.recipe import check_decay

__all__ = ["MtpObjective"]


class MtpObjective(Objective):
    """Cross-entropies of the guesses of one layer.

    Args:
        network: what is trained: one layer.
        target: the frozen target.
        num_unrolled: K, guesses of each place.
        decay: beta.
        teacher_weight: share of the cross-entropy with the target's law; the rest is that with the labels.

    Raises:
        ValueError: no guess at all, a decay outside (0, 1], a share outside [0, 1], or a network of several layers.
    """

    drafter_class = Mtp
    recipe = EAGLE_RECIPES[3]  # of the nearest relative
    network: MtpNetwork

    def __init__(
        self,
        network: MtpNetwork,
        target: Target,
        *,
        num_unrolled: int = 3,
        decay: float = 0.6,
        teacher_weight: float = 0.0,
    ) -> None:
        super().__init__(network, target)
        check_at_least(1, {"num_unrolled": num_unrolled})
        check_decay(decay)
        if not 0 <= teacher_weight <= 1:
            raise ValueError(f"teacher_weight: expected 0 to 1, got {teacher_weight}")
        if network.config.num_layers != 1:
            raise ValueError(
                f"num_layers: expected 1 to train, fed with its own states, got {network.config.num_layers}"
            )
        self.num_unrolled = num_unrolled
        self.decay = decay
        self.teacher_weight = teacher_weight

    @classmethod
    def new_network(cls, target: Target, **settings: Any) -> MtpNetwork:
        """A network whose layer is a LLaMA layer of the target's sizes; `settings` are fields of `MtpConfig`.

        Raises:
            ValueError: layers of another family, which come from files, or sizes that are not the target's.
        """
        if settings.get("family") is not None:
            raise ValueError("family: expected None for a new network, whose layer is ours")
        network = MtpNetwork(MtpConfig.for_target(target.model.config, **settings))
        network.check_fits(vocab_size=target.vocab_size, hidden_size=target.hidden_size)
        return network

    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss, and its parts `"depth_1"`, `"depth_2"`, ..."""
        network = self.network
        weights = next(network.parameters())
        if batch.tokens.shape[1] < 3:  # no token to guess; zero, with a gradient that distributed training can reduce
            return {"loss": 0.0 * weights.sum()}
        loss, parts = weights.new_zeros((), dtype=torch.float32), {}
        states, total = network.read(batch.hidden[:, :-2].to(weights.dtype)), 0.0
        for step, following, made in unrolled(network, states, self.embed, batch.tokens, self.num_unrolled):
            learnt = batch.loss_mask[:, 2 + step :]
            logits = self.logits(batch, network.lm_states(made[learnt]))
            cross_entropy = logits.new_zeros(())
            if self.teacher_weight < 1:
                labels = batch.vocabulary.labels(batch.labels[:, 2 + step :][learnt])
                cross_entropy = (1 - self.teacher_weight) * mean_cross_entropy(logits, labels)
            if self.teacher_weight > 0:
                law = batch.law(following, learnt)
                cross_entropy = cross_entropy + self.teacher_weight * mean_cross_entropy(logits, law)
            parts[f"depth_{step + 1}"] = cross_entropy
            loss, total = loss + self.decay**step * cross_entropy, total + self.decay**step
        return {"loss": loss / total, **parts}
