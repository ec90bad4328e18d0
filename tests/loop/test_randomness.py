"""specdec.common.randomness: where the numbers of a step come from, and by which kernels."""

import numpy as np
import pytest
import torch

from lib.families import build_model
from lib.recorder import Recording
from specdec.common.randomness import Stream, Uniforms, row_seeds
from specdec.drafting.base import Room
from specdec.kernels.common.library import as_ops
from specdec.loop.state import DecodeState
from specdec.models.target.target import Target


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_draw_is_one_op(backend, device):
    uniforms = Uniforms(row_seeds([1, 2], 2).to(device), backend=backend)
    with as_ops(), Recording() as recording:
        uniforms.draw(Stream.VERIFY, 7)
        uniforms.exponential(Stream.DRAFT + 1, 20)
    assert [func.name() for func, *_ in recording.calls] == ["specdec::philox_uniform", "specdec::philox_exponential"]


def test_both_backends_draw_the_same(device):
    ours, theirs = (Uniforms(row_seeds(5, 3).to(device), backend=backend) for backend in ("triton", "reference"))
    for _ in range(3):
        for uniforms in (ours, theirs):
            uniforms.step += 1
        assert torch.equal(ours.draw(Stream.NEXT_ROOT, 1), theirs.draw(Stream.NEXT_ROOT, 1))
        torch.testing.assert_close(ours.exponential(Stream.DRAFT, 50), theirs.exponential(Stream.DRAFT, 50))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_generation_draws_by_the_backend_of_its_target(backend, device):
    target = Target(build_model("llama").to(device), backend=backend)
    room = Room(batch_size=2, max_length=16, max_prompt=8, max_new_tokens=8)
    state = DecodeState.new(target, room, num_nodes=3, max_depth=2, device=target.device)
    assert state.uniforms.backend == backend


def test_integers_of_numpy_are_seeds():
    assert torch.equal(row_seeds(np.int64(3), 2), row_seeds(3, 2))
    assert torch.equal(row_seeds([np.uint8(3), 2**63], 2), row_seeds([3, 2**63], 2))
    assert torch.equal(row_seeds(np.uint64(2**64 - 1), 2), row_seeds(2**64 - 1, 2))
    for wrong in (True, [True, 1], 3.0, np.float64(3), "ab", np.bool_(True)):
        with pytest.raises(TypeError, match="seed: expected an int or one int per row, got"):
            row_seeds(wrong, 2)
