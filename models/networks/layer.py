"""The building block of feature-level drafters: one LLaMA decoder layer, with attention handed in from outside.

Equation:   a = x + O Attention(rope(Q n(x)), rope(K n(x)), V n(x));  y = a + Down(SiLU(Gate m(a)) * Up m(a))
            n and m are RMS norms; EAGLE-1 leaves n out
Source:     the decoder layer of LLaMA, as Hydra++'s prefix layer, EAGLE, Falcon, Amphista and ParallelSpec use it
Shapes:     x [B, T, C]; positions [B or 1, T]; queries [B, T, HQ, D], keys and values [B, T, HK, D]

The layer does not know where its keys and values go or who sees whom: `Attend` decides. `CachedAttention` writes them
to a `KVCache` and attends as a pass says (inference); `MaskedAttention` keeps nothing (training). So a network has one
forward for both; what surrounds attention runs on kernels where nothing is learnt (`specdec.models.common.ops`).
Parameter names are those of transformers, so that published checkpoints load as they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.kernels.common.launch import Backend
from specdec.kernels.rope_kv_write import rope_kv_write
from specdec.models.common.cache import KVCache
from specdec.models.common.ops import add_rms_normed, gated, projected, rms_normed
from specdec.models.common.passes import PromptPass, TreePass

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Attend", "CachedAttention", "DraftLayer", "DraftLayerConfig", "LayerNetworkConfig", "MaskedAttention"]
__all__ += ["Rotary", "Rotation", "attend_among", "rotary_table"]

_ROPE_OF_THE_WHOLE_TEXT = ("dynamic", "longrope")  # frequencies depend on how long the text is


class Attend(Protocol):
    """Attention of one layer of a draft network."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: "Rotation"
    ) -> torch.Tensor:
        """Rotate queries and keys to their positions, and attend.

        Args:
            layer: index of the layer in its network.
            query: [B, T, HQ, D].
            key: [B, T, HK, D].
            value: [B, T, HK, D].
            rotation: the rotary embedding of the pass.

        Returns:
            [B, T, HQ, D].
        """
        ...


@dataclass(frozen=True, slots=True)
class CachedAttention:
    """Write keys and values to the slots of a pass and attend to what the pass makes visible.

    Attributes:
        cache: of the draft network.
        visible: the pass.
        table: [P, D] of `rotary_table`, for all positions of the cache; None where there can be none.
        places: [1, P] int32, the numbers from 0.
    """

    cache: KVCache
    visible: PromptPass | TreePass
    table: torch.Tensor | None
    places: torch.Tensor

    @property
    def positions(self) -> torch.Tensor | None:
        """[B, T] int64 positions of the pass, which a network needs where cosines and sines are in no table."""
        return self.visible.positions if self.table is None else None

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: "Rotation"
    ) -> torch.Tensor:
        """As `Attend`."""
        visible, held = self.visible, cast(Any, self.cache.layers[layer])
        if self.table is None:
            self.cache.begin_pass(visible)
            held.update(rotation.rotate(key).transpose(1, 2), value.transpose(1, 2))
            query = rotation.rotate(query)
        else:
            memory = held.keys.transpose(1, 2), held.values.transpose(1, 2)
            # the nodes of a tree count from the length of their row
            of_tree = visible if isinstance(visible, TreePass) else None
            first = visible.first_node if isinstance(visible, TreePass) else visible.start
            slots = self.places[:, first : first + query.shape[1]]
            query = rope_kv_write(
                query,
                key,
                value,
                slots if of_tree is None else of_tree.depth,
                self.table,
                slots,
                *memory,
                lengths=None if of_tree is None else of_tree.lengths,
                backend=self.cache.backend,
            )
        return visible.attend(query.transpose(1, 2), held.keys, held.values, scale=query.shape[-1] ** -0.5, window=None)


@dataclass(frozen=True, slots=True)
class MaskedAttention:
    """Attend among the tokens at hand.

    Attributes:
        mask: [B or 1, T, T] bool, True where query i may see key j; None for causal.
    """

    mask: torch.Tensor | None = None

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: "Rotation"
    ) -> torch.Tensor:
        """As `Attend`."""
        return attend_among(rotation.rotate(query), rotation.rotate(key), value, self.mask)


def attend_among(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of rotated `query [B, T, HQ, D]` to `[B, S, HK, D]`; mask [B or 1, T, S] bool, None for causal."""
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None],
        is_causal=mask is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return attended.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class DraftLayerConfig:
    """Sizes of a draft layer, as a transformers LLaMA configuration names them.

    Attributes:
        rope_parameters: as in transformers v5, `rope_theta` and `rope_type` with its settings.
        attention_bias: biases on queries, keys and values (Qwen2).
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
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


class Rotary(nn.Module):
    """Rotary embedding at explicit positions; the tables are made by transformers and are not saved."""

    def __init__(self, config: DraftLayerConfig) -> None:
        super().__init__()
        llama = LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
        self.tables = LlamaRotaryEmbedding(llama)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Rotary":
        """As nn.Module, but the tables stay in fp32: rounded frequencies are radians off at far positions.

        They are the same tensors as before, unless the device changes: captured steps read them where they lie.
        """
        before = dict(self.tables._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, table in before.items():
            moved = self.tables._buffers[name]
            if table is not None and moved is not None:
                self.tables._buffers[name] = table.to(moved.device)
        return self

    def forward(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [B or 1, T, 1, D] for positions [B or 1, T], in the dtype of `like`."""
        cos, sin = self.tables(like, positions)
        return cos[:, :, None], sin[:, :, None]

    def at(self, like: torch.Tensor, positions: torch.Tensor | None) -> "Rotation":
        """The embedding at positions [B or 1, T], in the dtype of `like`; None if attention looks them up itself."""
        return Rotation(self, like, positions)


class Rotation:
    """The rotary embedding at the positions of one pass; cosines and sines are made when they are first asked for."""

    def __init__(self, rotary: Rotary, like: torch.Tensor, positions: torch.Tensor | None) -> None:
        self._of = rotary, like, positions

    @cached_property
    def _cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        rotary, like, positions = self._of
        return cast("tuple[torch.Tensor, torch.Tensor]", rotary(like, positions))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the embedding to x [B, T, H, D], halves as in transformers."""
        cos, sin = self._cos_sin
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


def rotary_table(config: DraftLayerConfig, num_positions: int, device: torch.device) -> torch.Tensor | None:
    """What `rope_kv_write` reads: [num_positions, D] fp32, cosines and then sines, as `Rotary` makes them.

    None where they depend on the length of the text too.
    """
    if config.rope_parameters.get("rope_type") in _ROPE_OF_THE_WHOLE_TEXT:
        return None
    rotary = Rotary(config).to(device)
    positions = torch.arange(num_positions, device=device)[None]
    halves = [part[0, :, 0, : config.head_dim // 2] for part in rotary(torch.zeros((), device=device), positions)]
    return torch.cat(halves, -1)


class _Attention(nn.Module):
    side_by_side: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: DraftLayerConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, key, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, key, bias=config.attention_bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, rotation: Rotation, attend: Attend, layer: int) -> torch.Tensor:
        parts = projected(x, (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return self.o_proj(attend(layer, query, key, value, rotation).flatten(2))


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
    """

    def __init__(
        self, config: DraftLayerConfig, *, input_norm: bool = True, attention_input_size: int | None = None
    ) -> None:
        super().__init__()
        self.self_attn = _Attention(config, attention_input_size or config.hidden_size)
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
            attention_input: [B, T, attention_input_size] when attention does not start from (normalised) x.
            norm: a norm behind the layer, if it is to be applied.

        Returns:
            [B, T, C].
        """
        if attention_input is None:
            attention_input = x if self.input_layernorm is None else rms_normed(x, self.input_layernorm, backend)
        attended = self.self_attn(attention_input, rotation, attend, layer)
        normed, x = add_rms_normed(attended, x, self.post_attention_layernorm, backend)
        added = self.mlp(normed, backend)
        return x + added if norm is None else add_rms_normed(added, x, norm, backend)[0]
