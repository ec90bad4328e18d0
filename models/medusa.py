"""Medusa heads: K residual blocks on one hidden state, each with an LM head of its own.

Equation:   logits_k = W_k (x + SiLU(R_k x + b_k)),  k = 1 .. K;  head k predicts the token k + 1 places after x's
Source:     Medusa (arXiv:2401.10774) section 2.1.1; the authors' `medusa_lm_head` files
Shapes:     x [B, C]; R [K, L, C, C], b [K, L, C]; W [K, V, C]; logits [B, K, V]

All heads run as one batched matrix product per layer. Files keep the authors' names, `{k}.{layer}.linear.weight`,
`{k}.{layer}.linear.bias`, `{k}.{num_layers}.weight`, so that published checkpoints and ours read alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch users know
from torch import nn

__all__ = ["MedusaConfig", "MedusaHeads"]


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Sizes of a set of Medusa heads."""

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    def check_fits(self, *, vocab_size: int, hidden_size: int) -> None:
        """Raise ValueError unless the heads belong to a target of these sizes."""
        if self.vocab_size != vocab_size:
            raise ValueError(
                f"drafter: expected a vocabulary of {vocab_size} tokens as the target's, got {self.vocab_size}"
            )
        if self.hidden_size != hidden_size:
            raise ValueError(f"drafter: expected hidden size {hidden_size} as the target's, got {self.hidden_size}")


class MedusaHeads(nn.Module):
    """K heads on the target's state."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        heads, layers, width = config.num_heads, config.num_layers, config.hidden_size
        self.block_weight = nn.Parameter(torch.zeros(heads, layers, width, width))
        self.block_bias = nn.Parameter(torch.zeros(heads, layers, width))
        self.lm_head = nn.Parameter(torch.zeros(heads, config.vocab_size, width))

    def forward(self, hidden: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """Logits of the first `num_heads` heads.

        Args:
            hidden: [B, C] states that entered the target's LM head.
            num_heads: how many heads to run; all by default.

        Returns:
            [B, num_heads, V] logits.
        """
        count = self.config.num_heads if num_heads is None else num_heads
        state = hidden.expand(count, -1, -1)  # [K, B, C]
        for layer in range(self.config.num_layers):
            weight, bias = self.block_weight[:count, layer], self.block_bias[:count, layer]
            state = state + F.silu(torch.baddbmm(bias[:, None], state, weight.mT))
        return torch.bmm(state, self.lm_head[:count].mT).transpose(0, 1)

    @torch.no_grad()
    def start_from(self, lm_head: torch.Tensor) -> None:
        """Begin training from the target's LM head [V, C]: every head first repeats the target's own guess."""
        self.lm_head.copy_(lm_head.expand_as(self.lm_head))

    def to_published(self) -> dict[str, torch.Tensor]:
        """The tensors under the authors' names."""
        tensors = {}
        for head in range(self.config.num_heads):
            for layer in range(self.config.num_layers):
                tensors[f"{head}.{layer}.linear.weight"] = self.block_weight[head, layer]
                tensors[f"{head}.{layer}.linear.bias"] = self.block_bias[head, layer]
            tensors[f"{head}.{self.config.num_layers}.weight"] = self.lm_head[head]
        return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}

    @classmethod
    def from_published(cls, tensors: Mapping[str, torch.Tensor]) -> "MedusaHeads":
        """Build heads from tensors under the authors' names; sizes are read off the tensors, not the config.

        Raises:
            ValueError: a missing, unexpected or misshapen tensor, by name.
        """
        head_names = [
            name for name in tensors if name.count(".") == 2 and not name.endswith(("linear.weight", "linear.bias"))
        ]
        indices = {name.split(".")[0] for name in tensors}
        if not indices or not all(index.isdigit() for index in indices):
            odd = sorted(name for name in tensors if not name.split(".")[0].isdigit())
            raise ValueError(f"checkpoint: expected tensors named '0.0.linear.weight', ..., got {odd[:3] or 'none'}")
        if head_names:  # '{k}.{layers}.weight' has two dots
            layers = int(head_names[0].split(".")[1])
        else:
            raise ValueError("checkpoint: missing the LM heads ('0.1.weight', ...)")
        lm_head = tensors[head_names[0]]
        config = MedusaConfig(
            hidden_size=lm_head.shape[1], vocab_size=lm_head.shape[0], num_heads=len(indices), num_layers=layers
        )
        heads = cls(config).to(lm_head.dtype)
        expected = heads.to_published()
        missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
        if missing or unexpected:
            raise ValueError(f"checkpoint: missing tensors {missing}, unexpected tensors {unexpected}")
        for name, tensor in tensors.items():
            if tensor.shape != expected[name].shape:
                raise ValueError(f"{name}: expected shape {list(expected[name].shape)}, got {list(tensor.shape)}")
        with torch.no_grad():
            for head in range(config.num_heads):
                for layer in range(layers):
                    heads.block_weight[head, layer] = tensors[f"{head}.{layer}.linear.weight"]
                    heads.block_bias[head, layer] = tensors[f"{head}.{layer}.linear.bias"]
                heads.lm_head[head] = tensors[f"{head}.{layers}.weight"]
        return heads
