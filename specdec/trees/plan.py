"""Which tree to draft, and the estimate behind the choice, as a file: wherever a tree is asked for, a plan is one.

`specdec.tuning` makes plans; this room only reads what they chose.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.trees.shape import TreeShape
from specdec.trees.text import FORMAT_VERSION, JsonFile, check_keys, parse_json

__all__ = ["PlanRow", "TreePlan", "read_plan"]

_PLAIN = 1  # nodes of plain decoding


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One size of tree.

    Attributes:
        num_nodes: nodes, root included; 1 is plain decoding.
        max_depth: depth of that tree.
        tau: expected tokens per step and row.
        step_ms: expected time of a step.
        tokens_per_second: of the whole batch.
    """

    num_nodes: int
    max_depth: int
    tau: float
    step_ms: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class TreePlan(JsonFile):
    """Which tree to draft, and the estimate behind it; `str` is a table.

    Attributes:
        tree: the tree; the root alone where speculation does not pay.
        batch_size: rows that it was planned for.
        rows: every size that was weighed, ascending, plain decoding first.
        place: where it was measured: device, context and the like, for people.
        order: rank paths of all nodes that were weighed: the first n - 1 make the best tree of n nodes.

    Raises:
        ValueError: an order that does not begin with the tree, or is too short for the rows.
    """

    tree: TreeShape
    batch_size: int
    rows: tuple[PlanRow, ...]
    place: str = ""
    order: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.order and (len(self.order) < len(self.rows) - 1 or self.tree_of(self.tree.num_nodes) != self.tree):
            raise ValueError(f"order: expected {len(self.rows) - 1} nodes or more that begin with the tree, got others")

    def tree_of(self, num_nodes: int) -> TreeShape:
        """The best tree of so many nodes, root included.

        Raises:
            ValueError: more nodes than were weighed.
        """
        if not 1 <= num_nodes <= len(self.order) + 1:
            raise ValueError(f"num_nodes: expected 1 to {len(self.order) + 1}, got {num_nodes}")
        return TreeShape.from_paths(self.order[: num_nodes - 1])

    @property
    def chosen(self) -> PlanRow:
        """The row of the tree."""
        return next(row for row in self.rows if row.num_nodes == self.tree.num_nodes)

    @property
    def pays(self) -> bool:
        """Whether a tree is expected to be faster than plain decoding."""
        return self.tree.num_draft_tokens > 0

    @property
    def speedup(self) -> float:
        """Expected tokens per second over those of plain decoding."""
        return self.chosen.tokens_per_second / self.rows[0].tokens_per_second

    def __str__(self) -> str:
        sizes = {_PLAIN, self.rows[-1].num_nodes, self.tree.num_nodes, *(2**power for power in range(1, 10))}
        lines = [f"batch {self.batch_size}{', ' * bool(self.place)}{self.place}; estimates"]
        lines.append(f"{'nodes':>7}{'depth':>7}{'tau':>8}{'step ms':>10}{'tok/s':>9}{'speedup':>9}")
        for row in self.rows:
            if row.num_nodes in sizes:
                speedup = row.tokens_per_second / self.rows[0].tokens_per_second
                mark = "  <- chosen" if row.num_nodes == self.tree.num_nodes else ""
                lines.append(
                    f"{row.num_nodes:>7}{row.max_depth:>7}{row.tau:>8.2f}{row.step_ms:>10.3f}"
                    f"{row.tokens_per_second:>9.0f}{speedup:>8.2f}x{mark}"
                )
        if not self.pays:
            lines.append("no tree is expected to be faster than plain decoding")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as a file's text; wherever a tree is asked for, the file is one."""
        rows, order = [asdict(row) for row in self.rows], [".".join(map(str, path)) for path in self.order]
        plan = {"batch_size": self.batch_size, "place": self.place, "rows": rows, "order": order}
        data = {"version": FORMAT_VERSION, "plan": plan, "tree": self.tree.to_dict()}
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_dict(cls, data: Any, *, source: str = "plan") -> "TreePlan":
        """The plan that `to_json` wrote, as a JSON reader returned it; errors as in `JsonFile`."""
        check_keys(data, {"version", "plan", "tree"}, source)
        tree = TreeShape.from_dict(data["tree"], source=f"{source}: tree")
        try:
            fields = dict(data["plan"])
            fields["rows"] = tuple(PlanRow(**row) for row in fields["rows"])
            fields["order"] = tuple(tuple(map(int, path.split("."))) for path in fields.get("order", ()))
            plan = cls(tree=tree, **fields)
            _ = plan.chosen  # a plan without the row of its tree is none
        except (TypeError, ValueError, KeyError, AttributeError, StopIteration) as error:
            raise ValueError(f"{source}: plan: expected what specdec tune writes, got an error: {error!r}") from error
        return plan


def read_plan(path: str | os.PathLike[str]) -> TreePlan | None:
    """The plan in a file; None if the file holds a tree alone.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is neither.
    """
    source = os.fspath(path)
    data = parse_json(Path(path).read_bytes(), source)
    return TreePlan.from_dict(data, source=source) if isinstance(data, dict) and "plan" in data else None
