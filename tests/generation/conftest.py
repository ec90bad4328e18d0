"""Fixtures of the tests of `generate`: a small LLaMA and a prompt for it."""

import pytest
import torch

from lib.families import build_model, random_prompts


@pytest.fixture
def model():
    return build_model("llama")


@pytest.fixture
def ids(generator):
    """[1, 8] a prompt."""
    return random_prompts(generator, [8])[0][None]


@pytest.fixture
def padded(generator):
    """Two prompts, the second with three pad tokens on its left, and their mask."""
    ids = torch.stack(random_prompts(generator, [8, 8])).clamp(min=6)
    ids[1, :3] = 0
    return ids, (ids != 0).long()
