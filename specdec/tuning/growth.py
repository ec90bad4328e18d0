"""Draft trees grown node by node for a drafter and a kind of text. Pure arithmetic on rank paths.

Source: Hydra (arXiv:2402.05109) section 4. T_1 is the root alone. Speculative decoding with T_(i-1) is simulated on a
corpus, and T_i has one node more: the child of one of its nodes that would have raised the acceptance length most. "To
populate a node with m children", the paper takes the drafter's m most likely tokens, so the child that a node may get
is the one of the next rank, and rules that draw candidates can use the trees too.

Simulated decoding is exact: steps lie where those of real decoding would, behind what the steps before have accepted.
A child's gain is counted at the steps of T_(i-1); with the child the steps after it move, so that now and then a tree
accepts a little less than the one before it. To simulate with every child and take the best would fit the corpus more
closely, and other text less well (docs/log.md, "trees from rank paths").
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.trees.shape import TreeShape

__all__ = ["Growth", "Simulation", "grow", "simulate"]

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Simulation:
    """Decoding of a corpus with one tree.

    Attributes:
        num_steps: steps whose whole path lies in the corpus.
        num_emitted: tokens that they emit.
        missed: how often a step would have gone on at each rank path that the tree lacks, its parent being the last
            accepted node.
    """

    num_steps: int
    num_emitted: int
    missed: Counter[Path]

    @property
    def tau(self) -> float:
        """Acceptance length."""
        return self.num_emitted / self.num_steps


@dataclass(frozen=True, slots=True)
class Growth:
    """Trees of 1, 2, ... nodes, each with one node more than the one before.

    Attributes:
        order: rank paths in the order in which they were added; the first n - 1 make the tree of n nodes.
        tau: acceptance length on the corpus by number of nodes, from that of the root alone, which is 1.
        num_steps: steps of the corpus with the last tree.
    """

    order: tuple[Path, ...]
    tau: tuple[float, ...]
    num_steps: int

    def tree(self, num_nodes: int) -> TreeShape:
        """The tree of so many nodes, root included."""
        return TreeShape.from_paths(self.order[: num_nodes - 1])


def simulate(texts: Sequence[Sequence[Path]], nodes: Iterable[Path]) -> Simulation:
    """Decode texts with a tree.

    Args:
        texts: per text the rank path at every place, as `specdec.tuning.ranks.rank_texts` has them.
        nodes: rank paths of the tree's nodes, without the root.

    Raises:
        ValueError: no place to begin a step at.
    """
    tree, missed = set(nodes), Counter[Path]()
    num_steps = num_emitted = 0
    for paths in texts:
        place = 0
        while place < len(paths):
            path, depth = paths[place], 0
            while depth < len(path) and path[: depth + 1] in tree:
                depth += 1
            if depth < len(path):
                missed[path[: depth + 1]] += 1
            num_steps += 1
            num_emitted += depth + 1
            place += depth + 1
    if not num_steps:
        raise ValueError("texts: expected some that are longer than the tree is deep, got none; raise max_new_tokens")
    return Simulation(num_steps, num_emitted, missed)


def grow(ranks: Sequence[Tensor], num_nodes: int, *, on_progress: Callable[[int], None] | None = None) -> Growth:
    """Grow trees up to a size.

    Args:
        ranks: per text [n, D] int64 rank paths at its places.
        num_nodes: nodes of the largest tree, root included; growth ends before where no child would have been taken.
        on_progress: called with the nodes of each tree.

    Returns:
        The trees, the same for the same corpus: of two children that gain equally the one nearer to the root is taken,
        then the one of the lower ranks.

    Raises:
        ValueError: fewer than two nodes, or no place to begin a step at.
    """
    if num_nodes < 2:
        raise ValueError(f"num_nodes: expected at least 2, the root and a child, got {num_nodes}")
    texts = [[tuple(row) for row in text.tolist()] for text in ranks]
    order: list[Path] = []
    num_children = Counter[Path]()
    found = simulate(texts, order)
    tau = [found.tau]
    while len(order) + 1 < num_nodes:
        gains = {(*node, num_children[node]): 0 for node in ((), *order)}
        gains = {child: found.missed[child] for child in gains if found.missed[child]}
        if not gains:
            break
        best = min(gains, key=lambda child: (-gains[child], len(child), child))
        order.append(best)
        num_children[best[:-1]] += 1
        found = simulate(texts, order)
        tau.append(found.tau)
        if on_progress is not None:
            on_progress(len(tau))
    return Growth(tuple(order), tuple(tau), found.num_steps)
