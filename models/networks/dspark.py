"""DSpark's network: DFlash's block, whose rows also know the token before theirs, and how sure they are.

Equation:   z_0, .., z_{b-1} = DFlash's block (`specdec.models.networks.dflash`); row j is about the token behind
                      its own position, so that the anchor's row drafts too
            logits    after token t at row j: head(z_j) + W2 f_j
            vanilla   f = W1[t];  gated: f = sigmoid(G [z_j; W1[t]] + g) * W1[t]
            rnn       [g; c; o] = J [s; W1[t]; z_j] + u;  f = tanh(o);  s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c),
                      which is the memory of the rows below; s = 0 at the anchor
            confidence  sigmoid(p [z_j; W1[t]] + q), how likely the most probable token there is accepted
Source:     DSpark (deepseek-ai/DeepSpec, its paper and code, MIT); vllm-project/speculators
Shapes:     z [B, b, C]; W1 [V, r]; W2 [draft V, r]; s [B, n, r]; t [B, n], the tokens of n nodes of one depth

The bias of a row depends on one token, and not on where that came from: each node of a tree has a law of its own, of
one pass of the layers. Rank 0 leaves the bias out. Parameter names are those of the authors' files.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from specdec.models.networks.dflash import DFlashConfig, DFlashNetwork

__all__ = ["ConfidenceHead", "DSparkConfig", "DSparkNetwork", "MarkovHead"]

_HEAD_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class DSparkConfig(DFlashConfig):
    """Sizes and switches of the network.

    Attributes:
        markov_rank: r, rank of the bias; 0 for none.
        markov_head_type: what the bias is made of.
        has_confidence: whether the network says how sure it is.
        confidence_with_markov: whether that depends on the token before.
    """

    markov_rank: int = 256
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    has_confidence: bool = True
    confidence_with_markov: bool = True

    least_block: ClassVar[int] = 1

    def __post_init__(self) -> None:
        DFlashConfig.__post_init__(self)
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank: expected at least 0, got {self.markov_rank}")
        if self.markov_head_type not in _HEAD_TYPES:
            raise ValueError(f"markov_head_type: expected {' or '.join(_HEAD_TYPES)}, got {self.markov_head_type!r}")
        if self.has_confidence and self.confidence_with_markov and self.markov_rank == 0:
            raise ValueError("confidence_with_markov: expected False with markov_rank 0, got True")

    @property
    def memory_size(self) -> int:
        """What is remembered along a path of a tree, in numbers."""
        return self.markov_rank if self.markov_head_type == "rnn" else 0


class MarkovHead(nn.Module):
    """What a token says about the one behind it: a bias of the logits, of low rank.

    Args:
        config: the network's.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, width = config.markov_rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.num_draft_tokens, bias=False)
        is_gated, is_rnn = config.markov_head_type == "gated", config.markov_head_type == "rnn"
        self.gate_proj = nn.Linear(width + rank, rank) if is_gated else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if is_rnn else None

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `markov_w2` makes the bias of, and what is remembered.

        Args:
            tokens: [.., n] target's tokens in front.
            states: [.., n or 1, C] of the rows.
            memory: [.., n, S] on the way to these tokens.

        Returns:
            [.., n, r] and [.., n, S].
        """
        before = self.markov_w1(tokens)
        states = states.expand(*before.shape[:-1], -1)
        if self.gate_proj is not None:
            return torch.sigmoid(self.gate_proj(torch.cat((states, before), -1))) * before, memory
        if self.joint_proj is not None:
            gate, new, out = self.joint_proj(torch.cat((memory, before, states), -1)).chunk(3, -1)
            return torch.tanh(out), torch.lerp(torch.tanh(new), memory, torch.sigmoid(gate))
        return before, memory


class ConfidenceHead(nn.Module):
    """How sure the network is of a row.

    Args:
        input_size: width of what it reads.
    """

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-odds [..] of [.., input_size]."""
        return self.proj(x).squeeze(-1)


class DSparkNetwork(DFlashNetwork):
    """DFlash's layers with the two heads.

    Args:
        config: sizes and switches.
    """

    config_class = DSparkConfig
    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        rank = config.markov_rank if config.confidence_with_markov else 0
        self.confidence_head = ConfidenceHead(config.hidden_size + rank) if config.has_confidence else None

    def new_memory(self, states: torch.Tensor) -> torch.Tensor:
        """What is remembered at the anchors of `states [.., b, C]`: [.., 1, S]."""
        return states.new_zeros(*states.shape[:-2], 1, self.config.memory_size)

    def confidence(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Log-odds [.., n] that the most probable token behind each of `tokens [.., n]` is accepted.

        Args:
            tokens: the target's tokens in front.
            states: [.., n or 1, C] of the rows.
        """
        assert self.confidence_head is not None
        states = states.expand(*tokens.shape, -1)
        if self.markov_head is None or not self.config.confidence_with_markov:
            return self.confidence_head(states)
        return self.confidence_head(torch.cat((states, self.markov_head.markov_w1(tokens)), -1))

    def factors(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What `markov_head.markov_w2` makes the biases of whole blocks of, whose tokens are known: [.., b, r].

        Args:
            tokens: [.., b] target's tokens, the anchor first: row j is about the token behind `tokens[j]`.
            states: [.., b, C].
        """
        assert self.markov_head is not None
        memory = self.new_memory(states)
        if not self.config.memory_size:
            return self.markov_head(tokens, states, memory)[0]
        rows = []
        for row in range(states.shape[-2]):
            place = (..., slice(row, row + 1))
            factor, memory = self.markov_head(tokens[place], states[(*place, slice(None))], memory)
            rows.append(factor)
        return torch.cat(rows, -2)

    @torch.no_grad()
    def start_from(self, lm_head: torch.Tensor, embedding: torch.Tensor) -> None:
        """As `DFlashNetwork`; the bias starts small, as speculators' does."""
        super().start_from(lm_head, embedding)
        if self.markov_head is not None:
            nn.init.normal_(self.markov_head.markov_w1.weight, std=0.01)
