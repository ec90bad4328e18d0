"""Commit of the accepted path: move its keys and values behind the prefix, in all layers, in place.

Equation:   cache[l, c, b, lengths[b] + j] = cache[l, c, b, lengths[b] + path[b, j]]  for j = 1..num_accepted[b],
            all right-hand sides taken before the first assignment
Source:     the cache update of Medusa (arXiv:2401.10774) section 3.1, without its copy and host synchronisation
Reference:  kernels/reference/kv_compact.py (exact)

Shapes:     L layers, 2 for keys and values, B requests, S slots, HK key heads, D head dim, P nodes of the longest path
            cache_        [L, 2, B, S, HK, D]  any floating dtype
            lengths       [B]      int32, tokens of the prefix; the root is in slot lengths[b], counted from 0
            path          [B, P]   int32, node ids from the root (0) down, strictly increasing, -1 padded
            num_accepted  [B]      int32, draft tokens accepted; 0 or -1 moves nothing
Cost:       reads and writes 2 * L * HK * D * sum(moved nodes) elements; a node already in its slot costs nothing
Edges:      no other slot is written, and nodes beyond num_accepted are not read
Numerics:   a copy, bit by bit

In place without a second buffer: node ids grow along the path and start at 0, so path[b, j] >= j. The tile that writes
slots j, j + 1, ... has read its own sources first, and every later source lies in a later slot. One program owns its
columns for the whole path, so nothing depends on the order of programs.
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_tensor
from specdec.kernels.common.launch import Backend, LaunchConfig, on_device, resolve_backend
from specdec.kernels.reference.kv_compact import kv_compact as kv_compact_reference

__all__ = ["kv_compact"]


@triton.jit(do_not_specialize=["P", "stride_pb"])
def _kv_compact_kernel(
    cache_ptr,  # [L, 2, B, S, HK * D]
    lengths_ptr,  # [B]
    path_ptr,  # [B, P]
    num_accepted_ptr,  # [B]
    stride_cl,
    stride_cc,
    stride_cb,
    stride_cs,
    stride_pb,
    P,
    C: tl.constexpr,  # HK * D
    BLOCK_J: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program moves BLOCK_C columns of one layer's keys or values along the whole path of one request."""
    layer = (tl.program_id(1) // 2).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    last = tl.minimum(tl.load(num_accepted_ptr + b), P - 1)
    length = tl.load(lengths_ptr + b).to(tl.int64)

    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    base_ptr = cache_ptr + layer * stride_cl + tl.program_id(1) % 2 * stride_cc + b * stride_cb + length * stride_cs
    for begin in range(1, last + 1, BLOCK_J):
        j = begin + tl.arange(0, BLOCK_J)
        node = tl.load(path_ptr + b * stride_pb + j, mask=j <= last, other=0)
        mask = ((j <= last) & (node > j))[:, None] & (cols < C)[None, :]
        rows = tl.load(base_ptr + node[:, None] * stride_cs + cols[None, :], mask=mask, other=0.0)
        tl.debug_barrier()  # a slot written by one thread may be the source of another
        tl.store(base_ptr + j[:, None] * stride_cs + cols[None, :], rows, mask=mask)


def _launch_config(max_moves: int, num_columns: int) -> LaunchConfig:
    """Tiles of at most 4096 elements: four 16-byte loads in flight per thread for 16-bit elements."""
    block_j = min(triton.next_power_of_2(max_moves), 8)
    block_c = min(triton.next_power_of_2(num_columns), 4096 // block_j)
    return LaunchConfig(blocks={"BLOCK_J": block_j, "BLOCK_C": block_c}, num_warps=4, num_stages=1)


@library.op(fake=lambda: None)
def kv_compact(
    cache_: torch.Tensor,
    lengths: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Move the keys and values of the accepted nodes behind the prefix, in place.

    Slot lengths[b] + path[b, j] goes to slot lengths[b] + j for j = 1..num_accepted[b], in all layers, keys and values.
    The root (j = 0) is in its slot already. `lengths` is not changed.

    Args:
        cache_: [L, 2, B, S, HK, D] of any floating dtype, changed in place; HK and D contiguous.
        lengths: [B] int32, tokens of the prefix, tree not counted.
        path: [B, P] int32, accepted nodes from the root (node 0) down, strictly increasing, -1 padded. That, and that
            lengths[b] + path[b, j] < S, is not checked because it lives on the device.
        num_accepted: [B] int32, accepted draft tokens, at most P - 1; 0 or -1 (a finished row) moves nothing.
        backend: "triton", "reference" or None for the default of the device.

    Raises:
        TypeError: an argument of another dtype.
        ValueError: a shape, stride or device that does not fit.
    """
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    check_tensor("cache_", cache_, shape=(None, 2, None, None, None, None), dtype=floats)
    layers, _, batch, _, kv_heads, head_dim = cache_.shape
    if kv_heads > 1 and cache_.stride(4) != head_dim:
        raise ValueError(f"cache_: expected stride {head_dim} between heads, got {cache_.stride(4)}")
    check_tensor("lengths", lengths, shape=(batch,), dtype=torch.int32, device=cache_.device)
    check_tensor("path", path, shape=(batch, None), dtype=torch.int32, device=cache_.device)
    check_tensor("num_accepted", num_accepted, shape=(batch,), dtype=torch.int32, device=cache_.device)
    max_moves, num_columns = path.shape[1] - 1, kv_heads * head_dim
    if cache_.numel() == 0 or max_moves < 1:
        return
    if resolve_backend(cache_, backend) == "reference":
        kv_compact_reference(cache_, lengths, path, num_accepted)
        return

    config = _launch_config(max_moves, num_columns)
    grid = (triton.cdiv(num_columns, config.blocks["BLOCK_C"]), 2 * layers, batch)
    tensors, sizes = (cache_, lengths, path, num_accepted), (path.shape[1], num_columns)
    with on_device(cache_):
        _kv_compact_kernel[grid](*tensors, *cache_.stride()[:4], path.stride(0), *sizes, **config.kwargs())
