"""Small tensors on the device that the tests run on."""

from functools import partial

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.float16, torch.bfloat16]

assert_near = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-5)
"""Equal but for the rounding of fp32 through some layers, which differs between processors."""


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def int64(values):
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def float32(values):
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def randn(generator, *shape, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(shape, generator=generator)).to(dtype).to(DEVICE)


def rand(generator, *shape):
    return torch.rand(shape, generator=generator).to(DEVICE)


def randint(generator, low, high, *shape, dtype=torch.int32):
    return torch.randint(low, high, shape, generator=generator, dtype=dtype).to(DEVICE)


def to_device(value):
    """A tensor on the device; anything else as it is."""
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value
