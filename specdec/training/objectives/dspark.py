"""Loss of DSpark: DFlash's blocks, whose rows know the text's token before theirs and learn how sure they are.

Paper: DSpark (deepseek-ai/DeepSpec, MIT), its section on training.
Equation:   DFlash's, with l = a CE(q, label) + d |q - p|_1 + c BCE(confidence, 1 - |q - p|_1 / 2);  a = 0.1, d = 0.9,
            c = 1. q is the law with the bias of the text's own token before. The last factor is how likely a draw from
            q is accepted; it is a label, and no gradient flows through it
Choices beyond the paper: docs/drafters/dspark.md.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F

from specdec.common.checks import check_at_least
from specdec.drafters.dflash import DFlash
from specdec.drafters.dspark import DSpark
from specdec.models.networks.dspark import DSparkNetwork
from specdec.models.target.target import Target
from specdec.training.objectives.base import TrainingBatch
from specdec.training.objectives.dflash import Blocks, DFlashObjective, text_at

__all__ = ["DSparkObjective"]


class DSparkObjective(DFlashObjective):
    """Loss of a block with a bias of the token before, and of the confidence head.

    Args:
        network: what is trained.
        target: the frozen target.
        gamma: as of `DFlashObjective`.
        num_anchors: as of `DFlashObjective`.
        cross_entropy_weight: a of the equation.
        distance_weight: d of the equation.
        confidence_weight: c of the equation; nothing of it where the network has no such head.

    Raises:
        ValueError: as `DFlashObjective`.
    """

    drafter_class: ClassVar[type[DFlash]] = DSpark
    network: DSparkNetwork

    def __init__(
        self,
        network: DSparkNetwork,
        target: Target,
        *,
        gamma: float | None = None,
        num_anchors: int = 512,
        cross_entropy_weight: float = 0.1,
        distance_weight: float = 0.9,
        confidence_weight: float = 1.0,
    ) -> None:
        super().__init__(
            network,
            target,
            gamma=gamma,
            num_anchors=num_anchors,
            cross_entropy_weight=cross_entropy_weight,
            distance_weight=distance_weight,
        )
        check_at_least(0, {"confidence_weight": confidence_weight})
        self.confidence_weight = confidence_weight

    def _losses(
        self, batch: TrainingBatch, blocks: Blocks, states: torch.Tensor, logits: torch.Tensor
    ) -> dict[str, tuple[float, torch.Tensor]]:
        losses = super()._losses(batch, blocks, states, logits)
        if self.network.confidence_head is None:
            return losses
        distance = losses["distance"][1] if "distance" in losses else self._distance(batch, blocks, logits)
        acceptance = (1 - distance.detach() / 2).clamp(0, 1)
        told = self.network.confidence(text_at(batch.tokens, blocks.places - 1), states)[blocks.learnt]
        error = F.binary_cross_entropy_with_logits(told.float(), acceptance, reduction="none")
        return {**losses, "confidence": (self.confidence_weight, error)}

    def _logits(self, batch: TrainingBatch, blocks: Blocks, states: torch.Tensor) -> torch.Tensor:
        logits = super()._logits(batch, blocks, states)
        head = self.network.markov_head
        if head is None:
            return logits
        factors = self.network.factors(text_at(batch.tokens, blocks.places - 1), states)[blocks.learnt]
        return logits + batch.vocabulary.products(factors, head.markov_w2.weight).float()
