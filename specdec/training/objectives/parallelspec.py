"""Group-wise training of ParallelSpec: every token of a text opens a group, itself and its K masks, all in one pass.

Paper: ParallelSpec (arXiv:2410.05589) section 4.1, figure 3, equation 3 (medusa variant), equation 4 (eagle variant).
Layout: groups one after the other, [x_t, MASK_1 .. MASK_K] at positions t .. t + K. A member sees the real tokens up to
its group's and the masks of its own group up to itself, which is what it sees when drafting.
Labels: member k of a group guesses the token k + 1 places after the group's last real one; not where the text ends
first or the place is not to be learnt.
Choices beyond the paper: docs/drafters/parallelspec.md.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch users know

from specdec.drafters.parallelspec import ParallelSpec
from specdec.models.draft_layer import MaskedAttention
from specdec.models.parallelspec import ParallelSpecConfig, ParallelSpecNetwork
from specdec.models.target import Target
from specdec.training.objectives.base import Objective, Recipe, TrainingBatch

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ParallelSpecObjective"]

# learning rate, betas, weight decay, epochs, batch: table 3 of the paper; schedule and clipping: Medusa's and EAGLE's
_RECIPES = {
    "medusa": Recipe(learning_rate=5e-4, betas=(0.9, 0.999), schedule="cosine", warmup_ratio=0.1, epochs=20),
    "eagle": Recipe(
        learning_rate=5e-5, betas=(0.9, 0.95), schedule="linear", warmup_ratio=0.0025, epochs=40, clip_value=0.5
    ),
}


class ParallelSpecObjective(Objective):
    """Loss of either variant.

    Args:
        network: what is trained.
        target: the frozen target.
        decay: medusa variant: member k weighs decay ** k.
        classification_weight: eagle variant: weight of the classification loss beside the regression's 1.
        soft_labels: eagle variant: classify by the target's distribution, as EAGLE's code does, not by the token.
        noise: eagle variant: features are trained with noise from U(-noise, noise).

    Raises:
        ValueError: a decay outside (0, 1], or a negative weight or noise.
    """

    drafter_class = ParallelSpec
    recipe = _RECIPES["eagle"]
    network: ParallelSpecNetwork

    def __init__(
        self,
        network: ParallelSpecNetwork,
        target: Target,
        *,
        decay: float = 0.8,
        classification_weight: float = 0.1,
        soft_labels: bool = False,
        noise: float = 0.1,
    ) -> None:
        super().__init__(network, target)
        if not 0 < decay <= 1:
            raise ValueError(f"decay: expected more than 0 and at most 1, got {decay}")
        if classification_weight < 0:
            raise ValueError(f"classification_weight: expected at least 0, got {classification_weight}")
        if noise < 0:
            raise ValueError(f"noise: expected at least 0, got {noise}")
        self.recipe = _RECIPES[network.config.variant]
        self.decay = decay
        self.classification_weight = classification_weight
        self.soft_labels = soft_labels
        self.noise = noise

    @classmethod
    def new(
        cls,
        target: Target,
        *,
        decay: float = 0.8,
        classification_weight: float = 0.1,
        soft_labels: bool = False,
        noise: float = 0.1,
        **settings: Any,
    ) -> "Self":
        """A network whose layer is sized like the target's; `settings` as in `ParallelSpecConfig.for_target`."""
        network = ParallelSpecNetwork(ParallelSpecConfig.for_target(target.model.config, **settings))
        network.check_fits(vocab_size=target.vocab_size, hidden_size=target.hidden_size)
        network.start_from(target.model.get_input_embeddings().weight)
        return cls(
            network.to(target.device),
            target,
            decay=decay,
            classification_weight=classification_weight,
            soft_labels=soft_labels,
            noise=noise,
        )

    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss, and its parts: `"depth_1"` ... (medusa), or `"regression"` and `"classification"` (eagle)."""
        if self.network.config.variant == "medusa":
            return self._medusa_loss(batch, self._states(batch.tokens, batch.hidden))
        features = batch.hidden[:, :-1]
        if self.training and self.noise:
            features = features + self.noise * (2 * torch.rand_like(features) - 1)
        return self._eagle_loss(batch, self._states(batch.tokens[:, 1:], features))

    def _states(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """States of all members of all groups: [B, G, K + 1, C] from [B, G] tokens and [B, G, C] features."""
        network = self.network
        num_groups, num_members = tokens.shape[1], network.config.num_masks + 1
        embedded, features = self.embed(tokens).to(network.masks.dtype), features.to(network.masks.dtype)
        real = network.read(embedded, features)
        inputs = torch.cat((real[:, :, None], network.read_masks(features, num_members - 1)), 2)
        members = torch.arange(num_members, device=tokens.device)
        positions = torch.arange(num_groups, device=tokens.device)[:, None] + members
        attend = MaskedAttention(group_mask(num_groups, num_members, tokens.device)[None])
        states = network(inputs.flatten(1, 2), positions.flatten()[None], attend)
        return states.unflatten(1, (num_groups, num_members))

    def _medusa_loss(self, batch: TrainingBatch, states: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = {}
        loss = states.new_zeros(())
        for member in range(states.shape[2]):
            place = member + 1  # of the first group's label; group 0 is token 0
            learnt = batch.loss_mask[:, place:]
            guess = states[:, : learnt.shape[1], member][learnt]
            cross_entropy = F.cross_entropy(
                self.lm_head(guess).float(), batch.labels[:, place:][learnt], reduction="sum"
            ) / learnt.sum().clamp(min=1)
            parts[f"depth_{member + 1}"] = cross_entropy
            loss = loss + self.decay**member * cross_entropy
        return {"loss": loss, **parts}

    def _eagle_loss(self, batch: TrainingBatch, states: torch.Tensor) -> dict[str, torch.Tensor]:
        regression, classification = states.new_zeros(()), states.new_zeros(())
        for member in range(states.shape[2]):
            place = member + 2  # group 0 is the pair of state 0 and token 1
            learnt = batch.loss_mask[:, place:]
            guess = states[:, : learnt.shape[1], member][learnt]
            count = learnt.sum().clamp(min=1)
            # the state that stands before a token is the one that predicts it
            truth = batch.hidden[:, place - 1 : -1][learnt]
            label = batch.logits[:, place - 1 : -1] if self.soft_labels else batch.labels[:, place:]
            label = label[learnt].float().softmax(-1) if self.soft_labels else label[learnt]
            error = F.smooth_l1_loss(guess.float(), truth.float(), reduction="sum") / truth.shape[1]
            regression = regression + error / count
            cross_entropy = F.cross_entropy(self.lm_head(guess).float(), label, reduction="sum")
            classification = classification + cross_entropy / count
        loss = regression + self.classification_weight * classification
        return {"loss": loss, "regression": regression, "classification": classification}


def group_mask(num_groups: int, num_members: int, device: torch.device | None = None) -> torch.Tensor:
    """Who sees whom in figure 3 of the paper: [N, N] bool over groups one after the other, True where i may see j."""
    index = torch.arange(num_groups * num_members, device=device)
    group, member = index // num_members, index % num_members
    earlier_token = (member == 0) & (group < group[:, None])
    own_group = (group == group[:, None]) & (member <= member[:, None])
    return earlier_token | own_group
