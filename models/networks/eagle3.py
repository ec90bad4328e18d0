"""EAGLE-3's network: one decoder layer on three of the target's states, with norms and an LM head of its own.

Equation:   f_t = W [tap_1; tap_2; tap_3];  s_{t+1} = layer with residual f_t that attends from
            [n_e(e(x_{t+1})); n_f(f_t)];  logits for x_{t+2} = own LM head on n(s_{t+1}), over a draft vocabulary.
            Deeper in a draft, s takes the place of f
Switches:   norm_before_residual: residual n_f(f_t);  norm_output: n(s_{t+1}) is what is fed on;
            feature_norm: W n_i([tap_1; ..]) ("joined") or W [n_1(tap_1); ..] ("each")
Source:     EAGLE-3 (arXiv:2503.01840) section 3; the authors' published files; the switches:
            vllm-project/speculators, and EAGLE-3.1 (arXiv:2605.09992)
Shapes:     e, s, f [B, T, C]; features [B, T, F], the taps side by side

Parameter names are those of the authors' files. The embedding is the target's and not in it, unless the network has one
of its own. Who uses which switch: docs/drafters/eagle.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import nn
from transformers import PretrainedConfig

from specdec.kernels.common.launch import Backend
from specdec.models.common.ops import rms_normed
from specdec.models.networks.base import DraftNetwork
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
    """

    tap_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    feature_norm: Literal["joined", "each"] | None = None
    own_embedding: bool = False
    shares_lm_head: bool = False

    # of a time when EAGLE-1 was a version of the same configuration
    retired: ClassVar[tuple[str, ...]] = ("version", "fc_bias")

    def __post_init__(self) -> None:
        LayerNetworkConfig.__post_init__(self)
        size = self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size
        object.__setattr__(self, "draft_vocab_size", size)
        if not 1 <= size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size: expected 1 to {self.vocab_size}, the target's vocabulary, got {size}")
        if self.feature_norm not in (None, "joined", "each"):
            raise ValueError(f"feature_norm: expected None, 'joined' or 'each', got {self.feature_norm!r}")
        if self.shares_lm_head and size != self.vocab_size:
            raise ValueError(f"shares_lm_head: expected False with a draft vocabulary of {size} tokens, got True")
        if self.tap_layers is not None:
            object.__setattr__(self, "tap_layers", tuple(self.tap_layers))  # JSON has lists
            if not self.tap_layers:
                raise ValueError("tap_layers: expected at least one layer, got ()")

    @property
    def feature_size(self) -> int:
        """Width F of what is read of the target at each token."""
        return self.hidden_size * self.num_taps

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


class Eagle3Network(DraftNetwork):
    """One layer with its input projection, norms, an LM head and a draft vocabulary.

    Args:
        config: sizes and switches.
    """

    config_class = Eagle3Config
    config: Eagle3Config
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.layer.rms_norm_eps
        self.rotary = Rotary(config.layer)
        self.fc = nn.Linear(config.feature_size, width, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.lm_head = None if config.shares_lm_head else nn.Linear(width, config.num_draft_tokens, bias=False)
        self.input_norm = nn.RMSNorm(config.feature_size, eps) if config.feature_norm == "joined" else None
        each = range(config.num_taps if config.feature_norm == "each" else 0)
        self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps) for _ in each)
        self.midlayer = _MidLayer(config.layer, norm_before_residual=config.norm_before_residual)
        self.norm = nn.RMSNorm(width, eps)
        if self.has_own_vocabulary:
            self.register_buffer("d2t", torch.zeros(config.num_draft_tokens, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.num_draft_tokens)

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether it proposes from fewer tokens than the target has."""
        return self.config.num_draft_tokens < self.config.vocab_size

    @property
    def target_ids(self) -> torch.Tensor:
        """[num_draft_tokens] int64, the target's id of each token of the draft vocabulary."""
        ids = torch.arange(self.config.num_draft_tokens, device=self.fc.weight.device)
        return ids + self.d2t if self.has_own_vocabulary else ids

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
        return self.midlayer(
            residual,
            self.rotary.at(states, positions),
            attend,
            backend=self.backend,
            attention_input=attention_input,
            norm=self.norm if self.config.norm_output else None,
        )

    def lm_states(self, states: torch.Tensor) -> torch.Tensor:
        """What enters the LM head, the target's or its own: [.., C] of `forward` to [.., C]."""
        return states if self.config.norm_output else rms_normed(states, self.norm, self.backend)

    @torch.no_grad()
    def set_draft_vocabulary(self, target_ids: torch.Tensor) -> None:
        """Choose the tokens that it can propose.

        Args:
            target_ids: [num_draft_tokens] distinct ids of the target's vocabulary, in any order.

        Raises:
            ValueError: another number of ids, an id twice, or one that the target does not have.
        """
        size, vocab_size = self.config.num_draft_tokens, self.config.vocab_size
        ids = torch.as_tensor(target_ids, dtype=torch.int64).cpu().sort().values
        if not self.has_own_vocabulary:
            raise ValueError(f"draft_tokens: expected None without a draft vocabulary, got {ids.numel()} ids")
        if ids.shape != (size,) or ids.unique().numel() != size or ids[0] < 0 or ids[-1] >= vocab_size:
            raise ValueError(
                f"draft_tokens: expected {size} distinct ids below {vocab_size}, got {ids.numel()} "
                f"({ids.unique().numel()} distinct)"
            )
        self.d2t.copy_(ids - torch.arange(size))
        self.t2d.zero_()
        self.t2d[ids.to(self.t2d.device)] = True

    @torch.no_grad()
    def start_from(self, lm_head: torch.Tensor, embedding: torch.Tensor) -> None:
        """Begin training with the target's weights, as far as it has some of its own in their place.

        Args:
            lm_head: [V, C] the target's LM head; the rows of the draft vocabulary are taken.
            embedding: [V, C] the target's input embedding.
        """
        if self.lm_head is not None:
            self.lm_head.weight.copy_(lm_head[self.target_ids.to(lm_head.device)])
        if self.embed_tokens is not None:
            self.embed_tokens.weight.copy_(embedding)

    def share_embedding(self) -> None:
        """As `DraftNetwork`."""
        self.embed_tokens = None
        self.config = replace(self.config, own_embedding=False)


class _MidLayer(DraftLayer):
    """EAGLE-3's layer: attention reads a token's embedding and its state side by side, each with a norm of its own."""

    def __init__(self, config: DraftLayerConfig, *, norm_before_residual: bool) -> None:
        super().__init__(config, attention_input_size=2 * config.hidden_size)
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
