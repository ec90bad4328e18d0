"""Attention of draft networks: where keys and values go, who sees whom, and the rotary embedding of both.

A layer hands its queries, keys and values to an `Attend`. `CachedAttention` writes them to a `KVCache` and attends as a
pass says (inference); `MaskedAttention` keeps nothing (training); `LayerwiseAttention` does as each layer's own says.
Shapes:     queries [B, T, HQ, D], keys and values [B, T, HK, D]; positions [B or 1, T]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.kernels.rope_kv_write import rope_kv_write
from specdec.models.common.cache import KVCache
from specdec.models.common.passes import PromptPass, TreePass

__all__ = ["Attend", "CachedAttention", "LayerwiseAttention", "MaskedAttention", "Rotary", "Rotation", "attend_among"]
__all__ += ["rotary_table"]

_ROPE_OF_THE_WHOLE_TEXT = ("dynamic", "longrope")  # frequencies depend on how long the text is


class _Sizes(Protocol):
    """What the rotary embedding has to know of a layer."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def rope_parameters(self) -> dict[str, Any]: ...


class Attend(Protocol):
    """Attention of one layer of a draft network."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: "Rotation",
        window: int | None,
    ) -> torch.Tensor:
        """Rotate queries and keys to their positions, and attend.

        Args:
            layer: index of the layer in its network.
            query: [B, T, HQ, D].
            key: [B, T, HK, D].
            value: [B, T, HK, D].
            rotation: the rotary embedding of the pass.
            window: positions that a query sees, its own included; None for all.

        Returns:
            [B, T, HQ, D], or of the last R tokens alone where those before them only give keys and values.
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
        asking: the last nodes of the pass, if the others only leave keys and values; None if all of them attend.
    """

    cache: KVCache
    visible: PromptPass | TreePass
    table: torch.Tensor | None
    places: torch.Tensor
    asking: TreePass | None = None

    @property
    def positions(self) -> torch.Tensor | None:
        """[B, T] int64 positions of the pass, which a network needs where cosines and sines are in no table."""
        return self.visible.positions if self.table is None else None

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: "Rotation",
        window: int | None,
    ) -> torch.Tensor:
        """As `Attend`."""
        held, asking = cast(Any, self.cache.layers[layer]), self.asking or self.visible
        query = self.write(layer, key, value, rotation, query)
        if self.asking is not None:
            query = query[:, -self.asking.num_nodes :]
        scale = query.shape[-1] ** -0.5
        return asking.attend(query.transpose(1, 2), held.keys, held.values, scale=scale, window=window)

    def write(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: "Rotation",
        query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write keys and values to their slots; arguments as of `Attend`.

        Returns:
            The rotated queries; the rotated keys where there are none.
        """
        visible, held = self.visible, cast(Any, self.cache.layers[layer])
        if self.table is None:
            self.cache.begin_pass(visible)
            rotated = rotation.rotate(key)
            held.update(rotated.transpose(1, 2), value.transpose(1, 2))
            return rotated if query is None else rotation.rotate(query)
        memory = held.keys.transpose(1, 2), held.values.transpose(1, 2)
        # the nodes of a tree count from the length of their row
        of_tree = visible if isinstance(visible, TreePass) else None
        first = visible.first_node if isinstance(visible, TreePass) else visible.start
        slots = self.places[:, first : first + key.shape[1]]
        return rope_kv_write(
            key if query is None else query,
            key,
            value,
            slots if of_tree is None else of_tree.depth,
            self.table,
            slots,
            *memory,
            lengths=None if of_tree is None else of_tree.lengths,
            backend=self.cache.backend,
        )


@dataclass(frozen=True, slots=True)
class MaskedAttention:
    """Attend among the tokens at hand.

    Attributes:
        mask: [B or 1, R, T] bool, True where query i of the last R tokens, which alone attend, may see key j; None for
            causal.
    """

    mask: torch.Tensor | None = None

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: "Rotation",
        window: int | None,
    ) -> torch.Tensor:
        """As `Attend`."""
        mask = self.mask
        if window is not None:
            if mask is not None:
                raise NotImplementedError(f"window: expected None beside a mask, got {window}")
            ones = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool, device=query.device)
            mask = (ones.tril() & ones.triu(1 - window))[None]
        query = rotation.rotate(query)
        return attend_among(query if mask is None else query[:, -mask.shape[1] :], rotation.rotate(key), value, mask)


@dataclass(frozen=True, slots=True)
class LayerwiseAttention:
    """Every layer attends in a way of its own.

    Attributes:
        attends: of each layer.
        windows: of each layer, where its `attends` want to be told.
    """

    attends: Sequence[Attend]
    windows: Sequence[int | None]

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: "Rotation",
        window: int | None,
    ) -> torch.Tensor:
        """As `Attend`; `window` is not asked for."""
        return self.attends[layer](layer, query, key, value, rotation, self.windows[layer])


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


class Rotary(nn.Module):
    """Rotary embedding at explicit positions; the tables are made by transformers and are not saved."""

    def __init__(self, config: _Sizes) -> None:
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


def rotary_table(config: _Sizes, num_positions: int, device: torch.device) -> torch.Tensor | None:
    """What `rope_kv_write` reads: [num_positions, D] fp32, cosines and then sines, as `Rotary` makes them.

    None where they depend on the length of the text too.
    """
    if config.rope_parameters.get("rope_type") in _ROPE_OF_THE_WHOLE_TEXT:
        return None
    rotary = Rotary(config).to(device)
    positions = torch.arange(num_positions, device=device)[None]
    halves = [part[0, :, 0, : config.head_dim // 2] for part in rotary(torch.zeros((), device=device), positions)]
    return torch.cat(halves, -1)
