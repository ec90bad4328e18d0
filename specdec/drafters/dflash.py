"""DFlash: a few layers guess a whole block of tokens in one pass, from masks that see the target's states.

Papers: DFlash (arXiv:2602.06036); JetSpec, the same network causal inside the block (hao-ai-lab/JetSpec); DFlash2,
which adds convolutions and a selector (z-lab/dflash).
Proposes: a static tree, all of whose nodes of a depth take their tokens from one list, that of the depth's mask; or the
best paths through these lists (`DynamicTree`), chosen anew in every step. With a selector each node's children come
from a law of their own, over the k candidates of the mask, which depends on the node's token.
Needs from the target: per token the outputs of the layers that the network reads, its embedding and its LM head, unless
the network has its own.
Cost of one draft: one pass of the layers over the newly committed tokens, whose queries and MLP are not wanted, and the
block's rows, and d rows of the LM head for a tree of depth d; nothing sequential but, with a selector and a static
tree, d small products. All b rows run whatever the tree's depth, as each sees all others; of a causal block d + 1.
Deviations: the authors verify a chain; any tree over the same laws is exact. They draft the most probable tokens at any
temperature; here a sampled draft comes from the laws of the network.
"""

from dataclasses import replace
from typing import ClassVar

import torch

from specdec.drafting.base import Prompt, Room
from specdec.drafting.candidates import Best, Candidates, Choose, choose_from, wants_logps
from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.grown import grow_lattice, grow_product, shape_for_block
from specdec.drafting.network import NetworkDrafter
from specdec.kernels.common.topk import TopK
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.tree_grow import MAX_GROWN_DEPTH
from specdec.models.common.lm_heads import LMHeads
from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.blocks.dflash2 import CandidateSelector, DFlash2Network
from specdec.models.networks.dflash import BlockPasses, DFlashConfig, DFlashNetwork
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.dynamic import DynamicTree
from specdec.trees.levels import plan_levels
from specdec.trees.shape import TreeShape

__all__ = ["DFlash"]


class DFlash(NetworkDrafter):
    """Drafting with a block of masks.

    Args:
        network: the trained network.
        shape: the tree to propose; at most as deep as the block has masks. The depth of one that grows is cut to that.

    Attributes:
        first_row: the row of a block that is about the tokens of depth 1; those before it are about nothing.
        most_grown: depth of a grown tree that nobody sized, where blocks are longer.

    Raises:
        ValueError: the tree is empty or deeper than the block, or of more ranks than a selector has candidates.
    """

    kind: ClassVar[str] = "dflash"
    network_class: ClassVar[type[DraftNetwork]] = DFlash2Network
    grows_trees = True
    network: DFlashNetwork
    first_row: ClassVar[int] = 1
    most_grown: ClassVar[int] = MAX_GROWN_DEPTH

    def __init__(self, network: DFlashNetwork, shape: TreeShape | DynamicTree) -> None:
        config = network.config
        if isinstance(shape, DynamicTree):
            shape = shape_for_block(shape, self.depth_limit(config)[0])
        super().__init__(network, shape)
        self._selector = network.candidate_selector if isinstance(network, DFlash2Network) else None
        if self._selector is not None:
            self.shares_candidates = False
        if self._selector is not None and isinstance(shape, TreeShape) and shape.max_rank >= self._selector.top_k:
            raise ValueError(
                f"tree: expected ranks below {self._selector.top_k}, the selector's candidates, got {shape.max_rank}"
            )
        self._num_rows = shape.max_depth + self.first_row if config.is_causal else config.block_size

    @classmethod
    def depth_limit(cls, config: DFlashConfig) -> tuple[int, str]:
        """As `NetworkDrafter`."""
        return config.block_size - cls.first_row, "the tokens that a block drafts"

    @classmethod
    def default_tree(cls, config: DFlashConfig) -> TreeShape | DynamicTree:
        """A grown tree, as deep as a block drafts."""
        return DynamicTree(depth=cls.most_grown - 1).cut(cls.depth_limit(config)[0])

    @property
    def proposes(self) -> torch.Tensor | None:
        """As `Drafter`."""
        return self.network.target_ids if self.network.has_own_vocabulary else None

    def bind(self, target: Target) -> None:
        """Check the sizes and move the network to the target's device and dtype.

        Raises:
            ValueError: sizes of another target, or layers to read that it does not have.
        """
        super().bind(target)
        network = self.network
        if network.lm_head is not None:
            self.lm_heads = LMHeads.of(network.lm_head, backend=target.backend)
        if self._selector is not None and isinstance(self.shape, TreeShape):
            self._levels = plan_levels(self.shape, target.device)
        self._taps = target.tap(network.config.tap_layers)
        self._target_ids = network.target_ids
        self._passes: dict[int, BlockPasses] = {}  # by the places for new tokens

    def allocate(self, room: Room, device: torch.device) -> None:
        """Keys and values of the layers, for the text and the block behind it."""
        config = self.network.config
        self._prefix = self.new_prefix(
            room,
            device,
            config.layer,
            num_layers=config.num_layers,
            feature_size=config.feature_size,
            num_slots=self.max_new + self._num_rows,
        )

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Leave keys and values of the prompt."""
        pairs = self._prefix.start(prompt.tokens, prompt.lengths, self._features(output), first=output.first)
        if pairs is not None:
            self.network.write(self.network.read(pairs.features), pairs.attend)

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """One pass over what the target says about the new tokens and over the block behind them."""
        states = self._states(root)[:, : self.shape.max_depth]
        if self._selector is not None:
            return self._draft_lattice(self._selector, states, root, choose)
        if isinstance(self.shape, DynamicTree):
            best, asked = self._best(states), wants_logps(choose)
            return grow_product(self.shape, root, best, backend=self._target.backend, with_logps=asked)
        return self._template.expand(self._choose(states, choose), root)

    def _draft_lattice(
        self, selector: CandidateSelector, states: torch.Tensor, root: torch.Tensor, choose: Choose
    ) -> DraftTree:
        """A tree whose nodes have laws of their own; `states [B, K, C]` are those of the depths."""
        best = self.lm_heads.best(states, selector.top_k)
        if isinstance(self.shape, DynamicTree):
            first = root[:, None, None].expand(-1, 1, selector.top_k)
            scores = selector(states, torch.cat((first, best.tokens[:, :-1]), 1), best.tokens, best.values)
            logps, width = scores.log_softmax(-1), min(self.shape.top_k, selector.top_k)
            tokens, logps = best.tokens[:, :, :width], logps[:, :, :width, :width]
            backend, asked = self._target.backend, wants_logps(choose)
            return grow_lattice(self.shape, root, tokens, logps, backend=backend, with_logps=asked)
        before = root[:, None]
        lists: list[Candidates] = []
        for depth in range(self.shape.max_depth):
            if depth:
                before = lists[-1].tokens.flatten(1)[:, self._levels[depth - 1].candidate]
            tokens = best.tokens[:, depth, None].long().expand(-1, before.shape[1], -1)
            scores = selector(states[:, depth], before, tokens[:, 0], best.values[:, depth])
            if isinstance(choose, Best):  # over the candidates alone
                chosen = choose(scores, self._num_ranks)
                lists.append(Candidates(tokens.gather(2, chosen.tokens), logps=chosen.logps))
            else:
                laws = scores.new_full((*before.shape, self._target.vocab_size), -torch.inf)
                lists.append(choose(laws.scatter(2, tokens, scores), self._num_ranks))
        return self._template.expand(Candidates.cat(lists), root)

    def skip(self, root: torch.Tensor) -> None:
        """As `Drafter`."""
        self._prefix.skip(root)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Keep what the target says about the root and the accepted tokens, to be read with the next draft."""
        self._prefix.commit(verdict, self._features(output))

    def _states(self, root: torch.Tensor) -> torch.Tensor:
        """States of the rows that draft, which enter the LM head: [B, R - first_row, C]."""
        network, pairs = self.network, self._prefix.read(root)
        width = pairs.tokens.shape[1]
        if width not in self._passes:
            self._passes[width] = BlockPasses(network.config.views, width, self._num_rows, root.device)
        positions, attend = self._passes[width].behind(self._prefix, pairs.counts)
        block = network.read_anchors(root, self.embed, self._num_rows)
        states = network(network.read(pairs.features), block, positions, attend)
        self._prefix.advance()
        return states[:, self.first_row :]

    def _choose(self, states: torch.Tensor, choose: Choose) -> Candidates:
        """Candidates after each of `states [B, n, C]`, as tokens of the target."""
        chosen = choose_from(choose, self.lm_heads, states, self._num_ranks)
        return chosen.among(self._target_ids, self._target.vocab_size) if self.network.has_own_vocabulary else chosen

    def _best(self, states: torch.Tensor) -> TopK:
        """The most probable tokens after each of `states [B, n, C]`, as tokens of the target."""
        best = self.lm_heads.best(states, self._num_ranks)
        return replace(best, tokens=self._target_ids[best.tokens]) if self.network.has_own_vocabulary else best

    def _features(self, output: PrefillOutput | TargetOutput) -> torch.Tensor:
        """What the network reads of the target: [B, T, F]."""
        return torch.cat([output.taps[place] for place in self._taps], -1)
