"""Eager reference of kernels.plan_splits: the definition, and what CPU decoding runs."""

import torch

__all__ = ["plan_splits"]


def plan_splits(
    lengths: torch.Tensor, *, num_tree_nodes: int, block: int, budget: int, max_work: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Share the key tiles of a ragged batch out into pieces of nearly equal size.

    Shapes, dtypes and meaning are those of `specdec.kernels.plan_splits.plan_splits`; arguments are not checked.

    Args:
        lengths: [B] int32.
        num_tree_nodes: T.
        block: slots of one tile.
        budget: pieces at most.
        max_work: entries of the work list.

    Returns:
        The work list [max_work, 3] and the offsets [B + 1], both int32.
    """
    tiles = [-(-length // block) + -(-num_tree_nodes // block) for length in lengths.tolist()]
    size = 1  # of the largest piece, in tiles
    while sum(-(-count // size) for count in tiles) > budget:
        size += 1

    work, offsets = [], [0]
    for row, count in enumerate(tiles):
        pieces = -(-count // size)
        work += [[row, i * count // pieces, (i + 1) * count // pieces] for i in range(pieces)]
        offsets.append(len(work))
    work += [[-1, 0, 0]] * (max_work - len(work))
    return lengths.new_tensor(work), lengths.new_tensor(offsets)
