"""The pairs of a step put where the next draft of a feature-level drafter reads them.

Equation:   kept = min(counts[b], keep);  with j = t - kept, node = path[b, j] and token = emitted[b, j], both 0 where
            they are -1 or j is past the path:
            features[b, t] = features[b, counts[b] - kept + t]  if t < kept, otherwise  states[b, node]
            tokens[b, t]   = tokens[b, counts[b] - kept + t]    if t < kept, otherwise  token
            counts[b] = kept + num_accepted[b] + 1;  last[b] = max(counts[b] - 1, 0)
            all right-hand sides taken before the first assignment
Source:     the inputs of EAGLE's next draft (arXiv:2401.15077) section 4.1, for a batch and without a copy on the host
Reference:  kernels/reference/commit_pairs.py (exact)

Shapes:     B requests, W places for pairs, N nodes, P nodes of the longest path, F width of the target's states
            features_          [B, W, F]  any floating dtype
            tokens_, counts_   [B, W], [B]  int32, the token after each state, and how many pairs are real
            last_              [B]        int64, place of the last real pair; 0 if there is none
            states             [B, N, F]  as features_
            path, emitted      [B, P]     int32, as in `Verdict`, -1 padded; P + keep <= W
            num_accepted       [B]        int32, draft tokens accepted; -1 for a finished row, which gains no pair
Cost:       reads and writes B * W * F elements; bound by the launch
Edges:      places past the last pair hold the root's state and token 0: what is computed there is never read
Numerics:   a copy, bit by bit

In place: a program reads all places of its columns before it writes the first. Which places are read depends on the
counts, which are written too, so with pairs to keep one program does all columns of a request.
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import FLOAT_DTYPES, check_tensor
from specdec.kernels.common.launch import Backend, LaunchConfig, on_device, resolve_backend
from specdec.kernels.reference.commit_pairs import commit_pairs as commit_pairs_reference

__all__ = ["commit_pairs"]


@triton.jit
def _commit_pairs_kernel(
    features_ptr,  # [B, W, F]
    tokens_ptr,  # [B, W]
    counts_ptr,  # [B]
    last_ptr,  # [B]
    states_ptr,  # [B, N, F]
    path_ptr,  # [B, P]
    emitted_ptr,  # [B, P]
    num_accepted_ptr,  # [B]
    stride_fb,
    stride_fw,
    stride_tb,
    stride_sb,
    stride_sn,
    stride_pb,
    stride_eb,
    W: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program fills a block of columns of one request; all of them, one after the other, with pairs to keep."""
    b = tl.program_id(0).to(tl.int64)
    offs_w = tl.arange(0, BLOCK_W)
    kept, before_kept = 0, 0
    if KEEP > 0:
        count = tl.load(counts_ptr + b)
        kept = tl.minimum(count, KEEP)
        before_kept = count - kept
    is_kept = offs_w < kept
    old = before_kept + offs_w  # [BLOCK_W]
    j = offs_w - kept
    inside = (j >= 0) & (j < P) & (offs_w < W)
    node = tl.maximum(tl.load(path_ptr + b * stride_pb + j, mask=inside, other=0), 0)
    token = tl.maximum(tl.load(emitted_ptr + b * stride_eb + j, mask=inside, other=0), 0)
    if KEEP > 0:
        token = tl.where(is_kept, tl.load(tokens_ptr + b * stride_tb + old, mask=is_kept, other=0), token)

    last_column: tl.constexpr = F if KEEP > 0 else 1  # without pairs to keep, a block for every program
    for begin in range(0, last_column, BLOCK_F):
        offs_f = begin + tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
        mask = (offs_w < W)[:, None] & (offs_f < F)[None, :]
        state_ptrs = states_ptr + b * stride_sb + node.to(tl.int64)[:, None] * stride_sn + offs_f[None, :]
        feature_ptrs = features_ptr + b * stride_fb + offs_f[None, :]
        pairs = tl.load(state_ptrs, mask=mask & (is_kept == 0)[:, None], other=0.0)  # [BLOCK_W, BLOCK_F]
        if KEEP > 0:
            kept_mask = mask & is_kept[:, None]
            before = tl.load(feature_ptrs + old.to(tl.int64)[:, None] * stride_fw, mask=kept_mask, other=0.0)
            pairs = tl.where(is_kept[:, None], before, pairs)
            tl.debug_barrier()  # what one thread writes, another has read
        tl.store(feature_ptrs + offs_w.to(tl.int64)[:, None] * stride_fw, pairs, mask=mask)

    if tl.program_id(1) == 0:
        if KEEP > 0:
            tl.debug_barrier()  # tokens and counts were read by every thread
        count = kept + tl.load(num_accepted_ptr + b) + 1
        tl.store(tokens_ptr + b * stride_tb + offs_w, token, mask=offs_w < W)
        tl.store(counts_ptr + b, count)
        tl.store(last_ptr + b, tl.maximum(count - 1, 0).to(tl.int64))


def _launch_config(num_places: int, width: int) -> LaunchConfig:
    """Tiles of about 4096 elements, 32 per thread."""
    block_w = triton.next_power_of_2(num_places)
    block_f = max(16, min(triton.next_power_of_2(max(width, 1)), 4096 // block_w))
    return LaunchConfig({"BLOCK_W": block_w, "BLOCK_F": block_f}, num_warps=max(1, min(8, block_w * block_f // 1024)))


@library.op(fake=lambda: None)
def commit_pairs(
    features_: torch.Tensor,
    tokens_: torch.Tensor,
    counts_: torch.Tensor,
    last_: torch.Tensor,
    states: torch.Tensor,
    path: torch.Tensor,
    emitted: torch.Tensor,
    num_accepted: torch.Tensor,
    *,
    keep: int = 0,
    backend: Backend | None = None,
) -> None:
    """Put the pairs of a step, the target's states at the accepted nodes and the tokens after them, in place.

    The newest `keep` pairs that were there stay, in front of the new ones.

    Args:
        features_: [B, W, F] float32, float16 or bfloat16, contiguous in F; F may be 0. Changed in place.
        tokens_: [B, W] int32, changed in place.
        counts_: [B] int32, real pairs of each row, 0 to W; changed in place.
        last_: [B] int64, changed in place to the place of each row's last real pair, 0 if there is none.
        states: [B, N, F] as `features_`, of all nodes of the tree.
        path: [B, P] int32, accepted nodes from the root down, -1 padded; P + keep is at most W.
        emitted: [B, P] int32, tokens that the step emitted, -1 padded.
        num_accepted: [B] int32, accepted draft tokens, at most P - 1; -1 for a row that emitted nothing.
        keep: how many of the newest pairs stay.
        backend: "triton" or "reference"; None decides by device.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, a negative `keep`, tensors on several devices.
    """
    check_tensor("features_", features_, shape=(None, None, None), dtype=FLOAT_DTYPES)
    batch, num_places, width = features_.shape
    device = features_.device
    if not 0 <= keep < num_places:
        raise ValueError(f"keep: expected 0 to {num_places - 1}, fewer than there are places, got {keep}")
    check_tensor("tokens_", tokens_, shape=(batch, num_places), dtype=torch.int32, device=device)
    check_tensor("counts_", counts_, shape=(batch,), dtype=torch.int32, device=device)
    check_tensor("last_", last_, shape=(batch,), dtype=torch.int64, device=device)
    check_tensor("states", states, shape=(batch, None, width), dtype=features_.dtype, device=device)
    check_tensor("path", path, shape=(batch, None), dtype=torch.int32, device=device)
    if path.shape[1] + keep > num_places:
        raise ValueError(f"path: expected at most {num_places - keep} nodes beside keep={keep}, got {path.shape[1]}")
    check_tensor("emitted", emitted, shape=path.shape, dtype=torch.int32, device=device)
    check_tensor("num_accepted", num_accepted, shape=(batch,), dtype=torch.int32, device=device)
    tensors = features_, tokens_, counts_, last_, states, path, emitted, num_accepted
    if resolve_backend(features_, backend) == "reference":
        commit_pairs_reference(*tensors, keep=keep)
        return
    if batch == 0:
        return

    config = _launch_config(num_places, width)
    grid = (batch, 1 if keep else max(1, triton.cdiv(width, config.blocks["BLOCK_F"])))
    strides = [*features_.stride()[:2], tokens_.stride(0), *states.stride()[:2], path.stride(0), emitted.stride(0)]
    sizes = num_places, width, path.shape[1], keep
    with on_device(features_):
        _commit_pairs_kernel[grid](*tensors, *strides, *sizes, **config.kwargs())
