"""kernels.swiglu against float64, against transformers' MLP and against what a gate is."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, FLOATS, randn
from lib.tolerances import assert_op_close
from specdec.kernels.reference.swiglu import swiglu as reference
from specdec.kernels.swiglu import _launch_config, swiglu

# exp(-gate) of a large negative gate is inf, which makes the right zero; numpy says so in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


assert_right = partial(assert_op_close, swiglu, reference)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_row_written_by_hand(backend):
    # silu(0) = 0, silu(ln 3) = ln 3 * 3 / 4, silu(-ln 3) = -ln 3 / 4
    gate_up = torch.tensor([[0.0, math.log(3), -math.log(3), 5.0, 4.0, -8.0]], device=DEVICE)
    expected = torch.tensor([[0.0, 3 * math.log(3), 2 * math.log(3)]], device=DEVICE)
    torch.testing.assert_close(swiglu(gate_up, backend=backend), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(12,), (1, 2), (3, 6), (2, 2, 14), (2, 2048), (5, 130), (2, 3, 2200)], ids=str)
def test_matches_float64(generator, shape, dtype):
    assert_right(randn(generator, *shape, dtype=dtype, scale=3.0))


def test_the_eager_reference_is_the_gate_of_transformers(generator):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=6, intermediate_size=10, num_attention_heads=1)
    for dtype in FLOATS:
        mlp = llama.LlamaMLP(config).to(device=DEVICE, dtype=dtype)
        mlp.down_proj = torch.nn.Identity()
        x = randn(generator, 3, 6, dtype=dtype)
        with torch.no_grad():
            gate_up = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1)
            assert torch.equal(reference(gate_up, upcast=False), mlp(x))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 70), st.sampled_from([0.1, 1.0, 30.0]))
def test_any_size_matches_float64(seed, num_rows, width, scale):
    assert_right(randn(torch.Generator().manual_seed(seed), num_rows, 2 * width, scale=scale))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 70), st.integers(-8, 8))
def test_is_linear_in_the_second_half(seed, width, exponent):
    gate_up = randn(torch.Generator().manual_seed(seed), 2, 2 * width)
    scaled = gate_up.clone()
    scaled[:, width:] *= 2.0**exponent  # a power of two scales without rounding
    assert torch.equal(swiglu(scaled, backend="triton"), 2.0**exponent * swiglu(gate_up, backend="triton"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_extreme_gates(dtype):
    huge = 0.9 * torch.finfo(dtype).max
    gate_up = torch.tensor([[huge, -huge, -0.0, 200.0, -200.0, 1, 1, 1, 1, 1]], dtype=dtype, device=DEVICE)
    got = swiglu(gate_up, backend="triton")
    assert got[0, 0] > 0.85 * torch.finfo(dtype).max
    assert got[0, 1:].tolist() == [0.0, 0.0, 200.0, 0.0]


def test_a_nan_stays_in_its_place(generator):
    gate_up = randn(generator, 3, 8)
    gate_up[1, 2] = gate_up[2, 7] = math.nan
    got = swiglu(gate_up, backend="triton").isnan()
    assert got.nonzero().tolist() == [[1, 2], [2, 3]]


@pytest.mark.parametrize(("width", "block", "num_warps"), [(1, 1, 1), (704, 1024, 4), (200, 256, 1), (11008, 1024, 4)])
def test_launch_config(width, block, num_warps):
    config = _launch_config(width)
    assert config.blocks["BLOCK_F"] == block
    assert config.num_warps == num_warps
