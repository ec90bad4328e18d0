"""kernels.draft_heads against float64, against plain PyTorch modules and against what a residual block is."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, FLOATS, randn
from lib.tolerances import assert_op_close
from specdec.kernels.draft_heads import MAX_PARTS, draft_heads, draft_heads_concat
from specdec.kernels.reference import draft_heads as reference

# numpy, under the interpreter, reports the overflow to infinity behind SiLU(-1000) = 0
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def heads(generator, num_heads, width, dtype=torch.float32):
    """Weights and biases of `num_heads` blocks."""
    weight = randn(generator, num_heads, width, width, dtype=dtype, scale=width**-0.5)
    return weight, randn(generator, num_heads, width, dtype=dtype)


def hydra(generator, num_parts, num_rows, width, dtype=torch.float32):
    """Parts, weight, bias, residual weight and residual bias of one block."""
    parts = [randn(generator, num_rows, width, dtype=dtype) for _ in range(num_parts)]
    matrices = [
        randn(generator, width, num_parts * width, dtype=dtype, scale=(num_parts * width) ** -0.5) for _ in "WR"
    ]
    biases = [randn(generator, width, dtype=dtype) for _ in "WR"]
    return parts, matrices[0], biases[0], matrices[1], biases[1]


assert_right = partial(assert_op_close, draft_heads, reference.draft_heads)
assert_concat_right = partial(assert_op_close, draft_heads_concat, reference.draft_heads_concat)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_block_written_by_hand(backend):
    # SiLU(0) = 0 and SiLU(log 3) = 3/4 log 3
    x = torch.tensor([[1.0, 2.0]], device=DEVICE)
    weight = torch.tensor([[[2.0, -1.0], [0.0, 0.0]]], device=DEVICE)
    bias = torch.tensor([[0.0, math.log(3)]], device=DEVICE)
    expected = torch.tensor([[[1.0, 2.0 + 0.75 * math.log(3)]]], device=DEVICE)
    torch.testing.assert_close(draft_heads(x, weight, bias, backend=backend), expected)

    # with R = (0 1 | 1 0; 1 0 | 0 1) on the parts (1, 2) and (10, 20), and r = (100, 200)
    residual_weight = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0]], device=DEVICE)
    wide = torch.cat([weight[0], torch.zeros_like(weight[0])], dim=1)
    out = draft_heads_concat(
        [x, 10 * x], wide, bias[0], residual_weight, torch.tensor([100.0, 200.0], device=DEVICE), backend=backend
    )
    torch.testing.assert_close(out, torch.tensor([[112.0, 221.0 + 0.75 * math.log(3)]], device=DEVICE))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "batch", "width"), [(1, 1, 1), (4, 3, 33), (2, 17, 64), (3, 1, 130), (1, 70, 20)]
)
def test_matches_float64(generator, num_heads, batch, width, dtype):
    weight, bias = heads(generator, num_heads, width, dtype)
    assert_right(randn(generator, batch, width, dtype=dtype), weight, bias)
    assert_right(randn(generator, num_heads, batch, width, dtype=dtype), weight, bias)


def test_a_wide_head_is_split_along_its_columns(generator):
    weight, bias = heads(generator, 1, 1100, torch.float16)
    assert_right(randn(generator, 2, 1100, dtype=torch.float16), weight, bias)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("num_parts", "num_rows", "width"),
    [(1, 1, 1), (2, 3, 33), (5, 17, 64), (3, 70, 20), (MAX_PARTS, 1, 8), (MAX_PARTS, 2, 70)],
)
def test_concatenated_parts_match_float64(generator, num_parts, num_rows, width, dtype):
    parts, *weights = hydra(generator, num_parts, num_rows, width, dtype)
    assert_concat_right(parts, *weights)
    assert_concat_right(parts, *weights[:3])


def test_the_reference_is_the_authors_block(generator):
    """Hydra's ResBlock of PyTorch modules: a linear layer, SiLU, and a linear layer on the way past."""
    parts, weight, bias, residual_weight, residual_bias = hydra(generator, 3, 4, 24)
    linear, past = torch.nn.Linear(72, 24, device=DEVICE), torch.nn.Linear(72, 24, device=DEVICE)
    with torch.no_grad():
        for module, values in ((linear, (weight, bias)), (past, (residual_weight, residual_bias))):
            module.weight.copy_(values[0])
            module.bias.copy_(values[1])
        wide = torch.cat(parts, dim=1)
        expected = past(wide) + torch.nn.SiLU()(linear(wide))
    got = reference.draft_heads_concat(parts, weight, bias, residual_weight, residual_bias)
    torch.testing.assert_close(got, expected)


def test_one_part_without_a_residual_weight_is_a_plain_block(generator):
    weight, bias = heads(generator, 1, 40)
    x = randn(generator, 3, 40)
    for backend in ("triton", "reference"):
        got = draft_heads_concat([x], weight[0], bias[0], backend=backend)
        torch.testing.assert_close(got, reference.draft_heads(x, weight, bias)[0])
    torch.testing.assert_close(reference.draft_heads_concat([x], weight[0], bias[0]), got)


def test_a_block_of_zeros_passes_its_input_on(generator):
    x = randn(generator, 2, 50)
    zeros = torch.zeros(3, 50, 50, device=DEVICE)
    assert torch.equal(draft_heads(x, zeros, zeros[:, 0], backend="triton"), x.expand(3, -1, -1))


def test_large_gates_do_not_overflow():
    x = torch.zeros(1, 4, device=DEVICE)
    bias = torch.tensor([[1000.0, -1000.0, 100.0, -100.0]], device=DEVICE)
    expected = torch.tensor([[[1000.0, 0.0, 100.0, 0.0]]], device=DEVICE)
    got = draft_heads(x, torch.zeros(1, 4, 4, device=DEVICE), bias, backend="triton")
    torch.testing.assert_close(got, expected)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 5), st.integers(1, 80))
def test_a_head_and_a_row_do_not_know_the_others(seed, num_heads, batch, width):
    generator = torch.Generator().manual_seed(seed)
    weight, bias = heads(generator, num_heads, width)
    x = randn(generator, batch, width)
    together = draft_heads(x, weight, bias, backend="triton")
    alone = draft_heads(x[1:2], weight[-1:], bias[-1:], backend="triton")
    assert torch.equal(alone[0, 0], together[-1, 1])
    own = draft_heads(x.repeat(num_heads, 1, 1), weight, bias, backend="triton")
    assert torch.equal(own, together)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 20), st.integers(1, 90))
def test_sums_over_parts_of_integers_are_exact(seed, num_parts, num_rows, width):
    """With a gate of zeros the block is R cat(parts) + r, which small integers make exact."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape):
        return torch.randint(-2, 3, shape, generator=generator).float().to(DEVICE)

    parts = [integers(num_rows, width) for _ in range(num_parts)]
    residual_weight, residual_bias = integers(width, num_parts * width), integers(width)
    zeros = torch.zeros_like(residual_weight)
    out = draft_heads_concat(parts, zeros, zeros[0, :width], residual_weight, residual_bias, backend="triton")
    assert torch.equal(out, torch.cat(parts, dim=1) @ residual_weight.T + residual_bias)


def test_a_nan_stays_in_its_row(generator):
    weight, bias = heads(generator, 2, 70)
    x = randn(generator, 3, 70)
    x[1, 69] = float("nan")
    out = draft_heads(x, weight, bias, backend="triton")
    assert out[:, 1].isnan().all()
    assert out[:, [0, 2]].isfinite().all()
    parts, *weights = hydra(generator, 3, 2, 70)
    parts[2][1, 69] = float("nan")
    out = draft_heads_concat(parts, *weights, backend="triton")
    assert out[1].isnan().all()
    assert out[0].isfinite().all()


def test_no_heads(generator):
    weight, bias = heads(generator, 0, 12)
    for backend in ("triton", "reference"):
        assert draft_heads(randn(generator, 3, 12), weight, bias, backend=backend).shape == (0, 3, 12)
