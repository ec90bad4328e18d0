"""Tokens of a static draft tree and, on request, their positions, from the drafter's top-k candidates.

Equation:   tokens[b, 0]    = root[b]
            tokens[b, n]    = candidates[b, row[n], rank[n]]
            positions[b, n] = lengths[b] + depth[n]
Source:     Medusa (arXiv:2401.10774) section 2.1.2: node n takes the rank[n]-th candidate of the head of its depth
Reference:  kernels/reference/tree_expand.py (int-exact)

Shapes:     B requests, M lists of candidates (one per head or per draft pass), R candidates in each, N nodes
            candidates  [B, M, R]  int32 or int64, token ids, best first
            root        [B]        int32, the last emitted token, not yet in the cache
            lengths     [B]        int32, tokens in the cache; the root's position, counted from 0; or None
            row         [N]        int32, 0 <= row < M; -1 takes the root's token
            rank        [N]        int32, 0 <= rank < R; read where row >= 0
            depth       [N]        int32, 0 at the root
            tokens      [B, N]     int32
            positions   [B, N]     int32; [B, 0] without lengths
Cost:       reads B*N candidates and 12*N bytes of tables, writes 4*B*N bytes (8 with positions); bound by the launch
Padding:    a node of row -1 besides node 0 is padding; it gets the root's token, so that every token is a valid id
Numerics:   integers only, exact
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_num_nodes, check_tensor
from specdec.kernels.common.launch import Backend, LaunchConfig, on_device, resolve_backend
from specdec.kernels.reference.tree_expand import tree_expand as tree_expand_reference

__all__ = ["tree_expand"]


@triton.jit(do_not_specialize=["stride_cb", "stride_cm", "N"])
def _tree_expand_kernel(
    candidates_ptr,  # [B, M, R]
    root_ptr,  # [B]
    lengths_ptr,  # [B] or None
    row_ptr,  # [N]
    rank_ptr,  # [N]
    depth_ptr,  # [N]
    tokens_ptr,  # [B, N]
    positions_ptr,  # [B, N], not written without lengths
    stride_cb,
    stride_cm,
    N,
    BLOCK_N: tl.constexpr,
):
    """One program fills BLOCK_N nodes of one request."""
    b = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N

    row = tl.load(row_ptr + offs_n, mask=mask_n, other=-1)  # [BLOCK_N]
    rank = tl.load(rank_ptr + offs_n, mask=mask_n, other=0)
    candidate_ptrs = candidates_ptr + b * stride_cb + row.to(tl.int64) * stride_cm + rank
    candidate = tl.load(candidate_ptrs, mask=row >= 0, other=0).to(tl.int32)
    token = tl.where(row >= 0, candidate, tl.load(root_ptr + b))
    tl.store(tokens_ptr + b * N + offs_n, token, mask=mask_n)

    if lengths_ptr is not None:  # decided at compile time
        position = tl.load(lengths_ptr + b) + tl.load(depth_ptr + offs_n, mask=mask_n, other=0)
        tl.store(positions_ptr + b * N + offs_n, position, mask=mask_n)


def _launch_config(num_nodes: int) -> LaunchConfig:
    """One program per request up to 128 nodes: four nodes for each lane of one warp."""
    return LaunchConfig(blocks={"BLOCK_N": min(triton.next_power_of_2(num_nodes), 128)}, num_warps=1)


def _empty_nodes(
    root: torch.Tensor, lengths: torch.Tensor | None, row: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, num_nodes = root.shape[0], row.shape[0]
    return root.new_empty(batch, num_nodes), root.new_empty(batch, 0 if lengths is None else num_nodes)


@library.op(fake=_empty_nodes)
def tree_expand(
    candidates: torch.Tensor,
    root: torch.Tensor,
    lengths: torch.Tensor | None,
    row: torch.Tensor,
    rank: torch.Tensor,
    depth: torch.Tensor,
    *,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay the candidates out on the nodes of a static tree.

    The range of `row` and `rank` is not checked: they are constants of the tree, and a look at their values would
    stop the GPU. Who builds them checks them once.

    Args:
        candidates: [B, M, R] int32 or int64, contiguous in R; token ids, best first.
        root: [B] int32, last emitted token of every request.
        lengths: [B] int32, tokens in the cache; None computes no positions.
        row: [N] int32, list of every node, in [0, M); -1 for the root (node 0) and for padding.
        rank: [N] int32, place in that list, in [0, R); any value where `row` is -1.
        depth: [N] int32, depth of every node, 0 for the root.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        tokens [B, N] int32 and positions [B, N] int32, counted from 0; [B, 0] without lengths.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, no or too many nodes, tensors on several devices.
    """
    check_tensor("candidates", candidates, shape=(None, None, None), dtype=(torch.int32, torch.int64))
    batch, device = candidates.shape[0], candidates.device
    check_tensor("root", root, shape=(batch,), dtype=torch.int32, device=device)
    if lengths is not None:
        check_tensor("lengths", lengths, shape=(batch,), dtype=torch.int32, device=device)
    check_tensor("row", row, shape=(None,), dtype=torch.int32, device=device)
    num_nodes = row.shape[0]
    check_num_nodes("row", num_nodes)
    check_tensor("rank", rank, shape=(num_nodes,), dtype=torch.int32, device=device)
    check_tensor("depth", depth, shape=(num_nodes,), dtype=torch.int32, device=device)
    if resolve_backend(candidates, backend) == "reference":
        return tree_expand_reference(candidates, root, lengths, row, rank, depth)

    tokens, positions = _empty_nodes(root, lengths, row)
    config = _launch_config(num_nodes)
    tensors = (candidates, root, lengths, row, rank, depth, tokens, positions)
    with on_device(candidates):
        _tree_expand_kernel[(batch, triton.cdiv(num_nodes, config.blocks["BLOCK_N"]))](
            *tensors, *candidates.stride()[:2], num_nodes, **config.kwargs()
        )
    return tokens, positions
