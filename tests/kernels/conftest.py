"""Fixtures of the kernel tests."""

import importlib

import pytest
import torch

from lib.tiles import torch_tiles


@pytest.fixture
def quick_tiles(monkeypatch):
    """In the interpreter the statistics of tiles come from PyTorch, so that thousands of trees can be walked.

    They take most programs of an acceptance, and have tests of their own.
    """
    if not torch.cuda.is_available():
        for name in ("accept_naive", "accept_rejection", "accept_traversal", "accept_typical"):
            monkeypatch.setattr(importlib.import_module(f"specdec.kernels.{name}"), "softmax_tiles", torch_tiles)
