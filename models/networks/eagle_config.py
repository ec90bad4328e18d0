"""Sizes, version and switches of an EAGLE network, and which layers EAGLE-3 reads when nobody says.

The switches of EAGLE-3 are those of its trainers: docs/drafters/eagle.md has the equations and who uses which.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from transformers import PretrainedConfig

from specdec.models.networks.layer import DraftLayerConfig

__all__ = ["DEFAULT_NUM_TAPS", "EagleConfig", "default_tap_layers"]

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
class EagleConfig:
    """Sizes and version of an EAGLE network.

    Attributes:
        vocab_size: tokens of the target.
        layer: sizes of the one layer.
        version: 1 for EAGLE-1 and EAGLE-2, which share their weights; 3 for EAGLE-3.
        fc_bias: whether the input projection has a bias; by default in version 1. Version 3 has none.
        tap_layers: decoder layers (0-based) of the target whose outputs version 3 reads; None for the published rule,
            which depends on the target's depth (`default_tap_layers`).
        draft_vocab_size: tokens that version 3 can propose; the target's vocabulary by default.
        norm_before_residual: version 3: the residual stream of the layer starts from the normed state, not the raw one.
        norm_output: version 3: the state that is fed on is the one that enters the LM head, behind the final norm.
        feature_norm: version 3: a norm in front of the input projection, `"joined"` over all taps side by side or
            `"each"` with one of every tap's own.
        own_embedding: version 3: tokens are embedded by the network, not by the target.
        shares_lm_head: version 3: the LM head is the target's, as version 1's always is.
    """

    vocab_size: int
    layer: DraftLayerConfig
    version: int = 1
    fc_bias: bool | None = None
    tap_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    norm_output: bool = False
    feature_norm: Literal["joined", "each"] | None = None
    own_embedding: bool = False
    shares_lm_head: bool = False

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise ValueError(f"version: expected 1 (EAGLE-1 and EAGLE-2) or 3, got {self.version!r}")
        if self.vocab_size < 1:
            raise ValueError(f"vocab_size: expected at least 1, got {self.vocab_size}")
        object.__setattr__(self, "fc_bias", self.version == 1 if self.fc_bias is None else self.fc_bias)
        size = self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size
        object.__setattr__(self, "draft_vocab_size", size)
        if not 1 <= size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size: expected 1 to {self.vocab_size}, the target's vocabulary, got {size}")
        if self.version == 1 and (self.tap_layers is not None or size != self.vocab_size):
            raise ValueError("version: expected 3 with tap_layers or a draft vocabulary, got 1")
        if self.version == 3 and self.fc_bias:
            raise ValueError("fc_bias: expected False with version 3, got True")
        self._check_switches()
        if self.tap_layers is not None:
            object.__setattr__(self, "tap_layers", tuple(self.tap_layers))  # JSON has lists
            if not self.tap_layers:
                raise ValueError("tap_layers: expected at least one layer, got ()")

    def _check_switches(self) -> None:
        """Raise ValueError for switches that the version does not have, or that do not go together."""
        for name in ("norm_before_residual", "norm_output", "feature_norm", "own_embedding", "shares_lm_head"):
            if self.version == 1 and getattr(self, name):
                raise ValueError(f"{name}: expected version 3 with it, got version 1")
        if self.feature_norm not in (None, "joined", "each"):
            raise ValueError(f"feature_norm: expected None, 'joined' or 'each', got {self.feature_norm!r}")
        if self.shares_lm_head and self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"shares_lm_head: expected False with a draft vocabulary of {self.draft_vocab_size} tokens, got True"
            )

    @property
    def hidden_size(self) -> int:
        """Width of embeddings and states."""
        return self.layer.hidden_size

    @property
    def feature_size(self) -> int:
        """Width F of what is read of the target at each token."""
        return self.hidden_size * (1 if self.version == 1 else self.num_taps)

    @property
    def num_taps(self) -> int:
        """Layers of the target that version 3 reads."""
        return DEFAULT_NUM_TAPS if self.tap_layers is None else len(self.tap_layers)

    @property
    def num_draft_tokens(self) -> int:
        """Size of the vocabulary that the network proposes from."""
        return self.draft_vocab_size or self.vocab_size

    @classmethod
    def for_target(cls, target_config: PretrainedConfig, **changes: Any) -> "EagleConfig":
        """A network with a layer like the target's.

        Args:
            target_config: the target's configuration.
            changes: fields of this class, and of `DraftLayerConfig`.

        Raises:
            TypeError: a change that neither class knows.
            ValueError: version 3 without `tap_layers` for a target too shallow for the published rule.
        """
        text = target_config.get_text_config(decoder=True)
        own = {field.name for field in fields(cls)} - {"layer"}
        layer = DraftLayerConfig.like(text, **{name: value for name, value in changes.items() if name not in own})
        settings = {"vocab_size": text.vocab_size, **{name: changes[name] for name in own & changes.keys()}}
        if settings.get("version", 1) == 3 and settings.get("tap_layers") is None:
            settings["tap_layers"] = default_tap_layers(text.num_hidden_layers)
        return cls(layer=layer, **settings)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "EagleConfig":
        """What `dataclasses.asdict` was given."""
        return cls(**{**data, "layer": DraftLayerConfig(**data["layer"])})
