"""EAGLE-1 and EAGLE-2's network: one decoder layer that continues the target's states, fed with each and its token.

Equation:   z_t = W [e(x_{t+1}); h_t] + b;  s_{t+1} = layer(z_t) without input norm, a guess of h_{t+1};
            logits for x_{t+2} = the target's LM head on s_{t+1}. Deeper in a draft, s takes the place of h
Source:     EAGLE (arXiv:2401.15077) section 4.1; the authors' published files
Shapes:     e, h, s [B, T, C]

Parameter names are those of the authors' files. The embedding and the LM head are the target's and not in it. EAGLE-1
and EAGLE-2 differ in the tree alone.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.layer import Attend, DraftLayer, LayerNetworkConfig, Rotary

__all__ = ["EagleConfig", "EagleNetwork"]


@dataclass(frozen=True, slots=True)
class EagleConfig(LayerNetworkConfig):
    """Sizes of the network.

    Attributes:
        fc_bias: whether the input projection has a bias.
    """

    fc_bias: bool = True

    # EAGLE-3 was a version of the same configuration once
    retired: ClassVar[tuple[str, ...]] = (
        "version",
        "tap_layers",
        "draft_vocab_size",
        "norm_before_residual",
        "norm_output",
        "feature_norm",
        "own_embedding",
        "shares_lm_head",
    )

    num_layers: ClassVar[int] = 1

    @property
    def feature_size(self) -> int:
        """Width F of what is read of the target at each token."""
        return self.hidden_size


class EagleNetwork(DraftNetwork):
    """One layer with its input projection."""

    config_class = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.rotary = Rotary(config.layer)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([DraftLayer(config.layer, input_norm=False)])

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """What takes the place of guesses at tokens that the target has seen: the target's states as they are."""
        return features

    def forward(
        self, states: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor | None, attend: Attend
    ) -> torch.Tensor:
        """The states that follow.

        Args:
            states: [B, T, C] state of each token: of the target, through `read`, or guessed.
            embedded: [B, T, C] the target's embedding of the token after each.
            positions: [B or 1, T] position of each state's own token.
            attend: who sees whom.

        Returns:
            [B, T, C] guessed states of the tokens after.
        """
        joined = torch.cat((embedded.to(states.dtype), states), -1)
        return self.layers[0](self.fc(joined), self.rotary.at(states, positions), attend, backend=self.backend)

    def lm_states(self, states: torch.Tensor) -> torch.Tensor:
        """What enters the LM head: [.., C] of `forward` as they are."""
        return states
