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
from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.network import NetworkDrafter
from specdec.kernels.common.verdict import Verdict
from specdec.models.networks.amphista import AmphistaConfig, AmphistaNetwork
from specdec.models.networks.prefix import Pairs
from specdec.models.target.target import PrefillOutput, TargetOutput
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
    least_depth: ClassVar[int] = 0

    @classmethod
    def depth_limit(cls, config: AmphistaConfig) -> tuple[int, str]:
        """As `NetworkDrafter`."""
        return config.num_heads, "one level per head"

    @classmethod
    def default_tree(cls, config: AmphistaConfig) -> TreeShape:
        """The paper's tree of 64 nodes and depth 4; a smaller one for fewer heads."""
        if config.num_heads >= 4:
            return TreeShape.preset("medusa/mc_sim_7b_63")
        return TreeShape.from_k_config((8, 4, 1)[: config.num_heads])

    def allocate(self, room: Room, device: torch.device) -> None:
        """Keys and values of the adaptation layers."""
        config = self.network.config
        self._prefix = self.new_prefix(room, device, config.layer, num_layers=config.adaptation_layers)

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Run the adaptation layers over the prompt."""
        pairs = self._prefix.start(prompt.tokens, prompt.lengths, output.hidden, first=output.first)
        if pairs is not None:
            self._adapt(pairs)

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """Read what was committed, and let all heads speak at the newest pair."""
        pairs = self._prefix.read(root)
        first, second = self._adapt(pairs)
        self._prefix.advance()
        # every head is heard by the others; LM heads are needed for the tree's levels alone
        states = self.network.lm_states(pairs.last(first), pairs.last(second))
        levels = slice(self.shape.max_depth)
        heads = self.network.lm_heads(levels) or self.lm_heads
        candidates = choose_from(choose, heads, states[:, levels], self._num_ranks)
        return self._template.expand(candidates, root)

    def skip(self, root: torch.Tensor) -> None:
        """As `Drafter`."""
        self._prefix.skip(root)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Take in the target's states at the accepted nodes."""
        self._prefix.commit(verdict, output.hidden)

    def _adapt(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embed(pairs.tokens) if self.network.config.reads_tokens else None
        return self.network.adapt(pairs.features, embedded, pairs.positions, pairs.attend)
