"""Amphista's network: the target's state adapted in two stages, and K heads that see each other before they speak.

Equation:   h1_t = SAL1(fc1 [h_t; e_{t+1}], kv1);  h2_t = SAL2(fc2 [h1_t; e_{t+1}], kv2)
            h'_k = MLP_k(h1_t) for k <= floor(K / 2), MLP_k(h2_t) above;  MLP_k(x) = x + SiLU(R_k x + b_k)
            H = [h'_1 .. h'_K] + PE;  per layer of the block:  H = H + O Attention(Q n(H), K n(H), V n(H)), unmasked
            logits_k = W_k H_k, or B_k A_k H_k with low-rank heads, or the target's W H_k;  head k predicts x_{t+k+1}
Source:     Amphista (arXiv:2406.13170) sections 3.1, 3.2, A.2.3 and A.2.4; no code or weights are public
Shapes:     h, e [B, T, C]; R [K, C, C], b [K, C]; PE [K, C]; W [K, V, C]; A [K, r, C], B [K, V, r]; logits [B, K, V]

What the equations leave open (residuals, norms, biases, initial values) is argued in docs/drafters/amphista.md.
"""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from specdec.kernels.common.launch import Backend
from specdec.kernels.draft_heads import draft_heads
from specdec.models.common.lm_heads import LMHeads
from specdec.models.common.ops import needs_pytorch, projected, rms_normed
from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.layer import Attend, DraftLayer, DraftLayerConfig, LayerNetworkConfig, Rotary

__all__ = ["AmphistaConfig", "AmphistaNetwork"]


@dataclass(frozen=True, slots=True)
class AmphistaConfig(LayerNetworkConfig):
    """Sizes and switches of the network; its layers' hidden size is C, and the block's attention has the same sizes.

    Attributes:
        num_heads: K, how many tokens are guessed.
        adaptation_layers: 2; 1 for "One-Adaptation-Layer", whose state all heads read; 0 for "w/o Staged-Adaptation",
            in which heads read the target's state and no token enters.
        sampled_token: whether the adaptation layers read e_{t+1}; False for "w/o Sampled-Token".
        auto_embedding: False for "w/o Auto-embedding": the heads' states go to the LM heads as they are.
        position_encoding: False for "w/o Position-Encoding": nothing is added to the states that enter the block.
        block_layers: attention layers of the auto-embedding block; 2 for Amphista-alpha.
        head_rank: r of low-rank LM heads; None for full matrices.
        own_lm_heads: False for heads that share the target's LM head, which the paper does not have: with a small
            target four vocabularies are most of the network.
    """

    num_heads: int = 4
    adaptation_layers: int = 2
    sampled_token: bool = True
    auto_embedding: bool = True
    position_encoding: bool = True
    block_layers: int = 1
    head_rank: int | None = None
    own_lm_heads: bool = True

    def __post_init__(self) -> None:
        LayerNetworkConfig.__post_init__(self)
        for name in ("num_heads", "block_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.adaptation_layers not in (0, 1, 2):
            raise ValueError(f"adaptation_layers: expected 0, 1 or 2, got {self.adaptation_layers}")
        most = min(self.vocab_size, self.hidden_size)
        if self.head_rank is not None and not 1 <= self.head_rank <= most:
            raise ValueError(f"head_rank: expected None or 1 to {most}, got {self.head_rank}")
        if self.head_rank is not None and not self.own_lm_heads:
            raise ValueError(f"head_rank: expected None where heads share the target's LM head, got {self.head_rank}")

    @property
    def reads_tokens(self) -> bool:
        """Whether embeddings of sampled tokens enter the network."""
        return self.sampled_token and self.adaptation_layers > 0


class _BlockLayer(nn.Module):
    """Unmasked self-attention among the K heads of one place, pre-norm and residual, without rotary embedding."""

    side_by_side: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: DraftLayerConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)

    def forward(self, states: torch.Tensor, backend: Backend | None) -> torch.Tensor:
        """[N, K, C] states of the heads to [N, K, C]."""
        parts = projected(rms_normed(states, self.norm, backend), (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1])
        return states + self.o_proj(attended.transpose(1, 2).flatten(2))


class AmphistaNetwork(DraftNetwork):
    """The network; the target's embedding is handed in, everything else is its own.

    `adapt` runs over the text and has a cache; `lm_states` and `logits` run at one place. A network of the right shapes
    is built with random weights; `start_from` gives it those that training begins with.
    """

    config_class = AmphistaConfig
    config: AmphistaConfig

    def __init__(self, config: AmphistaConfig) -> None:
        super().__init__(config)
        width, heads, rank = config.hidden_size, config.num_heads, config.head_rank
        inputs = 2 * width if config.reads_tokens else width
        self.fc = nn.ModuleList(nn.Linear(inputs, width) for _ in range(config.adaptation_layers))
        self.layers = nn.ModuleList(DraftLayer(config.layer) for _ in range(config.adaptation_layers))
        self.rotary = Rotary(config.layer)
        self.mlp_weight = nn.Parameter(torch.empty(heads, width, width))
        self.mlp_bias = nn.Parameter(torch.zeros(heads, width))
        has_positions = config.auto_embedding and config.position_encoding
        self.position_encoding = nn.Parameter(torch.empty(heads, width)) if has_positions else None
        self.block = nn.ModuleList(
            _BlockLayer(config.layer) for _ in range(config.block_layers * config.auto_embedding)
        )
        own = config.own_lm_heads
        columns = width if rank is None else rank
        self.lm_head = nn.Parameter(torch.empty(heads, config.vocab_size, columns)) if own else None
        self.lm_head_down = None if rank is None else nn.Parameter(torch.empty(heads, rank, width))
        for weight in (self.mlp_weight, self.position_encoding, self.lm_head, self.lm_head_down):
            if weight is not None:
                nn.init.normal_(weight, std=0.02)

    def adapt(
        self, features: torch.Tensor, embedded: torch.Tensor | None, positions: torch.Tensor | None, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the staged adaptation layers over pairs (h_t, x_{t+1}).

        Args:
            features: [B, T, C] h_t.
            embedded: [B, T, C] embeddings of x_{t+1}; None unless `config.reads_tokens`.
            positions: [B or 1, T] the places t.
            attend: what the pairs see; layers are numbered from 0.

        Returns:
            What the first floor(K / 2) heads read and what the others read, each [B, T, C].
        """
        stages = [features]
        rotation = self.rotary.at(features, positions)
        for index, (fc, layer) in enumerate(zip(self.fc, self.layers, strict=True)):
            read = stages[-1] if embedded is None else torch.cat((stages[-1], embedded), -1)
            stages.append(layer(fc(read), rotation, attend, backend=self.backend, layer=index))
        # two adaptation layers give (h1, h2); with fewer there is one state for all heads
        return stages[min(1, len(stages) - 1)], stages[-1]

    def lm_states(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """States of all heads, after they have seen each other.

        Args:
            first: [N, C] what the first floor(K / 2) heads read.
            second: [N, C] what the others read.

        Returns:
            [N, K, C] states that enter the LM heads.
        """
        half = self.config.num_heads // 2
        read = torch.cat((first.expand(half, -1, -1), second.expand(self.config.num_heads - half, -1, -1)))
        if needs_pytorch(read):
            states = read + F.silu(torch.baddbmm(self.mlp_bias[:, None], read, self.mlp_weight.mT))
        else:
            states = draft_heads(read, self.mlp_weight, self.mlp_bias, backend=self.backend)
        states = states.transpose(0, 1)
        if self.position_encoding is not None:
            states = states + self.position_encoding
        for layer in self.block:
            states = layer(states, self.backend)
        return states

    def lm_heads(self, heads: slice) -> LMHeads | None:
        """The LM heads that `heads` selects, of low rank where the network's are; None if they share the target's."""
        if self.lm_head is None:
            return None
        down = None if self.lm_head_down is None else self.lm_head_down[heads]
        return LMHeads(self.lm_head[heads], down, backend=self.backend)

    def before_lm_head(self, states: torch.Tensor, head: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One head's last matrix and what it reads, for laws over a part of the vocabulary.

        Args:
            states: [N, K, C] of `lm_states`.
            head: which one, from 0.

        Returns:
            [N, C] or [N, r], and [V, C] or [V, r]; None where it shares the target's LM head.
        """
        read = states[:, head]
        if self.lm_head_down is not None:
            read = F.linear(read, self.lm_head_down[head])
        return read, None if self.lm_head is None else self.lm_head[head]

    def forward(
        self, features: torch.Tensor, embedded: torch.Tensor | None, positions: torch.Tensor | None, attend: Attend
    ) -> torch.Tensor:
        """States of all heads after every pair, [B, T, K, C]; arguments as in `adapt`."""
        first, second = self.adapt(features, embedded, positions, attend)
        return self.lm_states(first.flatten(0, 1), second.flatten(0, 1)).unflatten(0, first.shape[:2])

    @torch.no_grad()
    def start_from(self, lm_head: torch.Tensor) -> None:
        """Begin training where every head repeats the target's own guess of x_{t+1}.

        Each part starts as the identity: fc keeps its first C inputs, what layers and MLPs add is zero, and so is PE.

        Args:
            lm_head: [V, C] the target's; low-rank heads take its best approximation of their rank.
        """
        for fc in cast("list[nn.Linear]", self.fc):
            fc.weight.zero_()
            fc.weight[:, : self.config.hidden_size].fill_diagonal_(1)
            fc.bias.zero_()
        for layer in cast("list[DraftLayer]", self.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for attention in cast("list[_BlockLayer]", self.block):
            attention.o_proj.weight.zero_()
        for added in (self.mlp_weight, self.mlp_bias, self.position_encoding):
            if added is not None:
                added.zero_()
        if self.lm_head is None:
            return
        if self.lm_head_down is None:
            self.lm_head.copy_(lm_head.expand_as(self.lm_head))
            return
        # W P is nearest to W if P projects on the r leading right singular vectors, the eigenvectors of W'W
        weight = lm_head.double()
        leading = torch.linalg.eigh(weight.mT @ weight).eigenvectors[:, -self.lm_head_down.shape[1] :]
        self.lm_head_down.copy_(leading.mT.expand_as(self.lm_head_down))
        self.lm_head.copy_((weight @ leading).expand_as(self.lm_head))
