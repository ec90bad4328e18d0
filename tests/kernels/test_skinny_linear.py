"""kernels.skinny_linear against float64, with and without a split of the columns."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, FLOATS, randn
from lib.tolerances import assert_op_close
from specdec.kernels.common.weight_first import choose_splits, weight_first_tiles
from specdec.kernels.reference.skinny_linear import skinny_linear as reference
from specdec.kernels.skinny_linear import MAX_ROWS, skinny_linear


def small_integers(generator, *shape):
    """Their products and sums are exact in any order."""
    return torch.randint(-2, 3, shape, generator=generator).float().to(DEVICE)


assert_right = partial(assert_op_close, skinny_linear, reference)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_product_written_by_hand(backend):
    x = torch.tensor([[1.0, 2.0], [0.0, -1.0]], device=DEVICE)
    weight = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 5.0]], device=DEVICE)
    expected = torch.tensor([[11.0, 1.0, 10.0], [-4.0, 0.0, -5.0]], device=DEVICE)
    assert torch.equal(skinny_linear(x, weight, backend=backend), expected)
    stacked = skinny_linear(torch.stack([x, -x]), torch.stack([weight, weight.flip(0)]), backend=backend)
    assert torch.equal(stacked, torch.stack([expected, -expected.flip(1)]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_columns"),
    [(1, 1, 1), (1, 64, 128), (5, 65, 33), (17, 3, 260), (33, 100, 64), (128, 70, 130), (2, 30, 1100)],
)
def test_matches_float64(generator, num_rows, num_outputs, num_columns, dtype):
    x, weight = randn(generator, num_rows, num_columns, dtype=dtype), randn(generator, num_outputs, num_columns)
    assert_right(x, weight.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_columns", [40, 1100])
def test_several_weights_match_float64(generator, num_columns, dtype):
    x, weight = randn(generator, 3, 2, num_columns, dtype=dtype), randn(generator, 3, 70, num_columns)
    assert_right(x, weight.to(dtype))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 150), st.integers(1, 1600))
def test_sums_of_integers_are_exact(seed, num_rows, num_outputs, num_columns):
    generator = torch.Generator().manual_seed(seed)
    x, weight = small_integers(generator, num_rows, num_columns), small_integers(generator, num_outputs, num_columns)
    assert torch.equal(skinny_linear(x, weight, backend="triton"), (x.double() @ weight.double().mT).float())


def test_a_nan_stays_in_its_row(generator):
    x, weight = randn(generator, 3, 1100), randn(generator, 66, 1100)
    x[1, 1099] = float("nan")
    out = skinny_linear(x, weight, backend="triton")
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_empty_dimensions():
    ones = torch.ones(4, 6, device=DEVICE)
    for backend in ("triton", "reference"):
        assert skinny_linear(ones, ones[:0], backend=backend).shape == (4, 0)
        assert skinny_linear(ones.expand(0, -1, -1), ones.expand(0, -1, -1), backend=backend).shape == (0, 4, 4)
        assert torch.equal(skinny_linear(ones[:, :0], ones[:, :0], backend=backend), torch.zeros(4, 4, device=DEVICE))


@pytest.mark.parametrize(
    ("num_tiles", "num_columns", "splits"),
    [(64, 4096, 4), (96, 4096, 2), (64, 11008, 4), (344, 4096, 1), (4, 256, 1), (2, 1024, 2), (8, 4096, 8), (0, 0, 1)],
)
def test_choose_splits(num_tiles, num_columns, splits):
    assert choose_splits(num_tiles, num_columns) == splits


@pytest.mark.parametrize(
    ("num_rows", "itemsize", "num_weights", "block_m", "block_k", "num_warps", "num_stages"),
    [
        (1, 2, 1, 16, 128, 4, 4),
        (32, 2, 1, 32, 128, 4, 4),
        (33, 2, 1, 64, 128, 4, 3),
        (MAX_ROWS, 2, 1, 128, 64, 4, 4),
        (500, 2, 1, 128, 64, 4, 4),
        (1, 2, 2, 16, 64, 4, 4),
        (MAX_ROWS, 2, 2, 128, 64, 8, 3),
        (64, 4, 1, 32, 32, 4, 3),
    ],
)
def test_tiles(num_rows, itemsize, num_weights, block_m, block_k, num_warps, num_stages):
    config = weight_first_tiles(num_rows, itemsize, num_weights=num_weights)
    assert config.blocks == {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_K": block_k}
    assert (config.num_warps, config.num_stages) == (num_warps, num_stages)


def test_two_programs_of_any_tile_fit_into_one_multiprocessor():
    for num_rows, itemsize, num_weights in itertools.product(range(1, 200), (2, 4), (1, 2)):
        config = weight_first_tiles(num_rows, itemsize, num_weights=num_weights)
        blocks = config.blocks
        stage_bytes = (num_weights * blocks["BLOCK_N"] + blocks["BLOCK_M"]) * blocks["BLOCK_K"] * itemsize
        assert config.num_stages >= 3
        assert 2 * (config.num_stages * stage_bytes + 1024) <= 227 * 1024
