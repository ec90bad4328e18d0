"""DFlash2's network: DFlash's block with short convolutions in its layers, and a selector of pairs of candidates.

Equation:   layer     u, s = conv_in(n(x)); x + conv_out(attention([context; u]), s); the same around the MLP
            conv      y_j[c] = sum over t of (k[t, c] + d_j[t, g(c)]) x_{j-t}[c], over the rows of one block, with
                      rows before it left out; d of both sides are one projection of row j of n(x), a number per group
            selector  score(c behind p at row j) = logit_j(c) + sum over r of P[p, r] (H z_j)[r] S[c, r], for the k
                      best c of row j; a row's law behind p is the softmax over these k
Source:     DFlash2 (z-lab/dflash, incoai; MIT); vllm-project/speculators, `dflash2`
Shapes:     x, z [B, R, C]; k [2, taps, C] (in, out); d [B, R, taps, G] with G groups of C / G columns;
            P, S [V, r]; H [r, C]

Without a convolution and without a selector it is DFlash's network. Context rows are not convolved: a convolution stays
within the block, and sees earlier rows alone, so that a causal block stays one. Parameter names are the authors'.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from specdec.kernels.common.launch import Backend
from specdec.models.common.ops import add_rms_normed, rms_normed
from specdec.models.networks.dflash import DFlashConfig, DFlashLayer, DFlashNetwork
from specdec.models.networks.layer import Attend, Rotation

__all__ = ["CandidateSelector", "DFlash2Config", "DFlash2Layer", "DFlash2Network", "LocalConvolution"]


@dataclass(frozen=True, slots=True)
class DFlash2Config(DFlashConfig):
    """Sizes and switches of the network.

    Attributes:
        conv_kernel_size: rows that a convolution reads, its own included; 0 for none.
        conv_group_size: columns that share what a row adds to the kernel.
        selector_rank: r, rank of the selector; 0 for none.
        selector_top_k: k, candidates of a row.
    """

    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16

    def __post_init__(self) -> None:
        DFlashConfig.__post_init__(self)
        if not 0 <= self.conv_kernel_size <= self.block_size:
            raise ValueError(
                f"conv_kernel_size: expected 0 to {self.block_size}, the rows of a block, got {self.conv_kernel_size}"
            )
        if self.conv_kernel_size and (self.conv_group_size < 1 or self.hidden_size % self.conv_group_size):
            raise ValueError(
                f"conv_group_size: expected a divisor of {self.hidden_size}, the hidden_size, got "
                f"{self.conv_group_size}"
            )
        if self.selector_rank < 0:
            raise ValueError(f"selector_rank: expected at least 0, got {self.selector_rank}")
        if self.selector_rank and not 1 <= self.selector_top_k <= self.vocab_size:
            raise ValueError(f"selector_top_k: expected 1 to {self.vocab_size}, got {self.selector_top_k}")
        if self.selector_rank and self.num_draft_tokens != self.vocab_size:
            raise ValueError(
                f"draft_vocab_size: expected {self.vocab_size}, the whole vocabulary, with a selector, got "
                f"{self.num_draft_tokens}"
            )
        if self.selector_rank and self.output_multiplier != 1:
            raise ValueError(f"output_multiplier: expected 1 with a selector, got {self.output_multiplier}")


class LocalConvolution(nn.Module):
    """Two convolutions over the rows of a block, in front of a sublayer and behind it.

    Args:
        config: the network's.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        taps, width = config.conv_kernel_size, config.hidden_size
        self.num_rows = config.block_size
        self.num_groups = width // config.conv_group_size
        kernel = torch.zeros(2, taps, width)
        kernel[:, 0] = 1  # an untrained one changes nothing
        self.base_kernel = nn.Parameter(kernel)
        self.kernel_projection = nn.Linear(width, 2 * taps * self.num_groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the sublayer reads in the place of `x [B, R, C]`, and what `leave` adds to its kernel."""
        added = self.kernel_projection(x).unflatten(-1, (2, -1, self.num_groups))
        return self._convolve(x, self.base_kernel[0], added[..., 0, :, :]), added[..., 1, :, :]

    def leave(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """What the sublayer gives, convolved: [B, R, C]."""
        return self._convolve(x, self.base_kernel[1], added)

    def _convolve(self, x: torch.Tensor, kernel: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Rows of one block, or of several whole ones side by side."""
        num_rows, grouped = min(self.num_rows, x.shape[1]), (self.num_groups, -1)
        rows = x.unflatten(-1, grouped).unflatten(1, (-1, num_rows))  # [B, M, R, G, C / G]
        added = added.unflatten(1, (-1, num_rows))[..., None]  # [B, M, R, taps, G, 1]
        out = torch.zeros_like(rows)
        for tap in range(min(kernel.shape[0], num_rows)):
            shifted = rows if tap == 0 else F.pad(rows[:, :, :-tap], (0, 0, 0, 0, tap, 0))
            out = out + shifted * (kernel[tap].unflatten(-1, grouped) + added[:, :, :, tap])
        return out.flatten(-2).flatten(1, 2)


class DFlash2Layer(DFlashLayer):
    """A layer with convolutions around attention and MLP.

    Args:
        config: the network's.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config.layer)
        self.attention_conv = LocalConvolution(config)
        self.mlp_conv = LocalConvolution(config)

    def read_block(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        rotation: Rotation,
        attend: Attend,
        *,
        backend: Backend | None,
        layer: int,
        norm: nn.RMSNorm | None,
    ) -> torch.Tensor:
        """As `DFlashLayer`."""
        assert self.input_layernorm is not None
        entered, added = self.attention_conv.enter(rms_normed(x, self.input_layernorm, backend))
        attended = self.self_attn(torch.cat((context, entered), 1), rotation, attend, layer, backend)
        attended = self.attention_conv.leave(attended, added)
        normed, x = add_rms_normed(attended, x, self.post_attention_layernorm, backend)
        entered, added = self.mlp_conv.enter(normed)
        out = self.mlp_conv.leave(self.mlp(entered, backend), added)
        return x + out if norm is None else add_rms_normed(out, x, norm, backend)[0]


class CandidateSelector(nn.Module):
    """How well a token goes with the one before it at a row of the block.

    Args:
        config: the network's.

    Attributes:
        top_k: k, candidates of a row.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(
        self, states: torch.Tensor, before: torch.Tensor, tokens: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Scores of candidates behind each of several tokens.

        Args:
            states: [.., C] of the rows.
            before: [.., n] tokens in front.
            tokens: [.., k] candidates of each row.
            logits: [.., k] theirs by the row alone.

        Returns:
            [.., n, k] in the dtype of the logits.
        """
        mixed = self.predecessor_codebook[before.long()] * self.hidden_projection(states)[..., None, :]
        pairs = mixed @ self.successor_codebook[tokens.long()].mT
        return logits[..., None, :] + pairs.to(logits.dtype)


class DFlash2Network(DFlashNetwork):
    """DFlash's network with what DFlash2 adds to it.

    Args:
        config: sizes and switches.
    """

    config_class = DFlash2Config
    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None

    def new_layer(self) -> DFlashLayer:
        """As `DFlashNetwork`, with convolutions if there are any."""
        return DFlash2Layer(self.config) if self.config.conv_kernel_size else super().new_layer()
