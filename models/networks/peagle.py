"""P-EAGLE's network: EAGLE-3's, which guesses several tokens in one pass, the further ones at masks.

Equation:   group of pair t   (f_t, x_{t+1}) at position t, and masks (W mask_hidden, e(MASK)) at t + 1, .., t + K
            row d of it (the pair is row 0) is about token t + 2 + d; layers, norms and LM head are EAGLE-3's
            a row sees the pairs up to t and the rows of its group up to itself
Source:     P-EAGLE (arXiv:2602.01469); vllm-project/speculators; the files of amazon and SpecForge
Shapes:     features [B, T, F], the taps side by side; e, states [B, N, C]; mask_hidden [1, 1, F]

A mask stands for what the target has not said yet: `mask_hidden` goes the way of the taps, through their norms and the
input projection, and all masks are alike but for their position. So a network drafts at any K; how many it was trained
for, files rarely say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig

from specdec.models.networks.base import check_mask_token
from specdec.models.networks.eagle3 import Eagle3Config, Eagle3Network
from specdec.models.networks.layer import LayerwiseAttention, MaskedAttention
from specdec.models.networks.parallelspec import group_mask

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PEagleConfig", "PEagleNetwork"]


@dataclass(frozen=True, slots=True)
class PEagleConfig(Eagle3Config):
    """Sizes and switches of the network.

    Attributes:
        mask_token_id: the token whose embedding masks have.
        num_masks: K; the network guesses K + 1 tokens.
    """

    mask_token_id: int = 0
    num_masks: int = 7

    def __post_init__(self) -> None:
        Eagle3Config.__post_init__(self)
        check_mask_token(self.mask_token_id, self.vocab_size)
        if self.num_masks < 0:
            raise ValueError(f"num_masks: expected at least 0, got {self.num_masks}")

    @classmethod
    def for_target(cls, target_config: PretrainedConfig, **changes: Any) -> "Self":
        """As `Eagle3Config`; the mask is the last token where none is named."""
        text = target_config.get_text_config(decoder=True)
        return super(PEagleConfig, cls).for_target(target_config, **{"mask_token_id": text.vocab_size - 1, **changes})


class PEagleNetwork(Eagle3Network):
    """EAGLE-3's layers, and what masks have in the place of the target's states.

    Args:
        config: sizes and switches.
    """

    config_class = PEagleConfig
    config: PEagleConfig
    trains_embedding = True

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.feature_size))

    def read_groups(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        num_masks: int,
        embed: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States and embeddings of pairs and then of masks, as `forward` takes them: [B, T + num_masks, C] both.

        Args:
            features: [B, T, F] what is read of the target.
            tokens: [B, T] token after each.
            num_masks: how many masks come behind the pairs.
            embed: what embeds tokens, the target's or `embed_tokens`.
        """
        batch_size = features.shape[0]
        states = self.read(torch.cat((features, self.mask_hidden.to(features.dtype).expand(batch_size, -1, -1)), 1))
        states = torch.cat((states[:, :-1], states[:, -1:].expand(-1, num_masks, -1)), 1)
        masks = tokens.new_full((batch_size, num_masks), self.config.mask_token_id)
        return states, embed(torch.cat((tokens, masks), 1))

    def see_groups(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        groups: torch.Tensor,
        members: torch.Tensor,
        embed: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """States of whole texts, of every pair and of masks behind some of them, for training; nothing is cached.

        Args:
            features: [B, T, F] what is read of the target.
            tokens: [B, T] token after each.
            groups: [N] int64 pair that each mask belongs to.
            members: [N] int64 place of each in its group, from 1; the ones before it in its group are among them too.
            embed: what embeds tokens, the target's or `embed_tokens`.

        Returns:
            [B, T + N, C]: of the pairs, and then of the masks.
        """
        pairs = torch.arange(tokens.shape[1], device=tokens.device)
        group, member = torch.cat((pairs, groups)), torch.cat((torch.zeros_like(pairs), members))
        states, embedded = self.read_groups(features, tokens, len(groups), embed)
        windows = self.config.window_of
        ways = {window: MaskedAttention(group_mask(group, member, window)[None]) for window in dict.fromkeys(windows)}
        attend = LayerwiseAttention([ways[window] for window in windows], (None,) * len(windows))
        return self(states, embedded, (group + member)[None], attend)

    @torch.no_grad()
    def start_from(self, lm_head: torch.Tensor, embedding: torch.Tensor) -> None:
        """As `OwnVocabulary`, with a mask like a normalised state."""
        super().start_from(lm_head, embedding)
        self.mask_hidden.normal_()
