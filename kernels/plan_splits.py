"""How attention over a ragged batch is shared out: pieces of nearly equal size, planned on the device.

Equation:   tiles[b] = ceil(lengths[b] / block) + ceil(T / block)
            size = the smallest s with sum over b of ceil(tiles[b] / s) <= budget;  pieces[b] = ceil(tiles[b] / size)
            piece i of row b holds the tiles floor(i * tiles[b] / pieces[b]) up to floor((i + 1) * tiles[b] / pieces[b])
Source:     the load-balanced scheduling of FlashInfer (arXiv:2501.01005), which plans its chunks of keys on the CPU
Reference:  kernels/reference/plan_splits.py (int-exact)

Shapes:     B requests, T tree nodes
            lengths  [B]            int32, tokens of the prefix
            work     [max_work, 3]  int32, row, first tile, and the tile behind the last; row -1 beyond the last piece
            offsets  [B + 1]        int32, row b has the pieces offsets[b] up to offsets[b + 1]; offsets[B] is their
                                    number
Cost:       reads 4 * B bytes in each of B + 1 programs, writes 12 * max_work bytes; bound by latency
Edges:      the tiles of the tree start at its first node, as in tree_attention, so every row has at least one tile
Numerics:   integers only, exact
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_num_nodes, check_tensor
from specdec.kernels.common.launch import Backend, LaunchConfig, on_device, resolve_backend
from specdec.kernels.reference.plan_splits import plan_splits as plan_splits_reference

__all__ = ["plan_splits"]


@triton.jit(do_not_specialize=["B", "num_tree_tiles", "budget", "max_work"])
def _plan_splits_kernel(
    lengths_ptr,  # [B]
    work_ptr,  # [max_work, 3]
    offsets_ptr,  # [B + 1]
    B,
    num_tree_tiles,
    budget,
    max_work,
    TILE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Program b writes the pieces of row b, program B what is left; each finds the size of a piece for itself."""
    b = tl.program_id(0)
    rows = tl.arange(0, BLOCK_B)
    lengths = tl.load(lengths_ptr + rows, mask=rows < B, other=0)
    tiles = tl.where(rows < B, tl.cdiv(lengths, TILE) + num_tree_tiles, 0)  # [BLOCK_B]

    low = 1
    high = tl.maximum(tl.max(tiles, 0), 1)  # one piece per row, which fits
    while low < high:
        size = (low + high) // 2
        fits = tl.sum(tl.cdiv(tiles, size), 0) <= budget
        low = tl.where(fits, low, size + 1)
        high = tl.where(fits, size, high)

    pieces = tl.cdiv(tiles, low)
    first = tl.sum(tl.where(rows < b, pieces, 0), 0)
    tl.store(offsets_ptr + b, first)
    own_tiles = tl.sum(tl.where(rows == b, tiles, 0), 0)
    own_pieces = tl.sum(tl.where(rows == b, pieces, 0), 0)
    row = tl.where(b < B, b, -1)
    num_entries = tl.where(b < B, own_pieces, max_work - first)
    for begin in range(0, num_entries, BLOCK_W):
        i = begin + tl.arange(0, BLOCK_W)
        mask = i < num_entries
        entry = (first + i) * 3
        divisor = tl.maximum(own_pieces, 1)  # program B has neither tiles nor pieces
        tl.store(work_ptr + entry, row, mask=mask)
        tl.store(work_ptr + entry + 1, i * own_tiles // divisor, mask=mask)
        tl.store(work_ptr + entry + 2, (i + 1) * own_tiles // divisor, mask=mask)


def _launch_config(batch: int, max_work: int) -> LaunchConfig:
    """One warp, whose sums need no barrier, up to 256 rows."""
    block_b = triton.next_power_of_2(max(batch, 1))
    blocks = {"BLOCK_B": block_b, "BLOCK_W": min(triton.next_power_of_2(max_work), 64)}
    return LaunchConfig(blocks, num_warps=max(1, min(8, block_b // 256)))


def _empty_plan(lengths: torch.Tensor, max_work: int) -> tuple[torch.Tensor, torch.Tensor]:
    return lengths.new_empty(max_work, 3), lengths.new_empty(lengths.shape[0] + 1)


@library.op(fake=_empty_plan)
def plan_splits(
    lengths: torch.Tensor,
    *,
    num_tree_nodes: int,
    block: int,
    budget: int,
    max_work: int,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Share the key tiles of a ragged batch out into pieces of nearly equal size.

    A row is cut into as few pieces as its length asks for, so that no piece of any row is longer than the longest has
    to be for `budget` pieces in all. One plan serves all layers of a step.

    Args:
        lengths: [B] int32, tokens of the prefix of every row.
        num_tree_nodes: T, tree slots behind the prefix, 1 to 512.
        block: slots of one tile.
        budget: pieces at most, at least B: every row has one.
        max_work: entries of the work list, at least `budget`; the grid that a captured graph launches.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        work [max_work, 3] int32: row, first tile, and the tile behind the last one, in the order of rows and tiles; row
        -1 and no tiles beyond the last piece. offsets [B + 1] int32: row b has the pieces offsets[b] up to
        offsets[b + 1], and offsets[B] is the number of pieces.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a shape that does not fit, or a number out of range.
    """
    check_tensor("lengths", lengths, shape=(None,), dtype=torch.int32)
    check_num_nodes("num_tree_nodes", num_tree_nodes)
    batch = lengths.shape[0]
    for name, value, least in (
        ("block", block, 1),
        ("budget", budget, max(batch, 1)),
        ("max_work", max_work, budget),
    ):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    if resolve_backend(lengths, backend) == "reference":
        return plan_splits_reference(
            lengths, num_tree_nodes=num_tree_nodes, block=block, budget=budget, max_work=max_work
        )

    work, offsets = _empty_plan(lengths, max_work)
    with on_device(lengths):
        _plan_splits_kernel[(batch + 1,)](
            lengths, work, offsets,
            B=batch, num_tree_tiles=triton.cdiv(num_tree_nodes, block), budget=budget, max_work=max_work,
            TILE=block, **_launch_config(batch, max_work).kwargs(),
        )  # fmt: skip
    return work, offsets
