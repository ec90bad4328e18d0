"""Eager reference of kernels.learn_chances: the definition, and what CPU decoding runs."""

import numpy as np
import torch

__all__ = ["learn_chances"]


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
) -> None:
    """Count which candidates the text went through, and estimate anew how often such candidates are right.

    Shapes, dtypes and meaning are those of `specdec.kernels.learn_chances.learn_chances`; arguments are not checked.
    """
    num_cells, members = prior.shape[0], member.tolist()
    learnt = np.zeros((tokens.shape[0], num_cells, 2), dtype=np.float32)
    agreed = np.zeros(agreed_.shape, dtype=np.int32)
    text, pools = emitted.tolist(), zip(tokens.tolist(), parent.tolist(), cell.tolist(), strict=True)
    for row, (accepted, pool) in enumerate(zip(num_accepted.tolist(), pools, strict=True)):
        depth_of = [0] * len(members)  # of the candidates that the text goes through
        for index, (token, above, own_cell) in enumerate(zip(*pool, strict=True)):
            depth = 1 if above < 0 else depth_of[above] + 1 if depth_of[above] else 0
            if not 0 < depth <= accepted + 1 or not own_cell < num_cells:
                continue
            is_right = token == text[row][depth - 1]
            learnt[row, own_cell] += (is_right, 1)
            if is_right:
                depth_of[index] = depth
                agreed[row, members[index]] += depth <= accepted
    new = torch.from_numpy(learnt).to(counts_.device)
    counts_.copy_(torch.where(new[..., 1:] > 0, decay * counts_ + new, counts_))
    totals_ += new
    agreed_ += torch.from_numpy(agreed).to(agreed_.device)
    chance_[:, :num_cells].copy_(_estimate(counts_, prior, num_grades, strength))


def _estimate(counts: torch.Tensor, prior: torch.Tensor, num_grades: int, strength: float) -> torch.Tensor:
    """[B, C] chances that do not rise with the grade."""
    single = (counts[..., 0] + strength * prior) / (counts[..., 1] + strength)
    by_grade = single.unflatten(1, (-1, num_grades))
    least_before = by_grade.cummin(-1).values
    most_behind = by_grade.flip(-1).cummax(-1).values.flip(-1)
    return ((least_before + most_behind) / 2).view(single.shape)
