"""Traversal verification: the whole drafted sequence is judged from its leaf up, not token by token from the root down.

Definition: at a node with target law p, draft law q (children drawn without replacement) and arrival weight w:
            w = 1 at the root; a child x arrives with w_x = min(1, w p(x) / q(x)).
            A leaf is accepted with its w. When a child and all below it were refused, its parent goes on with
            r = sum max(0, w p - q),  w <- r / (r + 1 - w),  p <- max(0, w p - q) / r,  q <- norm(q without x);
            after its last child the node itself is accepted with what w has become, and the next root follows p.
Source:     Weng et al. 2025, "Traversal Verification" (arXiv:2505.12398), algorithm 1; on a chain it is block
            verification (Sun et al. 2024, arXiv:2403.10444). tests/test_traversal.py proves the law by enumeration.

No weight depends on a decision, and what a node makes of its own arrival weight, laws and children asks for nothing
that happens below it: the nodes of one depth are computed at once, with a loop over the places of their children. The
first node in post-order whose uniform is below its weight is the accepted one.
"""

from dataclasses import dataclass

import torch

from specdec.kernels.accept_greedy import accept_greedy
from specdec.kernels.launch import Backend
from specdec.kernels.verdict import Verdict
from specdec.kernels.walk import RESIDUAL_FLOOR, draw
from specdec.trees import TreeShape

__all__ = ["TraversalLevel", "TraversalTables", "TraversalWeights", "accept_traversal", "traversal_weights"]


@dataclass(frozen=True, slots=True)
class TraversalLevel:
    """The nodes of one depth that have children.

    Attributes:
        nodes: [n] int64, those with the most children first.
        children: per place among siblings [m] int64, the child of each of the first m nodes, which are those that have
            that many.
    """

    nodes: torch.Tensor
    children: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class TraversalTables:
    """A tree's topology on the device. A step must not copy it there: it could not be captured.

    Attributes:
        order: [N] int64, the nodes in post-order.
        parent: [N] int32, -1 for the root.
        ancestors: [N, N] bool, row i marks the nodes on the path from the root to node i, both included.
        levels: one for each depth but the largest, from the root's.
    """

    order: torch.Tensor
    parent: torch.Tensor
    ancestors: torch.Tensor
    levels: tuple[TraversalLevel, ...]

    @classmethod
    def of(cls, shape: TreeShape, device: torch.device) -> "TraversalTables":
        """The tables of a tree."""
        return cls(
            torch.tensor(_post_order(shape), device=device),
            torch.tensor(shape.parent, dtype=torch.int32, device=device),
            torch.from_numpy(shape.ancestors.copy()).to(device),
            tuple(_level(shape, nodes, device) for nodes in shape.levels[:-1]),
        )


@dataclass(frozen=True, slots=True)
class TraversalWeights:
    """What traversal verification knows before it draws.

    Attributes:
        weight: [B, N] float32, with which each node is accepted once those before it in post-order were refused: the
            first accepted one in that order is the end of the path.
        law: [B, N, V] float32, what the next root follows if the node is accepted.
    """

    weight: torch.Tensor
    law: torch.Tensor


def accept_traversal(
    tokens: torch.Tensor,
    shape: TreeShape,
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_row: torch.Tensor,
    uniform: torch.Tensor,
    uniform_final: torch.Tensor,
    *,
    budget: torch.Tensor | None = None,
    stop_tokens: torch.Tensor | None = None,
    tables: TraversalTables | None = None,
    backend: Backend | None = None,
) -> Verdict:
    """Accept the path to one node of a drawn tree; the emitted law is exactly the target's.

    Args:
        tokens: [B, N] int32, the children of every node drawn without replacement in node order.
        shape: the tree's topology.
        logits: [B, N, V] what the target samples from, already processed.
        draft_logits: [B, M, V] what the drafter sampled from, already processed.
        draft_row: [N] int32 law that a node's children were drawn from; -1 for a leaf.
        uniform: [B, N] fp32 in [0, 1), for the test of each node.
        uniform_final: [B] fp32 in [0, 1), for the next root.
        budget: [B] int32 tokens that each row may still emit; 0 for a finished row.
        stop_tokens: [E] int32 tokens after which a row ends.
        tables: those of `shape`, if they are on the device already.
        backend: what runs the last walk; by default decided by the device.

    Returns:
        The verdict.
    """
    tables = TraversalTables.of(shape, tokens.device) if tables is None else tables
    weights = traversal_weights(tokens, tables, logits, draft_logits, draft_row)
    is_accepted = uniform[:, tables.order] < weights.weight[:, tables.order]
    is_accepted[:, -1].fill_(True)  # the root was emitted long ago
    accepted = tables.order[is_accepted.int().argmax(1)]  # [B]
    law = weights.law[torch.arange(tokens.shape[0], device=tokens.device), accepted]
    next_root = draw(law, uniform_final).int()

    # the walk of the greedy rule along this one path cuts at budgets and stop tokens
    table = tables.ancestors[accepted]  # [B, N] nodes on the path
    path_parent = torch.where(table, tables.parent, -1)
    on_path = table & (tables.parent >= 0)
    at = torch.where(on_path, tables.parent, accepted[:, None]).long()
    wanted = torch.full_like(tokens, -1).scatter(1, at, torch.where(on_path, tokens, next_root[:, None]))
    return accept_greedy(
        tokens,
        path_parent,
        wanted,
        max_depth=shape.max_depth,
        budget=budget,
        stop_tokens=stop_tokens,
        backend=backend,
    )


def traversal_weights(
    tokens: torch.Tensor,
    tables: TraversalTables,
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_row: torch.Tensor,
) -> TraversalWeights:
    """Weights and laws of all nodes; arguments as of `accept_traversal`."""
    tiny = torch.finfo(torch.float32).tiny
    law, draft_laws = logits.float().softmax(-1), draft_logits.float().softmax(-1)
    weight = law.new_ones(tokens.shape)  # the root's stays
    for level in tables.levels:
        p, w = law[:, level.nodes], weight[:, level.nodes]  # [B, n, V], [B, n]
        q = draft_laws[:, draft_row[level.nodes].clamp(min=0)]
        for children in level.children:
            m = len(children)  # nodes that have this child; p, q and w of the others are final
            token = tokens[:, children, None].long()
            p_token, q_token = p[:, :m].gather(-1, token)[..., 0], q[:, :m].gather(-1, token)[..., 0]
            is_drawn = q_token > 0  # a law of too few tokens fills its list with others
            arrival = (w[:, :m] * p_token / q_token.clamp(min=tiny)).clamp(max=1.0)
            weight[:, children] = torch.where(is_drawn, arrival, 0.0)

            residual = (w[:, :m, None] * p[:, :m] - q[:, :m]).clamp(min=0)
            mass = residual.sum(-1)
            is_law = is_drawn & (mass > RESIDUAL_FLOOR)  # a smaller residual is rounding: the law stays
            p[:, :m] = torch.where(is_law[..., None], residual / mass.clamp(min=tiny)[..., None], p[:, :m])
            refused = mass + (1 - w[:, :m])
            left = torch.where(refused > RESIDUAL_FLOOR, mass / refused.clamp(min=tiny), 1.0)
            w[:, :m] = torch.where(is_drawn, left, w[:, :m])
            q[:, :m] = q[:, :m].scatter(-1, token, 0.0)
            q[:, :m] /= q[:, :m].sum(-1, keepdim=True).clamp(min=tiny)
        weight[:, level.nodes], law[:, level.nodes] = w, p
    return TraversalWeights(weight, law)


def _level(shape: TreeShape, nodes: range, device: torch.device) -> TraversalLevel:
    inner = sorted((node for node in nodes if shape.children[node]), key=lambda node: -len(shape.children[node]))
    places = range(len(shape.children[inner[0]]))
    children = [[shape.children[node][i] for node in inner if i < len(shape.children[node])] for i in places]
    return TraversalLevel(
        torch.tensor(inner, device=device), tuple(torch.tensor(list_, device=device) for list_ in children)
    )


def _post_order(shape: TreeShape) -> list[int]:
    """All nodes, children before parents, and siblings with all below them in node order."""
    reversed_order, left = [], [0]
    while left:
        reversed_order.append(left.pop())
        left += shape.children[reversed_order[-1]]
    return reversed_order[::-1]
