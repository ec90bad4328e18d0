"""DSpark: a block in one pass, and every node of the tree corrects what follows it by its own token.

Paper: DSpark (deepseek-ai/DeepSpec, MIT).
Proposes: a static tree, every parent with a list of its own (`TreeShape`), or the best nodes of a beam search
(`DynamicTree`); no deeper than the block. Both come of one pass of the layers: the law behind a node is that of its
row, corrected for the node's token, or with the recurrent head for the path to it.
Needs from the target: per token the outputs of some decoder layers, and its embedding and LM head, unless the network
has its own.
Cost of one draft: one pass of the layers over the block and the newly committed tokens, one product with the LM head
for all rows, and per depth one with the head of rank r for the nodes that are extended: r / C of the LM head's bytes.
Deviations: theirs is a chain, here any tree is drafted; they cut the chain by what the confidence head says of its own
drawn tokens, which changes the law when sampling, so that here it sizes grown trees alone, which are not drawn.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch

from specdec.drafters.dflash import DFlash
from specdec.drafting.beam import check_pool, grow_by_beam, rows_of
from specdec.drafting.candidates import Candidates, Choose, choose_from, wants_logps
from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.grown import grow_product
from specdec.kernels.common.dynamic_tree import Beam
from specdec.kernels.common.topk import TopK
from specdec.models.common.lm_heads import LMHeads
from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.dspark import DSparkNetwork
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree
from specdec.trees.levels import plan_levels
from specdec.trees.shape import TreeShape

__all__ = ["DSpark"]


class DSpark(DFlash):
    """Drafting with a DSpark network and a static or grown tree.

    Args:
        network: the trained network.
        shape: the tree to propose.
        confidence: from this probability on the network counts as sure: a node has no children, nor theirs, if the
            network is less sure of them. None: not asked. For grown trees of a network with the confidence head.

    Raises:
        ValueError: as `DFlash`, or a confidence that is no probability, or of a static tree, which may be drawn,
            or of a network that lacks the head; or a tree beyond the limits of grown ones.
    """

    kind: ClassVar[str] = "dspark"
    network_class: ClassVar[type[DraftNetwork]] = DSparkNetwork
    shares_candidates = False
    first_row: ClassVar[int] = 0
    most_grown: ClassVar[int] = 20  # candidates are few enough for the beam then
    network: DSparkNetwork

    def __init__(
        self, network: DSparkNetwork, shape: TreeShape | DynamicTree, *, confidence: float | None = None
    ) -> None:
        super().__init__(network, shape)
        if isinstance(self.shape, DynamicTree):
            check_pool(self.shape)
        if confidence is not None:
            if not 0 <= confidence <= 1:
                raise ValueError(f"confidence: expected a probability or None, got {confidence}")
            if not isinstance(shape, DynamicTree):
                raise ValueError(
                    "confidence: expected None with a static tree, whose tokens may be drawn, and what is cut may not "
                    f"depend on them; got {confidence}; use a DynamicTree"
                )
            if network.confidence_head is None:
                raise ValueError(f"confidence: expected None, as the network has no confidence head, got {confidence}")
        self.confidence = confidence

    @property
    def settings(self) -> dict[str, Any]:
        """As `NetworkDrafter`."""
        return {"confidence": self.confidence}

    def bind(self, target: Target) -> None:
        """As `DFlash`, with the passes of a static tree."""
        super().bind(target)
        head = self.network.markov_head
        # without a bias the logits of a row are there already
        last = torch.nn.Identity() if head is None else head.markov_w2
        self._heads = LMHeads.of(last, backend=target.backend)
        self._levels = plan_levels(self.shape, target.device) if isinstance(self.shape, TreeShape) else ()

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """One pass over the block, then a small product per depth over the nodes that are extended."""
        states, asked = self._states(root)[:, : self.shape.max_depth], wants_logps(choose)
        if isinstance(self.shape, DynamicTree) and self.network.markov_head is None and self.confidence is None:
            best = self._best(states)
            return grow_product(self.shape, root, best, backend=self._target.backend, with_logps=asked)
        logits = self.lm_heads.logits(states)
        memory = self.network.new_memory(states)
        if isinstance(self.shape, DynamicTree):
            return self._draft_grown(self.shape, logits, states, memory, root, with_logps=asked)
        tokens, candidates = root[:, None], list[Candidates]()
        for depth, level in enumerate((None, *self._levels)):
            if level is not None:
                tokens, memory = candidates[-1].tokens.flatten(1)[:, level.candidate], memory[:, level.parent]
            heads, factors, memory = self._behind(logits[:, depth], states[:, depth], tokens, memory)
            chosen = choose_from(choose, heads, factors, self._num_ranks)
            candidates.append(self._as_target(chosen))
        return self._template.expand(Candidates.cat(candidates), root)

    def _behind(
        self, logits: torch.Tensor, states: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor
    ) -> tuple[LMHeads, torch.Tensor, torch.Tensor]:
        """What follows `tokens [B, n]`, nodes of one depth.

        Args:
            logits: [B, draft V] of the row.
            states: [B, C] of the row.
            tokens: the nodes'.
            memory: [B, n, S] of their paths.

        Returns:
            Heads and what they read of every node, [B, n, r], for its children; and the memory with the nodes' tokens.
        """
        head = self.network.markov_head
        if head is None:
            return self._heads, logits[:, None].expand(-1, tokens.shape[1], -1), memory
        factors, memory = head(tokens, states[:, None], memory)
        return self._heads.adding(logits), factors, memory

    def _draft_grown(
        self,
        shape: DynamicTree,
        logits: torch.Tensor,
        states: torch.Tensor,
        memory: torch.Tensor,
        root: torch.Tensor,
        *,
        with_logps: bool,
    ) -> DraftTree:
        """The best nodes of a beam search, of rows' `logits [B, max_depth, V]` and `states [B, max_depth, C]`."""

        def best(depth: int, tokens: torch.Tensor, memory: torch.Tensor) -> tuple[TopK, torch.Tensor]:
            heads, factors, memory = self._behind(logits[:, depth], states[:, depth], tokens, memory)
            found = heads.best(factors, shape.top_k)
            values = self._where_sure(found.values, tokens, states[:, depth, None])
            return replace(found, tokens=self._target_ids[found.tokens], values=values), memory

        def extend(depth: int, beam: Beam, memory: torch.Tensor) -> tuple[TopK, torch.Tensor]:
            return best(depth + 1, beam.tokens, rows_of(memory, beam.row))

        first, memory = best(0, root[:, None], memory)
        backend = self._target.backend
        return grow_by_beam(shape, root, first, memory, extend, backend=backend, with_logps=with_logps)

    def _where_sure(self, values: torch.Tensor, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Logits `[B, n, R]` behind `tokens [B, n]`, -inf where the network is less sure than is asked for."""
        if self.confidence is None:
            return values
        unsure = self.network.confidence(tokens, states).float().sigmoid() < self.confidence
        return values.masked_fill(unsure[:, :, None], -torch.inf)

    def _as_target(self, candidates: Candidates) -> Candidates:
        """Candidates of the draft vocabulary as the target's tokens."""
        if not self.network.has_own_vocabulary:
            return candidates
        return candidates.among(self._target_ids, self._target.vocab_size)
