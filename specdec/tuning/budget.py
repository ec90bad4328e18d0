"""How large a draft tree may be: the size that gives the most tokens per second on this machine. Pure arithmetic.

A tree costs what the target's pass over its nodes costs, for all rows of the batch together, and what drafting it
costs; it gives 1 + (accepted draft tokens) per step. Accepted draft tokens are a sum over nodes: of the chances that
the target's path runs through a node (its *reach*). So the best tree of k nodes is the k nodes of the largest reach,
which is a tree, because no node has a larger reach than its parent; and all best trees are prefixes of one list.

`specdec.tuning.measure` measures the costs and the reach; nothing here looks at a clock.
Trees that were grown on a corpus (`specdec.tuning.growth`) are prefixes of a list, too, with their acceptance known.
Source: Sequoia (arXiv:2402.12374) section 3 and the hardware-aware optimiser of Medusa and Hydra++ have the same aim.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specdec.trees.plan import PlanRow, TreePlan
from specdec.trees.shape import TreeShape

__all__ = ["StepCosts", "plan_sizes", "plan_tree", "ranked_nodes", "subtree"]


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
        reach: chance that the target's path runs through each node.
        costs: what a step costs.
        batch_size: rows that are decoded together.
        place: where the costs were measured, for people.

    Returns:
        The plan. Of two sizes that are equally fast it takes the smaller one; plain decoding is a size as any other.

    Raises:
        ValueError: costs that do not cover plain decoding of the batch or the tree's depth.
    """
    order = ranked_nodes(shape, reach)[1:]
    taus = accumulate((reach[node] for node in order), initial=1.0)
    return plan_sizes([shape.rank_paths[node] for node in order], [*taus], costs, batch_size=batch_size, place=place)


def plan_sizes(
    order: Sequence[tuple[int, ...]], tau: Sequence[float], costs: StepCosts, *, batch_size: int, place: str = ""
) -> TreePlan:
    """Choose among trees that are prefixes of one list of nodes.

    Args:
        order: rank paths, of which the first n - 1 make the tree of n nodes.
        tau: acceptance length by number of nodes, from that of the root alone.
        costs: what a step costs.
        batch_size: rows that are decoded together.
        place: where the costs were measured, for people.

    Returns:
        As `plan_tree`.

    Raises:
        ValueError: costs that do not cover plain decoding of the batch or the deepest tree.
    """
    depths = [*accumulate(map(len, order), max, initial=0)]
    if len(costs.draft_ms) <= depths[-1]:
        raise ValueError(f"draft_ms: expected an entry for each depth up to {depths[-1]}, got {costs.draft_ms}")
    rows: list[PlanRow] = []
    for size, (depth, length) in enumerate(zip(depths, tau, strict=True), start=1):
        if size > 1 and size * batch_size > max(costs.pass_ms):
            break
        step_ms = costs.at(size * batch_size) + costs.draft_ms[depth] + costs.other_ms
        rows.append(PlanRow(size, depth, length, step_ms, 1e3 * batch_size * length / step_ms))
    best = max(rows, key=lambda row: (row.tokens_per_second, -row.num_nodes))
    tree = TreeShape.from_paths(order[: best.num_nodes - 1])
    return TreePlan(tree, batch_size, tuple(rows), place, tuple(order))
