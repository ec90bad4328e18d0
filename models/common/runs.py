"""Attention of tree nodes on a CPU: rows of like lengths at once, and heads that share keys as if they were one head.

What a node may see is the definition's (`specdec.kernels.reference.tree_attention`). Here a run of rows is one call of
PyTorch's attention: slots that a row does not see are masked there, so that they must hold finite numbers, as they must
for the kernels. The queries of the heads that share keys are as many queries of one head, so that keys are read once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from specdec.kernels.common.words import unpack_words

__all__ = ["Run", "attend_in_runs", "visible_runs"]

_SLOTS_OF_A_CALL = 64
"""Slots of one row that take as long as a call of its own: rows whose lengths differ by more are attended to apart."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that are attended to at once, and what their nodes see.

    Attributes:
        first_row: the first of them.
        num_rows: how many they are.
        first: the first slot that any of their nodes sees.
        count: slots from there to the last one that any sees.
        mask: [num_rows, 1, 1 or queries, count] what is added to the scores, in the dtype of the queries; None if all
            see all. Of what is not seen it is finite, so that padding that sees nothing leaves finite numbers too.
    """

    first_row: int
    num_rows: int
    first: int
    count: int
    mask: torch.Tensor | None


def visible_runs(
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    num_tree_nodes: int,
    depth: torch.Tensor,
    window: int | None,
    *,
    num_groups: int,
    dtype: torch.dtype,
) -> list[Run]:
    """Who sees whom, the same in all layers of one window.

    Args:
        lengths: as in `specdec.kernels.tree_attention`, as are the next ones.
        ancestors: as there.
        num_tree_nodes: as there.
        depth: as there.
        window: as there.
        num_groups: query heads that share one head of keys.
        dtype: of the queries.
    """
    known, num_nodes = lengths.tolist(), ancestors.shape[1]
    runs = []
    for begin, end in _of_like_lengths(known, 0, len(known)):
        own = known[begin:end]
        first = 0 if window is None else max(0, min(own) + 1 - window)  # the root sees back furthest
        count = max(own) + num_tree_nodes - first
        mask = None
        if num_tree_nodes > 1 or window is not None or min(own) < max(own):
            rows = slice(begin, end) if ancestors.shape[0] > 1 else slice(None)
            deep = depth[begin:end] if depth.shape[0] > 1 else depth
            seen = _seen(lengths[begin:end], ancestors[rows], num_tree_nodes, deep, window, first, count)
            seen = seen.repeat(1, num_groups, 1) if num_nodes > 1 else seen
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min / 2)[:, None]
        runs.append(Run(begin, end - begin, first, count, mask))
    return runs


def attend_in_runs(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, runs: Sequence[Run], *, scale: float
) -> torch.Tensor:
    """Attention of `query [B, HQ, N, D]` to `[B, HK, S, D]` slots; returns [B, N, HQ, D].

    Args:
        query: of the nodes.
        keys: of all slots.
        values: of all slots.
        runs: of `visible_runs`.
        scale: factor of the scores.
    """
    batch, num_heads, num_nodes, size = query.shape
    grouped = query.reshape(batch, keys.shape[1], -1, size)
    attended = []
    for run in runs:
        rows = grouped, keys, values
        if run.num_rows < batch:  # views are not free for the small models that a CPU runs
            rows = tuple(one.narrow(0, run.first_row, run.num_rows) for one in rows)  # type: ignore[assignment]
        q, k, v = rows
        k, v = k.narrow(2, run.first, run.count), v.narrow(2, run.first, run.count)
        out = scaled_dot_product_attention(q, k, v, attn_mask=run.mask, scale=scale)
        attended.append(out.reshape(run.num_rows, num_heads, num_nodes, size).transpose(1, 2))
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def _of_like_lengths(lengths: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Stretches of rows that waste less on the shorter ones than calls of their own would take."""
    own = lengths[begin:end]
    if max(own) * len(own) - sum(own) <= _SLOTS_OF_A_CALL * (len(own) - 1):
        yield begin, end
        return
    middle = (begin + end) // 2
    yield from _of_like_lengths(lengths, begin, middle)
    yield from _of_like_lengths(lengths, middle, end)


def _seen(
    lengths: torch.Tensor,
    ancestors: torch.Tensor,
    num_tree_nodes: int,
    depth: torch.Tensor,
    window: int | None,
    first: int,
    count: int,
) -> torch.Tensor:
    """[b, N, count] bool, the slots from the first one on that each node sees."""
    slots = torch.arange(first, first + count)
    behind = slots - lengths[:, None].long()  # [b, count] slot of the tree, negative in the prefix
    if num_tree_nodes == 1:
        in_tree = (behind == 0)[:, None]
    else:
        of_tree = unpack_words(ancestors, num_tree_nodes).expand(len(lengths), -1, -1)  # [b, N, T]
        places = behind.clamp(0, num_tree_nodes - 1)[:, None].expand(-1, of_tree.shape[1], -1)
        in_tree = of_tree.gather(2, places) & ((behind >= 0) & (behind < num_tree_nodes))[:, None]
    prefix = (behind < 0)[:, None]
    if window is not None:
        prefix = prefix & (depth[:, :, None] - behind[:, None] < window)
    return in_tree | prefix
