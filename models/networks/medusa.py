"""Medusa heads: K residual blocks on one hidden state, each with an LM head of its own.

Equation:   logits_k = W_k (x + SiLU(R_k x + b_k)),  k = 1 .. K;  head k predicts the token k + 1 places after x's
Source:     Medusa (arXiv:2401.10774) section 2.1.1
Shapes:     x [B, C]; R [K, L, C, C], b [K, L, C]; W [K, V, C]; logits [B, K, V]

All heads of a layer run in one launch of the op `draft_heads`; training runs batched matrix products instead. A set of
heads may have no W: all of them then use the target's LM head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from specdec.kernels.draft_heads import draft_heads
from specdec.models.common.lm_heads import LMHeads
from specdec.models.common.ops import needs_pytorch
from specdec.models.networks.base import DraftNetwork

__all__ = ["MedusaConfig", "MedusaHeads"]


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Sizes of a set of Medusa heads.

    Attributes:
        vocab_size: None where the heads have no LM heads of their own but share the target's.
        num_layers: residual blocks per head.
    """

    hidden_size: int
    vocab_size: int | None
    num_heads: int = 4
    num_layers: int = 1

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")

    @classmethod
    def for_target(cls, config: PretrainedConfig, **changes: Any) -> "MedusaConfig":
        """Sizes for a target of this configuration; `changes` replace some of them."""
        config = config.get_text_config(decoder=True)
        return cls(**{"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, **changes})


class MedusaHeads(DraftNetwork):
    """K heads on the target's state."""

    config_class: ClassVar[type] = MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        heads, layers, width = config.num_heads, config.num_layers, config.hidden_size
        self.block_weight = nn.Parameter(torch.zeros(heads, layers, width, width))
        self.block_bias = nn.Parameter(torch.zeros(heads, layers, width))
        if config.vocab_size is not None:
            self.lm_head = nn.Parameter(torch.zeros(heads, config.vocab_size, width))

    def forward(
        self,
        hidden: torch.Tensor,
        num_heads: int | None = None,
        *,
        lm_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Logits of the first `num_heads` heads.

        Args:
            hidden: [B, C] states that entered the target's LM head.
            num_heads: how many heads to run; all by default.
            lm_head: the target's, [.., C] to [.., V]; needed by heads without their own.

        Returns:
            [B, num_heads, V] logits.
        """
        count = self.config.num_heads if num_heads is None else num_heads
        states = self.states(hidden, count)
        if self.config.vocab_size is not None:
            return self.lm_heads(count).logits(states)
        if lm_head is None:
            raise ValueError("lm_head: expected the target's, which heads without their own share, got None")
        return lm_head(states)

    def states(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        """What enters the LM heads of the first `num_heads` heads: [B, C] to [B, num_heads, C]."""
        state = hidden
        for layer in range(self.config.num_layers):
            weight, bias = self.block_weight[:num_heads, layer], self.block_bias[:num_heads, layer]
            if needs_pytorch(hidden):
                state = state.expand(num_heads, -1, -1)
                state = state + F.silu(torch.baddbmm(bias[:, None], state, weight.mT))
            else:
                state = draft_heads(state, weight, bias, backend=self.backend)
        return state.transpose(0, 1)

    def lm_heads(self, num_heads: int) -> LMHeads:
        """The first `num_heads` LM heads, of a network that has its own."""
        return LMHeads(self.lm_head[:num_heads], backend=self.backend)

    @torch.no_grad()
    def start_from(self, lm_head: torch.Tensor) -> None:
        """Begin training from the target's LM head [V, C]: every head first repeats the target's own guess."""
        self.lm_head.copy_(lm_head.expand_as(self.lm_head))
