"""Loss of P-EAGLE: EAGLE-3's classification at all depths of a draft in one pass, deeper ones at fewer places.

Paper: P-EAGLE (arXiv:2602.01469), its section on training: depth d is learnt behind a share r^d of the pairs, drawn
among those that have depth d - 1, so that what a mask sees of its group is there (conditional drop).
Equation:   L = mean over the drawn guesses of all depths of CE(q, p), of the network's law q and the target's p
Places:     row d behind pair t (0 the pair itself) guesses token t + 2 + d
Choices beyond the paper: docs/drafters/peagle.md.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from specdec.drafters.peagle import PEagle
from specdec.models.networks.peagle import PEagleConfig, PEagleNetwork
from specdec.models.target.target import Target
from specdec.training.objectives.base import Objective, TrainingBatch
from specdec.training.objectives.eagle import EAGLE_RECIPES, guesses_of, prepare_third

__all__ = ["PEagleObjective"]


class PEagleObjective(Objective):
    """Loss of a pair and its masks.

    Args:
        network: what is trained.
        target: the frozen target.
        keep_ratio: r, the share of the pairs of a depth that the next one is learnt behind.
        least_share: of all pairs at least this share has every depth.

    Raises:
        ValueError: a share outside (0, 1].
    """

    drafter_class = PEagle
    recipe = replace(EAGLE_RECIPES[3], learning_rate=1e-4)
    network: PEagleNetwork

    def __init__(
        self, network: PEagleNetwork, target: Target, *, keep_ratio: float = 0.7, least_share: float = 0.2
    ) -> None:
        super().__init__(network, target)
        for name, share in (("keep_ratio", keep_ratio), ("least_share", least_share)):
            if not 0 < share <= 1:
                raise ValueError(f"{name}: expected more than 0 and at most 1, got {share}")
        self.keep_ratio = keep_ratio
        self.least_share = least_share

    @classmethod
    def new_network(
        cls,
        target: Target,
        *,
        draft_tokens: Sequence[int] | torch.Tensor | None = None,
        start_from_target: bool = True,
        **settings: Any,
    ) -> PEagleNetwork:
        """As version 3 of `EagleObjective`; `settings` as `PEagleConfig.for_target` takes them.

        Raises:
            TypeError: a setting that this kind does not have.
            ValueError: as `EagleObjective`.
        """
        if draft_tokens is not None:
            settings.setdefault("draft_vocab_size", len(draft_tokens))
        network = PEagleNetwork(PEagleConfig.for_target(target.model.config, **settings))
        prepare_third(network, target, draft_tokens, start_from_target=start_from_target)
        return network

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Decoder layers that the network reads."""
        return self.network.config.tap_layers or ()

    @property
    def needs_best(self) -> bool:
        """A draft vocabulary learns where they are in it."""
        return self.network.has_own_vocabulary

    def forward(self, batch: TrainingBatch) -> dict[str, torch.Tensor]:
        """The loss, and its mean at each depth: `"depth_1"`, `"depth_2"`, ..."""
        num_tokens, network = batch.tokens.shape[1], self.network
        if num_tokens < 3:  # no token to guess; zero, with a gradient that distributed training can reduce
            return {"loss": 0.0 * network.fc.weight.sum()}
        depths = self._groups(batch)
        groups = torch.cat(depths[1:])
        members = torch.cat([torch.full_like(some, member) for member, some in enumerate(depths)][1:])
        features = torch.cat([tap[:, :-2] for tap in batch.taps], -1).to(network.fc.weight.dtype)
        embed = self.embed if network.embed_tokens is None else network.embed_tokens
        states = network.see_groups(features, batch.tokens[:, 1:-1], groups, members, embed)
        total, count, parts = states.new_zeros((), dtype=torch.float32), 0, {}
        of_depth = states.split([len(some) for some in depths], 1)
        for member, (some, guesses) in enumerate(zip(depths, of_depth, strict=True)):
            logits, law = guesses_of(self, batch, guesses, some + member + 1)
            entropy = F.cross_entropy(logits, law, reduction="sum")
            parts[f"depth_{member + 1}"] = entropy / max(len(law), 1)
            total, count = total + entropy, count + len(law)
        return {"loss": total / max(count, 1), **parts}

    def _groups(self, batch: TrainingBatch) -> list[torch.Tensor]:
        """Per depth the pairs that it is learnt behind, the same for all texts; each has those of the next one.

        The first depth has all pairs. Of those whose group has something to learn, the others have fewer and fewer,
        drawn anew at each step, and in an evaluation the same ones every time.
        """
        device, config = batch.tokens.device, self.network.config
        num_pairs = batch.tokens.shape[1] - 2
        generator = None if self.training else torch.Generator().manual_seed(0)
        may = batch.loss_mask[:, 2:].any(0)
        order = torch.randperm(num_pairs, generator=generator).to(device)
        order = order[may[order]]
        depths = [torch.arange(num_pairs, device=device)]
        for depth in range(1, config.num_masks + 1):
            share = max(self.keep_ratio**depth, self.least_share)
            order = order[: int(share * int(may.sum()))]
            order = order[order + depth < num_pairs]  # behind the others the text ends
            depths.append(order.sort().values)
        return depths
