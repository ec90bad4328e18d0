"""Traversal verification: the whole drafted sequence is judged from its leaf up, not token by token from the root down.

Definition: at a node with target law p, draft law q (children drawn without replacement) and arrival weight w:
            w = 1 at the root; a child x arrives with w_x = min(1, w p(x) / q(x)).
            A leaf is accepted with its w. When a child and all below it were refused, its parent goes on with
            r = sum max(0, w p - q),  w <- r / (r + 1 - w),  p <- max(0, w p - q) / r,  q <- norm(q without x);
            after its last child the node itself is accepted with what w has become, and the next root follows p.
Source:     Weng et al. 2025, "Traversal Verification" (arXiv:2505.12398), algorithm 1; on a chain it is block
            verification (Sun et al. 2024, arXiv:2403.10444). tests/test_traversal.py proves the law by enumeration.

No weight depends on a decision: the weights of all nodes are computed in post-order, and the first node in that order
whose uniform is below its weight is the accepted one.
"""

from dataclasses import dataclass

import torch

from specdec.kernels.accept_greedy import accept_greedy
from specdec.kernels.launch import Backend
from specdec.kernels.verdict import Verdict
from specdec.kernels.walk import RESIDUAL_FLOOR, draw
from specdec.trees import TreeShape

__all__ = ["TraversalTables", "TraversalWeights", "accept_traversal", "traversal_weights"]


@dataclass(frozen=True, slots=True)
class TraversalTables:
    """A tree's topology on the device. A step must not copy it there: it could not be captured.

    Attributes:
        order: [N] int64, the nodes in post-order.
        parent: [N] int32, -1 for the root.
        ancestors: [N, N] bool, row i marks the nodes on the path from the root to node i, both included.
    """

    order: torch.Tensor
    parent: torch.Tensor
    ancestors: torch.Tensor

    @classmethod
    def of(cls, shape: TreeShape, device: torch.device) -> "TraversalTables":
        """The tables of a tree."""
        return cls(
            torch.tensor(_post_order(shape), device=device),
            torch.tensor(shape.parent, dtype=torch.int32, device=device),
            torch.from_numpy(shape.ancestors.copy()).to(device),
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
    weights = traversal_weights(tokens, shape, logits, draft_logits, draft_row)
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
    shape: TreeShape,
    logits: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_row: torch.Tensor,
) -> TraversalWeights:
    """Weights and laws of all nodes; arguments as of `accept_traversal`."""
    tiny = torch.finfo(torch.float32).tiny
    laws = logits.float().softmax(-1).unbind(1)
    draft_laws = draft_logits.float().softmax(-1)
    columns, rows = tokens.long(), draft_row.clamp(min=0)
    weight, law = [laws[0]] * shape.num_nodes, list(laws)

    def visit(node: int, w: torch.Tensor) -> None:
        p, q = laws[node], laws[node]
        if shape.children[node]:  # which law they were drawn from is known on the device alone
            q = draft_laws.index_select(1, rows[node : node + 1])[:, 0]
        for child in shape.children[node]:
            token = columns[:, child, None]
            p_token, q_token = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
            is_drawn = q_token > 0  # a law of too few tokens fills its list with others
            visit(child, torch.where(is_drawn, w * p_token / q_token.clamp(min=tiny), 0.0).clamp(max=1.0))
            residual = (w[:, None] * p - q).clamp(min=0)
            mass = residual.sum(-1)
            is_law = is_drawn & (mass > RESIDUAL_FLOOR)  # a smaller residual is rounding: the law stays
            p = torch.where(is_law[:, None], residual / mass.clamp(min=tiny)[:, None], p)
            refused = mass + (1 - w)
            w = torch.where(is_drawn, torch.where(refused > RESIDUAL_FLOOR, mass / refused.clamp(min=tiny), 1.0), w)
            q = q.scatter(1, token, 0.0)
            q = q / q.sum(-1, keepdim=True).clamp(min=tiny)
        weight[node], law[node] = w, p

    visit(0, torch.ones_like(laws[0][:, 0]))
    return TraversalWeights(torch.stack(weight, 1), torch.stack(law, 1))


def _post_order(shape: TreeShape) -> list[int]:
    """All nodes, children before parents, and siblings with all below them in node order."""
    reversed_order, left = [], [0]
    while left:
        reversed_order.append(left.pop())
        left += shape.children[reversed_order[-1]]
    return reversed_order[::-1]
