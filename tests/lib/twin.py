"""A small twin of a large model with random weights, as the decoding benchmark makes them."""

import torch

from specdec.bench.common.shapes import ModelShape
from specdec.bench.decoding.simulated import random_target
from specdec.models.target.target import Target

SHAPE = ModelShape("twin", 7, 64, 96, 4, 2, 16, 256)


def twin_target(dtype: torch.dtype = torch.float32) -> Target:
    """The twin, whose text counts upwards."""
    return Target(random_target(SHAPE, max_positions=256, device="cpu", dtype=dtype))


def twin_prompts() -> list[torch.Tensor]:
    """Two prompts of twelve tokens."""
    return list(torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1)))
