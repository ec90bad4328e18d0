"""Medusa: independent heads on the target's last state, each guessing one token further ahead.

Paper: Cai et al. 2024, "Medusa" (arXiv:2401.10774), section 2.1; the baseline of Hydra, Amphista and ParallelSpec.
Proposes: a static tree; all nodes of a depth take their tokens from the same head's top-k list.
Needs from the target: the state that enters the LM head, at the last accepted node.
Cost of one draft: one pass through K heads, (d^2 + d V) K weights; nothing sequential, no cache.
Deviations: none. The heads of a Medusa-2 model are the same heads; its target is the model in the same files.
"""

from typing import ClassVar

import torch

from specdec.drafting.base import Prompt, Room
from specdec.drafting.candidates import Choose, choose_from
from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.network import NetworkDrafter
from specdec.kernels.common.verdict import Verdict
from specdec.models.common.cache import RowState
from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.medusa import MedusaConfig, MedusaHeads
from specdec.models.target.target import PrefillOutput, TargetOutput
from specdec.trees.shape import TreeShape

__all__ = ["Medusa"]


class Medusa(NetworkDrafter):
    """Static-tree drafting with Medusa heads.

    Args:
        network: the trained heads.
        shape: the tree to propose; at most as deep as there are heads.

    Raises:
        ValueError: the tree is deeper than there are heads, or takes ranks beyond the vocabulary.
    """

    kind: ClassVar[str] = "medusa"
    network: MedusaHeads
    shape: TreeShape
    least_depth: ClassVar[int] = 0
    network_class: ClassVar[type[DraftNetwork]] = MedusaHeads

    @classmethod
    def depth_limit(cls, config: MedusaConfig) -> tuple[int, str]:
        """As `NetworkDrafter`."""
        return config.num_heads, "one level per head"

    @classmethod
    def default_tree(cls, config: MedusaConfig) -> TreeShape:
        """The authors' tree of 63 nodes where there are heads for its depth of four, else a width per depth."""
        if config.num_heads >= 4:
            return TreeShape.preset("medusa/mc_sim_7b_63")
        return TreeShape.from_k_config((8, 4, 1)[: config.num_heads])

    def allocate(self, room: Room, device: torch.device) -> None:
        """One state per row."""
        target = self._target
        self._hidden = torch.zeros(room.batch_size, target.hidden_size, dtype=target.dtype, device=device)

    def row_state(self) -> RowState:
        """As `Drafter`."""
        return (self._hidden,)

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Begin from the state of the last prompt token."""
        self._hidden.copy_(output.last_hidden(prompt.lengths, self._hidden))

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """Candidates of every head, laid out as the tree."""
        network, count = self.network, self.shape.max_depth
        heads = self.lm_heads if network.config.vocab_size is None else network.lm_heads(count)
        candidates = choose_from(choose, heads, network.states(self._hidden, count), self._num_ranks)
        return self._template.expand(candidates, root)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Keep the state at the last accepted node; the next root is the token after it."""
        self._hidden.copy_(verdict.at_last_node(output.hidden))
