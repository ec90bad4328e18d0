"""Hydra and Hydra++: heads that see what the heads before them guessed, so that drafting runs depth by depth.

Paper: Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (arXiv:2402.05109).
Proposes: a static tree; head d + 1 runs once for all nodes of depth d that have children, and every such node takes its
children from the head's top-k list for its own path.
Needs from the target: the state that enters the LM head, at the last accepted node (Hydra), or of all text, for the
prefix attention layer and its own cache (Hydra++); the input embedding.
Cost of one draft: one pass through each head in turn; one through the prefix layer over the last step's states.
Deviations: none in what is computed; what the authors' files do differently is in docs/drafters/hydra.md.
"""

from typing import ClassVar

import torch

from specdec.drafting.base import Prompt, Room
from specdec.drafting.candidates import Candidates, Choose, choose_from
from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.network import NetworkDrafter
from specdec.kernels.common.verdict import Verdict
from specdec.models.common.cache import RowState
from specdec.models.common.lm_heads import LMHeads
from specdec.models.networks.hydra import HydraConfig, HydraNetwork
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.levels import plan_levels
from specdec.trees.shape import TreeShape

__all__ = ["Hydra"]


class Hydra(NetworkDrafter):
    """Static-tree drafting with Hydra heads; with prefix attention its `kind` is `"hydra++"`.

    Args:
        network: the trained heads.
        shape: the tree to propose; at most as deep as there are heads.

    Raises:
        ValueError: the tree proposes nothing, is deeper than there are heads, or takes ranks beyond the vocabulary.
    """

    kind: ClassVar[str] = "hydra"
    network_class = HydraNetwork
    shares_candidates = False
    network: HydraNetwork
    shape: TreeShape

    def __init__(self, network: HydraNetwork, shape: TreeShape) -> None:
        super().__init__(network, shape)
        if network.config.prefix_attention:
            self.kind = "hydra++"  # type: ignore[misc]  # one class has two names

    @classmethod
    def depth_limit(cls, config: HydraConfig) -> tuple[int, str]:
        """As `NetworkDrafter`."""
        return config.num_heads, "one level per head"

    @classmethod
    def default_tree(cls, config: HydraConfig) -> TreeShape:
        """The authors' tree of 63 nodes, as deep as there are heads."""
        paths = TreeShape.preset("hydra/mc_sim_7b_63").rank_paths[1:]
        return TreeShape.from_paths([path for path in paths if len(path) <= config.num_heads])

    def bind(self, target: Target) -> None:
        """Check the sizes and move the network to the target's device and dtype."""
        super().bind(target)
        self._levels = plan_levels(self.shape, target.device)
        own = map(self.network.lm_head, range(self.network.config.num_heads))
        self._heads = [self.lm_heads if head is None else LMHeads.of(head, backend=target.backend) for head in own]

    def allocate(self, room: Room, device: torch.device) -> None:
        """One state per row; with prefix attention, the keys and values of the text."""
        target, layer = self._target, self.network.config.prefix
        if layer is None:
            self._hidden = torch.zeros(room.batch_size, target.hidden_size, dtype=target.dtype, device=device)
            return
        self._prefix = self.new_prefix(room, device, layer)

    def row_state(self) -> RowState:
        """As `Drafter`."""
        return super().row_state() if self.network.config.prefix_attention else (self._hidden,)

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Begin from the state of the last prompt token; prefix attention reads all of them."""
        if not self.network.config.prefix_attention:
            self._hidden.copy_(output.last_hidden(prompt.lengths, self._hidden))
            return
        pairs = self._prefix.start(prompt.tokens, prompt.lengths, output.hidden, first=output.first)
        if pairs is not None:
            self.network.encode(pairs.features, pairs.positions, pairs.attend)

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """Candidates of every node that has children, a depth at a time."""
        parts = torch.stack((self._state(root), self.embed(root)), 1)[:, None]  # [B, nodes, parts, C]
        lists = [self._choose(choose, 0, parts)]
        for head, level in enumerate(self._levels, start=1):
            tokens = lists[-1].tokens.flatten(1)[:, level.candidate]
            parts = torch.cat((parts[:, level.parent], self.embed(tokens)[:, :, None]), 2)
            lists.append(self._choose(choose, head, parts))
        return self._template.expand(Candidates.cat(lists), root)

    def skip(self, root: torch.Tensor) -> None:
        """As `Drafter`."""
        if self.network.config.prefix_attention:
            self._prefix.skip(root)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Keep the state at the last accepted node; prefix attention is owed those of the whole accepted path."""
        if self.network.config.prefix_attention:
            self._prefix.commit(verdict, output.hidden)
            return
        self._hidden.copy_(verdict.at_last_node(output.hidden))

    def _choose(self, choose: Choose, head: int, parts: torch.Tensor) -> Candidates:
        """Candidates of one head for nodes with these parts [B, n, P, C]."""
        return choose_from(choose, self._heads[head], self.network.states(head, parts.unbind(2)), self._num_ranks)

    def _state(self, root: torch.Tensor) -> torch.Tensor:
        """What all heads read of the committed text: [B, C]."""
        if not self.network.config.prefix_attention:
            return self._hidden
        pairs = self._prefix.read(root)
        states = self.network.encode(pairs.features, pairs.positions, pairs.attend)
        self._prefix.advance()
        return pairs.last(states)
