"""Eager reference of kernels.philox_uniform: the definition, and what CPU decoding runs."""

import torch

from specdec.kernels.common.philox import philox

__all__ = ["philox_exponential", "philox_uniform"]


def philox_uniform(seeds: torch.Tensor, step: torch.Tensor, *, stream: int, count: int) -> torch.Tensor:
    """Uniforms, multiples of 2**-24 in [0, 1).

    Shapes, dtypes and meaning are those of `specdec.kernels.philox_uniform.philox_uniform`; arguments are not checked.
    """
    return (_words(seeds, step, stream, count) >> 8).float() * 2**-24


def philox_exponential(seeds: torch.Tensor, step: torch.Tensor, *, stream: int, count: int) -> torch.Tensor:
    """Exponential variates of rate 1, in float64 from all 32 bits of a word, rounded once.

    Shapes, dtypes and meaning are those of `specdec.kernels.philox_uniform.philox_exponential`; arguments are not
    checked.
    """
    uniform = (_words(seeds, step, stream, count).double() + 0.5) * 2**-32
    return -torch.log1p(-uniform).float()


def _words(seeds: torch.Tensor, step: torch.Tensor, stream: int, count: int) -> torch.Tensor:
    """[B, count] int64: word i of a row is word i % 4 of the block with counter (i // 4, step, stream, 0)."""
    blocks = torch.arange((count + 3) // 4, device=seeds.device)[None]
    zero = torch.zeros_like(blocks)
    words = philox((blocks, zero + step, zero + stream, zero), seeds[:, None])
    return torch.stack(words, -1).flatten(1)[:, :count]
