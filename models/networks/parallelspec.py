"""ParallelSpec's network: one decoder layer that guesses K + 1 tokens in one pass, the further ones at K [MASK] places.

Equation:   group:   x_t, [MASK]_1, ..., [MASK]_K at the positions of t, t + 1, ..., t + K
            medusa:  u = e(x_t), or m_k at a mask;                         z = norm(layer(u)); logits = LM_head(z)
            eagle:   u = fc([e(x_{t+1}); h_t]), or fc([m_k; g_k]) at a mask;  z = layer(u), a guess of h; the same head
Source:     ParallelSpec (arXiv:2410.05589) sections 4.1 and 4.3; the eagle variant's layer is EAGLE-1's
Shapes:     x [B, T]; e, h, u, z [B, N, C]; m, g [K, C]

The network reads embeddings and gives states; the target's embedding and LM head are shared and not in it. No files
were published. Choices that the paper leaves open: docs/drafters/parallelspec.md.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.eagle import EagleNetwork
from specdec.models.networks.eagle3 import Eagle3Network
from specdec.models.networks.layer import Attend, DraftLayer, LayerNetworkConfig, Rotary

__all__ = ["ParallelSpecConfig", "ParallelSpecNetwork", "group_mask"]


@dataclass(frozen=True, slots=True)
class ParallelSpecConfig(LayerNetworkConfig):
    """Sizes and variant of a ParallelSpec network.

    Attributes:
        variant: `"medusa"` reads tokens alone; `"eagle"` reads them with the target's states and guesses states.
        num_masks: K; the network guesses K + 1 tokens.
        mask_feature: what stands in the feature's place at a mask of the eagle variant: `"last"`, the group's own
            h_t, the newest that is known, or `"trained"`, a trainable vector per mask.
    """

    variant: Literal["medusa", "eagle"] = "eagle"
    num_masks: int = 4
    mask_feature: Literal["last", "trained"] = "last"

    def __post_init__(self) -> None:
        LayerNetworkConfig.__post_init__(self)
        if self.num_masks < 1:
            raise ValueError(f"num_masks: expected at least 1, got {self.num_masks}")
        if self.variant not in ("medusa", "eagle"):
            raise ValueError(f"variant: expected 'medusa' or 'eagle', got {self.variant!r}")
        if self.mask_feature not in ("last", "trained"):
            raise ValueError(f"mask_feature: expected 'last' or 'trained', got {self.mask_feature!r}")
        if self.variant == "medusa" and self.mask_feature != "last":
            raise ValueError(f"mask_feature: expected 'last' in the medusa variant, got {self.mask_feature!r}")


class ParallelSpecNetwork(DraftNetwork):
    """One layer, and the embeddings of the masks."""

    config_class = ParallelSpecConfig
    config: ParallelSpecConfig

    def __init__(self, config: ParallelSpecConfig) -> None:
        super().__init__(config)
        width, is_eagle = config.hidden_size, config.variant == "eagle"
        has_features = is_eagle and config.mask_feature == "trained"
        self.masks = nn.Parameter(torch.zeros(config.num_masks, width))
        self.mask_features = nn.Parameter(torch.zeros(config.num_masks, width)) if has_features else None
        self.fc = nn.Linear(2 * width, width) if is_eagle else None
        self.layer = DraftLayer(config.layer, input_norm=not is_eagle)
        self.norm = None if is_eagle else nn.RMSNorm(width, config.layer.rms_norm_eps)
        self.rotary = Rotary(config.layer)

    def read(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Inputs of the layer at real tokens.

        Args:
            embedded: [B, T, C] embedding of each token.
            features: [B, T, C] the target's state before each token; unused, of any width, in the medusa variant.
        """
        return embedded if self.fc is None else self.fc(torch.cat((embedded, features), -1))

    def read_masks(self, features: torch.Tensor, num_masks: int) -> torch.Tensor:
        """Inputs of the layer at the first `num_masks` masks of groups.

        Args:
            features: [B, C] or [B, T, C] feature of each group's real token; only its leading sizes matter where masks
                have features of their own or none.
            num_masks: how many masks to read.

        Returns:
            [B, num_masks, C] or [B, T, num_masks, C].
        """
        masks = self.masks[:num_masks].expand(*features.shape[:-1], -1, -1)
        if self.fc is None:
            return masks
        given = features[..., None, :] if self.mask_features is None else self.mask_features[:num_masks]
        return self.fc(torch.cat((masks, given.expand_as(masks)), -1))

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor | None, attend: Attend) -> torch.Tensor:
        """States that enter the LM head.

        Args:
            inputs: [B, N, C] inputs of the layer, from `read` and `read_masks`.
            positions: [B or 1, N] positions.
            attend: who sees whom.

        Returns:
            [B, N, C].
        """
        rotation = self.rotary.at(inputs, positions)
        return self.layer(inputs, rotation, attend, backend=self.backend, norm=self.norm)

    @torch.no_grad()
    def start_from(self, embedding: torch.Tensor) -> None:
        """Begin training: masks as large as the target's embeddings [V, C], their features as a normalised state."""
        self.masks.normal_(std=float(embedding.float().std()))
        if self.mask_features is not None:
            self.mask_features.normal_()

    @torch.no_grad()
    def start_from_eagle(self, eagle: EagleNetwork | Eagle3Network) -> None:
        """Begin training of the eagle variant with a trained head of EAGLE-1, which is this network without its masks.

        Raises:
            ValueError: another variant, a head of EAGLE-3, or one of other sizes.
        """
        if self.config.variant != "eagle" or not isinstance(eagle, EagleNetwork):
            raise ValueError(
                "eagle: expected a drafter of EAGLE-1 for the eagle variant, got one of EAGLE-"
                f"{1 if isinstance(eagle, EagleNetwork) else 3} for the {self.config.variant} variant"
            )
        own = self.state_dict()
        given = {name.replace("layers.0.", "layer."): tensor for name, tensor in eagle.state_dict().items()}
        sizes = {name: list(tensor.shape) for name, tensor in own.items() if name not in ("masks", "mask_features")}
        got = {name: list(tensor.shape) for name, tensor in given.items()}
        if got != sizes:
            differing = sorted(name for name in sizes.keys() | got.keys() if sizes.get(name) != got.get(name))
            raise ValueError(f"eagle: expected the sizes of this network, got others for {', '.join(differing)}")
        for name, tensor in given.items():
            own[name].copy_(tensor)


def group_mask(group: torch.Tensor, member: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """Who sees whom in figure 3 of the paper.

    Args:
        group: [N] group of each token and mask, counted by its real token.
        member: [N] place of each in its group: 0 for the real token, k for mask k.
        window: real tokens that a row sees, counted back from its own position; None for all before it.

    Returns:
        [N, N] bool, True where row i may see column j.
    """
    earlier_token = (member == 0) & (group < group[:, None])
    if window is not None:
        earlier_token &= (group + member)[:, None] - group < window
    own_group = (group == group[:, None]) & (member <= member[:, None])
    return earlier_token | own_group
