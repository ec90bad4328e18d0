"""Eager reference of kernels.commit_pairs: the definition."""

import torch

__all__ = ["commit_pairs"]


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
) -> None:
    """Put the pairs of a step in the place of those that were read.

    Shapes, dtypes and meaning are those of `specdec.kernels.commit_pairs.commit_pairs`; arguments are not checked.
    """
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    if keep == 0 and path.shape[1] == features_.shape[1]:  # no pair moves, and every place gets one
        features_.copy_(states[rows, path.clamp(min=0)])
        tokens_.copy_(emitted.clamp(min=0))
        counts_.copy_(num_accepted + 1)
        last_.copy_(num_accepted.clamp(min=0))
        return
    kept = counts_.clamp(max=keep)[:, None]
    place = torch.arange(features_.shape[1], device=path.device)
    old = (counts_[:, None] - kept + place).clamp(max=features_.shape[1] - 1)
    new = place - kept
    is_kept, inside = new < 0, (new >= 0) & (new < path.shape[1])
    new = torch.where(inside, new, 0)
    node = torch.where(inside, path.gather(1, new.long()), 0).clamp(min=0)
    token = torch.where(inside, emitted.gather(1, new.long()), 0).clamp(min=0)
    features = torch.where(is_kept[:, :, None], features_[rows, old], states[rows, node])
    features_.copy_(features)
    tokens_.copy_(torch.where(is_kept, tokens_[rows, old], token))
    counts_.copy_(kept[:, 0] + num_accepted + 1)
    last_.copy_((counts_ - 1).clamp(min=0))
