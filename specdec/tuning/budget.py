"""How large a draft tree may be: the size that gives the most tokens per second on this machine. Pure arithmetic.

A tree costs what the target's pass over its nodes costs, for all rows of the batch together, and what drafting it
costs; it gives 1 + (accepted draft tokens) per step. Accepted draft tokens are a sum over nodes: of the chances that
the target's path runs through a node (its *reach*). So the best tree of k nodes is the k nodes of the largest reach,
which is a tree, because no node has a larger reach than its parent; and all best trees are prefixes of one list.

`specdec.tuning.measure` measures the costs and the reach; nothing here looks at a clock.
Source: Sequoia (arXiv:2402.12374) section 3 and the hardware-aware optimiser of Medusa and Hydra++ have the same aim.
"""

import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.common.files import replace_file
from specdec.trees.shape import TreeShape
from specdec.trees.text import FORMAT_VERSION, check_keys, parse_json

__all__ = ["PlanRow", "StepCosts", "TreePlan", "plan_tree", "ranked_nodes", "reach_from_depths", "read_plan", "subtree"]

_PLAIN = 1  # nodes of plain decoding


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step costs on a machine, in milliseconds.

    Attributes:
        pass_ms: time of the target's pass by M, the tree nodes of all rows of the batch together; between two entries
            it is interpolated, beyond the last one no tree is planned.
        draft_ms: entry d is the time of drafting a tree of depth d; entry 0 belongs to plain decoding.
        other_ms: acceptance, commit and the host, the same for all trees.

    Raises:
        ValueError: no entries, or times that are not positive.
    """

    pass_ms: Mapping[int, float]
    draft_ms: Sequence[float]
    other_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.pass_ms or not all(rows >= 1 and time > 0 for rows, time in self.pass_ms.items()):
            raise ValueError(
                f"pass_ms: expected positive times by numbers of rows of at least 1, got {dict(self.pass_ms)}"
            )
        if not self.draft_ms or min(self.draft_ms) < 0 or self.other_ms < 0:
            raise ValueError(f"draft_ms, other_ms: expected times of at least 0, got {self.draft_ms}, {self.other_ms}")

    def at(self, num_rows: int) -> float:
        """Time of a pass over `num_rows` nodes.

        Raises:
            ValueError: more rows than were measured.
        """
        known = sorted(self.pass_ms)
        if num_rows > known[-1]:
            raise ValueError(f"num_rows: expected at most {known[-1]}, what was measured, got {num_rows}")
        above = bisect_left(known, num_rows)
        if known[above] == num_rows or above == 0:
            return self.pass_ms[known[above]]
        low, high = known[above - 1], known[above]
        share = (num_rows - low) / (high - low)
        return self.pass_ms[low] + share * (self.pass_ms[high] - self.pass_ms[low])


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
class TreePlan:
    """Which tree to draft, and the estimate behind it; `str` is a table.

    Attributes:
        tree: the tree; the root alone where speculation does not pay.
        batch_size: rows that it was planned for.
        rows: every size that was weighed, ascending, plain decoding first.
        place: where it was measured: device, context and the like, for people.
    """

    tree: TreeShape
    batch_size: int
    rows: tuple[PlanRow, ...]
    place: str = ""

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
        plan = {"batch_size": self.batch_size, "place": self.place, "rows": [asdict(row) for row in self.rows]}
        data = {"version": FORMAT_VERSION, "plan": plan, "tree": self.tree.to_dict()}
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_dict(cls, data: Any, *, source: str = "plan") -> "TreePlan":
        """The plan that `to_json` wrote, as a JSON reader returned it.

        Args:
            data: the file's content.
            source: where it came from, named by errors.

        Raises:
            ValueError: anything that `to_json` cannot have written; the message names the source.
        """
        check_keys(data, {"version", "plan", "tree"}, source)
        tree = TreeShape.from_dict(data["tree"], source=f"{source}: tree")
        try:
            fields = dict(data["plan"])
            fields["rows"] = tuple(PlanRow(**row) for row in fields["rows"])
            plan = cls(tree=tree, **fields)
            _ = plan.chosen  # a plan without the row of its tree is none
        except (TypeError, ValueError, KeyError, StopIteration) as error:
            raise ValueError(f"{source}: plan: expected what specdec tune writes, got an error: {error!r}") from error
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file, in one step."""
        replace_file(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TreePlan":
        """Read a file that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no such file.
        """
        source = os.fspath(path)
        return cls.from_dict(parse_json(Path(path).read_bytes(), source), source=source)


def read_plan(path: str | os.PathLike[str]) -> TreePlan | None:
    """The plan in a file; None if the file holds a tree alone.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is neither.
    """
    source = os.fspath(path)
    data = parse_json(Path(path).read_bytes(), source)
    return TreePlan.from_dict(data, source=source) if isinstance(data, dict) and "plan" in data else None


def reach_from_depths(shape: TreeShape, acceptance_at_depth: Sequence[float]) -> list[float]:
    """Reach of every node from acceptance by depth alone, where nobody measured nodes.

    The chance that one of a node's children is right is shared out among them by rank: each gets half of what the one
    before it gets.

    Args:
        shape: the tree.
        acceptance_at_depth: entry d - 1 is the chance that a node at depth d is accepted, given that one at depth d - 1
            was; the last entry holds for all further depths.

    Raises:
        ValueError: no entry, or one that is no probability.
    """
    if not acceptance_at_depth or not all(0 <= chance <= 1 for chance in acceptance_at_depth):
        raise ValueError(f"acceptance_at_depth: expected probabilities, at least one, got {list(acceptance_at_depth)}")
    reach = [1.0] + [0.0] * shape.num_draft_tokens
    for node, children in enumerate(shape.children):
        weights = [0.5 ** shape.rank[child] for child in children]
        depth = int(shape.depth[node])
        chance = acceptance_at_depth[min(depth, len(acceptance_at_depth) - 1)]
        for child, weight in zip(children, weights, strict=True):
            reach[child] = reach[node] * chance * weight / sum(weights)
    return reach


def ranked_nodes(shape: TreeShape, reach: Sequence[float]) -> list[int]:
    """All nodes by falling reach, the root first and every parent before its children.

    Args:
        shape: the tree.
        reach: chance that the target's path runs through each node; the root's is not looked at.

    Raises:
        ValueError: another number of entries, or a node that is reached more often than its parent.
    """
    if len(reach) != shape.num_nodes:
        raise ValueError(f"reach: expected {shape.num_nodes} entries, one per node, got {len(reach)}")
    for node in range(1, shape.num_nodes):
        parent = shape.parent[node]
        if parent and reach[node] > reach[parent]:
            raise ValueError(f"reach: expected node {node} below its parent's {reach[parent]}, got {reach[node]}")
    return [0, *sorted(range(1, shape.num_nodes), key=lambda node: (-reach[node], node))]


def subtree(shape: TreeShape, nodes: Sequence[int]) -> TreeShape:
    """The tree of some nodes of `shape`, which keep their ranks; the root may be listed or not."""
    return TreeShape.from_paths([shape.rank_paths[node] for node in nodes if node])


def plan_tree(
    shape: TreeShape, reach: Sequence[float], costs: StepCosts, *, batch_size: int, place: str = ""
) -> TreePlan:
    """Choose the size of a tree.

    Args:
        shape: the drafter's tree: what is chosen is a part of it.
        reach: chance that the target's path runs through each node, measured or from `reach_from_depths`.
        costs: what a step costs.
        batch_size: rows that are decoded together.
        place: where the costs were measured, for people.

    Returns:
        The plan. Of two sizes that are equally fast it takes the smaller one; plain decoding is a size as any other.

    Raises:
        ValueError: costs that do not cover plain decoding of the batch or the tree's depth.
    """
    if len(costs.draft_ms) <= shape.max_depth:
        raise ValueError(f"draft_ms: expected an entry for each depth up to {shape.max_depth}, got {costs.draft_ms}")
    order = ranked_nodes(shape, reach)
    rows, tau, depth = [], 1.0, 0
    for size, node in enumerate(order, start=1):
        if node:
            tau += reach[node]
            depth = max(depth, int(shape.depth[node]))
        if size > 1 and size * batch_size > max(costs.pass_ms):
            break
        step_ms = costs.at(size * batch_size) + costs.draft_ms[depth] + costs.other_ms
        rows.append(PlanRow(size, depth, tau, step_ms, 1e3 * batch_size * tau / step_ms))
    best = max(rows, key=lambda row: (row.tokens_per_second, -row.num_nodes))
    return TreePlan(subtree(shape, order[: best.num_nodes]), batch_size, tuple(rows), place)
