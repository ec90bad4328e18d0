"""kernels.lstm_recurrence against float64, against PyTorch's LSTM and against what a recurrence is."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, FLOATS, int32, int64, randn
from lib.tolerances import assert_close_to_reference
from specdec.kernels.lstm_recurrence import _launch_config, lstm_recurrence
from specdec.kernels.reference import lstm_recurrence as reference

# numpy, under the interpreter, reports the overflow to infinity behind sigmoid(-100) = 0
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BOTH = pytest.mark.parametrize("backend", ["triton", "reference"])
on_triton = partial(lstm_recurrence, backend="triton")


def layer(generator, width, dtype=torch.float32):
    """Recurrent weights and bias."""
    return randn(generator, 4 * width, width, dtype=dtype, scale=width**-0.5), randn(generator, 4 * width, dtype=dtype)


def assert_right(*tensors):
    """Both results within rounding of float64; integers and None stay what they are."""
    exact = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in tensors]
    found = on_triton(*tensors), reference.lstm_recurrence(*exact), reference.lstm_recurrence(*tensors, upcast=False)
    for got, want, eager in zip(*found, strict=True):
        assert got.is_contiguous()
        assert_close_to_reference(got, want, eager, scale=max(1.0, want.abs().max().item()))


@BOTH
def test_two_steps_written_by_hand(backend):
    # gates of 0 are 1/2, of 100 are 1, of -100 are 0; tanh(100) = 1
    on, off = 100.0, -100.0
    first, second = [on, off, on, on], [off, on, 0.0, 0.0]
    steps = torch.tensor([first, second], device=DEVICE)[None, None]
    weight = torch.tensor([[0.0], [0.0], [0.0], [on]], device=DEVICE)
    outputs, last = lstm_recurrence(steps, weight, backend=backend)
    # the first writes a cell of 1, the second keeps it and opens its output by the hidden state of the first
    tanh = torch.tensor(1.0, device=DEVICE).tanh().item()
    assert outputs.flatten().tolist() == pytest.approx([tanh, tanh])
    assert last.flatten().tolist() == pytest.approx([tanh, 1.0])
    # a bias that closes the entry leaves the state it began with, halved by a forget gate of 1/2
    state = torch.tensor([[[[5.0], [3.0]]]], device=DEVICE)
    bias = torch.tensor([off, 0.0, on, on], device=DEVICE)
    _, last = lstm_recurrence(torch.zeros(1, 1, 1, 4, device=DEVICE), 0 * weight, bias, state, backend=backend)
    assert last[0, 0, 1].item() == pytest.approx(1.5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("batch", "num_sequences", "length", "width"), [(1, 1, 1, 1), (3, 2, 3, 33), (2, 1, 9, 64), (1, 70, 2, 20)]
)
def test_matches_float64(generator, batch, num_sequences, length, width, dtype):
    steps = randn(generator, batch, num_sequences, length, 4 * width, dtype=dtype)
    weight, bias = layer(generator, width, dtype)
    states = randn(generator, batch, 3, 2, width, dtype=dtype)
    source = torch.randint(3, (num_sequences,), generator=generator).to(DEVICE)
    counts = torch.randint(length + 1, (batch,), generator=generator).to(DEVICE)
    first = torch.randint(2, (batch,), generator=generator).to(DEVICE)
    assert_right(steps, weight, bias, states, source, first, counts)
    assert_right(steps, weight, None, None, None, None, counts.int())
    assert_right(steps, weight, bias, states[:, :1].expand(-1, num_sequences, -1, -1))
    assert_right(steps, weight)


@BOTH
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_pytorchs_lstm(generator, bias, backend):
    lstm = torch.nn.LSTM(5, 12, bias=bias, batch_first=True).to(DEVICE)
    x, start = randn(generator, 2, 7, 5), randn(generator, 2, 1, 2, 12)
    with torch.no_grad():
        hidden, cell = (state.transpose(0, 1).contiguous() for state in start.unbind(2))
        expected, (last_hidden, last_cell) = lstm(x, (hidden, cell))
        steps = torch.nn.functional.linear(x, lstm.weight_ih_l0, lstm.bias_ih_l0 if bias else None)
        outputs, last = lstm_recurrence(
            steps[:, None], lstm.weight_hh_l0, lstm.bias_hh_l0 if bias else None, start, backend=backend
        )
    torch.testing.assert_close(outputs[:, 0], expected)
    torch.testing.assert_close(last[:, 0], torch.stack((last_hidden[0], last_cell[0]), 1))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 4), st.sampled_from(FLOATS))
def test_a_text_may_be_read_in_parts(seed, before, after, dtype):
    """To the bit: between steps the states have the dtype that they have between calls."""
    generator = torch.Generator().manual_seed(seed)
    weight, bias = layer(generator, 18, dtype)
    steps = randn(generator, 2, 2, before + after, 72, dtype=dtype)
    whole, last = on_triton(steps, weight, bias)
    first, between = on_triton(steps[:, :, :before], weight, bias)
    second, end = on_triton(steps[:, :, before:], weight, bias, between)
    assert torch.equal(torch.cat((first, second), 2), whole)
    assert torch.equal(end, last)
    short, there = on_triton(steps, weight, bias, counts=int32([before, before + after]))
    assert torch.equal(short[0, :, :before], whole[0, :, :before])
    assert torch.equal(there, torch.stack((between[0], last[1])))
    assert not short[0, :, before:].any()
    late, there = on_triton(steps, weight, bias, between, first=int32([before, before]))
    assert torch.equal(late[:, :, before:], second)
    assert torch.equal(late[:, :, :before], between[:, :, :1].expand(-1, -1, before, -1))
    assert torch.equal(there, end)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_sequences_begin_with_the_states_that_they_are_told(seed, sources):
    generator = torch.Generator().manual_seed(seed)
    weight, bias = layer(generator, 6)
    steps, states = randn(generator, 2, len(sources), 2, 24), randn(generator, 2, 3, 2, 6)
    got = on_triton(steps, weight, bias, states, int64(sources))
    expected = on_triton(steps, weight, bias, states[:, sources])
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@BOTH
def test_a_row_of_no_steps_keeps_its_state(generator, backend):
    weight, bias = layer(generator, 10)
    steps, states = randn(generator, 2, 2, 4, 40), randn(generator, 2, 2, 2, 10)
    outputs, last = lstm_recurrence(steps, weight, bias, states, counts=int32([0, 4]), backend=backend)
    assert not outputs[0].any()
    assert torch.equal(last[0], states[0])
    _, last = lstm_recurrence(steps, weight, bias, counts=int32([0, -1]), backend=backend)
    assert not last.any()
    everything = lstm_recurrence(steps, weight, bias, states, counts=int32([9, 4]), backend=backend)
    assert torch.equal(everything[0], lstm_recurrence(steps, weight, bias, states, backend=backend)[0])


@pytest.mark.interpreter
def test_a_step_that_nobody_takes_reads_no_weights(generator, monkeypatch):
    """Neither does one from zeros, as nothing was before."""
    from triton.runtime.interpreter import interpreter_builder

    weight, bias = layer(generator, 10)
    begin, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    load, num_read = interpreter_builder.create_masked_load, [0]

    def count(ptrs, mask, *rest):
        num_read[0] += ((ptrs.data >= begin) & (ptrs.data < end) & mask.data).sum()
        return load(ptrs, mask, *rest)

    monkeypatch.setattr(interpreter_builder, "create_masked_load", count)

    def steps_read(state=None, **steps):
        num_read[0] = 0
        on_triton(given, weight, bias, state, **{name: int32(values) for name, values in steps.items()})
        return num_read[0] / weight.numel()

    given, states = randn(generator, 2, 4, 3, 40), randn(generator, 2, 4, 2, 10)
    assert steps_read() == 2
    assert steps_read(states) == 3
    assert steps_read(counts=[0, 1]) == 0
    assert steps_read(states, counts=[0, 1]) == 1
    assert steps_read(states, first=[2, 1], counts=[2, 2]) == 1
    assert steps_read(states, first=[1, 3], counts=[3, 3]) == 2


def test_a_nan_stays_in_its_sequence(generator):
    weight, bias = layer(generator, 10)
    steps = randn(generator, 1, 3, 3, 40)
    steps[0, 1, 1, 0] = torch.nan
    outputs, _ = on_triton(steps, weight, bias)
    assert outputs[0, [0, 2]].isfinite().all()
    assert outputs[0, 1, 0].isfinite().all()
    assert outputs[0, 1, 2].isnan().all()


def test_small_gates_are_not_lost_to_cancellation():
    """tanh near 0 is right in all its digits, not in those of 1."""
    update = torch.tensor([1e-30, 1e-6, -1e-3, 0.1, -0.2499, 0.2501, -3.0, 50.0, -1e30], device=DEVICE)
    width = update.shape[0]
    gates = torch.stack([torch.full_like(update, 100.0), 0 * update, update, 0 * update]).flatten()[None, None, None]
    _, last = on_triton(gates, torch.zeros(4 * width, width, device=DEVICE))
    torch.testing.assert_close(last[0, 0, 1], update.tanh(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("num_rows", "itemsize"), [(1, 2), (12, 2), (128, 2), (500, 2), (1, 4), (64, 4)])
def test_a_tile_of_weights_holds_four_gates(num_rows, itemsize):
    blocks = _launch_config(num_rows, itemsize).blocks
    assert blocks["BLOCK_U"] == 16
    assert blocks["BLOCK_M"] <= 128
