"""Draft trees without a fixed topology: how large they may become. `TreeShape` is the fixed kind.

Source: EAGLE-2 (arXiv:2406.16858) sections 4.1 and 4.2; the defaults are those of the authors' evaluation scripts.
JetSpec's tree: arXiv:2606.18394.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from specdec.trees.plan import TreePlan
from specdec.trees.shape import MAX_NODES, TreeLike, TreeShape, as_tree_shape
from specdec.trees.text import FORMAT_VERSION, JsonFile, check_keys, parse_json

__all__ = ["GROWN_PRESETS", "AnyTreeLike", "DynamicTree", "as_tree", "load_tree"]


@dataclass(frozen=True, slots=True)
class DynamicTree(JsonFile):
    """A tree that a drafter grows anew at every step from its most probable paths, and then prunes to the best nodes.

    Attributes:
        num_nodes: nodes that are kept, root included: what the target scores per step.
        depth: passes that extend paths. The pass over the committed text gives the nodes of depth 1, so the tree is at
            most `depth + 1` deep. Heads that draft a block in one pass extend no paths: theirs is the best tree of at
            most this depth, and of the block's, if that is smaller.
        top_k: paths that a pass extends, and candidates that it gives each of them; of parallel heads the candidates of
            each position.

    Raises:
        TypeError: a value is not an int.
        ValueError: no draft token at all, more than 512 nodes, or more nodes than there are candidates.
    """

    num_nodes: int = 60
    depth: int = 5
    top_k: int = 10

    def __post_init__(self) -> None:
        for name, least in (("depth", 0), ("top_k", 1), ("num_nodes", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        most = min(MAX_NODES, 1 + self.num_candidates)
        if self.num_nodes > most:
            raise ValueError(
                f"num_nodes: expected at most {most} with depth {self.depth} and top_k {self.top_k} "
                f"(the root and {self.num_candidates} candidates, {MAX_NODES} nodes in all), got {self.num_nodes}"
            )

    @property
    def num_candidates(self) -> int:
        """Candidates of all passes, from which the best `num_nodes - 1` are kept."""
        return self.top_k + self.depth * self.top_k**2

    @property
    def max_depth(self) -> int:
        """Largest depth of any node: how many draft tokens one step can accept."""
        return self.depth + 1

    @property
    def max_rank(self) -> int:
        """Largest rank of any candidate in its list."""
        return self.top_k - 1

    def cut(self, max_depth: int) -> "DynamicTree":
        """The tree with a depth of at most `max_depth`, and with no more nodes than it then has candidates."""
        if self.max_depth <= max_depth:
            return self
        num_candidates = self.top_k + (max_depth - 1) * self.top_k**2
        return replace(self, depth=max_depth - 1, num_nodes=min(self.num_nodes, 1 + num_candidates))

    def to_json(self) -> str:
        """The tree as a file's text: `{"version": 1, "dynamic": {"num_nodes": 60, "depth": 5, "top_k": 10}}`."""
        return json.dumps({"version": FORMAT_VERSION, "dynamic": asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_dict(cls, data: Any, *, source: str = "tree") -> "DynamicTree":
        """The tree that `to_json` wrote, as a JSON reader returned it; errors as in `JsonFile`."""
        check_keys(data, {"version", "dynamic"}, source)
        try:
            return cls(**data["dynamic"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source}: dynamic: {error}") from error


GROWN_PRESETS = {
    "dynamic": DynamicTree(),
    # 128 nodes of paths through 20 positions with 7 candidates each
    "jetspec": DynamicTree(num_nodes=128, depth=19, top_k=7),
}
"""Dynamic trees by name: EAGLE-2's and JetSpec's."""

AnyTreeLike: TypeAlias = TreeLike | DynamicTree
"""What a `tree` argument accepts where trees may be dynamic; see `as_tree`."""


def as_tree(tree: AnyTreeLike) -> TreeShape | DynamicTree:
    """As `as_tree_shape`, and beyond: a DynamicTree, the name of one (`GROWN_PRESETS`), or a file that holds one."""
    if isinstance(tree, DynamicTree):
        return tree
    if isinstance(tree, str | os.PathLike) and os.path.isfile(tree):
        return load_tree(tree)
    if isinstance(tree, str) and tree in GROWN_PRESETS:
        return GROWN_PRESETS[tree]
    return as_tree_shape(tree)


def load_tree(path: str | os.PathLike[str]) -> TreeShape | DynamicTree:
    """Read a file with a tree of either kind, or with the plan of one that `specdec tune` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file; the message names the file and the field.
    """
    source = os.fspath(path)
    data = parse_json(Path(path).read_bytes(), source)
    if isinstance(data, dict) and "dynamic" in data:
        return DynamicTree.from_dict(data, source=source)
    if isinstance(data, dict) and "plan" in data:
        return TreePlan.from_dict(data, source=source).tree
    return TreeShape.from_dict(data, source=source)
