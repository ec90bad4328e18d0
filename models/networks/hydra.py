"""Hydra heads: K sequentially dependent heads, each fed with the embeddings of the tokens guessed before it.

Equation:   c_i = [p_t; e(x_{t+1}); ...; e(x_{t+i})]                     side by side, i = 1 .. K
            y_1 = R_i c_i + r_i + SiLU(W_i1 c_i + b_i1);  y_l = y_{l-1} + SiLU(W_il y_{l-1} + b_il),  l = 2 .. L
            logits_i = U_i y_L + u_i, the law of x_{t+1+i}
            p_t = h_t (Hydra), or n(DraftLayer(h_0 .. h_t)) at t (Hydra++: prefix attention)
Source:     Hydra (arXiv:2402.05109) sections 3, 3.1 and A.2; the biases, R and the norm n are the authors' code
Shapes:     h, p, e [.., C]; W_i1, R_i [C, (i + 1) C]; W_il [C, C]; U [V, C]; logits [.., V]

The state h_t enters the target's LM head, so heads see what the target's own guess of x_{t+1} is made from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from specdec.kernels.common.launch import Backend
from specdec.kernels.draft_heads import MAX_PARTS, draft_heads_concat
from specdec.models.common.ops import needs_pytorch
from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.layer import Attend, DraftLayer, DraftLayerConfig, Rotary

__all__ = ["HydraConfig", "HydraNetwork"]


@dataclass(frozen=True, slots=True)
class HydraConfig:
    """Sizes of a set of Hydra heads.

    Attributes:
        vocab_size: None where the heads have no LM heads of their own but share the target's.
        num_heads: how many tokens beyond the root they guess, one head each.
        num_layers: residual blocks per head; 1 for Hydra, 4 for Hydra++.
        shared_tail: all blocks of a head after its first are one and the same, as in the authors' files.
        dropout: part of the features that training drops in front of every block and every LM head.
        prefix: sizes of the prefix attention layer; None without one.
    """

    hidden_size: int
    vocab_size: int | None
    num_heads: int = 4
    num_layers: int = 1
    shared_tail: bool = False
    dropout: float = 0.0
    prefix: DraftLayerConfig | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if self.num_heads >= MAX_PARTS:
            raise ValueError(f"num_heads: expected at most {MAX_PARTS - 1}, got {self.num_heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected 0 up to, not including, 1, got {self.dropout}")
        if self.prefix is not None and self.prefix.hidden_size != self.hidden_size:
            raise ValueError(
                f"prefix: expected a layer of hidden size {self.hidden_size}, got {self.prefix.hidden_size}"
            )

    @property
    def prefix_attention(self) -> bool:
        """Whether the heads read a prefix attention layer's output (Hydra++) instead of the target's state."""
        return self.prefix is not None

    @classmethod
    def for_target(
        cls, target_config: PretrainedConfig, *, prefix_attention: bool = False, **changes: Any
    ) -> "HydraConfig":
        """Hydra for a target; its prefix layer, if any, has the sizes of the target's own layers.

        Args:
            target_config: the target's transformers configuration.
            prefix_attention: add the prefix attention layer.
            changes: fields to set.
        """
        text = target_config.get_text_config(decoder=True)
        prefix = DraftLayerConfig.like(target_config) if prefix_attention else None
        sizes = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size, "prefix": prefix}
        return cls(**{**sizes, **changes})

    @classmethod
    def plus_plus(cls, target_config: PretrainedConfig, **changes: Any) -> "HydraConfig":
        """Hydra++ for a target: four blocks per head, prefix attention, dropout of 0.2; `changes` replace them."""
        return cls.for_target(target_config, **{"num_layers": 4, "prefix_attention": True, "dropout": 0.2, **changes})

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "HydraConfig":
        """The configuration of which `dataclasses.asdict` made `fields`."""
        prefix = fields.get("prefix")
        return cls(**{**fields, "prefix": None if prefix is None else DraftLayerConfig(**prefix)})


class _Block(nn.Module):
    """Residual block on parts side by side; a single part is its own residual."""

    def __init__(self, width: int, num_parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_parts * width, width)
        self.residual = nn.Linear(num_parts * width, width) if num_parts > 1 else None

    def forward(self, parts: Sequence[torch.Tensor], backend: Backend | None) -> torch.Tensor:
        residual = self.residual
        if needs_pytorch(parts[0]):
            x = torch.cat(list(parts), -1)
            return (x if residual is None else residual(x)) + F.silu(self.linear(x))
        weights = () if residual is None else (residual.weight, residual.bias)
        return draft_heads_concat(parts, self.linear.weight, self.linear.bias, *weights, backend=backend)


class _Head(nn.Module):
    def __init__(self, config: HydraConfig, num_parts: int) -> None:
        super().__init__()
        width = config.hidden_size
        num_tail = min(config.num_layers - 1, 1) if config.shared_tail else config.num_layers - 1
        self.blocks = nn.ModuleList([_Block(width, num_parts), *(_Block(width, 1) for _ in range(num_tail))])
        self.lm_head = None if config.vocab_size is None else nn.Linear(width, config.vocab_size)
        self.num_layers = config.num_layers
        self.dropout = config.dropout

    def forward(self, parts: Sequence[torch.Tensor], backend: Backend | None) -> torch.Tensor:
        x = self.blocks[0]([self._drop(part) for part in parts], backend)
        for layer in range(1, self.num_layers):
            x = self.blocks[min(layer, len(self.blocks) - 1)]([self._drop(x)], backend)
        return self._drop(x)

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


class _Prefix(nn.Module):
    def __init__(self, config: DraftLayerConfig) -> None:
        super().__init__()
        self.layer = DraftLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor | None, attend: Attend, backend: Backend | None
    ) -> torch.Tensor:
        return self.layer(hidden, self.rotary.at(hidden, positions), attend, backend=backend, norm=self.norm)


class HydraNetwork(DraftNetwork):
    """K heads, and the prefix attention layer where the configuration has one."""

    config_class = HydraConfig
    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(_Head(config, num_parts=2 + index) for index in range(config.num_heads))
        self.prefix = None if config.prefix is None else _Prefix(config.prefix)

    def encode(self, hidden: torch.Tensor, positions: torch.Tensor | None, attend: Attend) -> torch.Tensor:
        """What the heads read: the output of prefix attention, or without it the states themselves.

        Args:
            hidden: [B, T, C] states that enter the target's LM head.
            positions: [B or 1, T] index of each state in its text, from 0.
            attend: what each state sees.

        Returns:
            [B, T, C].
        """
        return hidden if self.prefix is None else self.prefix(hidden, positions, attend, self.backend)

    def states(self, head: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What enters the LM head of one head.

        Args:
            head: which one, from 0.
            parts: `head + 2` tensors [.., C] of one shape: `encode`'s state, then the embeddings of the tokens after
                it in their order, the root's first.

        Returns:
            [.., C].
        """
        rows = [part.reshape(-1, part.shape[-1]) for part in parts]
        states: torch.Tensor = self.heads[head](rows, self.backend)
        return states.view(parts[0].shape)

    def lm_head(self, head: int) -> nn.Linear | None:
        """The LM head of one head; None where it shares the target's."""
        return cast(_Head, self.heads[head]).lm_head

    @torch.no_grad()
    def start_from(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Begin training with the target's LM head (weight [V, C], bias [V]) in every head, and blocks without W."""
        for head in cast("list[_Head]", self.heads):
            if head.lm_head is not None:
                head.lm_head.weight.copy_(weight)
                head.lm_head.bias.zero_() if bias is None else head.lm_head.bias.copy_(bias)
            for block in cast("list[_Block]", head.blocks):
                block.linear.weight.zero_()
