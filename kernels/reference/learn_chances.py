"""Eager reference of kernels.learn_chances: the definition, and what CPU decoding runs."""

import numpy as np
import numpy.typing as npt
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
    tried: dict[tuple[int, int], list[int]] = {}  # right and tried, by row and cell
    agreed = [[0] * agreed_.shape[1] for _ in range(agreed_.shape[0])]
    text, pools = emitted.tolist(), zip(tokens.tolist(), parent.tolist(), cell.tolist(), strict=True)
    for row, (accepted, pool) in enumerate(zip(num_accepted.tolist(), pools, strict=True)):
        depth_of = [0] * len(members)  # of the candidates that the text goes through
        for index, (token, above, own_cell) in enumerate(zip(*pool, strict=True)):
            depth = 1 if above < 0 else depth_of[above] + 1 if depth_of[above] else 0
            if not 0 < depth <= accepted + 1 or own_cell >= num_cells:
                continue
            is_right = token == text[row][depth - 1]
            counted = tried.setdefault((row, own_cell), [0, 0])
            counted[0] += is_right
            counted[1] += 1
            if is_right:
                depth_of[index] = depth
                agreed[row][members[index]] += depth <= accepted
    # of tensors on the host these are the tensors' own memory
    tables = [tensor.cpu().numpy() for tensor in (counts_, totals_, chance_)]
    counts, totals, chance = tables
    if tried:
        agreed_ += torch.tensor(agreed, dtype=torch.int32, device=agreed_.device)
        rows, cells = np.array([*tried]).T
        found = np.array([*tried.values()], dtype=np.float32)
        counts[rows, cells] = np.float32(decay) * counts[rows, cells] + found
        totals[rows, cells] += found
    chance[:, :num_cells] = _estimate(counts, prior.cpu().numpy(), num_grades, np.float32(strength))
    for tensor, table in zip((counts_, totals_, chance_), tables, strict=True):
        if tensor.device.type != "cpu":
            tensor.copy_(torch.from_numpy(table))


def _estimate(
    counts: npt.NDArray[np.float32], prior: npt.NDArray[np.float32], num_grades: int, strength: np.float32
) -> npt.NDArray[np.float32]:
    """[B, C] chances that do not rise with the grade, of [B, C, 2] counts."""
    single = (counts[..., 0] + strength * prior) / (counts[..., 1] + strength)
    by_grade = single.reshape(counts.shape[0], counts.shape[1] // num_grades, num_grades)
    least_before = np.minimum.accumulate(by_grade, 2)
    most_behind = np.maximum.accumulate(by_grade[:, :, ::-1], 2)[:, :, ::-1]
    return ((least_before + most_behind) / np.float32(2)).reshape(single.shape)
