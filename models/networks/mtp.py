"""MTP heads: decoder layers behind the target's, each of which continues states by one more token.

Equation:   z_t = W [n_e(e(x_{t+k+1})); n_h(h^{k-1}_t)];  h^k_t = n(layer_k(z_t)), h^{-1}_t the target's final state;
            logits for x_{t+k+2} = the target's LM head on h^k_t. Behind the last layer its own states are fed to it
Source:     DeepSeek-V3 (arXiv:2412.19437) section 2.2, FastMTP (arXiv:2509.18362); transformers' `MtpModel`, which
            feeds the states behind the last norm n to the next layer, as here
Shapes:     e, h [B, T, C]

The embedding and the LM head are the target's. A layer is a `DraftLayer` where the family's layers are LLaMA's, Qwen2's
or Qwen3's, or else the family's own (`specdec.models.common.family`), whose weights come from a file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from specdec.kernels.common.launch import Backend
from specdec.models.common.family import family_parts
from specdec.models.common.ops import rms_normed
from specdec.models.common.passes import PromptPass
from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.layer import Attend, CachedAttention, DraftLayer, LayerNetworkConfig, Rotary

__all__ = ["MtpConfig", "MtpNetwork"]


@dataclass(frozen=True, slots=True)
class MtpConfig(LayerNetworkConfig):
    """Sizes of the network.

    Attributes:
        num_layers: layers, one a depth; deeper drafts use the last one again.
        states_first: the order of what is joined: states and then embeddings, as in MiMo's files.
        family: what the `config.json` of a family says, if the layers are the family's own; `layer` then has no more
            than the sizes of its keys.
    """

    num_layers: int = 1
    states_first: bool = False
    family: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        # by name: a slotted dataclass is another class than the one that `super()` knows here
        LayerNetworkConfig.__post_init__(self)
        if self.num_layers < 1:
            raise ValueError(f"num_layers: expected at least 1, got {self.num_layers}")

    @property
    def feature_size(self) -> int:
        """Width F of what is read of the target at each token."""
        return self.hidden_size


class MtpNetwork(DraftNetwork):
    """The layers with what stands in front of and behind each."""

    config_class = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        sizes = config.layer
        blocks: list[nn.Module]
        new_norm: Callable[[], nn.Module]
        if config.family is None:
            self.rotary: Rotary = Rotary(sizes)
            blocks = [DraftLayer(sizes) for _ in range(config.num_layers)]

            def new_norm() -> nn.Module:
                return nn.RMSNorm(config.hidden_size, sizes.rms_norm_eps)
        else:
            parts = family_parts(config.family, config.num_layers)
            self.rotary = _FamilyRotary(parts.rotary)
            blocks, new_norm = parts.layers, parts.new_norm
        self.depths = nn.ModuleList([_Depth(config.hidden_size, block, new_norm) for block in blocks])

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """What takes the place of guesses at tokens that the target has seen: the target's states as they are."""
        return features

    def forward(
        self,
        states: torch.Tensor,
        embedded: torch.Tensor,
        positions: torch.Tensor | None,
        attend: Attend,
        layer: int = 0,
    ) -> torch.Tensor:
        """The states that one layer makes.

        Args:
            states: [B, T, C] state of each token: of the target, of the layer before, or of the layer itself.
            embedded: [B, T, C] the target's embedding of the token that is `layer + 1` behind each.
            positions: [B or 1, T] place of each among the keys of the layer; the layers of a family need them always.
            attend: who sees whom.
            layer: index of the layer.

        Returns:
            [B, T, C] what the LM head reads, for the tokens after those.
        """
        depth = cast(_Depth, self.depths[layer])
        parts = (
            _normed(embedded.to(states.dtype), depth.token_norm, self.backend),
            _normed(states, depth.state_norm, self.backend),
        )
        joined = depth.fc(torch.cat(parts[::-1] if self.config.states_first else parts, -1))
        if self.config.family is None:
            rotation = self.rotary.at(states, positions)
            norm = depth.final_norm
            return depth.block(joined, rotation, attend, backend=self.backend, layer=layer, norm=norm)
        return depth.final_norm(self._run_family(depth.block, joined, positions, attend))

    def lm_states(self, states: torch.Tensor) -> torch.Tensor:
        """What enters the LM head: [.., C] of `forward` as they are, or the first of several side by side."""
        return states[..., : self.config.hidden_size]

    def _run_family(
        self, block: nn.Module, x: torch.Tensor, positions: torch.Tensor | None, attend: Attend
    ) -> torch.Tensor:
        """Run a family's own layer on x [B, T, C]."""
        if isinstance(attend, CachedAttention):
            cache, visible = attend.cache, attend.visible
            cache.begin_pass(visible)
            positions = visible.positions
        else:
            assert positions is not None
            cache = None
            visible = PromptPass(start=0, num_tokens=x.shape[1], batch_size=x.shape[0], device=x.device)
        output = block(
            x,
            position_embeddings=self.rotary.tables(x, positions),
            position_ids=positions,
            past_key_values=cache,
            specdec_pass=visible,
        )
        return output if isinstance(output, torch.Tensor) else output[0]


class _FamilyRotary(Rotary):
    """The rotary embedding of a family, whose tables stay in fp32."""

    def __init__(self, tables: nn.Module) -> None:
        nn.Module.__init__(self)
        self.tables = tables


class _Depth(nn.Module):
    def __init__(self, hidden_size: int, block: nn.Module, new_norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.token_norm = new_norm()
        self.state_norm = new_norm()
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.block = block
        self.final_norm = new_norm()


def _normed(x: torch.Tensor, norm: nn.Module, backend: Backend | None) -> torch.Tensor:
    """A norm of x [.., C]; of those that are not LLaMA's, their own forward."""
    return rms_normed(x, norm, backend) if isinstance(norm, nn.RMSNorm) else norm(x)
