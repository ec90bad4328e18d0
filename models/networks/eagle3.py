"""EAGLE-3's network: a decoder layer or more on some of the target's states, with norms and an LM head of its own.

Equation:   f_t = W [tap_1; tap_2; tap_3];  s_{t+1} = layer with residual f_t that attends from
            [n_e(e(x_{t+1})); n_f(f_t)];  logits for x_{t+2} = own LM head on n(s_{t+1}), over a draft vocabulary.
            Deeper in a draft, s takes the place of f
Switches:   norm_before_residual: residual n_f(f_t);  norm_output: n(s_{t+1}) is what is fed on;
            feature_norm: W n_i([tap_1; ..]) ("joined") or W [n_1(tap_1); ..] ("each");  num_layers: behind the first
            come plain decoder layers, s_{t+1} is the last one's;  windows: how far back each sees
Source:     EAGLE-3 (arXiv:2503.01840) section 3; the authors' published files; the switches:
            vllm-project/speculators, and EAGLE-3.1 (arXiv:2605.09992)
Shapes:     e, s, f [B, T, C]; features [B, T, F], the taps side by side

Parameter names are those of the authors' files. The embedding is the target's and not in it, unless the network has one
of its own. Who uses which switch: docs/drafters/eagle.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import nn
from transformers import PretrainedConfig

from specdec.kernels.common.launch import Backend
from specdec.models.common.ops import rms_normed
from specdec.models.networks.base import (
    OwnVocabulary,
    check_target_width,
    draft_vocabulary_size,
)
from specdec.models.networks.layer import Attend, DraftLayer, DraftLayerConfig, LayerNetworkConfig, Rotary

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DEFAULT_NUM_TAPS", "Eagle3Config", "Eagle3Network", "default_tap_layers"]

DEFAULT_NUM_TAPS = 3


def default_tap_layers(num_layers: int) -> tuple[int, ...]:
    """The decoder layers whose outputs EAGLE-3 reads: the inputs of layers 2, L // 2 and L - 3.

    Args:
        num_layers: L, layers of the target.

    Raises:
        ValueError: the target is so shallow that these are not three layers in order.
    """
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if not 1 < layers[1] < layers[2]:
        raise ValueError(
            f"tap_layers: expected the setting with a target of {num_layers} layers, such as tap_layers="
            f"{tuple(range(num_layers))[:DEFAULT_NUM_TAPS]}; the published rule needs 7 layers or more"
        )
    return layers


@dataclass(frozen=True, slots=True)
class Eagle3Config(LayerNetworkConfig):
    """Sizes and switches of the network.

    Attributes:
        tap_layers: decoder layers (0-based) of the target whose outputs are read; None for the published rule, which
            depends on the target's depth (`default_tap_layers`).
        draft_vocab_size: tokens that it can propose; the target's vocabulary by default.
        norm_before_residual: the residual stream of the layer starts from the normed state, not the raw one.
        norm_output: the state that is fed on is the one that enters the LM head, behind the final norm.
        feature_norm: a norm in front of the input projection, `"joined"` over all taps side by side or `"each"` with
            one of every tap's own.
        own_embedding: tokens are embedded by the network, not by the target.
        shares_lm_head: the LM head is the target's.
        num_layers: decoder layers; those behind the first one are plain.
        windows: of each layer how many positions a token sees, its own included, None for all; None where no layer has
            a window.
        target_hidden_size: width of the target's states, if it is not the network's.
    """

    tap_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    feature_norm: Literal["joined", "each"] | None = None
    own_embedding: bool = False
    shares_lm_head: bool = False
    num_layers: int = 1
    windows: tuple[int | None, ...] | None = None
    target_hidden_size: int | None = None

    # of a time when EAGLE-1 was a version of the same configuration
    retired: ClassVar[tuple[str, ...]] = ("version", "fc_bias")

    def __post_init__(self) -> None:
        LayerNetworkConfig.__post_init__(self)
        size = draft_vocabulary_size(self.draft_vocab_size, self.vocab_size, shares_lm_head=self.shares_lm_head)
        object.__setattr__(self, "draft_vocab_size", size)
        if self.feature_norm not in (None, "joined", "each"):
            raise ValueError(f"feature_norm: expected None, 'joined' or 'each', got {self.feature_norm!r}")
        if self.tap_layers is not None:
            object.__setattr__(self, "tap_layers", tuple(self.tap_layers))  # JSON has lists
            if not self.tap_layers:
                raise ValueError("tap_layers: expected at least one layer, got ()")
        if self.num_layers < 1:
            raise ValueError(f"num_layers: expected at least 1, got {self.num_layers}")
        if self.windows is not None:
            object.__setattr__(self, "windows", tuple(self.windows))
            if len(self.windows) != self.num_layers or any(size is not None and size < 1 for size in self.windows):
                raise ValueError(
                    f"windows: expected None or at least 1 for each of {self.num_layers} layers, got {self.windows}"
                )
        check_target_width(self)

    @property
    def tap_size(self) -> int:
        """Width of the target's states."""
        return self.target_hidden_size or self.hidden_size

    @property
    def feature_size(self) -> int:
        """Width F of what is read of the target at each token."""
        return self.tap_size * self.num_taps

    @property
    def window_of(self) -> tuple[int | None, ...]:
        """How many positions a token sees in each layer; None for all."""
        return self.windows or (None,) * self.num_layers

    @property
    def least_window(self) -> int | None:
        """The smallest window; None where no layer has one."""
        return min((size for size in self.window_of if size is not None), default=None)

    @property
    def num_taps(self) -> int:
        """Layers of the target that are read."""
        return DEFAULT_NUM_TAPS if self.tap_layers is None else len(self.tap_layers)

    @property
    def num_draft_tokens(self) -> int:
        """Size of the vocabulary that the network proposes from."""
        return self.draft_vocab_size or self.vocab_size

    @classmethod
    def for_target(cls, target_config: PretrainedConfig, **changes: Any) -> "Self":
        """As `LayerNetworkConfig`.

        Raises:
            ValueError: no `tap_layers` for a target too shallow for the published rule.
        """
        if changes.get("tap_layers") is None:
            changes["tap_layers"] = default_tap_layers(target_config.get_text_config(decoder=True).num_hidden_layers)
        return super(Eagle3Config, cls).for_target(target_config, **changes)


class Eagle3Network(OwnVocabulary):
    """Layers with their input projection, norms, an LM head and a draft vocabulary.

    Args:
        config: sizes and switches.
    """

    config_class = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.layer.rms_norm_eps
        self.rotary = Rotary(config.layer)
        self.fc = nn.Linear(config.feature_size, width, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.lm_head = None if config.shares_lm_head else nn.Linear(width, config.num_draft_tokens, bias=False)
        self.input_norm = nn.RMSNorm(config.feature_size, eps) if config.feature_norm == "joined" else None
        each = range(config.num_taps if config.feature_norm == "each" else 0)
        self.fc_norm = nn.ModuleList(nn.RMSNorm(config.tap_size, eps) for _ in each)
        first, *others = config.window_of
        self.midlayer = _MidLayer(config.layer, norm_before_residual=config.norm_before_residual, window=first)
        # numbered from 1 on, as in files with several layers
        self.layers = nn.ModuleDict(
            {str(index): DraftLayer(config.layer, window=window) for index, window in enumerate(others, start=1)}
        )
        self.norm = nn.RMSNorm(width, eps)
        self.add_vocabulary()

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """What takes the place of guesses at tokens that the target has seen: [B, T, F] to [B, T, C]."""
        if self.input_norm is not None:
            features = rms_normed(features, self.input_norm, self.backend)
        if self.fc_norm:
            norms = cast("Sequence[nn.RMSNorm]", self.fc_norm)
            taps = features.chunk(len(norms), -1)
            features = torch.cat(
                [rms_normed(tap, norm, self.backend) for norm, tap in zip(norms, taps, strict=True)], -1
            )
        return self.fc(features)

    def forward(
        self, states: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor | None, attend: Attend
    ) -> torch.Tensor:
        """As `EagleNetwork`; `embedded` is of `embed_tokens` if there is one."""
        residual, attention_input = self.midlayer.read(embedded.to(states.dtype), states, self.backend)
        rotation, backend = self.rotary.at(states, positions), self.backend
        norms = [None] * (self.config.num_layers - 1) + [self.norm if self.config.norm_output else None]
        x = self.midlayer(residual, rotation, attend, backend=backend, attention_input=attention_input, norm=norms[0])
        for index, layer in enumerate(self.layers.values(), start=1):
            x = layer(x, rotation, attend, backend=backend, layer=index, norm=norms[index])
        return x

    def lm_states(self, states: torch.Tensor) -> torch.Tensor:
        """What enters the LM head, the target's or its own: [.., C] of `forward` to [.., C]."""
        return states if self.config.norm_output else rms_normed(states, self.norm, self.backend)


class _MidLayer(DraftLayer):
    """EAGLE-3's layer: attention reads a token's embedding and its state side by side, each with a norm of its own."""

    def __init__(self, config: DraftLayerConfig, *, norm_before_residual: bool, window: int | None) -> None:
        super().__init__(config, attention_input_size=2 * config.hidden_size, window=window)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._norm_before_residual = norm_before_residual

    def read(
        self, embedded: torch.Tensor, states: torch.Tensor, backend: Backend | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T, C] where the residual stream starts, and [B, T, 2 C] what queries, keys and values are made from."""
        assert self.input_layernorm is not None
        normed = rms_normed(states, self.hidden_norm, backend)
        joined = torch.cat((rms_normed(embedded, self.input_layernorm, backend), normed), -1)
        return normed if self._norm_before_residual else states, joined
