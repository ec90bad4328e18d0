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
"""

import torch

from specdec.kernels.common import library
from specdec.kernels.common.check import check_parent, check_tensor
from specdec.kernels.common.launch import Backend, resolve_backend
from specdec.kernels.reference.learn_chances import learn_chances as learn_chances_reference
from specdec.kernels.tree_merge import MAX_POOL

__all__ = ["MAX_CELLS", "learn_chances"]

MAX_CELLS = 1024
"""Most cells of a table: each is compared with each candidate."""


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
        agreed_: [B, J] int32, accepted tokens that each drafter had proposed; changed in place.
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
    _check_table(batch, prior, counts_, totals_, chance_, num_grades=num_grades, device=device)
    if not 0 <= decay <= 1:
        raise ValueError(f"decay: expected 0 to 1, got {decay}")
    if not strength > 0:
        raise ValueError(f"strength: expected more than 0, got {strength}")
    tensors = tokens, parent, cell, member, emitted, num_accepted, prior, counts_, totals_, chance_, agreed_
    if resolve_backend(tokens, backend) == "reference":
        learn_chances_reference(*tensors, num_grades=num_grades, decay=decay, strength=strength)
        return
    raise NotImplementedError("learn_chances: the kernel is being written")


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
