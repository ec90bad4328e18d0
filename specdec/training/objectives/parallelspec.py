"""Group-wise training of ParallelSpec: every token of a text opens a group, itself and its K masks, all in one pass.

Paper: ParallelSpec (arXiv:2410.05589) section 4.1, figure 3, equation 3 (medusa variant), equation 4 (eagle variant).
Layout: groups [x_t, MASK_1 .. MASK_K] at positions t .. t + K; in memory all real tokens, then the masks by group. A
member sees the real tokens up to its group's and the masks of its own group up to itself, which is what it sees when
drafting.
Labels: member k of a group guesses the token k + 1 places after the group's last real one; not where the text ends
first or the place is not to be learnt.
Choices beyond the paper: docs/drafters/parallelspec.md.
"""

import os
from typing import Any

import torch
import torch.nn.functional as F

from specdec.common.checks import check_at_least
from specdec.drafters.eagle import Eagle
from specdec.drafters.load import load_drafter
from specdec.drafters.parallelspec import ParallelSpec
from specdec.models.networks.eagle import EagleNetwork
from specdec.models.networks.eagle3 import Eagle3Network
from specdec.models.networks.layer import MaskedAttention
from specdec.models.networks.parallelspec import ParallelSpecConfig, ParallelSpecNetwork, group_mask
from specdec.models.target.target import Target
from specdec.training.objectives.base import Objective, TrainingBatch, mean_cross_entropy, refuse_unread
from specdec.training.objectives.recipe import Recipe, check_decay

__all__ = ["ParallelSpecObjective"]

# learning rate, betas, weight decay, epochs, batch: table 3 of the paper; schedule and clipping: Medusa's and EAGLE's
_RECIPES = {
    "medusa": Recipe(learning_rate=5e-4, betas=(0.9, 0.999), schedule="cosine", warmup_ratio=0.1, epochs=20),
    "eagle": Recipe(
        learning_rate=5e-5, betas=(0.9, 0.95), schedule="linear", warmup_ratio=0.0025, epochs=40, clip_value=0.5
    ),
}
_DECAYS = {"medusa": 0.8, "eagle": 1.0}  # Medusa's lambda; the sum of equation 4


class ParallelSpecObjective(Objective):
    """Loss of either variant.

    Args:
        network: what is trained.
        target: the frozen target.
        decay: member k weighs decay ** k; by default 0.8 in the medusa variant and 1 in the eagle variant.
        classification_weight: eagle variant: weight of the classification loss beside the regression's 1.
        soft_labels: eagle variant: classify by the target's distribution, as EAGLE's code does, not by the token.
        noise: eagle variant: features are trained with noise from U(-noise, noise).
        num_groups: groups of a text, drawn anew in every step, that have their masks; the others are their real token
            alone. None for all, as in the paper. Evaluation has all.

    Raises:
        ValueError: a decay outside (0, 1], a negative weight or noise, no group at all, or the other variant's setting.
    """

    drafter_class = ParallelSpec
    recipe = _RECIPES["eagle"]
    network: ParallelSpecNetwork

    def __init__(
        self,
        network: ParallelSpecNetwork,
        target: Target,
        *,
        decay: float | None = None,
        classification_weight: float = 0.1,
        soft_labels: bool = False,
        noise: float = 0.1,
        num_groups: int | None = None,
    ) -> None:
        super().__init__(network, target)
        if decay is None:
            decay = _DECAYS[network.config.variant]
        check_decay(decay)
        check_at_least(0, {"classification_weight": classification_weight, "noise": noise})
        check_at_least(1, {"num_groups": num_groups})
        self.recipe = _RECIPES[network.config.variant]
        self.decay = decay
        self.classification_weight = classification_weight
        self.soft_labels = soft_labels
        self.noise = noise
        self.num_groups = num_groups
        if network.config.variant == "medusa":
            refuse_unread(self, ("classification_weight", "soft_labels", "noise"), "the medusa variant")

    @classmethod
    def new_network(
        cls, target: Target, *, eagle: str | os.PathLike[str] | None = None, **settings: Any
    ) -> ParallelSpecNetwork:
        """A network whose layer is sized like the target's.

        Args:
            target: the frozen target.
            eagle: eagle variant: a trained drafter of EAGLE-1, as `load_drafter` finds it, with whose weights training
                begins; PyTorch's initial values without it.
            settings: as `ParallelSpecConfig.for_target` takes them.

        Raises:
            FileNotFoundError: no such drafter.
            TypeError: a setting that this kind does not have.
            ValueError: a value out of range, or a drafter that does not fit.
        """
        network = ParallelSpecNetwork(ParallelSpecConfig.for_target(target.model.config, **settings))
        network.check_fits(vocab_size=target.vocab_size, hidden_size=target.hidden_size)
        network.start_from(target.model.get_input_embeddings().weight)
        if eagle is not None:
            trained = load_drafter(eagle, target)
            given = trained.network if isinstance(trained, Eagle) else None
            if not isinstance(given, EagleNetwork | Eagle3Network):
                raise ValueError(f"eagle: expected a drafter of EAGLE-1, got one of kind {trained.kind}")
            network.start_from_eagle(given)
        return network

    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss, and its parts: `"depth_1"` ... (medusa), or `"regression"` and `"classification"` (eagle)."""
        if self.network.config.variant == "medusa":
            return self._medusa_loss(batch, self._states(batch.tokens, batch.hidden))
        features = batch.hidden[:, :-1]
        if self.training and self.noise:
            features = features + self.noise * (2 * torch.rand_like(features) - 1)
        return self._eagle_loss(batch, self._states(batch.tokens[:, 1:], features))

    def _states(self, tokens: torch.Tensor, features: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """States of the members of groups.

        Args:
            tokens: [B, T] the real token of each group.
            features: [B, T, C] feature of each group.

        Returns:
            Per member, the [G] groups that have it, and its [B, G, C] states there.
        """
        network, num_masks = self.network, self.network.config.num_masks
        groups = torch.arange(tokens.shape[1], device=tokens.device)
        chosen = groups
        if self.training and self.num_groups is not None:
            chosen = torch.randperm(len(groups), device=groups.device)[: self.num_groups].sort().values
        embedded, features = self.embed(tokens).to(network.masks.dtype), features.to(network.masks.dtype)
        real = network.read(embedded, features)
        masks = network.read_masks(features[:, chosen], num_masks).flatten(1, 2)
        mask_members = torch.arange(1, num_masks + 1, device=groups.device).repeat(len(chosen))
        group = torch.cat((groups, chosen.repeat_interleave(num_masks)))
        member = torch.cat((torch.zeros_like(groups), mask_members))
        attend = MaskedAttention(group_mask(group, member)[None])
        states = network(torch.cat((real, masks), 1), (group + member)[None], attend)
        of_masks = states[:, len(groups) :].unflatten(1, (len(chosen), num_masks)).unbind(2)
        return [(groups, states[:, : len(groups)]), *((chosen, guesses) for guesses in of_masks)]

    def _medusa_loss(
        self, batch: TrainingBatch, states: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        parts = {}
        loss = states[0][1].new_zeros(())
        for member, (groups, guesses) in enumerate(states):
            guess, learnt, places = _with_labels(batch, groups + member + 1, guesses)  # group 0 is token 0
            labels = batch.vocabulary.labels(batch.labels[:, places][learnt])
            cross_entropy = mean_cross_entropy(self.logits(batch, guess), labels)
            parts[f"depth_{member + 1}"] = cross_entropy
            loss = loss + self.decay**member * cross_entropy
        return {"loss": loss, **parts}

    def _eagle_loss(
        self, batch: TrainingBatch, states: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        loss = regression = classification = states[0][1].new_zeros(())
        for member, (groups, guesses) in enumerate(states):
            # group 0 is the pair of state 0 and token 1
            guess, learnt, places = _with_labels(batch, groups + member + 2, guesses)
            count = learnt.sum().clamp(min=1)
            # the state that stands before a token is the one that predicts it
            truth = batch.hidden[:, places - 1][learnt]
            if self.soft_labels:
                label = batch.law(places - 1, learnt)
            else:
                label = batch.vocabulary.labels(batch.labels[:, places][learnt])
            error = F.smooth_l1_loss(guess.float(), truth.float(), reduction="sum") / truth.shape[1]
            cross_entropy = F.cross_entropy(self.logits(batch, guess), label, reduction="sum")
            loss = loss + self.decay**member * (error + self.classification_weight * cross_entropy) / count
            regression = regression + error / count
            classification = classification + cross_entropy / count
        return {"loss": loss, "regression": regression, "classification": classification}


def _with_labels(
    batch: TrainingBatch, places: torch.Tensor, guesses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Guesses about places of the text that are to be learnt.

    Args:
        batch: the batch.
        places: [G] place that each guess is about, ascending, perhaps beyond the text.
        guesses: [B, G, C].

    Returns:
        [N, C] guesses that have a label, [B, G'] bool which these are, and the [G'] places within the text.
    """
    places = places[: int((places < batch.tokens.shape[1]).sum())]
    learnt = batch.loss_mask[:, places]
    return guesses[:, : len(places)][learnt], learnt, places
