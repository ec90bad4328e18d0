"""Philox4x32-10, the counter-based generator that all random numbers here come from; shared code in plain PyTorch.

Source:     Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", section 3.3
A number is a pure function of a key (a row's seed) and a counter (step, stream, index), so that it depends neither on
the batch around it nor on the device, and every decision can be replayed.
"""

import torch

__all__ = ["philox"]

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
