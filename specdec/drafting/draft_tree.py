"""What a drafter proposes: one tree of tokens per row. A chain is a tree; the root alone is plain decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from specdec.drafting.candidates import Candidates
from specdec.kernels.common.dynamic_tree import RerankedTree
from specdec.kernels.common.launch import Backend
from specdec.kernels.tree_expand import tree_expand
from specdec.trees.shape import TreeShape

__all__ = ["DraftTree", "TreeTemplate"]


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A draft tree per row. Node 0 is the root: the last emitted token, not yet in the target's cache.

    A padding node has parent -1 and any valid token; it is never accepted.

    Attributes:
        tokens: [B, N] int32.
        parent: [B or 1, N] int32, `parent[i] < i`; -1 for the root and for padding.
        depth: [B or 1, N] int32 distance from the root (root 0).
        ancestors: [B or 1, N, ceil(N / 32)] int32 words; bit j of row i says that node i may attend to node j.
        deepest: [B or 1] int32, depth of the deepest proposed node of each row; 0 when nothing was proposed.
        max_depth: largest depth that any step of this drafter can have.
        laws: [B, M, V] logits of the laws that the tokens were drawn from; None if they were not drawn.
        law_row: [N] int32, the law that each node's children were drawn from, -1 for a leaf; None without laws.
        num_fixed: nodes from the first on that are scored in any case, as their drafter reads what the target says at
            them; padding behind these may be left out (`cut`). None: all of them.
        logps: [B, N] float32, log-probability that the drafter gives each node behind its parent, nats; 0 at the root
            and anything at padding. None if it was not asked (`Best.with_logps`), or knows of none.
    """

    tokens: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    ancestors: torch.Tensor
    deepest: torch.Tensor
    max_depth: int
    laws: torch.Tensor | None = None
    law_row: torch.Tensor | None = None
    num_fixed: int | None = None
    logps: torch.Tensor | None = None

    @classmethod
    def of(cls, tree: RerankedTree, max_depth: int, logps: torch.Tensor | None = None) -> "DraftTree":
        """A tree that was grown from the most probable paths, at most `max_depth` deep; it has no laws."""
        nodes = tree.tokens, tree.parent, tree.depth, tree.ancestors
        return cls(*nodes, deepest=tree.deepest, max_depth=max_depth, num_fixed=1, logps=logps)

    def cut(self) -> "DraftTree":
        """The tree without the padding behind the last node that any row uses, which nobody has to score.

        It asks the device how many nodes are left, and largest depth and verdicts stay as they are. A tree with laws is
        not cut: it fills its shape, which rules may have tables of.
        """
        if self.num_fixed is None or self.laws is not None or self.num_fixed >= self.tokens.shape[1]:
            return self
        is_used = (self.parent >= 0).any(0).tolist()
        last_used = max((node for node, used in enumerate(is_used) if used), default=0)
        num_nodes = max(self.num_fixed, last_used + 1)
        if num_nodes == len(is_used):
            return self
        return self._of_first(num_nodes)

    def first(self, num_nodes: int) -> "DraftTree":
        """The first nodes of a tree without laws, whose nodes stand in the order of their worth."""
        if num_nodes >= self.tokens.shape[1]:
            return self
        tree = self._of_first(num_nodes)
        return replace(tree, deepest=tree.depth.amax(1))

    def _of_first(self, num_nodes: int) -> "DraftTree":
        return replace(
            self,
            tokens=self.tokens[:, :num_nodes],
            parent=self.parent[:, :num_nodes],
            depth=self.depth[:, :num_nodes],
            ancestors=self.ancestors[:, :num_nodes, : (num_nodes + 31) // 32],
            logps=None if self.logps is None else self.logps[:, :num_nodes],
        )


class TreeTemplate:
    """A `TreeShape` on a device: the constant tables from which every step's `DraftTree` is filled.

    Args:
        shape: the topology.
        device: where the tables go.
        rows: which list of candidates a node is taken from: `"depth"`, one list per depth that all parents share
            (Medusa), `"parent"`, one list per node with children, in node order, or the number of each node's list,
            -1 for the root; siblings share a list.
        backend: what runs the kernel; by default decided by the device.

    Raises:
        ValueError: `rows` lists another number of nodes, or siblings under different lists.
    """

    def __init__(
        self,
        shape: TreeShape,
        device: torch.device,
        *,
        rows: Literal["depth", "parent"] | Sequence[int] = "depth",
        backend: Backend | None = None,
    ) -> None:
        def table(values: object) -> torch.Tensor:
            return torch.from_numpy(np.array(values, dtype=np.int32)).to(device)

        parent = np.asarray(shape.parent, dtype=np.int32)
        depth = np.asarray(shape.depth, dtype=np.int32)
        inner = sorted(set(shape.parent) - {-1})  # nodes with children
        if not isinstance(rows, str):
            row, law_row = _given_rows(shape, rows)
        elif rows == "depth":
            row = depth - 1
            law_row = np.where(np.isin(np.arange(shape.num_nodes), inner), depth, -1)
        else:
            row_of = {node: index for index, node in enumerate(inner)}
            row = np.array([row_of.get(node, -1) for node in shape.parent], dtype=np.int32)
            law_row = np.array([row_of.get(node, -1) for node in range(shape.num_nodes)], dtype=np.int32)
        self.shape = shape
        self.backend = backend
        self.num_rows = int(row.max()) + 1
        self.row = table(row)
        self.law_row = table(law_row)
        self.rank = table(shape.rank)
        self.node_depth = table(depth)
        self.parent = table(parent)[None]
        self.depth = self.node_depth[None]
        self.ancestors = table(shape.ancestor_words)[None]
        self.deepest = table([shape.max_depth])

    def expand(self, candidates: Candidates, root: torch.Tensor) -> DraftTree:
        """Fill the tree.

        Args:
            candidates: M lists, as `rows` says, of more tokens than the largest rank.
            root: [B] int32 last emitted token.
        """
        nodes = self.row, self.rank, self.node_depth
        tokens, _ = tree_expand(candidates.tokens, root, None, *nodes, backend=self.backend)
        logps = candidates.logps
        return DraftTree(
            tokens,
            self.parent,
            self.depth,
            self.ancestors,
            deepest=self.deepest,
            max_depth=self.shape.max_depth,
            laws=candidates.laws,
            law_row=None if candidates.laws is None else self.law_row,
            logps=None if logps is None else _behind_root(logps[:, self.row[1:], self.rank[1:]]),
        )

    def expand_chain(
        self,
        continuation: torch.Tensor,
        num_tokens: torch.Tensor,
        root: torch.Tensor,
        logps: torch.Tensor | None = None,
    ) -> DraftTree:
        """Fill a chain of which each row uses its own first `num_tokens` nodes.

        Args:
            continuation: [B, max_depth] int32 tokens after the root; any valid token past `num_tokens`.
            num_tokens: [B] int32, 0 to max_depth.
            root: [B] int32 last emitted token.
            logps: [B, max_depth] float32, how probable each is behind the one before, nats.
        """
        used = self.depth <= num_tokens[:, None]
        return DraftTree(
            tokens=torch.cat((root[:, None], continuation), 1),
            parent=torch.where(used, self.parent, -1),
            depth=self.depth,
            ancestors=self.ancestors,
            deepest=num_tokens,
            max_depth=self.shape.max_depth,
            num_fixed=1,
            logps=None if logps is None else _behind_root(logps),
        )


def _behind_root(logps: torch.Tensor) -> torch.Tensor:
    """`logps [B, N - 1]` of all nodes but the root, which is certain."""
    return F.pad(logps, (1, 0))


def _given_rows(shape: TreeShape, rows: Sequence[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The list that each node is taken from, and the one that each node's children are taken from."""
    parent = np.asarray(shape.parent[1:], dtype=np.int32)
    row = np.asarray(rows, dtype=np.int32)
    law_row = np.full(shape.num_nodes, -1, dtype=np.int32)
    if row.shape != law_row.shape or row[0] != -1 or row[1:].min(initial=0) < 0:
        raise ValueError(f"rows: expected -1 and then the list of each of {shape.num_nodes - 1} nodes, got {rows}")
    law_row[parent] = row[1:]
    if (law_row[parent] != row[1:]).any():
        raise ValueError(f"rows: expected one list for all children of a node, got {rows}")
    return row, law_row
