"""P-EAGLE: EAGLE-3's network guesses all tokens of a draft in one pass, the further ones at masks.

Paper: Hui et al. 2026, "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training" (arXiv:2602.01469).
Proposes: a static tree, all of whose nodes of a depth take their tokens from one list, that of the root's state or of a
mask's; or the best paths through these lists (`DynamicTree`), chosen anew in every step.
Needs from the target: per token the outputs of the layers that the network reads, and its embedding, unless the network
has its own.
Cost of one draft: one pass of the layers over the newly committed tokens and the masks, and d rows of the LM head for a
tree of depth d; nothing sequential.
Deviations: the authors verify a chain, whose tokens are the most probable ones; any tree over the same laws is exact,
and a sampled draft comes from the laws of the network.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from specdec.drafters.eagle3 import Eagle3, check_windows
from specdec.drafters.parallelspec import MaskPasses
from specdec.drafting.candidates import Choose, wants_logps
from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.grown import grow_product, shape_for_block
from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.peagle import PEagleConfig, PEagleNetwork
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

__all__ = ["PEagle"]


class PEagle(Eagle3):
    """Drafting with a P-EAGLE network.

    Args:
        network: the trained network.
        shape: the tree to propose; at most K + 1 deep. The depth of one that grows is cut to that.
        tap_layers: as for `Eagle3`.

    Raises:
        ValueError: the tree is empty or deeper than K + 1, or as `Eagle3`.
    """

    kind: ClassVar[str] = "peagle"
    network_class: ClassVar[type[DraftNetwork]] = PEagleNetwork
    shares_candidates = True
    network: PEagleNetwork

    def __init__(
        self, network: PEagleNetwork, shape: TreeShape | DynamicTree, *, tap_layers: Sequence[int] | None = None
    ) -> None:
        if isinstance(shape, DynamicTree):
            shape = shape_for_block(shape, self.depth_limit(network.config)[0])
        super().__init__(network, shape, tap_layers=tap_layers)
        # a mask sees those before it and never those after, so that masks beyond the tree change nothing
        self._num_masks = shape.max_depth - 1
        # a mask reaches back over those before it and all that may be pending
        check_windows(network.config, shape.max_depth + 1 + self._num_masks)

    @classmethod
    def depth_limit(cls, config: PEagleConfig) -> tuple[int, str]:
        """As `NetworkDrafter`."""
        return config.num_masks + 1, "the masks and one"

    @classmethod
    def default_tree(cls, config: PEagleConfig) -> DynamicTree:
        """The best paths, as deep as the masks go."""
        return shape_for_block(DynamicTree(depth=config.num_masks), config.num_masks + 1)

    def _check_grown(self, shape: DynamicTree) -> None:
        """Nothing: `shape_for_block` says what can grow."""

    @property
    def most_new(self) -> int | None:
        """As `Eagle3`, with the masks behind what is read."""
        least = self.network.config.least_window
        return None if least is None else least - self._num_masks

    def _lay_out(self, target: Target) -> None:
        check_windows(self.network.config, self.max_new + self._num_masks)
        self._passes = MaskPasses(self._num_masks, target.device)
        self._num_slots = self.max_new + self._num_masks

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """One pass over the tokens that are new and the masks behind each row's last one."""
        network, pairs = self.network, self._prefix.read(root)
        visible = self._passes.behind(self._prefix, pairs)
        inputs, embedded = network.read_groups(pairs.features, pairs.tokens, self._num_masks, self.embed)
        attend = self._prefix.attention(visible)
        states = network(inputs, embedded, attend.positions, attend)
        self._prefix.advance()
        width = pairs.tokens.shape[1]
        states = torch.cat((pairs.last(states[:, :width])[:, None], states[:, width:]), 1)
        if isinstance(self.shape, DynamicTree):
            best, asked = self._best(states), wants_logps(choose)
            return grow_product(self.shape, root, best, backend=self._target.backend, with_logps=asked)
        return self._template.expand(self._choose(states, choose), root)
