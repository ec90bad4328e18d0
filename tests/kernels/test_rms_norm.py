"""kernels.rms_norm against float64, against the roundings of LlamaRMSNorm and against what a norm is."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, FLOATS, randn
from lib.tolerances import assert_op_close
from specdec.kernels.reference import rms_norm as reference
from specdec.kernels.rms_norm import MAX_WIDTH, _launch_config, add_rms_norm, rms_norm

EPS = 1e-5


assert_right = partial(assert_op_close, rms_norm, reference.rms_norm, eps=EPS)
assert_add_right = partial(assert_op_close, add_rms_norm, reference.add_rms_norm, eps=EPS)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_row_written_by_hand(backend):
    # the mean square of (1, 7, 5, 5) is 25
    x = torch.tensor([[1.0, 7.0, 5.0, 5.0]], device=DEVICE)
    weight = torch.tensor([1.0, 2.0, -1.0, 0.0], device=DEVICE)
    expected = torch.tensor([[0.2, 2.8, -1.0, 0.0]], device=DEVICE)
    torch.testing.assert_close(rms_norm(x, weight, eps=0.0, backend=backend), expected)
    normed, summed = add_rms_norm(x - 3, torch.full_like(x, 3.0), weight, eps=0.0, backend=backend)
    torch.testing.assert_close(normed, expected)
    assert torch.equal(summed, x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(12,), (1, 1), (3, 2), (2, 2, 7), (5, 64), (2, 3, 130), (1, 4096)], ids=str)
def test_matches_float64(generator, shape, dtype):
    x, residual = randn(generator, *shape, dtype=dtype), randn(generator, *shape, dtype=dtype)
    weight = randn(generator, shape[-1], dtype=dtype)
    assert_right(x, weight)
    assert_add_right(x, residual, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rounds_like_llama(generator, dtype):
    """Apart from the order of one sum, every rounding is that of LlamaRMSNorm, so nearly all elements are equal."""
    x, weight = randn(generator, 4, 256, dtype=dtype), randn(generator, 256, dtype=dtype)
    residual = randn(generator, 4, 256, dtype=dtype)
    normed, summed = add_rms_norm(x, residual, weight, eps=EPS, backend="triton")
    eager, eager_sum = reference.add_rms_norm(x, residual, weight, eps=EPS, upcast=False)
    assert torch.equal(summed, eager_sum)
    if dtype == torch.float16:
        assert (normed == eager).float().mean() > 0.98


def test_the_eager_reference_is_the_norm_of_transformers(generator):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    for dtype in FLOATS:
        norm = llama.LlamaRMSNorm(64, eps=EPS).to(device=DEVICE, dtype=dtype)
        with torch.no_grad():
            norm.weight.copy_(randn(generator, 64))
            x = randn(generator, 3, 64, dtype=dtype, scale=3.0)
            assert torch.equal(reference.rms_norm(x, norm.weight, eps=EPS, upcast=False), norm(x))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 70), st.integers(-12, 12))
def test_scaling_a_row_changes_nothing_but_eps(seed, num_rows, width, exponent):
    generator = torch.Generator().manual_seed(seed)
    x, weight = randn(generator, num_rows, width), randn(generator, width)
    factor = 2.0**exponent  # a power of two scales without rounding
    assert_right(factor * x, weight, eps=1e-6)
    # eps scales with the square; what is left is the rounding of eps to float32
    scaled = rms_norm(factor * x, weight, eps=1e-3 * factor**2, backend="triton")
    torch.testing.assert_close(scaled, rms_norm(x, weight, eps=1e-3, backend="triton"))


def test_a_row_of_zeros_gives_zeros():
    x, weight = torch.zeros(2, 24, device=DEVICE), torch.ones(24, device=DEVICE)
    assert torch.equal(rms_norm(x, weight, eps=EPS, backend="triton"), x)


def test_large_half_precision_values_do_not_overflow_in_the_square(generator):
    x = randn(generator, 2, 48, dtype=torch.float16, scale=8000.0)
    assert x.abs().max() > 256  # whose square is beyond float16
    assert_right(x, torch.ones(48, dtype=torch.float16, device=DEVICE))


def test_a_nan_stays_in_its_row(generator):
    x, weight = randn(generator, 3, 16), torch.ones(16, device=DEVICE)
    x[1, 3] = float("nan")
    normed = rms_norm(x, weight, eps=EPS, backend="triton")
    assert normed[1].isnan().all()
    assert normed[[0, 2]].isfinite().all()


def test_a_row_too_wide_is_refused():
    x = torch.ones(1, MAX_WIDTH + 1)
    with pytest.raises(ValueError, match="x: expected a last dimension of 1 to 32768"):
        rms_norm(x, x[0], eps=EPS)


@pytest.mark.parametrize(
    ("width", "block", "num_warps"), [(1, 1, 1), (64, 64, 1), (4096, 4096, 8), (5120, 8192, 16), (32768, 32768, 16)]
)
def test_launch_config(width, block, num_warps):
    config = _launch_config(width)
    assert config.blocks["BLOCK_C"] == block
    assert config.num_warps == num_warps
