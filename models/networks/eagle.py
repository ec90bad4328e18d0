"""EAGLE's network: one decoder layer that continues the target's states, fed with each state and the token after it.

Equation:   EAGLE-1 and 2   z_t = W [e(x_{t+1}); h_t] + b;  s_{t+1} = layer(z_t) without input norm, a guess of h_{t+1};
                            logits for x_{t+2} = the target's LM head on s_{t+1}
            EAGLE-3         f_t = W [tap_1; tap_2; tap_3];  s_{t+1} = layer with residual f_t that attends from
                            [n_e(e(x_{t+1})); n_f(f_t)];  logits for x_{t+2} = own LM head on n(s_{t+1}), over a draft
                            vocabulary. Deeper in a draft, s takes the place of f (and of h)
            switches of 3   norm_before_residual: residual n_f(f_t);  norm_output: n(s_{t+1}) is what is fed on;
                            feature_norm: W n_i([tap_1; ..]) ("joined") or W [n_1(tap_1); ..] ("each")
Source:     EAGLE (arXiv:2401.15077) section 4.1; EAGLE-3 (arXiv:2503.01840) section 3; the authors' published files;
            the switches: vllm-project/speculators, and EAGLE-3.1 (arXiv:2605.09992)
Shapes:     e, h, s, f [B, T, C]; features [B, T, F], F = C (EAGLE-1) or the taps side by side (EAGLE-3)

Parameter names are those of the authors' files. The embedding, and EAGLE-1's LM head, are the target's and not in it,
but for an EAGLE-3 that has an embedding of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specdec.models.networks.base import DraftNetwork, load_strictly
from specdec.models.networks.eagle_config import EagleConfig, default_tap_layers
from specdec.models.networks.layer import Attend, DraftLayer, DraftLayerConfig, Rotary
from specdec.models.published.eagle import is_eagle, read_published

__all__ = ["EagleConfig", "EagleNetwork", "default_tap_layers"]


class EagleNetwork(DraftNetwork):
    """One layer with its input projection; EAGLE-3 also has norms, an LM head and a draft vocabulary of its own.

    Args:
        config: sizes and version.
    """

    config_class = EagleConfig
    file_embedding = "embed_tokens.weight"
    config: EagleConfig
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        width, eps = config.hidden_size, config.layer.rms_norm_eps
        self.rotary = Rotary(config.layer)
        self.fc = nn.Linear(
            config.feature_size + (width if config.version == 1 else 0), width, bias=bool(config.fc_bias)
        )
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        has_lm_head = config.version == 3 and not config.shares_lm_head
        self.lm_head = nn.Linear(width, config.num_draft_tokens, bias=False) if has_lm_head else None
        self.input_norm = nn.RMSNorm(config.feature_size, eps) if config.feature_norm == "joined" else None
        each = range(config.num_taps if config.feature_norm == "each" else 0)
        self.fc_norm = nn.ModuleList(nn.RMSNorm(width, eps) for _ in each)
        if config.version == 1:
            self.layers = nn.ModuleList([DraftLayer(config.layer, input_norm=False)])
            return
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
        """What takes the place of states at tokens that the target has seen: [B, T, F] to [B, T, C]."""
        if self.config.version == 1:
            return features
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm:
            taps = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], -1)
        return self.fc(features)

    def forward(
        self, states: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The states that follow.

        Args:
            states: [B, T, C] state of each token: of the target, through `read`, or guessed.
            embedded: [B, T, C] embedding of the token after each: the target's, or `embed_tokens` if there is one.
            positions: [B or 1, T] position of each state's own token.
            attend: who sees whom.

        Returns:
            [B, T, C] guessed states of the tokens after.
        """
        embedded = embedded.to(states.dtype)
        cos_sin = self.rotary(states, positions)
        if self.config.version == 1:
            return self.layers[0](self.fc(torch.cat((embedded, states), -1)), cos_sin, attend)
        residual, attention_input = self.midlayer.read(embedded, states)
        states = self.midlayer(residual, cos_sin, attend, attention_input=attention_input)
        return self.norm(states) if self.config.norm_output else states

    def logits(self, states: torch.Tensor, lm_head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Logits of the token after next.

        Args:
            states: [.., C] of `forward`.
            lm_head: the target's, for a network without one.

        Returns:
            [.., num_draft_tokens].
        """
        return (lm_head if self.lm_head is None else self.lm_head)(self.speak(states))

    def speak(self, states: torch.Tensor) -> torch.Tensor:
        """What enters the LM head, the target's or its own: [.., C] of `forward` to [.., C]."""
        return states if self.config.version == 1 or self.config.norm_output else self.norm(states)

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
    def start_from(self, lm_head: torch.Tensor, embedding: torch.Tensor) -> None:
        """Begin training version 3 with the target's weights, as far as it has some of its own in their place.

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

    @classmethod
    def recognises(cls, names: set[str], config: Mapping[str, Any]) -> bool:  # noqa: ARG003 - interface
        """As `DraftNetwork`: an input projection, and a layer of version 3 or a layer 0 without input norm."""
        return is_eagle(names)

    @classmethod
    def from_published(
        cls,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        *,
        tap_layers: Sequence[int] | None = None,
        rope_theta: float | None = None,
    ) -> "EagleNetwork":
        """As `DraftNetwork`. Files hold fp32 as a rule; the target's dtype is taken on when a drafter is bound.

        An embedding in a file of version 3 becomes the network's own; `share_embedding` gives it up again.

        Args:
            tensors: the file's tensors by name, in any of the layouts of docs/drafters/eagle.md.
            config: content of the `config.json` beside it.
            tap_layers: decoder layers (0-based) whose outputs version 3 reads, whatever the file says.
            rope_theta: base of the rotary embedding, whatever the file says.

        Raises:
            ValueError: a missing, unexpected or misshapen tensor, by name; contradicting vocabulary tables; or a
                configuration that does not say what has to be known.
            NotImplementedError: a field of the configuration asks for other arithmetic than this network's.
        """
        settings, tensors = read_published(tensors, config, tap_layers=tap_layers, rope_theta=rope_theta)
        network = cls(settings)
        load_strictly(network, tensors)
        if network.has_own_vocabulary:
            network._check_vocabulary()
        return network

    def _check_vocabulary(self) -> None:
        """Refuse tables that contradict each other; `d2t` read as ids instead of offsets would show here."""
        ids = self.target_ids
        if not torch.equal(ids.sort().values, self.t2d.nonzero()[:, 0]):
            raise ValueError(
                f"d2t: expected offsets that lead to the {int(self.t2d.sum())} tokens marked in t2d, got "
                f"ids from {int(ids.min())} to {int(ids.max())}"
            )


class _MidLayer(DraftLayer):
    """EAGLE-3's layer: attention reads a token's embedding and its state side by side, each with a norm of its own."""

    def __init__(self, config: DraftLayerConfig, *, norm_before_residual: bool) -> None:
        super().__init__(config, attention_input_size=2 * config.hidden_size)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._norm_before_residual = norm_before_residual

    def read(self, embedded: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T, C] where the residual stream starts, and [B, T, 2 C] what queries, keys and values are made from."""
        assert self.input_layernorm is not None
        normed = self.hidden_norm(states)
        joined = torch.cat((self.input_layernorm(embedded), normed), -1)
        return normed if self._norm_before_residual else states, joined
