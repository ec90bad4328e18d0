"""DFlash's network: a block of an anchor and masks, read in one pass by layers that also see the target's states.

Equation:   context   c_t = hidden_norm(W [tap_1; ..; tap_n]) of the target's states at token t; it has no layers of its
                      own: every layer makes keys and values of the same c_t, by its own projections
            block     x_0, .., x_{b-1} = e(anchor), e(MASK), .., e(MASK); row j stands at the anchor's position + j
            layer     queries of n(x); keys and values of [c_0; ..; c_{a-1}; n(x)], for an anchor at position a
            output    z = norm(x); row j of z, through the LM head, is about the token at row j's own position
Switches:   causal: row j sees rows 0 .. j of its block alone (JetSpec);  windows: what a layer sees back;
            input_embedding_scale, output_multiplier: factors in front of the layers and of the LM head
Source:     DFlash (arXiv:2602.06036); z-lab/dflash; vllm-project/speculators; JetSpec (hao-ai-lab/JetSpec)
Shapes:     features [B, T, F], the taps side by side; c [B, T, C]; x, z [B, R, C]; anchors [B, M]

Row 0, the anchor, is about a token that is known already, so that a block of b rows drafts b - 1 tokens. What a row
sees is said once (`BlockView`), for training (`see_blocks`) and for cached drafting (`BlockPasses`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import nn
from transformers import PretrainedConfig

from specdec.kernels.common.launch import Backend
from specdec.kernels.common.words import pack_words
from specdec.models.common.ops import rms_normed
from specdec.models.networks.base import (
    OwnVocabulary,
    check_mask_token,
    check_target_width,
    draft_vocabulary_size,
)
from specdec.models.networks.layer import (
    Attend,
    CachedAttention,
    DraftLayer,
    LayerNetworkConfig,
    LayerwiseAttention,
    MaskedAttention,
    Rotary,
    Rotation,
)
from specdec.models.networks.prefix import FeaturePrefix

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BlockPasses", "BlockView", "DFlashConfig", "DFlashLayer", "DFlashNetwork", "default_tap_layers"]


def default_tap_layers(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """The decoder layers whose outputs are read where nobody says: evenly spaced from layer 1 to layer L - 3.

    Args:
        num_layers: L, layers of the target.
        num_taps: how many; the authors take as many as the network has layers.

    Raises:
        ValueError: the target is so shallow that these are not as many layers, in order.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    layers = tuple(round(1 + place * (num_layers - 4) / (num_taps - 1)) for place in range(num_taps))
    if len(set(layers)) < num_taps or list(layers) != sorted(layers):
        raise ValueError(
            f"tap_layers: expected the setting with a target of {num_layers} layers, such as tap_layers="
            f"{tuple(range(num_layers))[:num_taps]}; the published rule needs {num_taps + 3} layers or more"
        )
    return layers


@dataclass(frozen=True, slots=True)
class BlockView:
    """What the rows of a block see in a layer. Row j stands at position a + j, behind the context 0 .. a - 1.

    Attributes:
        window: how far back it sees, None for all: of row j, positions over a + j - window; `from_anchor` the newest
            `window` of the context, whatever the row.
        causal: row j sees rows 0 .. j of its block, not all of them.
        from_anchor: the window is the block's, not each row's.
    """

    window: int | None = None
    causal: bool = False
    from_anchor: bool = False

    def of_context(self, anchors: torch.Tensor, places: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Which of the context's `places [T]` the rows behind `anchors [..]` see: [.., num_rows, T] bool."""
        ends, places = anchors[..., None, None], places.expand(num_rows, -1)
        seen = places < ends
        if self.window is None:
            return seen
        rows = torch.zeros if self.from_anchor else torch.arange
        return seen & (ends + rows(num_rows, device=anchors.device)[:, None] - places < self.reach)

    def of_block(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """Which of its block each row sees: [num_rows, num_rows] bool."""
        ones = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device)
        if self.window is not None and not self.from_anchor:
            ones = ones.triu(1 - self.window).tril(self.window - 1)
        return ones.tril() if self.causal else ones

    @property
    def reach(self) -> int:
        """Positions that the window holds, that of the row, or of the anchor, included."""
        assert self.window is not None
        return self.window + self.from_anchor


@dataclass(frozen=True, slots=True)
class DFlashConfig(LayerNetworkConfig):
    """Sizes and switches of the network.

    Attributes:
        tap_layers: decoder layers (0-based) of the target whose outputs are read, in the order of the projection.
        block_size: b, rows of a block: the anchor and b - 1 masks.
        mask_token_id: the token whose embedding masks have.
        num_layers: decoder layers.
        windows: of each layer how far back it sees, None for all; None where no layer has a window.
        window_from: where windows end, as `BlockView.from_anchor` has it.
        causal: rows see their block up to themselves, in every layer.
        causal_windows: so in layers with a window.
        target_hidden_size: width of the target's states, if it is not the network's.
        draft_vocab_size: tokens that it can propose; the target's vocabulary by default.
        own_embedding: tokens are embedded by the network, not by the target.
        own_mask_embedding: masks have an embedding of the network's in the place of the token's.
        shares_lm_head: the LM head is the target's.
        input_embedding_scale: factor of the embeddings.
        output_multiplier: factor of the logits.
    """

    tap_layers: tuple[int, ...] = (0,)
    block_size: int = 16
    mask_token_id: int = 0
    num_layers: int = 5
    windows: tuple[int | None, ...] | None = None
    window_from: Literal["row", "anchor"] = "row"
    causal: bool = False
    causal_windows: bool = False
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    own_mask_embedding: bool = False
    shares_lm_head: bool = True
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0

    least_block: ClassVar[int] = 2

    def __post_init__(self) -> None:
        LayerNetworkConfig.__post_init__(self)
        object.__setattr__(self, "tap_layers", tuple(self.tap_layers))  # JSON has lists
        if not self.tap_layers or len(set(self.tap_layers)) < len(self.tap_layers):
            raise ValueError(f"tap_layers: expected at least one layer, each of them once, got {self.tap_layers}")
        if self.block_size < self.least_block:
            raise ValueError(f"block_size: expected at least {self.least_block}, got {self.block_size}")
        check_mask_token(self.mask_token_id, self.vocab_size)
        if self.num_layers < 1:
            raise ValueError(f"num_layers: expected at least 1, got {self.num_layers}")
        size = draft_vocabulary_size(self.draft_vocab_size, self.vocab_size, shares_lm_head=self.shares_lm_head)
        object.__setattr__(self, "draft_vocab_size", size)
        self._check_windows()
        check_target_width(self)

    def _check_windows(self) -> None:
        if self.window_from not in ("row", "anchor"):
            raise ValueError(f"window_from: expected 'row' or 'anchor', got {self.window_from!r}")
        if self.windows is None:
            return
        object.__setattr__(self, "windows", tuple(self.windows))
        if len(self.windows) != self.num_layers or any(window is not None and window < 1 for window in self.windows):
            raise ValueError(
                f"windows: expected None or at least 1 for each of {self.num_layers} layers, got {self.windows}"
            )

    @property
    def feature_size(self) -> int:
        """Width F of what is read of the target at each token."""
        return (self.target_hidden_size or self.hidden_size) * len(self.tap_layers)

    @property
    def num_draft_tokens(self) -> int:
        """Size of the vocabulary that the network proposes from."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def views(self) -> tuple[BlockView, ...]:
        """What a block sees in each layer."""
        windows = self.windows or (None,) * self.num_layers
        of_anchor = self.window_from == "anchor"
        return tuple(
            BlockView(
                window,
                causal=self.causal or (self.causal_windows and window is not None),
                from_anchor=of_anchor and window is not None,
            )
            for window in windows
        )

    @property
    def is_causal(self) -> bool:
        """Whether no row sees those behind it in any layer, so that a shorter block drafts the same."""
        return all(view.causal for view in self.views)

    @classmethod
    def for_target(cls, target_config: PretrainedConfig, *, qk_norm: bool = True, **changes: Any) -> "Self":
        """As `LayerNetworkConfig`, and with taps by the published rule where none are named.

        Args:
            target_config: the target's configuration.
            qk_norm: norms of the heads of queries and keys, as published ones have; without them where layers are to
                begin as those of a target that has none.
            changes: fields of this class, and of `DraftLayerConfig`.

        Raises:
            ValueError: no `tap_layers` for a target too shallow for the published rule.
        """
        text = target_config.get_text_config(decoder=True)
        if changes.get("tap_layers") is None:
            num_taps = changes.get("num_layers", cls.__dataclass_fields__["num_layers"].default)
            changes["tap_layers"] = default_tap_layers(text.num_hidden_layers, num_taps)
        changes = {"mask_token_id": text.vocab_size - 1, "qk_norm": qk_norm, **changes}
        return super(DFlashConfig, cls).for_target(target_config, **changes)


class DFlashLayer(DraftLayer):
    """A decoder layer of block rows that see the context too."""

    def read_block(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
        *,
        backend: Backend | None,
        layer: int,
        norm: nn.RMSNorm | None,
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            x: [B, R, C] the block rows.
            context: [B, T, C] context rows that are not cached yet, the same for every layer.
            rotation: the rotary embedding at the positions of [context; block].
            attend: what the last R rows see.
            backend: as of `DraftLayer`.
            layer: index of this layer.
            norm: a norm behind the layer, if it is to be applied.

        Returns:
            [B, R, C].
        """
        assert self.input_layernorm is not None
        joined = torch.cat((context, rms_normed(x, self.input_layernorm, backend)), 1)
        return self(x, rotation, attend, backend=backend, layer=layer, attention_input=joined, norm=norm)


class DFlashNetwork(OwnVocabulary):
    """The projection of the taps and the layers.

    Args:
        config: sizes and switches.
    """

    config_class = DFlashConfig
    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.layer.rms_norm_eps
        self.rotary = Rotary(config.layer)
        self.fc = nn.Linear(config.feature_size, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.layers = nn.ModuleList(self.new_layer() for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(width, eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.mask_embedding = nn.Parameter(torch.zeros(width)) if config.own_mask_embedding else None
        self.lm_head = None if config.shares_lm_head else nn.Linear(width, config.num_draft_tokens, bias=False)
        self.add_vocabulary()

    def new_layer(self) -> DFlashLayer:
        """One of its layers."""
        return DFlashLayer(self.config.layer)

    @property
    def decoder(self) -> Sequence[DFlashLayer]:
        """The layers, from the first one on."""
        return cast("Sequence[DFlashLayer]", self.layers)

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """Context rows [B, T, C] of what the target's layers say at T tokens: [B, T, F]."""
        return rms_normed(self.fc(features), self.hidden_norm, self.backend)

    def read_anchors(
        self, anchors: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor], num_rows: int | None = None
    ) -> torch.Tensor:
        """Blocks as they enter the layers.

        Args:
            anchors: [..] tokens.
            embed: the target's embedding.
            num_rows: rows of each block; all of them by default.

        Returns:
            [.., R, C].
        """
        config = self.config
        num_masks = (num_rows or config.block_size) - 1
        masks = anchors.new_full((1,), config.mask_token_id).expand(*anchors.shape, num_masks)
        tokens = torch.cat((anchors[..., None], masks), -1)
        embedded = (embed if self.embed_tokens is None else self.embed_tokens)(tokens).to(self.fc.weight.dtype)
        if self.mask_embedding is not None:
            given = self.mask_embedding.expand(*anchors.shape, num_masks, -1)
            embedded = torch.cat((embedded[..., :1, :], given), -2)
        return embedded if config.input_embedding_scale == 1 else embedded * config.input_embedding_scale

    def write(self, context: torch.Tensor, attend: CachedAttention) -> None:
        """Leave keys and values of context rows [B, T, C] in the cache, in all layers; nothing is attended to."""
        rotation = self.rotary.at(context, attend.positions)
        for index, layer in enumerate(self.decoder):
            attend.write(index, *layer.self_attn.keys_values(context, self.backend), rotation)

    def forward(
        self, context: torch.Tensor, block: torch.Tensor, positions: torch.Tensor | None, attend: Attend
    ) -> torch.Tensor:
        """States that enter the LM head.

        Args:
            context: [B, T, C] context rows that no cache holds yet, of `read`.
            block: [B, R, C] block rows, of `read_anchors`.
            positions: [B or 1, T + R] positions of both, the context's first.
            attend: what the block rows see; the context rows only give keys and values.

        Returns:
            [B, R, C], of the block rows.
        """
        rotation, x = self.rotary.at(block, positions), block
        for index, layer in enumerate(self.decoder):
            norm = self.norm if index + 1 == len(self.decoder) else None
            x = layer.read_block(x, context, rotation, attend, backend=self.backend, layer=index, norm=norm)
        return x if self.config.output_multiplier == 1 else x * self.config.output_multiplier

    def see_blocks(self, context: torch.Tensor, blocks: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """States of many blocks of whole texts at once, for training; nothing is cached.

        Args:
            context: [B, T, C] context rows of texts, of `read`.
            blocks: [B, M, R, C] block rows, of `read_anchors`.
            anchors: [B, M] int64 position of each block's anchor; the block sees the context before it.

        Returns:
            [B, M, R, C].
        """
        batch_size, num_blocks, num_rows, _ = blocks.shape
        places = torch.arange(context.shape[1], device=context.device)
        rows = torch.arange(num_rows, device=context.device)
        masks: dict[BlockView, MaskedAttention] = {}
        own = torch.eye(num_blocks, dtype=torch.bool, device=context.device)
        for view in dict.fromkeys(self.config.views):
            seen = view.of_context(anchors, places, num_rows).flatten(1, 2)
            among = torch.kron(own, view.of_block(num_rows, context.device)).expand(batch_size, -1, -1)
            masks[view] = MaskedAttention(torch.cat((seen, among), -1))
        attend = LayerwiseAttention([masks[view] for view in self.config.views], (None,) * len(self.decoder))
        positions = torch.cat(
            (places.expand(batch_size, -1), (anchors[..., None] + rows).flatten(1)),
            1,
        )
        return self(context, blocks.flatten(1, 2), positions, attend).view_as(blocks)

    @torch.no_grad()
    def start_from(self, lm_head: torch.Tensor, embedding: torch.Tensor) -> None:
        """As `OwnVocabulary`, and the mask with the embedding of its token."""
        super().start_from(lm_head, embedding)
        if self.mask_embedding is not None:
            self.mask_embedding.copy_(embedding[self.config.mask_token_id])


class BlockPasses:
    """How a step's pass runs behind a cache: places for context rows that are new, and then the block rows.

    A row of the batch fills `count` of the places. The block's rows lie behind all places, so that slots are the same
    for every row, and stand at the positions behind the count.

    Args:
        views: what a block sees in each layer.
        max_new: places for new context rows.
        num_rows: R, rows of a block.
        device: where the tables go.
    """

    def __init__(self, views: Sequence[BlockView], max_new: int, num_rows: int, device: torch.device) -> None:
        self.max_new, self.num_rows = max_new, num_rows
        self._views = tuple(views)
        counts, places = torch.arange(max_new + 1), torch.arange(max_new)
        own = counts[:, None] + torch.arange(num_rows)
        depth = torch.cat((places.expand(max_new + 1, -1), own), 1)
        self._depth = depth.to(device, torch.int32)
        self._anchor_depth = counts[:, None].repeat(1, num_rows).to(device, torch.int32)
        self._ancestors = {view: self._words(view, counts, places).to(device) for view in dict.fromkeys(views)}

    def _words(self, view: BlockView, counts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[max_new + 1, R, W] int32, what the rows see of the places and of their block, by the count."""
        new = view.of_context(counts, places, self.num_rows)
        among = view.of_block(self.num_rows, counts.device).expand(len(counts), -1, -1)
        return pack_words(torch.cat((new, among), -1))

    def behind(self, prefix: FeaturePrefix, counts: torch.Tensor) -> tuple[torch.Tensor | None, LayerwiseAttention]:
        """Positions [B, max_new + R], where the network has to know, and attention of a pass behind a text.

        Args:
            prefix: the committed text, with room for `max_new + num_rows` slots behind it.
            counts: [B] int32, new context rows.
        """
        ways: dict[BlockView, CachedAttention] = {}
        everything: Any = None
        for view, words in self._ancestors.items():
            seen = words[counts]
            if everything is None:  # who sees whom is asked of the block rows alone
                everything = prefix.visible(self._depth[counts], seen)
            asking = prefix.visible(everything.depth[:, self.max_new :], seen, first_node=self.max_new)
            asking.window_depth = self._anchor_depth[counts] if view.from_anchor else None
            ways[view] = prefix.attention(everything, asking)
        windows = [None if view.window is None else view.reach for view in self._views]
        return next(iter(ways.values())).positions, LayerwiseAttention([ways[view] for view in self._views], windows)
