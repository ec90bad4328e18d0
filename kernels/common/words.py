"""Sets of tree nodes as bits: bit j % 32 of the int32 word j // 32 is node j, and bit 31 is the sign. PyTorch alone."""

import torch
from torch.nn.functional import pad

__all__ = ["pack_words", "unpack_words"]


def pack_words(seen: torch.Tensor) -> torch.Tensor:
    """[..., M] bool -> [..., ceil(M / 32)] int32, on the same device and without waiting for it."""
    bits = pad(seen, (0, -seen.shape[-1] % 32)).unflatten(-1, (-1, 32)).int()
    return (bits << torch.arange(32, dtype=torch.int32, device=seen.device)).sum(-1, dtype=torch.int32)


def unpack_words(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """[..., W] int32 -> [..., num_bits] bool, the inverse of `pack_words`."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 1).bool().flatten(-2)[..., :num_bits]
