"""The building block of feature-level drafters: one LLaMA decoder layer, with attention handed in from outside.

Equation:   a = x + O Attention(rope(Q n(x)), rope(K n(x)), V n(x));  y = a + Down(SiLU(Gate m(a)) * Up m(a))
            n and m are RMS norms; EAGLE-1 leaves n out; Qwen3 norms the heads of queries and keys before rope
Source:     the decoder layer of LLaMA, as Hydra++'s prefix layer, EAGLE, Falcon, Amphista and ParallelSpec use it, and
            that of Qwen3, as the heads of 2026 do
Shapes:     x [B, T, C]; positions [B or 1, T]; queries [B, T, HQ, D], keys and values [B, T, HK, D]

The layer does not know where its keys and values go or who sees whom: `Attend` decides. `CachedAttention` writes them
to a `KVCache` and attends as a pass says (inference); `MaskedAttention` keeps nothing (training). So a network has one
forward for both; what surrounds attention runs on kernels where nothing is learnt (`specdec.models.common.ops`).
Parameter names are those of transformers, so that published checkpoints load as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig

from specdec.kernels.common.launch import Backend
from specdec.models.common.attention import (
    Attend,
    CachedAttention,
    LayerwiseAttention,
    MaskedAttention,
    Rotary,
    Rotation,
    attend_among,
    rotary_table,
)
from specdec.models.common.ops import add_rms_normed, gated, projected, rms_normed

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Attend", "CachedAttention", "DraftLayer", "DraftLayerConfig", "LayerNetworkConfig", "MaskedAttention"]
__all__ += ["LayerwiseAttention", "Rotary", "Rotation", "attend_among", "rotary_table"]


@dataclass(frozen=True, slots=True)
class DraftLayerConfig:
    """Sizes of a draft layer, as a transformers LLaMA configuration names them.

    Attributes:
        rope_parameters: as in transformers v5, `rope_theta` and `rope_type` with its settings.
        attention_bias: biases on queries, keys and values (Qwen2).
        qk_norm: an RMS norm over each head of queries and of keys, before rope (Qwen3).
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    qk_norm: bool = False
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})

    def __post_init__(self) -> None:
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        for name in (*names, "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of {self.num_attention_heads}, got {self.num_key_value_heads}"
            )

    @classmethod
    def like(cls, config: PretrainedConfig, **changes: Any) -> "DraftLayerConfig":
        """The sizes of a target's layers, from its LLaMA-like configuration; `changes` replace some of them."""
        config = config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
        sizes = {
            "hidden_size": config.hidden_size,
            "intermediate_size": getattr(config, "intermediate_size", None) or config.ffn_dim,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
            "rope_parameters": dict(rope),
        }
        return cls(**{**sizes, **changes})


@dataclass(frozen=True, slots=True)
class LayerNetworkConfig:
    """What the configurations of networks of such layers have in common.

    Attributes:
        vocab_size: tokens of the target.
        layer: sizes of the layer, or of all of them.
    """

    vocab_size: int
    layer: DraftLayerConfig

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size: expected at least 1, got {self.vocab_size}")

    @property
    def hidden_size(self) -> int:
        """Width of embeddings and states."""
        return self.layer.hidden_size

    @classmethod
    def for_target(cls, target_config: PretrainedConfig, **changes: Any) -> "Self":
        """A network with layers like the target's.

        Args:
            target_config: the target's configuration.
            changes: fields of this class, and of `DraftLayerConfig`.

        Raises:
            TypeError: a change that neither class knows.
        """
        text = target_config.get_text_config(decoder=True)
        own = {field.name: changes.pop(field.name) for field in fields(cls) if field.name in changes}
        layer = replace(own.pop("layer", None) or DraftLayerConfig.like(text), **changes)
        return cls(**{"vocab_size": text.vocab_size, "layer": layer, **own})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Self":
        """What `dataclasses.asdict` was given."""
        return cls(**{**data, "layer": DraftLayerConfig(**data["layer"])})


class _Attention(nn.Module):
    side_by_side: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: DraftLayerConfig, input_size: int, window: int | None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.window = window
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, key, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, key, bias=config.attention_bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def keys_values(self, x: torch.Tensor, backend: Backend | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, not rotated yet, and values of x: [B, T, HK, D] both."""
        key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in projected(x, (self.k_proj, self.v_proj)))
        return key if self.k_norm is None else rms_normed(key, self.k_norm, backend), value

    def forward(
        self, x: torch.Tensor, rotation: Rotation, attend: Attend, layer: int, backend: Backend | None
    ) -> torch.Tensor:
        parts = projected(x, (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = rms_normed(query, self.q_norm, backend), rms_normed(key, self.k_norm, backend)
        return self.o_proj(attend(layer, query, key, value, rotation, self.window).flatten(2))


class _MLP(nn.Module):
    side_by_side: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")

    def __init__(self, config: DraftLayerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, backend: Backend | None) -> torch.Tensor:
        return self.down_proj(gated(x, self.gate_proj, self.up_proj, backend))


class DraftLayer(nn.Module):
    """One decoder layer.

    Args:
        config: sizes.
        input_norm: normalise the attention's input; False for EAGLE-1, whose first layer does not.
        attention_input_size: width of what queries, keys and values are made from; the hidden size by default.
            EAGLE-3 attends from the embedding and the feature side by side.
        window: positions that a query sees, its own included; None for all.
    """

    def __init__(
        self,
        config: DraftLayerConfig,
        *,
        input_norm: bool = True,
        attention_input_size: int | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.self_attn = _Attention(config, attention_input_size or config.hidden_size, window)
        self.mlp = _MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps) if input_norm else None
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
        *,
        backend: Backend | None,
        layer: int = 0,
        attention_input: torch.Tensor | None = None,
        norm: nn.RMSNorm | None = None,
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            x: [B, T, C] the residual stream.
            rotation: the rotary embedding at the tokens' positions.
            attend: what the tokens see.
            backend: what runs the kernels around attention; None decides by device.
            layer: index of this layer for `attend`.
            attention_input: [B, T, attention_input_size] when attention does not start from (normalised) x; more rows
                than x has where `attend` answers for the last T alone.
            norm: a norm behind the layer, if it is to be applied.

        Returns:
            [B, T, C].
        """
        if attention_input is None:
            attention_input = x if self.input_layernorm is None else rms_normed(x, self.input_layernorm, backend)
        attended = self.self_attn(attention_input, rotation, attend, layer, backend)
        normed, x = add_rms_normed(attended, x, self.post_attention_layernorm, backend)
        added = self.mlp(normed, backend)
        return x + added if norm is None else add_rms_normed(added, x, norm, backend)[0]
