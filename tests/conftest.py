"""Fixtures of all tests. Without a GPU, Triton kernels run in Triton's interpreter."""

import os
import zlib

import pytest
import torch

# Triton reads this when @triton.jit runs, hence before any kernel is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import specdec
from lib.interpreter import mend_interpreter
from lib.tensors import DEVICE
from specdec.bundled.chat_model import cached

mend_interpreter()


def pytest_collection_modifyitems(items):
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs an NVIDIA GPU"
    if os.environ.get("TRITON_INTERPRET") != "1":
        reasons["interpreter"] = "needs Triton's interpreter: hide the GPU with CUDA_VISIBLE_DEVICES="
    if cached() is None:
        reasons["smollm2"] = "needs the chat model: specdec.load_model('smollm2') fetches it"
    for item in items:
        for marker, reason in reasons.items():
            if marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session")
def smollm2():
    """The chat model and its tokenizer, for tests marked `smollm2`."""
    return specdec.load_model("smollm2")


@pytest.fixture
def generator(request) -> torch.Generator:
    """Seeded by the test's file and name, so that adding a test or moving a file changes no other."""
    place, _, name = request.node.nodeid.partition("::")
    return torch.Generator().manual_seed(zlib.crc32(f"tests/{os.path.basename(place)}::{name}".encode()))


@pytest.fixture(autouse=True)
def poison_uninitialized_memory():
    """torch.empty yields NaN, the largest int, or True: a kernel that skips an element is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def reversed_programs(monkeypatch):
    """Run the programs of every launch from the last to the first; the list of their grid indices, as they ran."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("only the interpreter lets a test choose the order of the programs")
    from triton.runtime.interpreter import interpreter_builder

    indices = []
    set_grid_idx = interpreter_builder.set_grid_idx

    def set_reversed_grid_idx(*index):
        indices.append(tuple(size - 1 - i for size, i in zip(interpreter_builder.grid_dim, index, strict=True)))
        set_grid_idx(*indices[-1])

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_reversed_grid_idx)
    return indices
