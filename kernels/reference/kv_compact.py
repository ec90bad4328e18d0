"""Eager reference of kernels.kv_compact: the definition, and what CPU decoding runs."""

import torch

__all__ = ["kv_compact"]


def kv_compact(cache_: torch.Tensor, lengths: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """Move the keys and values of the accepted nodes behind the prefix, in place.

    Shapes, dtypes and meaning are those of `specdec.kernels.kv_compact.kv_compact`; arguments are not checked.
    """
    for b, (length, count) in enumerate(zip(lengths.tolist(), num_accepted.tolist(), strict=True)):
        if count > 0:
            # indexing with a tensor copies, so every node is read before the first slot is written
            nodes = cache_[:, :, b, length + path[b, 1 : count + 1].long()]
            cache_[:, :, b, length + 1 : length + count + 1] = nodes
