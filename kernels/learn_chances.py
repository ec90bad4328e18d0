"""How often the candidates of several drafters are right, learnt from every step: counts, and chances from them.

Equation:   a candidate is tried if everything above it is right and its depth is at most num_accepted[b] + 1; it is
            right if it is the token that was emitted at its depth. With (right, tried) the numbers of a cell's
            candidates,
            counts = decay * counts + (right, tried)  in the cells with tried > 0;  totals = totals + (right, tried)
            single = (counts_right + strength * prior) / (counts_tried + strength)
            chance[.., j] = (min over i <= j of single[.., i] + max over i >= j of single[.., i]) / 2,  j the grade
            agreed[member] counts its right candidates of a depth up to num_accepted[b]
Source:     a count that forgets, with a prior of `strength` tries; the middle of the two monotone envelopes, as a
            closed form in place of isotonic regression
Reference:  kernels/reference/learn_chances.py (exact)

Shapes:     B requests, M candidates each, C cells = (any) * num_grades, P tokens of the longest step, J drafters
            tokens, parent  [B, M]     int32, as for `tree_merge`
            cell            [B, M]     int32, cell of each candidate; C or more: none
            member          [M]        int32, 0 to 30, the drafter that proposes it
            emitted         [B, P]     int32, tokens of the step, -1 padded
            num_accepted    [B]        int32, draft tokens accepted; -1 for a finished row
            prior           [C]        fp32
            counts_         [B, C, 2]  fp32, right and tried, decayed
            totals_         [B, C, 2]  fp32, right and tried
            chance_         [B, C + 1] fp32; the last entry is not written
            agreed_         [B, J]     int32
Cost:       reads 4 * (3 * B + 1) * M, reads and writes 4 * B * (5 * C + J); about 6 * M * C integer operations a row. A
            few kB: bound by latency, one program per request
Edges:      a finished row counts nothing; its chances are what its counts give, as ever
Numerics:   numbers of candidates are exact; a product is rounded before it meets a sum, and a quotient to nearest, as
            in eager PyTorch
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_parent, check_tensor
from specdec.kernels.common.launch import Backend, LaunchConfig, on_device, resolve_backend
from specdec.kernels.reference.learn_chances import learn_chances as learn_chances_reference
from specdec.kernels.tree_merge import MAX_DRAFTERS, MAX_POOL

__all__ = ["MAX_CELLS", "learn_chances"]

MAX_CELLS = 1024
"""Most cells of a table: each is compared with each candidate."""

_STRIDES = ["stride_tb", "stride_pb", "stride_cb", "stride_eb", "stride_nb", "stride_nc", "stride_sb", "stride_sc"]


@triton.jit
def _smaller(x, y):
    return tl.minimum(x, y)


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y)


@triton.jit
def _follow_text(token, parent, is_candidate, emitted_ptr, deepest):
    """Whether the text tries each candidate, and the depth of those that are right, -1 of others."""
    is_tried = is_candidate & (token != token)
    right_at = tl.full(token.shape, -1, tl.int32)
    d = 1
    while d <= deepest:
        depth_above = tl.where(parent < 0, 0, tl.gather(right_at, tl.maximum(parent, 0), 0))
        is_here = is_candidate & (depth_above == d - 1)
        is_tried = is_tried | is_here
        right_at = tl.where(is_here & (token == tl.load(emitted_ptr + d - 1)), d, right_at)
        d += 1
    return is_tried, right_at


@triton.jit
def _monotone(single, is_cell, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr):
    """The middle of the least up to each grade and the most from it on; anything where there is no cell."""
    up_to = tl.reshape(tl.where(is_cell, single, float("inf")), [BLOCK_R, BLOCK_G])
    from_it = tl.reshape(tl.where(is_cell, single, float("-inf")), [BLOCK_R, BLOCK_G])
    least = tl.associative_scan(up_to, 1, _smaller)
    most = tl.associative_scan(from_it, 1, _larger, reverse=True)
    return tl.reshape((least + most) * 0.5, [BLOCK_R * BLOCK_G])


@triton.jit(do_not_specialize=[*_STRIDES, "stride_hb", "stride_ab", "P"])
def _learn_chances_kernel(
    tokens_ptr,  # [B, M]
    parent_ptr,  # [B, M]
    cell_ptr,  # [B, M]
    member_ptr,  # [M]
    emitted_ptr,  # [B, P]
    num_accepted_ptr,  # [B]
    prior_ptr,  # [C]
    counts_ptr,  # [B, C, 2]
    totals_ptr,  # [B, C, 2]
    chance_ptr,  # [B, C + 1]
    agreed_ptr,  # [B, J]
    stride_tb,
    stride_pb,
    stride_cb,
    stride_eb,
    stride_nb,
    stride_nc,
    stride_sb,
    stride_sc,
    stride_hb,
    stride_ab,
    P,
    decay,
    strength,
    M: tl.constexpr,
    C: tl.constexpr,
    J: tl.constexpr,
    GRADES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """One program learns from one request, its candidates and its table in registers."""
    b = tl.program_id(0).to(tl.int64)
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    token = tl.load(tokens_ptr + b * stride_tb + offs_m, mask=mask_m, other=0)
    parent = tl.load(parent_ptr + b * stride_pb + offs_m, mask=mask_m, other=0)
    cell = tl.load(cell_ptr + b * stride_cb + offs_m, mask=mask_m, other=C)
    member = tl.load(member_ptr + offs_m, mask=mask_m, other=-1)
    num_accepted = tl.load(num_accepted_ptr + b)
    is_candidate = (cell >= 0) & (cell < C) & (parent < offs_m)
    parent = tl.where(is_candidate, parent, -1)
    deepest = tl.minimum(num_accepted + 1, P)
    is_tried, right_at = _follow_text(token, parent, is_candidate, emitted_ptr + b * stride_eb, deepest)
    is_right = right_at > 0

    # a block of grades for every kind of cell, so that grades are an axis
    offs_c = tl.arange(0, BLOCK_R * BLOCK_G)
    c = offs_c // BLOCK_G * GRADES + offs_c % BLOCK_G
    mask_c = (offs_c % BLOCK_G < GRADES) & (c < C)
    offs_j = tl.arange(0, BLOCK_J)
    num_right = tl.zeros([BLOCK_R * BLOCK_G], tl.int32)
    num_tried = tl.zeros([BLOCK_R * BLOCK_G], tl.int32)
    num_agreed = tl.zeros([BLOCK_J], tl.int32)
    of_cell = tl.where(is_tried, cell * 2 + is_right.to(tl.int32), -1)
    of_member = tl.where(is_right & (right_at <= num_accepted), member, -1)
    for begin in range(0, M, BLOCK_T):
        tile = begin + tl.arange(0, BLOCK_T)
        theirs = tl.gather(of_cell, tile, 0)[:, None]  # [BLOCK_T, 1]
        num_right += tl.sum((theirs == (c * 2 + 1)[None, :]).to(tl.int32), 0)
        num_tried += tl.sum((theirs >> 1 == c[None, :]).to(tl.int32), 0)
        num_agreed += tl.sum((tl.gather(of_member, tile, 0)[:, None] == offs_j[None, :]).to(tl.int32), 0)
    agreed_ptrs = agreed_ptr + b * stride_ab + offs_j
    tl.store(agreed_ptrs, tl.load(agreed_ptrs, mask=offs_j < J, other=0) + num_agreed, mask=offs_j < J)

    new_right, new_tried = num_right.to(tl.float32), num_tried.to(tl.float32)
    total_ptrs = totals_ptr + b * stride_sb + c.to(tl.int64) * stride_sc
    tl.store(total_ptrs, tl.load(total_ptrs, mask=mask_c, other=0.0) + new_right, mask=mask_c)
    tl.store(total_ptrs + 1, tl.load(total_ptrs + 1, mask=mask_c, other=0.0) + new_tried, mask=mask_c)
    count_ptrs = counts_ptr + b * stride_nb + c.to(tl.int64) * stride_nc
    right = tl.load(count_ptrs, mask=mask_c, other=0.0)
    tried = tl.load(count_ptrs + 1, mask=mask_c, other=0.0)
    factor, weight = tl.cast(decay, tl.float32), tl.cast(strength, tl.float32)
    right = tl.where(num_tried > 0, factor * right + new_right, right)
    tried = tl.where(num_tried > 0, factor * tried + new_tried, tried)
    tl.store(count_ptrs, right, mask=mask_c)
    tl.store(count_ptrs + 1, tried, mask=mask_c)
    prior = tl.load(prior_ptr + c, mask=mask_c, other=0.0)
    single = tl.div_rn(right + weight * prior, tried + weight)
    chance = _monotone(single, mask_c, BLOCK_R, BLOCK_G)
    tl.store(chance_ptr + b * stride_hb + c, chance, mask=mask_c)


def _launch_config(pool_size: int, num_cells: int, num_grades: int, num_members: int) -> LaunchConfig:
    """Tiles of 16 candidates, up to 64 comparisons with cells a lane; products are rounded by definition."""
    block_m = triton.next_power_of_2(pool_size)
    blocks = {
        "BLOCK_M": block_m,
        "BLOCK_T": min(16, block_m),
        "BLOCK_R": triton.next_power_of_2(num_cells // num_grades),
        "BLOCK_G": triton.next_power_of_2(num_grades),
        "BLOCK_J": triton.next_power_of_2(num_members),
    }
    widest = max(block_m, blocks["BLOCK_R"] * blocks["BLOCK_G"])
    return LaunchConfig(blocks, num_warps=max(1, min(8, widest // 64)), fuses_products=False)


@library.op(fake=lambda: None)
def learn_chances(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    cell: torch.Tensor,
    member: torch.Tensor,
    emitted: torch.Tensor,
    num_accepted: torch.Tensor,
    prior: torch.Tensor,
    counts_: torch.Tensor,
    totals_: torch.Tensor,
    chance_: torch.Tensor,
    agreed_: torch.Tensor,
    *,
    num_grades: int,
    decay: float,
    strength: float,
    backend: Backend | None = None,
) -> None:
    """Count which candidates the text went through, and estimate anew how often such candidates are right, in place.

    Args:
        tokens: [B, M] int32, contiguous in M, candidates of all drafters; M is 1 to 512.
        parent: [B, M] int32, contiguous in M, place of the candidate behind which each stands, an earlier one; -1 for
            the root. Checked on the CPU only; on a GPU a candidate of another parent is never tried.
        cell: [B, M] int32, contiguous in M, cell of the table that each candidate belongs to, 0 or more. With C or more
            it is no candidate, and neither counted nor is what stands behind it.
        member: [M] int32, number of the drafter that proposes each candidate, 0 to J - 1.
        emitted: [B, P] int32, contiguous in P, tokens that the step emitted, -1 padded.
        num_accepted: [B] int32, draft tokens accepted, at most P - 1; -1 for a finished row, which counts nothing.
        prior: [C] float32, chance of a cell that nothing is known of; C is 1 to 1024, a multiple of `num_grades`.
        counts_: [B, C, 2] float32, how many candidates of a cell were right and how many were tried, of late; changed
            in place.
        totals_: [B, C, 2] float32, the same without decay, changed in place.
        chance_: [B, C + 1] float32, estimate of every cell, changed in place; the last entry is left as it is.
        agreed_: [B, J] int32, accepted tokens that each drafter had proposed, J up to 31; changed in place.
        num_grades: cells of one kind, which lie next to each other, by grade; their chances do not rise with it.
        decay: what the counts of a cell are multiplied by when it is tried again, 0 to 1.
        strength: how many tries the prior is worth, above 0.
        backend: "triton" or "reference"; None decides by device.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, too many candidates or cells, a number out of range, a parent that is no
            earlier place (CPU only), tensors on several devices.
    """
    check_tensor("tokens", tokens, shape=(None, None), dtype=torch.int32)
    batch, pool_size = tokens.shape
    device = tokens.device
    if not 1 <= pool_size <= MAX_POOL:
        raise ValueError(f"tokens: expected 1 to {MAX_POOL} candidates per request, got {pool_size}")
    check_tensor("parent", parent, shape=(batch, pool_size), dtype=torch.int32, device=device)
    check_parent(parent)
    check_tensor("cell", cell, shape=(batch, pool_size), dtype=torch.int32, device=device)
    check_tensor("member", member, shape=(pool_size,), dtype=torch.int32, device=device)
    check_tensor("emitted", emitted, shape=(batch, None), dtype=torch.int32, device=device)
    check_tensor("num_accepted", num_accepted, shape=(batch,), dtype=torch.int32, device=device)
    check_tensor("agreed_", agreed_, shape=(batch, None), dtype=torch.int32, device=device)
    if not 1 <= agreed_.shape[1] <= MAX_DRAFTERS:
        raise ValueError(f"agreed_: expected 1 to {MAX_DRAFTERS} drafters, got {agreed_.shape[1]}")
    _check_table(batch, prior, counts_, totals_, chance_, num_grades=num_grades, device=device)
    if not 0 <= decay <= 1:
        raise ValueError(f"decay: expected 0 to 1, got {decay}")
    if not strength > 0:
        raise ValueError(f"strength: expected more than 0, got {strength}")
    tensors = tokens, parent, cell, member, emitted, num_accepted, prior, counts_, totals_, chance_, agreed_
    if resolve_backend(tokens, backend) == "reference":
        learn_chances_reference(*tensors, num_grades=num_grades, decay=decay, strength=strength)
        return

    config = _launch_config(pool_size, prior.shape[0], num_grades, agreed_.shape[1])
    rows = tokens.stride(0), parent.stride(0), cell.stride(0), emitted.stride(0)
    strides = *rows, *counts_.stride()[:2], *totals_.stride()[:2], chance_.stride(0), agreed_.stride(0)
    numbers = emitted.shape[1], decay, strength, pool_size, prior.shape[0], agreed_.shape[1], num_grades
    with on_device(tokens):
        _learn_chances_kernel[(batch,)](*tensors, *strides, *numbers, **config.kwargs())


def _check_table(
    batch: int,
    prior: torch.Tensor,
    counts_: torch.Tensor,
    totals_: torch.Tensor,
    chance_: torch.Tensor,
    *,
    num_grades: int,
    device: torch.device,
) -> None:
    """Check the tensors with an entry per cell."""
    check_tensor("prior", prior, shape=(None,), dtype=torch.float32, device=device)
    num_cells = prior.shape[0]
    if not 1 <= num_cells <= MAX_CELLS:
        raise ValueError(f"prior: expected 1 to {MAX_CELLS} cells, got {num_cells}")
    if num_grades < 1 or num_cells % num_grades:
        raise ValueError(f"num_grades: expected a divisor of the {num_cells} cells, got {num_grades}")
    check_tensor("counts_", counts_, shape=(batch, num_cells, 2), dtype=torch.float32, device=device)
    check_tensor("totals_", totals_, shape=(batch, num_cells, 2), dtype=torch.float32, device=device)
    check_tensor("chance_", chance_, shape=(batch, num_cells + 1), dtype=torch.float32, device=device)
