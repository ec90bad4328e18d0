"""Uniform and exponential random numbers as functions of a row's seed and a counter, in one launch.

Equation:   r_i = word i mod 4 of Philox4x32-10 with key = seed, counter = (i div 4, step, stream, 0)
            philox_uniform      u_i = floor(r_i / 2^8) / 2^24
            philox_exponential  e_i = -log(1 - (r_i + 1/2) / 2^32)
Source:     Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011) section 3.3
Reference:  kernels/reference/philox_uniform.py

Shapes:     B rows, count numbers for each
            seeds    [B]         int64, all 64 bits are the key
            step     []          int64, on the device, so that a captured graph draws anew at each replay; the low 32
                                 bits count
            numbers  [B, count]  fp32
Cost:       writes 4*B*count bytes. Bound by the launch for the numbers of one verdict; by integer and fp64 arithmetic
            more than by bandwidth for those of a race over vocabularies
Edges:      no rows or no numbers give an empty tensor; the last block of a row is cut
Numerics:   uniforms are exact. An exponential is computed in fp64, where 1 - u is exact, and rounded once: it equals
            the definition, or its neighbour in fp32 where two fp64 logarithms fall on both sides of a rounding border.
            So the smallest, which decide for improbable tokens, are as exact as the largest
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_tensor
from specdec.kernels.common.launch import Backend, LaunchConfig, on_device, resolve_backend
from specdec.kernels.reference import philox_uniform as reference

__all__ = ["philox_exponential", "philox_uniform"]


@triton.jit
def _uniform(words):
    """Uniforms from words of 32 bits, by their upper 24, which fp32 holds."""
    return (words >> 8).to(tl.float32) * 2.0**-24


@triton.jit
def _exponential(words):
    """Exponential variates of rate 1 from words of 32 bits."""
    # in fp64 u is an odd multiple of 2^-33 below 1, and so is 1 - u: the logarithm's argument is not rounded
    return (-tl.log(1.0 - (words.to(tl.float64) + 0.5) * 2.0**-32)).to(tl.float32)


@triton.jit(do_not_specialize=["stream_id", "count"])
def _philox_uniform_kernel(
    seeds_ptr,  # [B]
    step_ptr,  # []
    numbers_ptr,  # [B, count]
    stream_id,
    count,
    EXPONENTIAL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes the numbers of BLOCK counters of one row, four each."""
    t = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    counter = (t * BLOCK + tl.arange(0, BLOCK)).to(tl.int32)
    zero = counter * 0
    step = tl.load(step_ptr).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(tl.load(seeds_ptr + b), counter, zero + step, zero + stream_id, zero)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # [4 * BLOCK], in the order of i
    numbers = _exponential(words) if EXPONENTIAL else _uniform(words)
    if IS_ALIGNED:
        count = count // 4 * 4  # the same, but the compiler sees it: four numbers go out as one
    offs = t * (4 * BLOCK) + tl.arange(0, 4 * BLOCK)
    tl.store(numbers_ptr + b * count + offs, numbers, mask=offs < count)


def _launch_config(count: int) -> LaunchConfig:
    """One warp for the numbers of a verdict; two counters a thread for those of a vocabulary."""
    block = 32 if count <= 128 else 256
    return LaunchConfig(blocks={"BLOCK": block, "IS_ALIGNED": count % 4 == 0}, num_warps=1 if block == 32 else 4)


def _empty_numbers(seeds: torch.Tensor, count: int) -> torch.Tensor:
    return seeds.new_empty((seeds.shape[0], count), dtype=torch.float32)


@library.op(fake=_empty_numbers)
def philox_uniform(
    seeds: torch.Tensor, step: torch.Tensor, *, stream: int, count: int, backend: Backend | None = None
) -> torch.Tensor:
    """Draw uniforms, multiples of 2**-24 in [0, 1): the same call gives the same numbers, whatever the other rows.

    Args:
        seeds: [B] int64 keys, contiguous.
        step: [] int64, on the device, of which the low 32 bits count; the host never reads it.
        stream: what the numbers are for, 0 to 2^31 - 1; each purpose within a step has its own.
        count: how many per row, 0 to 2^31 - 1.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        [B, count] float32, contiguous.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, a number out of range, tensors on several devices.
    """
    _check(seeds, step, stream, count)
    if resolve_backend(seeds, backend) == "reference":
        return reference.philox_uniform(seeds, step, stream=stream, count=count)
    return _launch(seeds, step, stream, count, exponential=False)


@library.op(fake=_empty_numbers)
def philox_exponential(
    seeds: torch.Tensor, step: torch.Tensor, *, stream: int, count: int, backend: Backend | None = None
) -> torch.Tensor:
    """Draw exponential variates of rate 1, from 1.2e-10 to 23.

    All 32 bits of a word are used, so that an early arrival, which decides for an improbable token, is as exact as a
    late one.

    Args:
        seeds: [B] int64 keys, contiguous.
        step: [] int64, on the device, of which the low 32 bits count; the host never reads it.
        stream: what the numbers are for, 0 to 2^31 - 1; each purpose within a step has its own.
        count: how many per row, 0 to 2^31 - 1.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        [B, count] float32, contiguous; on both backends the same but for a last bit, about once in 10^8 numbers.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, a number out of range, tensors on several devices.
    """
    _check(seeds, step, stream, count)
    if resolve_backend(seeds, backend) == "reference":
        return reference.philox_exponential(seeds, step, stream=stream, count=count)
    return _launch(seeds, step, stream, count, exponential=True)


def _check(seeds: torch.Tensor, step: torch.Tensor, stream: int, count: int) -> None:
    check_tensor("seeds", seeds, shape=(None,), dtype=torch.int64)
    check_tensor("step", step, shape=(), dtype=torch.int64, device=seeds.device)
    for name, number in (("stream", stream), ("count", count)):
        if not 0 <= number < 2**31:
            raise ValueError(f"{name}: expected 0 to 2**31 - 1, got {number}")


def _launch(seeds: torch.Tensor, step: torch.Tensor, stream: int, count: int, *, exponential: bool) -> torch.Tensor:
    numbers = torch.empty(seeds.shape[0], count, dtype=torch.float32, device=seeds.device)
    config = _launch_config(count)
    with on_device(seeds):
        _philox_uniform_kernel[(triton.cdiv(count, 4 * config.blocks["BLOCK"]), seeds.shape[0])](
            seeds, step, numbers, stream_id=stream, count=count, EXPONENTIAL=exponential, **config.kwargs()
        )
    return numbers
