"""Falcon: semi-autoregressive drafting, k tokens of every branch in one pass over its last k tokens.

Paper: Gao et al. 2025, "Falcon" (AAAI; arXiv:2412.12639), sections 3.1, 3.2 and 3.4.
Proposes: a static tree, filled k depths at a time. A block is k tokens that end in one node, with the k features that
    were guessed for them; its pass gives the next k depths below that node. Nodes of one depth below one block take
    their tokens from one list, as in Medusa.
Needs from the target: the state that enters the LM head at every token, its input embedding and its LM head.
Cost of one draft: depth / k passes through an LSTM of 2 layers (20 C^2 weights) and a decoder layer, each with the LM
    head at the places that some node takes its token from. The LSTM is sequential: it reads its recurrent weights
    (8 C^2) once for each of the depth + k pairs that are read first, and k times in every other pass.
Deviations: the paper's method; the authors' code differs in the LSTM (`recurrent=False`), in where blocks begin after
    an acceptance, and in the ranks of some nodes. See docs/drafters/falcon.md.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from specdec.drafting.base import Prompt, Room
from specdec.drafting.candidates import Candidates, Choose, choose_from
from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.network import NetworkDrafter
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.words import pack_words
from specdec.models.networks.falcon import FalconConfig, FalconNetwork
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.shape import MAX_NODES, TreeShape

__all__ = ["Falcon"]


class Falcon(NetworkDrafter):
    """Static-tree drafting in blocks of k.

    Args:
        network: the trained network.
        shape: the tree to propose; a depth that is no multiple of k leaves the last lists of the last blocks unused.

    Raises:
        ValueError: the tree has no draft token, takes ranks beyond the vocabulary, or needs more than 512 places in
            the drafter's cache.
    """

    kind: ClassVar[str] = "falcon"
    network_class: ClassVar[type[FalconNetwork]] = FalconNetwork
    network: FalconNetwork
    shape: TreeShape

    def __init__(self, network: FalconNetwork, shape: TreeShape) -> None:
        super().__init__(network, shape)
        self._blocks = _Blocks.of(shape, network.config.block_size)
        if self._blocks.num_slots > MAX_NODES:
            raise ValueError(
                f"tree: expected blocks of {network.config.block_size} tokens that fit into {MAX_NODES} places, "
                f"got {len(self._blocks.nodes)} blocks, {self._blocks.num_slots} places"
            )

    @property
    def lists(self) -> tuple[int, ...]:
        """As `NetworkDrafter`: that of the block and the place in it."""
        return self._blocks.rows

    @classmethod
    def default_tree(cls, config: FalconConfig) -> TreeShape:
        """The paper's tree for k = 2; down to the depths that its section 4.5 names, 6 and 8, for k = 3 and 4."""
        tree = TreeShape.preset("falcon/kmask2_8layer_tree")
        depth = 8 // config.block_size * config.block_size or 8
        paths = [path for path in tree.rank_paths[1:] if len(path) <= depth and max(path) < config.vocab_size]
        return TreeShape.from_paths(paths)

    def bind(self, target: Target) -> None:
        """As `NetworkDrafter.bind`."""
        super().bind(target)
        self._first_used = torch.tensor(self._blocks.used(level=0), device=target.device)
        self._passes = self._blocks.passes(target.device)
        self._keep = self.network.config.block_size - 1
        width = self.shape.max_depth + 1 + self._keep
        columns, counts = torch.arange(max(width, self._blocks.num_slots)), torch.arange(width + 1)
        self._first_words = pack_words(columns < counts[:, None]).to(target.device)  # row c: the first c bits

    def allocate(self, room: Room, device: torch.device) -> None:
        """The LSTM's state; keys and values of the layer, for the text and the blocks of the tree."""
        config, batch_size = self.network.config, room.batch_size
        self._prefix = self.new_prefix(room, device, config.layer, keep=self._keep, num_slots=self._blocks.num_slots)
        self._rows = torch.arange(batch_size, device=device)
        self._state = torch.zeros(batch_size, self.network.state_size, dtype=self._target.dtype, device=device)

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Run the LSTM over the prompt and keep the keys and values of its pairs."""
        if output.first == 0:
            self._state.zero_()
        pairs = self._prefix.start(prompt.tokens, prompt.lengths, output.hidden, first=output.first)
        if pairs is not None:
            fused, state = self.network.fuse_prompt(pairs.features, self.embed(pairs.tokens), pairs.counts, self._state)
            self._state.copy_(state)
            self.network.decode(fused, pairs.positions, pairs.attend)

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """Run the newest k pairs as a block, then the blocks of the tree depth by depth."""
        features, states, kept = self._read(root)
        candidates = choose_from(choose, self.lm_heads, features[:, self._first_used], self._num_ranks)
        for blocks in self._passes:
            features, states = self._run_blocks(blocks, candidates, features, states, kept)
            lists = choose_from(choose, self.lm_heads, features[:, blocks.used], self._num_ranks)
            candidates = Candidates.cat((candidates, lists))
        return self._template.expand(candidates, root)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Take in the target's states at the accepted nodes."""
        self._prefix.commit(verdict, output.hidden)

    def _read(self, root: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read what was committed, the newest k pairs as one block.

        Returns:
            [B, k, C] features of the block, [B, 1, S] the LSTM's state at its end, and [B] int32 pairs of the block
            that lie behind the cache.
        """
        prefix, block_size = self._prefix, self._keep + 1
        # pairs before the block lend their keys and values, which do not depend on what they see: all see the same
        words = self._first_words[prefix.counts, : (prefix.width + 31) // 32]
        pairs = prefix.read(root, words[:, None].expand(-1, prefix.width, -1).contiguous())
        fused, states = self.network.fuse(pairs.features, self.embed(pairs.tokens), self._state)
        features = self.network.decode(fused, pairs.positions, pairs.attend)
        prefix.advance()
        states = torch.cat((self._state[:, None], states), 1)  # after 0, 1, ... pairs
        kept = pairs.counts.clamp(max=self._keep)
        self._state.copy_(states[self._rows, pairs.counts - kept])
        # a text of fewer than k pairs has no guess for the first depths; its first pair's stands in
        newest = pairs.counts[:, None] - block_size + torch.arange(block_size, device=root.device)
        return features[self._rows[:, None], newest.clamp(min=0)], states[self._rows, pairs.counts][:, None], kept.int()

    def _run_blocks(
        self,
        blocks: "_Pass",
        candidates: Candidates,
        features: torch.Tensor,
        states: torch.Tensor,
        kept: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the blocks of one depth.

        Args:
            blocks: which they are.
            candidates: the lists so far.
            features: [B, P k, C] outputs of the P blocks of the pass before.
            states: [B, P, S] the LSTM's state at the end of these.
            kept: [B] int32 committed pairs behind the cache.

        Returns:
            The same of these blocks.
        """
        (batch_size, _, width), block_size, num_blocks = features.shape, self._keep + 1, blocks.parent.shape[0]
        tokens = candidates.tokens[:, blocks.rows, blocks.ranks]
        features = features.unflatten(1, (-1, block_size))[:, blocks.parent]
        fused, after = self.network.fuse(
            features.flatten(0, 1),
            self.embed(tokens).reshape(-1, block_size, width),
            states[:, blocks.parent].flatten(0, 1),
        )
        num_words = blocks.ancestors.shape[2]
        visible = self._prefix.visible(
            kept[:, None] + blocks.depth,
            self._first_words[kept.long(), None, :num_words] | blocks.ancestors,
            first_node=blocks.first_slot,
        )
        attend = self._prefix.attention(visible)
        guesses = self.network.decode(fused.reshape(batch_size, -1, width), visible.positions, attend)
        return guesses, after[:, -1].reshape(batch_size, num_blocks, self.network.state_size)


@dataclass(frozen=True, slots=True)
class _Pass:
    """The n blocks of one depth, on the device.

    Attributes:
        used: [m] int64, their outputs from which some node takes its token.
        parent: [n] int64, the block of the pass before that each one goes on from.
        rows: [n k] int64, list of each of their tokens.
        ranks: [n k] int64, rank of each token in its list.
        depth: [1, n k] int32, position of each token, counted from the first one that is not committed.
        ancestors: [1, n k, W] int32 words over the places behind the cache.
        first_slot: place of the first token behind the cache.
    """

    used: torch.Tensor
    parent: torch.Tensor
    rows: torch.Tensor
    ranks: torch.Tensor
    depth: torch.Tensor
    ancestors: torch.Tensor
    first_slot: int


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How a tree is made of blocks of k.

    Attributes:
        shape: the tree.
        block_size: k.
        nodes: the node at the end of each block, ascending; node 0 stands for the newest pairs of the text.
        lists: block and place in it, of every output from which some node takes its token, ascending.
        rows: the list of each node, -1 for the root.
    """

    shape: TreeShape
    block_size: int
    nodes: tuple[int, ...]
    lists: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]

    @classmethod
    def of(cls, shape: TreeShape, block_size: int) -> "_Blocks":
        """Divide a tree: every node at depth 0, k, 2k, ... that has children ends a block."""
        depth = shape.depth.tolist()
        nodes = tuple(n for n in range(shape.num_nodes) if shape.children[n] and depth[n] % block_size == 0)
        block_of = [0] * shape.num_nodes  # the block that each node's children come from
        for node in range(1, shape.num_nodes):
            is_end = depth[node] % block_size == 0 and shape.children[node]
            block_of[node] = nodes.index(node) if is_end else block_of[shape.parent[node]]
        outputs = [(block_of[shape.parent[n]], (depth[n] - 1) % block_size) for n in range(1, shape.num_nodes)]
        lists = tuple(sorted(set(outputs)))
        return cls(shape, block_size, nodes, lists, (-1, *map(lists.index, outputs)))

    @property
    def num_slots(self) -> int:
        """Places behind the cache: k - 1 for committed pairs, then k for each block of the tree."""
        return self.block_size - 1 + (len(self.nodes) - 1) * self.block_size

    def used(self, level: int) -> list[int]:
        """Of the outputs of the blocks that end at depth `level`, those from which some node takes its token."""
        first = min(index for index, node in enumerate(self.nodes) if self.shape.depth[node] == level)
        return [
            (block - first) * self.block_size + place
            for block, place in self.lists
            if self.shape.depth[self.nodes[block]] == level
        ]

    def passes(self, device: torch.device) -> list[_Pass]:
        """The tables of every pass but the first, which reads the text alone."""
        return [self._pass(level, device) for level in range(self.block_size, self.shape.max_depth, self.block_size)]

    def _pass(self, level: int, device: torch.device) -> _Pass:
        def table(values: object) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values), dtype=torch.int64, device=device)

        size = self.block_size
        slot_of = {node: size - 1 + index * size for index, node in enumerate(self.nodes[1:])}
        chosen = [node for node in self.nodes if self.shape.depth[node] == level]
        before = [node for node in self.nodes if self.shape.depth[node] == level - size]
        seen = torch.zeros(len(chosen), slot_of[chosen[-1]] + size, dtype=torch.bool)
        tokens, parents = [], []
        for row, node in zip(seen, chosen, strict=True):
            path = np.flatnonzero(self.shape.ancestors[node])  # by depth, the root first
            tokens += path[-size:].tolist()
            parents.append(before.index(path[-1 - size]))
            for above in path[size::size]:
                row[slot_of[above] : slot_of[above] + size] = True
        return _Pass(
            used=table(self.used(level)),
            parent=table(parents),
            rows=table(np.take(self.rows, tokens)),
            ranks=table(np.take(self.shape.rank, tokens)),
            depth=torch.arange(level - size, level, dtype=torch.int32, device=device).repeat(len(chosen))[None],
            ancestors=pack_words(seen).repeat_interleave(size, 0)[None].to(device),
            first_slot=slot_of[chosen[0]],
        )
