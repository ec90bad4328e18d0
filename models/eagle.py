"""EAGLE's network: one decoder layer that continues the target's states, fed with each state and the token after it.

Equation:   EAGLE-1 and 2   z_t = W [e(x_{t+1}); h_t] + b;  s_{t+1} = layer(z_t) without input norm, a guess of h_{t+1};
                            logits for x_{t+2} = the target's LM head on s_{t+1}
            EAGLE-3         f_t = W [tap_1; tap_2; tap_3];  s_{t+1} = layer with residual f_t that attends from
                            [n_e(e(x_{t+1})); n_f(f_t)];  logits for x_{t+2} = own LM head on n(s_{t+1}), over a draft
                            vocabulary. Deeper in a draft, s takes the place of f (and of h)
Source:     EAGLE (arXiv:2401.15077) section 4.1; EAGLE-3 (arXiv:2503.01840) section 3; the authors' published files
Shapes:     e, h, s, f [B, T, C]; features [B, T, F], F = C (EAGLE-1) or the taps side by side (EAGLE-3)

Parameter names are those of the authors' files. The embedding, and EAGLE-1's LM head, are the target's and not in it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from specdec.models.draft_layer import Attend, DraftLayer, DraftLayerConfig, Rotary
from specdec.models.draft_network import DraftNetwork, load_strictly

__all__ = ["DEFAULT_NUM_TAPS", "EagleConfig", "EagleNetwork", "default_tap_layers"]

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
    """

    vocab_size: int
    layer: DraftLayerConfig
    version: int = 1
    fc_bias: bool | None = None
    tap_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None

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
        if self.tap_layers is not None:
            object.__setattr__(self, "tap_layers", tuple(self.tap_layers))  # JSON has lists
            if not self.tap_layers:
                raise ValueError("tap_layers: expected at least one layer, got ()")

    @property
    def hidden_size(self) -> int:
        """Width of embeddings and states."""
        return self.layer.hidden_size

    @property
    def feature_size(self) -> int:
        """Width F of what is read of the target at each token."""
        if self.version == 1:
            return self.hidden_size
        return self.hidden_size * (DEFAULT_NUM_TAPS if self.tap_layers is None else len(self.tap_layers))

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


class EagleNetwork(DraftNetwork):
    """One layer with its input projection; EAGLE-3 also has norms, an LM head and a draft vocabulary of its own.

    Args:
        config: sizes and version.
    """

    config_class = EagleConfig
    config: EagleConfig
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.rotary = Rotary(config.layer)
        if config.version == 1:
            self.fc = nn.Linear(2 * width, width, bias=bool(config.fc_bias))
            self.layers = nn.ModuleList([DraftLayer(config.layer, input_norm=False)])
            return
        self.fc = nn.Linear(config.feature_size, width, bias=False)
        self.midlayer = _MidLayer(config.layer)
        self.norm = nn.RMSNorm(width, config.layer.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.num_draft_tokens, bias=False)
        if self.has_own_vocabulary:
            self.register_buffer("d2t", torch.zeros(config.num_draft_tokens, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.num_draft_tokens)

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether it proposes from fewer tokens than the target has."""
        return self.config.num_draft_tokens < self.config.vocab_size

    @property
    def target_ids(self) -> torch.Tensor:
        """[num_draft_tokens] int64, the target's id of each token of the draft vocabulary, ascending."""
        ids = torch.arange(self.config.num_draft_tokens, device=self.fc.weight.device)
        return ids + self.d2t if self.has_own_vocabulary else ids

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """What takes the place of states at tokens that the target has seen: [B, T, F] to [B, T, C]."""
        return features if self.config.version == 1 else self.fc(features)

    def forward(
        self, states: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
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
        embedded = embedded.to(states.dtype)
        cos_sin = self.rotary(states, positions)
        if self.config.version == 1:
            return self.layers[0](self.fc(torch.cat((embedded, states), -1)), cos_sin, attend)
        return self.midlayer(states, cos_sin, attend, attention_input=self.midlayer.join(embedded, states))

    def logits(self, states: torch.Tensor, lm_head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Logits of the token after next.

        Args:
            states: [.., C] of `forward`.
            lm_head: the target's, for version 1.

        Returns:
            [.., num_draft_tokens].
        """
        head = lm_head if self.config.version == 1 else self.lm_head
        return head(self.speak(states))

    def speak(self, states: torch.Tensor) -> torch.Tensor:
        """What enters the LM head, the target's or for version 3 its own: [.., C] of `forward` to [.., C]."""
        return states if self.config.version == 1 else self.norm(states)

    @torch.no_grad()
    def set_draft_vocabulary(self, target_ids: torch.Tensor) -> None:
        """Choose the tokens that version 3 can propose.

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
    def start_from(self, lm_head: torch.Tensor) -> None:
        """Begin training version 3 with the target's LM head [V, C], as far as the draft vocabulary goes."""
        self.lm_head.weight.copy_(lm_head[self.target_ids.to(lm_head.device)])

    @classmethod
    def recognises(cls, names: set[str], config: Mapping[str, Any]) -> bool:  # noqa: ARG003 - interface
        """As `DraftNetwork`: an input projection, and a `midlayer` or a layer 0 without input norm."""
        has_first_layer = any(name.startswith("layers.0.") for name in names)
        is_first = has_first_layer and "layers.0.input_layernorm.weight" not in names
        return "fc.weight" in names and (is_first or _is_third(names))

    @classmethod
    def from_published(cls, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> "EagleNetwork":
        """As `DraftNetwork`. Files hold fp32 as a rule; the target's dtype is taken on when a drafter is bound."""
        network = cls(_published_config(tensors, config))
        embedding = tensors.get("embed_tokens.weight")
        expected = (network.config.vocab_size, network.config.hidden_size)
        if embedding is not None and embedding.shape != expected:
            raise ValueError(f"embed_tokens.weight: expected shape {list(expected)}, got {list(embedding.shape)}")
        tensors = dict(tensors)
        ignored = {"embed_tokens.weight"}  # equal to the target's, which is used
        if network.config.version == 3 and not network.has_own_vocabulary:
            ignored |= {"d2t", "t2d"}  # nothing to map; the authors delete them
        elif network.config.version == 3 and "t2d" in tensors:
            tensors["t2d"] = tensors["t2d"].bool()
        load_strictly(network, tensors, ignored=frozenset(ignored))
        if network.has_own_vocabulary:
            network._check_vocabulary()
        return network

    def _check_vocabulary(self) -> None:
        """Refuse tables that contradict each other; `d2t` read as ids instead of offsets would show here."""
        ids = self.target_ids
        if not torch.equal(ids, self.t2d.nonzero()[:, 0]):
            raise ValueError(
                f"d2t: expected offsets that lead to the {int(self.t2d.sum())} tokens marked in t2d, got "
                f"ids from {int(ids.min())} to {int(ids.max())}"
            )


class _MidLayer(DraftLayer):
    """EAGLE-3's layer: attention reads a token's embedding and its state side by side, each with a norm of its own."""

    def __init__(self, config: DraftLayerConfig) -> None:
        super().__init__(config, attention_input_size=2 * config.hidden_size)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def join(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[B, T, 2 C] what queries, keys and values are made from."""
        assert self.input_layernorm is not None
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), -1)


def _is_third(names: Iterable[str]) -> bool:
    """Whether tensors of these names are EAGLE-3's."""
    return any(name.startswith("midlayer.") for name in names)


def _published_config(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> EagleConfig:
    """The configuration of the authors' file, from its `config.json`; defaults are those of the authors' code."""
    is_third = _is_third(tensors)
    layer = "midlayer" if is_third else "layers.0"
    missing = [name for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
               if name not in config]  # fmt: skip
    if missing:
        raise ValueError(f"config.json: expected {', '.join(missing)} beside the tensors, got {sorted(config)}")
    heads = config["num_attention_heads"]
    head_vocabulary = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else config["vocab_size"]
    return EagleConfig(
        vocab_size=config["vocab_size"],
        layer=DraftLayerConfig(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            # the drafter of Vicuna-33B has another name for it; it sizes nothing but tables of scaled rotary embeddings
            max_position_embeddings=config.get("max_position_embeddings", config.get("max_sequence_length", 2048)),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            attention_bias=config.get("qkv_bias", f"{layer}.self_attn.q_proj.bias" in tensors),
            rope_parameters=_published_rope(config),
        ),
        version=3 if is_third else 1,
        fc_bias=None if is_third else config.get("bias", True),
        draft_vocab_size=config.get("draft_vocab_size", head_vocabulary) if is_third else None,
    )


def _published_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings under the names of transformers v5, from files that were written for v4."""
    if config.get("rope_parameters"):
        return dict(config["rope_parameters"])
    scaling = dict(config.get("rope_scaling") or {})
    plain_type = scaling.pop("type", "default")
    return {"rope_type": plain_type, "rope_theta": float(config.get("rope_theta") or 10000.0), **scaling}
