"""Shared by the kernels that multiply few rows by a large weight: the product of a tile, and a split of its columns.

The weight's tile is the first operand of the product: wgmma takes 64 rows of its first operand and any multiple of 8
columns of its second, so that few rows of x cost little as the second and would be padded to 64 as the first.

A weight with few tiles is split along its columns, or it would occupy a part of the GPU only. Every split writes its
part in fp32; the last to arrive adds all parts in the order of their columns and goes on with the tile, so there is no
second launch, nobody waits, and a call repeats bit by bit. How many splits there are depends on the weight alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from specdec.kernels.common.launch import LaunchConfig
from specdec.kernels.common.limits import NUM_SMS
from specdec.kernels.common.scratch import arrival_counters

__all__ = ["add_splits", "arrives_last", "choose_splits", "publish_split", "silu", "split_columns", "split_workspace"]
__all__ += ["weight_first_dot", "weight_first_tiles"]

_STAGES_BYTES = 96 * 1024
_MAX_SPLITS = 8
_MIN_COLUMNS_PER_SPLIT = 512
_NUM_PROGRAMS = 2 * NUM_SMS  # two on each, which is what the shared memory of a tile allows


@triton.jit
def weight_first_dot(
    x_rows,  # [BLOCK_M] pointers to the rows of x
    weight_rows,  # [BLOCK_N] pointers to the rows of the weight
    mask_m,
    mask_n,
    first,
    last,
    K,
    UPCAST: tl.constexpr,  # see `needs_upcast`
    BLOCK_K: tl.constexpr,
):
    """Products of weight rows with rows of x over the columns from `first` to `last`: [BLOCK_N, BLOCK_M] in fp32."""
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([mask_n.shape[0], mask_m.shape[0]], tl.float32)
    for start in range(first, last, BLOCK_K):
        cols = start + offs_k
        mask_k = cols < K
        w = tl.load(weight_rows[:, None] + cols[None, :], mask=mask_n[:, None] & mask_k[None, :], other=0.0)
        x = tl.load(x_rows[None, :] + cols[:, None], mask=mask_k[:, None] & mask_m[None, :], other=0.0)
        w = w.to(tl.float32) if UPCAST else w
        x = x.to(tl.float32) if UPCAST else x
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit
def silu(x):
    """SiLU: x / (1 + exp(-x))."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def split_columns(split, K, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """First and last column of a split, whole blocks apart from the end; a split may be empty."""
    columns = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    return split * columns, tl.minimum((split + 1) * columns, K)


@triton.jit
def publish_split(acc, partial_ptr, split, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Write one split's part of a tile to its place in `partial_ptr` [SPLITS, BLOCK_N, BLOCK_M] fp32."""
    offs = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    tl.store(partial_ptr + split * (BLOCK_N * BLOCK_M) + offs, acc)


@triton.jit
def arrives_last(arrivals_ptr, num_splits):
    """Count this program in, after its stores; whether all other splits of the tile were counted before it.

    The last one leaves the counter at zero, as it was before the launch (`scratch.py`).
    """
    tl.debug_barrier()  # all stores of the program come before its one arrival
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    is_last = arrived == num_splits - 1
    tl.store(arrivals_ptr, 0, mask=is_last)
    return is_last


@triton.jit
def add_splits(partial_ptr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Add the parts of a tile in the order of the splits, whoever arrived last."""
    offs = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for split in range(0, SPLITS):
        # .cg reads the L2, where other programs' stores are; a line in this SM's L1 may be stale
        acc += tl.load(partial_ptr + split * (BLOCK_N * BLOCK_M) + offs, cache_modifier=".cg")
    return acc


def weight_first_tiles(num_rows: int, itemsize: int, *, num_weights: int = 1) -> LaunchConfig:
    """Tiles for `num_rows` rows of x, at most 128 in one tile, times `num_weights` weights.

    The stages of two programs, at most 96 KiB each, fit into the shared memory of one SM. What the tiles compile to is
    listed in docs/kernels/skinny_linear.md and docs/kernels/draft_heads.md.
    """
    block_m = min(max(16, triton.next_power_of_2(num_rows)), 128)
    if itemsize == 4:  # no tensor cores in full fp32: small tiles keep the operands in registers
        return LaunchConfig({"BLOCK_M": min(block_m, 32), "BLOCK_N": 64, "BLOCK_K": 32}, num_warps=4, num_stages=3)
    block_k = 128 if num_weights == 1 and block_m <= 64 else 64
    blocks = {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": block_k}
    stage_bytes = (num_weights * 64 + block_m) * block_k * itemsize
    # two sums of 128 rows would spill with four warps
    num_warps = 8 if num_weights * block_m > 128 else 4
    return LaunchConfig(blocks, num_warps=num_warps, num_stages=min(4, _STAGES_BYTES // stage_bytes))


def choose_splits(num_tiles: int, num_columns: int) -> int:
    """Splits of the columns that fill the GPU once; one split has at least 512 columns.

    A second wave of programs would cost more than some idle slots, so the number is rounded down.
    """
    return max(1, min(_NUM_PROGRAMS // max(num_tiles, 1), num_columns // _MIN_COLUMNS_PER_SPLIT, _MAX_SPLITS))


@contextmanager
def split_workspace(
    num_tiles: int, splits: int, tile_size: int, device: torch.device
) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Room for the parts of every tile and the counts of arrivals, for the launch inside; None without a split."""
    if splits == 1:
        yield None, None
        return
    partial = torch.empty(num_tiles, splits, tile_size, dtype=torch.float32, device=device)
    with arrival_counters(num_tiles, device) as arrivals:
        yield partial, arrivals
