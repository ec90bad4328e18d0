"""Falcon: semi-autoregressive drafting, k tokens of every branch in one pass over its last k tokens.

Paper: Gao et al. 2025, "Falcon" (AAAI; arXiv:2412.12639), sections 3.1, 3.2 and 3.4.
Proposes: a static tree, filled k depths at a time. A block is k tokens that end in one node, with the k features that
    were guessed for them; its pass gives the next k depths below that node. Nodes of one depth below one block take
    their tokens from one list, as in Medusa.
Needs from the target: the state that enters the LM head at every token, its input embedding and its LM head.
Cost of one draft: depth / k passes through an LSTM of 2 layers (20 C^2 weights) and a decoder layer, each with the LM
    head at the places that some node takes its token from. The LSTM is sequential: it reads its recurrent weights
    (8 C^2) once for each of the pairs that came in with the last step, and k times in every other pass.
Deviations: the paper's method; the authors' code differs in the LSTM (`recurrent=False`), in where blocks begin after
    an acceptance, and in the ranks of some nodes. See docs/drafters/falcon.md.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from specdec.drafting.base import Prompt, Room
from specdec.drafting.candidates import Candidates, Choose, choose_from
from specdec.drafting.draft_tree import DraftTree
from specdec.drafting.network import NetworkDrafter
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.words import pack_words
from specdec.models.common.cache import RowState
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
        """The most promising 64 nodes of the paper's tree for k = 2, which has 166.

        Promising as if a candidate of rank r were accepted with probability 0.6 / (r + 1), at every depth. No deeper
        than 8, or than 8 // k blocks of k: for k = 3 and 4 the depths that the paper's section 4.5 names, 6 and 8.
        """
        tree = TreeShape.preset("falcon/kmask2_8layer_tree")
        depth = 8 // config.block_size * config.block_size or 8
        paths = [path for path in tree.rank_paths[1:] if len(path) <= depth and max(path) < config.vocab_size]
        paths.sort(key=lambda path: math.prod((rank + 1) / 0.6 for rank in path))
        return TreeShape.from_paths(paths[:63])

    def bind(self, target: Target) -> None:
        """As `NetworkDrafter.bind`."""
        super().bind(target)
        self._keep = self.network.config.block_size - 1
        self._first_used = _table(self._blocks.used(level=0), target.device)
        self._passes = self._blocks.passes(target.device)
        # by the places of a pass, of which there are always as many where the device is not asked
        self._pending = {width: self._tables(width) for width in (self.max_new + self._keep,)}

    def allocate(self, room: Room, device: torch.device) -> None:
        """The LSTM's state; keys and values of the layer, for the text and the blocks of the tree."""
        config = self.network.config
        self._prefix = self.new_prefix(room, device, config.layer, keep=self._keep, num_slots=self._blocks.num_slots)
        self._rows = torch.arange(room.batch_size, device=device)[:, None]
        like = torch.empty(0, dtype=self._target.dtype, device=device)
        self._state = self.network.zero_state(room.batch_size, like)
        # outputs of the LSTM at the kept pairs; the last of them is the hidden state
        self._kept = like.new_zeros(room.batch_size, self._keep, config.hidden_size)

    def row_state(self) -> RowState:
        """As `Drafter`."""
        return *super().row_state(), *self._state, self._kept

    def start(self, prompt: Prompt, output: PrefillOutput) -> None:
        """Run the LSTM over the prompt and keep the keys and values of its pairs."""
        if output.first == 0:
            for state in self._state:
                state.zero_()
        pairs = self._prefix.start(prompt.tokens, prompt.lengths, output.hidden, first=output.first)
        if pairs is not None:
            embedded = self.embed(pairs.tokens)[:, None]
            fused, states = self.network.fuse(pairs.features[:, None], embedded, self._state, counts=pairs.counts)
            self._remember(states)
            self.network.decode(fused[:, 0], pairs.positions, pairs.attend)

    def draft(self, root: torch.Tensor, choose: Choose) -> DraftTree:
        """Run the newest k pairs as a block, then the blocks of the tree depth by depth."""
        width = self._prefix.num_places()
        if width not in self._pending:
            self._pending[width] = self._tables(width)
        pending = self._pending[width].of(self._prefix.counts)
        features, states = self._read(root, pending)
        lists = [choose_from(choose, self.lm_heads, _select(features, self._first_used), self._num_ranks)]
        for blocks, seen in zip(self._passes, pending.seen, strict=True):
            features, states = self._run_blocks(blocks, seen, lists[-1].tokens, features, states)
            lists.append(choose_from(choose, self.lm_heads, _select(features, blocks.used), self._num_ranks))
        return self._template.expand(Candidates.cat(lists), root)

    def skip(self, root: torch.Tensor) -> None:
        """As `Drafter`."""
        self._prefix.skip(root)

    def commit(self, verdict: Verdict, output: TargetOutput) -> None:
        """Take in the target's states at the accepted nodes."""
        self._prefix.commit(verdict, output.hidden)

    def _tables(self, width: int) -> "_Pending":
        return _Pending.tables(width, self._keep, self._blocks).to(self._target.device)

    def _read(self, root: torch.Tensor, pending: "_Pending") -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Read what was committed, the newest k pairs as one block.

        Returns:
            [B, k, C] features of the block, and the LSTM's state at its end.
        """
        prefix = self._prefix
        pairs = prefix.read(root, pending.ancestors)
        fused, states = self.network.fuse(
            pairs.features[:, None],
            self.embed(pairs.tokens)[:, None],
            self._state,
            first=prefix.kept,
            counts=pairs.counts,
        )
        fused = fused[:, 0]
        if self._keep > 1:  # one kept pair has the hidden state as its output
            columns = torch.arange(self._keep, device=root.device)
            is_kept = (columns < prefix.kept[:, None])[:, :, None]
            fused[:, : self._keep].copy_(torch.where(is_kept, self._kept, fused[:, : self._keep]))
            places = (pairs.counts - self._keep).clamp(min=0)[:, None] + columns
            self._kept.copy_(fused[self._rows, places])
        features = self.network.decode(fused, pairs.positions, pairs.attend)
        prefix.advance()
        self._remember(states)
        return features[self._rows, pending.newest], states

    def _remember(self, states: tuple[torch.Tensor, ...]) -> None:
        """Go on from these states of the LSTM next time."""
        for state, new in zip(self._state, states, strict=True):
            state.copy_(new)

    def _run_blocks(
        self,
        blocks: "_Pass",
        seen: "_Seen",
        candidates: torch.Tensor,
        features: torch.Tensor,
        states: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run the blocks of one depth.

        Args:
            blocks: which they are.
            seen: what their tokens see.
            candidates: [B, M, R] lists of the pass before.
            features: [B, P k, C] outputs of the P blocks of the pass before.
            states: [B, P, 2, C] the state of each layer of the LSTM at the end of these.

        Returns:
            The same of these blocks.
        """
        block_size = self._keep + 1
        tokens = candidates[:, blocks.rows, blocks.ranks].unflatten(1, (-1, block_size))
        features = features.unflatten(1, (-1, block_size))[:, blocks.parent]
        fused, after = self.network.fuse(features, self.embed(tokens), states, source=blocks.parent)
        visible = self._prefix.visible(seen.depth, seen.ancestors, first_node=blocks.first_slot)
        attend = self._prefix.attention(visible)
        guesses = self.network.decode(fused.flatten(1, 2), attend.positions, attend)
        return guesses, after


def _table(values: object, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int64, device=device)


def _select(features: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The places [m] of features [B, n, C], which are ascending: all of them, or some."""
    return features if places.shape[0] == features.shape[1] else features[:, places]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the tokens of one pass over blocks see.

    Attributes:
        depth: [B, n k] int32, position of each token, counted from the first one behind the cache.
        ancestors: [B, n k, W] int32 words over the places behind the cache.
    """

    depth: torch.Tensor
    ancestors: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Pending:
    """What follows from how many pairs are pending: B of it for as many rows of a batch, or of each number a row.

    Attributes:
        values: [B, ..] int32, all of the others in one piece, so that they are looked up at once.
        sizes: shapes of the pieces, without B.
    """

    values: torch.Tensor
    sizes: tuple[tuple[int, ...], ...]

    @classmethod
    def tables(cls, width: int, keep: int, blocks: "_Blocks") -> "_Pending":
        """Row c is what holds with c pending pairs, 0 to `width`, of which up to `keep` stay in front of the tree.

        Pairs before the newest block lend keys and values, which do not depend on what they see: all see the same.
        """
        counts, columns = torch.arange(width + 1), torch.arange(max(width, blocks.num_slots))
        first_bits = pack_words(columns < counts[:, None])  # row c: the first c bits
        kept, block = counts.clamp(max=keep), torch.arange(keep + 1)
        pieces = [
            first_bits[:, None, : (width + 31) // 32].expand(-1, width, -1),
            # a text of fewer than k pairs has no guess for the first depths; its first pair's stands in
            (counts[:, None] - (keep + 1) + block).clamp(min=0),
        ]
        for depth, ancestors in blocks.seen():
            pieces += [kept[:, None] + depth, first_bits[kept, None, : ancestors.shape[1]] | ancestors]
        flat = torch.cat([piece.int().flatten(1) for piece in pieces], 1)
        return cls(flat, tuple(tuple(piece.shape[1:]) for piece in pieces))

    def to(self, device: torch.device) -> "_Pending":
        """The same on a device."""
        return replace(self, values=self.values.to(device))

    def of(self, counts: torch.Tensor) -> "_Pending":
        """The rows of these [B] numbers of pending pairs."""
        return replace(self, values=self.values[counts])

    @property
    def ancestors(self) -> torch.Tensor:
        """[B, width, W] int32 words of what each pending pair sees of the pending ones."""
        return self._pieces()[0]

    @property
    def newest(self) -> torch.Tensor:
        """[B, k] int32, places of the newest k pairs among the pending ones."""
        return self._pieces()[1]

    @property
    def seen(self) -> tuple[_Seen, ...]:
        """What the tokens of every pass over blocks see."""
        pieces = self._pieces()
        return tuple(map(_Seen, pieces[2::2], pieces[3::2]))

    def _pieces(self) -> list[torch.Tensor]:
        pieces = self.values.split([math.prod(size) for size in self.sizes], 1)
        return [piece.unflatten(1, size) for piece, size in zip(pieces, self.sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class _Pass:
    """The n blocks of one depth, on the device.

    Attributes:
        used: [m] int64, their outputs from which some node takes its token.
        parent: [n] int64, the block of the pass before that each one goes on from.
        rows: [n k] int64, list of each of their tokens, among those of the pass before.
        ranks: [n k] int64, rank of each token in its list.
        first_slot: place of the first token behind the cache.
    """

    used: torch.Tensor
    parent: torch.Tensor
    rows: torch.Tensor
    ranks: torch.Tensor
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
        return [self._pass(level, device) for level in self._levels]

    def seen(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For these passes, [n k] int32 depth of each token and [n k, W] words, counted without committed pairs.

        The places behind the cache begin with k - 1 for committed pairs, whose bits are 0 here.
        """
        size, found = self.block_size, []
        for level in self._levels:
            chosen = self._ends(level)
            seen = torch.zeros(len(chosen), self._slot_of(chosen[-1]) + size, dtype=torch.bool)
            for row, node in zip(seen, chosen, strict=True):
                for above in np.flatnonzero(self.shape.ancestors[node])[size::size]:  # by depth, the root first
                    row[self._slot_of(above) : self._slot_of(above) + size] = True
            depth = torch.arange(level - size, level, dtype=torch.int32).repeat(len(chosen))
            found.append((depth, pack_words(seen).repeat_interleave(size, 0)))
        return found

    @property
    def _levels(self) -> range:
        return range(self.block_size, self.shape.max_depth, self.block_size)

    def _ends(self, level: int) -> list[int]:
        """The nodes at this depth that end a block."""
        return [node for node in self.nodes if self.shape.depth[node] == level]

    def _slot_of(self, node: int) -> int:
        """Place of the first token of the block that ends in a node, counted from the first one behind the cache."""
        return self.nodes.index(node) * self.block_size - 1

    def _pass(self, level: int, device: torch.device) -> _Pass:
        size, before = self.block_size, self._ends(level - self.block_size)
        first_list = self.lists.index((self.nodes.index(before[0]), 0))
        tokens, parents = [], []
        for node in self._ends(level):
            path = np.flatnonzero(self.shape.ancestors[node])
            tokens += path[-size:].tolist()
            parents.append(before.index(path[-1 - size]))
        return _Pass(
            used=_table(self.used(level), device),
            parent=_table(parents, device),
            rows=_table(np.take(self.rows, tokens) - first_list, device),
            ranks=_table(np.take(self.shape.rank, tokens), device),
            first_slot=self._slot_of(self._ends(level)[0]),
        )
