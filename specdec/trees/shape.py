"""Shapes of draft trees: which node hangs under which, and which of the drafter's candidates each node takes.

A `TreeShape` holds topology alone, no tokens. Node 0 is the root: the last emitted token, at depth 0. Every other node
has a parent and a rank: it takes candidate number `rank` (0 = the most probable) of the drafter's list for its parent
(or, for drafters with one list per depth, for its depth). Nodes are numbered by depth, and within a depth by rank path
(the ranks from the root down), so the nodes of a depth, and the children of a node, are contiguous and ascending.

Sources: node order and "choices" of Medusa (arXiv:2401.10774); k_config of MCSD (arXiv:2401.06706); preset trees as
named in `presets/*.json`. What the published code calls `retrieve_indices` is `TreeShape.paths` here.

The dataclass has no slots: its derived arrays are `functools.cached_property`, which needs the instance's `__dict__`.
"""

import functools
import json
import numbers
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from specdec.trees.presets import ALIASES, preset_children, preset_names, suggestion
from specdec.trees.text import (
    FORMAT_VERSION,
    MAX_NODES,
    MAX_RANK,
    JsonFile,
    check_keys,
    draw_below,
    parse_json,
    read_children,
)

__all__ = ["MAX_NODES", "TreeLike", "TreeShape", "as_tree_shape", "preset_names"]


@dataclass(frozen=True, repr=False)
class TreeShape(JsonFile):
    """Static topology of a draft tree; immutable, hashable, equal when the trees are equal.

    Usually built by `chain`, `from_k_config`, `from_paths`, `preset` or `load`. Every array below is computed on first
    use, kept, and read-only.

    Attributes:
        parent: index of each node's parent, -1 for the root; never decreasing, and smaller than the node itself.
        rank: which candidate each node takes, from 0; -1 for the root; ascending among siblings.

    Raises:
        TypeError: `parent` or `rank` is not a sequence of ints.
        ValueError: not a tree, nodes out of order, siblings of one rank, or more than 512 nodes.
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...]

    def __post_init__(self) -> None:
        parent, rank = _ints("parent", self.parent), _ints("rank", self.rank)
        object.__setattr__(self, "parent", parent)
        object.__setattr__(self, "rank", rank)
        if len(parent) != len(rank):
            raise ValueError(f"rank: expected {len(parent)} entries, one per entry of parent, got {len(rank)}")
        if not 1 <= len(parent) <= MAX_NODES:
            raise ValueError(f"parent: expected 1 to {MAX_NODES} nodes, root included, got {len(parent)}")
        for name, values in (("parent", parent), ("rank", rank)):
            if values[0] != -1:
                raise ValueError(f"{name}: expected -1 for node 0, the root, got {values[0]}")
        for node in range(1, len(parent)):
            if not 0 <= parent[node] < node:
                raise ValueError(f"parent: expected 0 to {node - 1} for node {node}, got {parent[node]}")
            if not 0 <= rank[node] <= MAX_RANK:
                raise ValueError(f"rank: expected 0 to {MAX_RANK} for node {node}, got {rank[node]}")
            if parent[node] < parent[node - 1]:
                raise ValueError(
                    f"parent: expected nodes in order of depth and rank path (TreeShape.from_paths sorts them), "
                    f"got parent {parent[node]} of node {node} after parent {parent[node - 1]}"
                )
            if parent[node] == parent[node - 1] and rank[node] <= rank[node - 1]:
                raise ValueError(
                    f"rank: expected distinct ascending ranks among the children of node {parent[node]}, "
                    f"got {rank[node]} after {rank[node - 1]}"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        # pickles and copies carry the topology alone: a pickled array would come back writable
        return TreeShape, (self.parent, self.rank)

    # Constructors

    @classmethod
    def none(cls) -> "TreeShape":
        """The root alone: plain autoregressive decoding."""
        return cls.chain(0)

    @classmethod
    def chain(cls, num_draft_tokens: int) -> "TreeShape":
        """One candidate per depth, `num_draft_tokens` (0 to 511) deep."""
        num_draft_tokens = _int("num_draft_tokens", num_draft_tokens)
        if not 0 <= num_draft_tokens < MAX_NODES:
            raise ValueError(f"num_draft_tokens: expected 0 to {MAX_NODES - 1}, got {num_draft_tokens}")
        return cls(parent=tuple(range(-1, num_draft_tokens)), rank=(-1, *[0] * num_draft_tokens))

    @classmethod
    def from_k_config(cls, k_config: Iterable[int]) -> "TreeShape":
        """The tree in which every node of depth d has `k_config[d]` children, as in MCSD.

        Raises:
            TypeError: an entry is not an int.
            ValueError: an entry below 1, or more than 512 nodes in all.
        """
        k_config = _ints("k_config", k_config)
        parent, rank = [-1], [-1]
        level = range(1)
        for depth, num_children in enumerate(k_config):
            if num_children < 1:
                raise ValueError(f"k_config: expected at least 1 child per node, got {num_children} at depth {depth}")
            if len(parent) + len(level) * num_children > MAX_NODES:
                raise ValueError(f"k_config: expected at most {MAX_NODES} nodes, root included, got more: {k_config}")
            parent += [node for node in level for _ in range(num_children)]
            rank += [*range(num_children)] * len(level)
            level = range(level.stop, len(parent))
        return cls(tuple(parent), tuple(rank))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], *, drop_duplicates: bool = False) -> "TreeShape":
        """The tree of these rank paths ("medusa choices").

        Args:
            paths: one path per node except the root, in any order: the ranks to take from the root down. `[0, 2]` is
                the third candidate under the first one.
            drop_duplicates: keep one of several equal paths (some published lists repeat a node) instead of raising.

        Raises:
            TypeError: a path is not a sequence of ints.
            ValueError: an empty path, a negative rank, a path given twice, a path whose parent is missing, or more
                than 511 paths.
        """
        if not isinstance(paths, Iterable):
            raise TypeError(f"paths: expected a list of rank paths, got {type(paths).__name__}")
        nodes: set[tuple[int, ...]] = set()
        for index, raw in enumerate(paths):
            path = _ints(f"paths[{index}]", raw)
            if not path:
                raise ValueError(f"paths[{index}]: expected at least one rank (the root is not listed), got {raw!r}")
            if min(path) < 0 or max(path) > MAX_RANK:
                raise ValueError(f"paths[{index}]: expected ranks from 0 to {MAX_RANK}, got {[*path]}")
            if path in nodes and not drop_duplicates:
                raise ValueError(
                    f"paths[{index}]: expected every path once, got {[*path]} again (drop_duplicates=True keeps one)"
                )
            nodes.add(path)
            if len(nodes) >= MAX_NODES:
                raise ValueError(f"paths: expected at most {MAX_NODES - 1} paths, got more")
        order = sorted(nodes, key=lambda path: (len(path), path))
        index_of = {(): 0} | {path: node for node, path in enumerate(order, start=1)}
        for path in order:
            if path[:-1] not in index_of:
                raise ValueError(f"paths: expected the parent of every path, got {[*path]} without {[*path[:-1]]}")
        return cls((-1, *(index_of[path[:-1]] for path in order)), (-1, *(path[-1] for path in order)))

    @classmethod
    def preset(cls, name: str) -> "TreeShape":
        """A published tree, such as `"medusa/mc_sim_7b_63"`; `preset_names()` lists them.

        Raises:
            ValueError: no preset of this name; the message suggests the closest ones.
        """
        if name not in preset_names():
            raise ValueError(f"tree: expected the name of a preset, got {name!r}{suggestion(name)}")
        return _preset(ALIASES.get(name, name))

    # Sizes

    @property
    def num_nodes(self) -> int:
        """Nodes, root included: what the target scores per step."""
        return len(self.parent)

    @property
    def num_draft_tokens(self) -> int:
        """Nodes without the root."""
        return len(self.parent) - 1

    @cached_property
    def num_leaves(self) -> int:
        """Nodes without children; 1 for the root alone."""
        return sum(not nodes for nodes in self.children)

    @property
    def max_depth(self) -> int:
        """Largest depth of any node: how many draft tokens one step can accept."""
        return len(self.levels) - 1

    @cached_property
    def max_rank(self) -> int:
        """Largest rank of any node: the drafter needs `max_rank + 1` candidates; -1 for the root alone."""
        return max(self.rank)

    @property
    def num_nodes_per_depth(self) -> tuple[int, ...]:
        """Nodes at each depth from the root (1) to `max_depth`."""
        return tuple(map(len, self.levels))

    # Structure

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """The nodes of each depth, from the root's; contiguous."""
        levels = [range(1)]
        for node in range(1, self.num_nodes):
            if self.parent[node] >= levels[-1].start:
                levels.append(range(node, node))
            levels[-1] = range(levels[-1].start, node + 1)
        return tuple(levels)

    @cached_property
    def children(self) -> tuple[range, ...]:
        """The children of each node, in order of rank; contiguous, empty for a leaf."""
        counts = np.bincount(np.asarray(self.parent[1:], dtype=np.int64), minlength=self.num_nodes)
        stops = 1 + np.cumsum(counts)
        return tuple(map(range, (stops - counts).tolist(), stops.tolist()))

    @cached_property
    def rank_paths(self) -> tuple[tuple[int, ...], ...]:
        """Ranks from the root down to each node, () for the root; without that one, what `from_paths` takes."""
        paths: list[tuple[int, ...]] = [()]
        for parent, rank in zip(self.parent[1:], self.rank[1:], strict=True):
            paths.append((*paths[parent], rank))
        return tuple(paths)

    # Arrays

    @cached_property
    def depth(self) -> npt.NDArray[np.int32]:
        """[N] int32, distance of each node from the root (0)."""
        return _read_only(np.repeat(np.arange(self.max_depth + 1, dtype=np.int32), self.num_nodes_per_depth))

    @cached_property
    def paths(self) -> npt.NDArray[np.int32]:
        """[num_leaves, max_depth + 1] int32, the nodes from the root to each leaf, -1 padded (retrieve_indices).

        Rows ascend lexicographically, so row 0 takes rank 0 as long as it can if the tree has such nodes. This is the
        order of EAGLE and Falcon; Medusa and Hydra list the leaves themselves in descending order.
        """
        rows = []
        for leaf in (node for node in range(self.num_nodes) if not self.children[node]):
            row = [leaf]
            while row[-1]:
                row.append(self.parent[row[-1]])
            rows.append(row[::-1])
        paths = np.full((len(rows), self.max_depth + 1), -1, dtype=np.int32)
        # no leaf's path begins another's, so the padding never takes part in a comparison
        for index, row in enumerate(sorted(rows)):
            paths[index, : len(row)] = row
        return _read_only(paths)

    @cached_property
    def ancestors(self) -> npt.NDArray[np.bool_]:
        """[N, N] bool, entry [i, j] is True if j lies on the path from the root to i, i itself included."""
        ancestors = np.eye(self.num_nodes, dtype=np.bool_)
        for node in range(1, self.num_nodes):
            ancestors[node] |= ancestors[self.parent[node]]
        return _read_only(ancestors)

    @cached_property
    def ancestor_words(self) -> npt.NDArray[np.int32]:
        """[N, ceil(N / 32)] int32, `ancestors` as bits: node j is bit j % 32 of word j // 32; bit 31 is the sign."""
        padded = np.pad(self.ancestors, ((0, 0), (0, -self.num_nodes % 32)))
        words = np.packbits(padded, axis=1, bitorder="little").view("<i4")
        return _read_only(words.astype(np.int32))

    # Files

    def to_dict(self) -> dict[str, Any]:
        """The tree as JSON data: `{"version": 1, "children": {"root": 4, "0": 2, "0.1": [0, 3]}}`.

        A key of `children` is the rank path of a node that has children; its value is their number if they take the
        first ranks, else the list of their ranks.
        """
        children: dict[str, int | list[int]] = {}
        for node, nodes in enumerate(self.children):
            if nodes:
                ranks = list(self.rank[nodes.start : nodes.stop])
                key = ".".join(map(str, self.rank_paths[node])) or "root"
                children[key] = len(ranks) if ranks == list(range(len(ranks))) else ranks
        return {"version": FORMAT_VERSION, "children": children}

    @classmethod
    def from_dict(cls, data: Any, *, source: str = "tree") -> "TreeShape":
        """The tree that `to_dict` describes; errors as in `JsonFile`."""
        check_keys(data, {"version", "children"}, source)
        return cls.from_paths(read_children(data["children"], f"{source}: children"))

    def to_json(self) -> str:
        """`to_dict` as text, one node per line."""
        data = self.to_dict()
        children = ",\n".join(f"    {json.dumps(key)}: {json.dumps(ranks)}" for key, ranks in data["children"].items())
        block = f"{{\n{children}\n  }}" if children else "{}"
        return f'{{\n  "version": {data["version"]},\n  "children": {block}\n}}\n'

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "tree") -> "TreeShape":
        """The tree that `to_json` wrote; errors as in `from_dict`."""
        return cls.from_dict(parse_json(text, source), source=source)

    # For people

    def __repr__(self) -> str:
        if not self.num_draft_tokens:
            return "TreeShape.none()"
        if self.num_draft_tokens == self.max_depth and not self.max_rank:
            return f"TreeShape.chain({self.num_draft_tokens})"
        shown, hidden = self.num_nodes_per_depth[1:13], self.num_nodes_per_depth[13:]
        per_depth = "/".join([*map(str, shown), *(["..."] if hidden else [])])
        return f"<TreeShape: {self.num_draft_tokens} draft tokens, {per_depth} by depth, {self.num_leaves} leaves>"

    def draw(self, *, max_lines: int = 48, max_width: int = 100) -> str:
        """A picture of the tree: one line per branching, nodes written as their ranks, `2..5` for four leaves.

        Args:
            max_lines: lines after which the picture is cut.
            max_width: characters after which a line is cut.
        """
        lines = ["root", *draw_below(self.children, self.rank, 0, "")]
        if len(lines) > max_lines:
            lines[max_lines - 1 :] = [f"... {len(lines) - max_lines + 1} more lines"]
        return "\n".join(line if len(line) <= max_width else line[: max_width - 3] + "..." for line in lines)


TreeLike = TreeShape | str | os.PathLike[str] | int | Sequence[int]
"""What a `tree` argument accepts; see `as_tree_shape`."""


def as_tree_shape(tree: TreeLike) -> TreeShape:
    """Whatever a `tree` argument accepts, as a TreeShape.

    Args:
        tree: a TreeShape; a preset name; the path of a JSON file (str or PathLike); a k_config such as `(4, 2, 2)`;
            an int for a chain of that many draft tokens (0: plain decoding).

    Raises:
        TypeError: none of these.
        ValueError: a string that is neither a preset nor a file, or a value that makes no tree.
        OSError: a file that cannot be read.
    """
    if isinstance(tree, TreeShape):
        return tree
    if isinstance(tree, str):
        if tree in preset_names():
            return TreeShape.preset(tree)
        if tree.endswith(".json") or os.path.isfile(tree):
            return TreeShape.load(tree)
        raise ValueError(
            f"tree: expected the name of a preset or the path of a JSON file, got {tree!r}{suggestion(tree)}"
        )
    if isinstance(tree, os.PathLike):
        return TreeShape.load(tree)
    if _is_int(tree):
        return TreeShape.chain(tree)
    if isinstance(tree, tuple | list) and all(map(_is_int, tree)):
        return TreeShape.from_k_config(tree)
    hint = "; TreeShape.from_paths takes rank paths" if isinstance(tree, tuple | list) else ""
    raise TypeError(
        "tree: expected a TreeShape, the name of a preset, the path of a JSON file, a k_config such as (4, 2, 2), or "
        f"the length of a chain, got {type(tree).__name__}{hint}"
    )


@functools.cache
def _preset(name: str) -> TreeShape:
    """One object per stored tree, so that its derived arrays are computed once in a process."""
    return TreeShape.from_paths(read_children(preset_children()[name], f"preset {name}"))


# Small helpers


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _int(name: str, value: Any) -> int:
    if not _is_int(value):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    return int(value)  # a NumPy integer compares, but does not serialise, as an int


def _ints(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name}: expected a sequence of ints, got {type(values).__name__}")
    items: tuple[Any, ...] = tuple(values)
    if set(map(type, items)) <= {int}:  # the common case, several times faster
        return items
    return tuple(_int(f"{name}[{index}]", item) for index, item in enumerate(items))


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
