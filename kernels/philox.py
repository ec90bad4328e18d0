"""Philox4x32-10, the counter-based generator that all random numbers here come from; shared code in plain PyTorch.

Source:     Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", section 3.3
A number is a pure function of a key (a row's seed) and a counter (step, stream, index), so that it depends neither on
the batch around it nor on the device, and every decision can be replayed.
"""

import torch

__all__ = ["philox", "philox_exponential", "philox_uniform"]

_MASK = 0xFFFFFFFF


def philox(counters: tuple[torch.Tensor, ...], seed: int | torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Four words of 32 bits, in int64 tensors, for each counter.

    Args:
        counters: four int64 tensors that broadcast, of which the low 32 bits count.
        seed: 64-bit key; an int64 tensor gives every counter its own.
    """
    c0, c1, c2, c3 = (counter & _MASK for counter in torch.broadcast_tensors(*counters))
    key0, key1 = seed & _MASK, seed >> 32 & _MASK
    for _ in range(10):
        # products of two 32-bit words wrap around in int64, but keep their bits
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (product1 >> 32 & _MASK) ^ c1 ^ key0, (product0 >> 32 & _MASK) ^ c3 ^ key1
        c1, c3 = product1 & _MASK, product0 & _MASK
        key0, key1 = key0 + 0x9E3779B9 & _MASK, key1 + 0xBB67AE85 & _MASK
    return c0, c1, c2, c3


def philox_uniform(seeds: torch.Tensor, step: torch.Tensor, stream: int, count: int) -> torch.Tensor:
    """`count` uniforms per row, multiples of 2**-24 in [0, 1).

    Args:
        seeds: [B] int64 keys.
        step: [] int64.
        stream: what the numbers are for; each purpose within a step has its own.
        count: how many.

    Returns:
        [B, count] float32.
    """
    return (_words(seeds, step, stream, count) >> 8).float() * 2**-24


def philox_exponential(seeds: torch.Tensor, step: torch.Tensor, stream: int, count: int) -> torch.Tensor:
    """`count` exponential variates of rate 1 per row, [B, count] float32; arguments as of `philox_uniform`.

    All 32 bits of a word are used, so that an early arrival, which decides for an improbable token, is as exact as a
    late one.
    """
    uniform = (_words(seeds, step, stream, count).double() + 0.5) * 2**-32
    return -torch.log1p(-uniform).float()


def _words(seeds: torch.Tensor, step: torch.Tensor, stream: int, count: int) -> torch.Tensor:
    blocks = torch.arange((count + 3) // 4, device=seeds.device)[None]
    zero = torch.zeros_like(blocks)
    words = philox((blocks, zero + step, zero + stream, zero), seeds[:, None])
    return torch.stack(words, -1).flatten(1)[:, :count]
