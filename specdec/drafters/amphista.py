"""Amphista: heads that see each other, on a state that two layers have adapted to looking further ahead.

Paper: Li et al. 2024, "Amphista" (arXiv:2406.13170), section 3; with Amphista-alpha and low-rank heads (appendix A.2).
Proposes: a static tree; all nodes of a depth take their tokens from the same head's list, as in Medusa.
Needs from the target: the states that enter the LM head at all committed tokens, and its input embedding.
Cost of one draft: one pass: two decoder layers and two 2C x C matrices over the tokens that came in, then at one place
    per row K matrices C x C, the attention block over K positions, and the LM heads of the tree's depth.
Deviations: none known; the paper is the only source. Its open questions: docs/drafters/amphista.md.
"""

from typing import ClassVar

import torch

from specdec.drafting.base import Prompt, Room
from specdec.drafting.candidates import Choose, choose_from
from specdec.drafting.draft_tree import DraftTree, TreeTemplate
from specdec.drafting.network import NetworkDrafter
from specdec.kernels.common.verdict import Verdict
from specdec.models.common.cache import KVCache
from specdec.models.networks.amphista import AmphistaConfig, AmphistaNetwork
from specdec.models.networks.prefix import FeaturePrefix, Pairs
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.shape import TreeShape

__all__ = ["Amphista"]


class Amphista(NetworkDrafter):
    """Static-tree drafting with Amphista's network.

    Args:
        network: the trained network.
        shape: the tree to propose; at most as deep as there are heads.

    Raises:
        ValueError: the tree is deeper than there are heads, or takes ranks beyond the vocabulary.
    """

    kind: ClassVar[str] = "amphista"
    shape: TreeShape
    network_class: ClassVar[type[AmphistaNetwork]] = AmphistaNetwork
    network: AmphistaNetwork

    def __init__(self, network: AmphistaNetwork, shape: TreeShape) -> None:
        super().__init__(network, shape)
        config = network.config
        if shape.max_depth > config.num_heads:
            raise ValueError(
                f"tree: expected a depth of at most {config.num_heads}, one level per head, got {shape.max_depth}"
            )
        if shape.max_rank >= config.vocab_size:
            raise ValueError(f"tree: expected ranks below {config.vocab_size}, got {shape.max_rank}")

    @classmethod
    def default_tree(cls, config: AmphistaConfig) -> TreeShape:
        """The paper's tree of 64 nodes and depth 4; a smaller one for fewer heads."""
        if config.num_heads >= 4:
            return TreeShape.preset("medusa/mc_sim_7b_63")
        return TreeShape.from_k_config((8, 4, 1)[: config.num_heads])

    def bind(self, target: Target) -> None:
        """As `NetworkDrafter.bind`."""
        super().bind(target)
        self._template = TreeTemplate(self.shape, target.device, rows="depth", backend=target.backend)
        self._num_ranks = self.shape.max_rank + 1
        self._target = target

    def allocate(self, room: Room, device: torch.device) -> None:
        """Keys and values of the adaptation layers."""
        layer, max_new = self.network.config.layer, self.shape.max_depth + 1
        cache = KVCache(
            num_layers=self.network.config.adaptation_layers,
            batch_size=room.batch_size,
            capacity=room.max_length + max_new,
            num_kv_heads=layer.num_key_value_heads,
            head_dim=layer.head_dim,
            dtype=self._target.dtype,
            device=device,
            backend=self._target.backend,
        )
        self._prefix = FeaturePrefix(cache, max_new=max_new, feature_size=self._target.hidden_size)

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Run the adaptation layers over the prompt."""
        pairs = self._prefix.start(prompt.tokens, prompt.lengths, output.hidden)
        if pairs is not None:
            self._adapt(pairs)

    def draft(self, root: torch.Tensor, lengths: torch.Tensor, choose: Choose) -> DraftTree:
        """Read what was committed, and let all heads speak at the newest pair."""
        pairs = self._prefix.read(root)
        first, second = self._adapt(pairs)
        self._prefix.advance()
        # every head is heard by the others; LM heads are needed for the tree's levels alone
        states = self.network.speak(pairs.last(first), pairs.last(second))
        levels = slice(self.shape.max_depth)
        candidates = choose_from(choose, self.network.lm_heads(levels), states[:, levels], self._num_ranks)
        return self._template.expand(candidates, root, lengths)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Take in the target's states at the accepted nodes."""
        self._prefix.commit(verdict, output.hidden)

    def _adapt(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embed(pairs.tokens) if self.network.config.reads_tokens else None
        return self.network.adapt(pairs.features, embedded, pairs.positions, pairs.attend)
