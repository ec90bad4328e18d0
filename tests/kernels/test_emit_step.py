"""kernels.emit_step against the reference, on steps worked out by hand, and on generations of many steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, int32
from specdec.kernels.emit_step import _launch_config, emit_step

BACKENDS = ["triton", "reference"]
CHANGED = ("output_", "num_output_", "root_", "budget_", "lengths_", "progress_", "step_", "steps_", "nan_rows_")


def bools(values):
    return torch.tensor(values, dtype=torch.bool, device=DEVICE)


def hand_written():
    """Four rows: one goes on, one runs out of its budget, one emits a stop token, one had finished."""
    output = torch.full((4, 9), -1, dtype=torch.int32, device=DEVICE)
    output[:, 0] = int32([9, 8, 7, 6])
    return {
        "num_accepted": int32([1, 0, 2, -1]),
        "emitted": int32([[11, 12, -1], [21, -1, -1], [31, 32, 5], [-1, -1, -1]]),
        "deepest": int32([2, 1, 2, 2]),
        "has_nan": bools([[False, False]] * 3 + [[False, True]]),
        "stop_tokens": int32([4, 5]),
        "output_": output,
        "num_output_": int32([1, 1, 1, 1]),
        "root_": int32([9, 8, 7, 6]),
        "budget_": int32([10, 1, 10, 0]),
        "lengths_": int32([20, 30, 40, 50]),
        "progress_": int32([1, -1]),
        "step_": torch.tensor(1, device=DEVICE),
        "steps_": torch.full((3, 2, 4), -7, dtype=torch.int32, device=DEVICE),
        "nan_rows_": int32([0, 0, 0, 0]),
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_worked_out_by_hand(backend):
    args = hand_written()
    emit_step(**args, backend=backend)
    assert args["output_"][:, :5].tolist() == [
        [9, 11, 12, -1, -1],
        [8, 21, -1, -1, -1],
        [7, 31, 32, 5, -1],
        [6] + [-1] * 4,
    ]
    assert (args["output_"][:, 5:] == -1).all()
    assert args["root_"].tolist() == [12, 21, 5, 6]
    assert args["budget_"].tolist() == [8, 0, 0, 0]
    assert args["num_output_"].tolist() == [3, 2, 4, 1]
    assert args["lengths_"].tolist() == [22, 31, 43, 50]
    assert args["progress_"].tolist() == [1, -1]  # the NaN was in a row that had finished
    assert args["nan_rows_"].tolist() == [0, 0, 0, 0]
    assert args["step_"].item() == 2
    assert args["steps_"].tolist() == [[[-7] * 4] * 2, [[2, 1, 3, 0], [2, 1, 2, 2]], [[-7] * 4] * 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_step_with_a_nan_is_remembered(backend):
    args = hand_written()
    args["has_nan"] = bools([[False, True]] + [[False, False]] * 3)
    emit_step(**args, backend=backend)
    assert args["progress_"].tolist() == [1, 1]
    emit_step(**args, backend=backend)
    assert args["progress_"].tolist()[1] == 1
    assert args["step_"].item() == 3
    assert args["nan_rows_"].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_end_of_the_last_row_stops_the_count_of_steps(backend):
    """A surplus step leaves zeros where the next one would be noted, and changes nothing else."""
    args = hand_written()
    args["budget_"][:] = int32([2, 1, 10, 0])
    emit_step(**args, backend=backend)
    assert args["progress_"].tolist() == [0, -1]
    assert args["step_"].item() == 2
    surplus = args | {"num_accepted": int32([-1] * 4), "emitted": int32([[-1] * 3] * 4), "deepest": int32([2])}
    before = {name: args[name].clone() for name in CHANGED}
    for _ in range(2):
        emit_step(**surplus, backend=backend)
    changed = [name for name in CHANGED if not torch.equal(args[name], before[name])]
    assert changed == ["steps_"]
    assert args["steps_"][2].tolist() == [[0] * 4, [2] * 4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_past_the_last_place_nothing_is_noted_and_without_lengths_none_grow(backend):
    args = hand_written()
    args["step_"].fill_(3)
    lengths = args["lengths_"].clone()
    emit_step(**args | {"lengths_": None, "stop_tokens": None}, backend=backend)
    assert (args["steps_"] == -7).all()
    assert torch.equal(args["lengths_"], lengths)
    assert args["budget_"].tolist() == [8, 0, 7, 0]


def random_call(seed, batch, path_length, num_places, num_stops, *, running=0.7):
    generator = torch.Generator().manual_seed(seed)

    def randint(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32).to(DEVICE)

    is_running = torch.rand(batch, generator=generator).to(DEVICE) < running
    counts = torch.where(is_running, randint(1, path_length + 1, batch), 0)
    columns = torch.arange(path_length, device=DEVICE)
    budget = torch.where(is_running, counts + randint(0, 3, batch), 0)
    shared = bool(torch.rand((), generator=generator) < 0.5)
    return {
        "num_accepted": (counts - 1).int(),
        "emitted": torch.where(columns < counts[:, None], randint(0, 9, batch, path_length), -1).int(),
        "deepest": randint(0, 9, 1 if shared else batch),
        "has_nan": torch.rand(batch, num_places, generator=generator).to(DEVICE) < 0.3 / max(num_places, 1),
        "stop_tokens": randint(0, 9, num_stops) if num_stops else None,
        "output_": randint(0, 9, batch, 2 * path_length + 3),
        "num_output_": randint(0, path_length + 3, batch),
        "root_": randint(0, 9, batch),
        "budget_": budget.int(),
        "lengths_": randint(0, 99, batch),
        "progress_": int32([int(is_running.any()), -1]),
        "step_": randint(0, 4).long(),
        "steps_": randint(0, 9, 4, 2, batch),
        "nan_rows_": randint(0, 2, batch) if shared else None,
    }


def assert_equal_to_reference(args):
    copies = {name: None if one is None else one.clone() for name, one in args.items()}
    emit_step(**args, backend="triton")
    emit_step(**copies, backend="reference")
    for name, one in args.items():
        assert one is None or torch.equal(one, copies[name]), name


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 6), st.integers(0, 7), st.integers(0, 3), st.booleans())
def test_any_step_matches_the_reference(seed, batch, path_length, num_places, num_stops, any_running):
    assert_equal_to_reference(
        random_call(seed, batch, path_length, num_places, num_stops, running=0.7 if any_running else 0.0)
    )


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (700, 3, 2, 2), (3, 150, 300, 0), (64, 17, 64, 1)], ids=str)
def test_more_than_a_tile_matches_the_reference(sizes):
    assert_equal_to_reference(random_call(5, *sizes))


def test_rows_of_a_wider_tensor(generator):
    args = random_call(3, 4, 3, 5, 2)
    wide = {
        "emitted": torch.cat((args["emitted"], args["emitted"]), 1)[:, :3],
        "output_": torch.cat((args["output_"], args["output_"]), 1)[:, : args["output_"].shape[1]],
        "has_nan": torch.cat((args["has_nan"], args["has_nan"]), 1)[:, :5],
    }
    assert_equal_to_reference(args | wide)


def test_no_rows():
    args = random_call(0, 1, 2, 3, 1)
    per_row = (
        "num_accepted",
        "emitted",
        "deepest",
        "has_nan",
        "output_",
        "num_output_",
        "root_",
        "budget_",
        "lengths_",
    )
    empty = {name: args[name][:0] for name in per_row} | {"steps_": args["steps_"][..., :0], "nan_rows_": None}
    before = args["progress_"].clone()
    for backend in BACKENDS:
        emit_step(**args | empty, backend=backend)
    assert torch.equal(args["progress_"], before)


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [((1, 1, 1), (1, 1, 1)), ((1, 6, 64), (1, 8, 64)), ((64, 6, 64), (8, 8, 64)), ((900, 200, 512), (4, 128, 128))],
    ids=str,
)
def test_launch_config(sizes, blocks):
    config = _launch_config(*sizes)
    assert tuple(config.blocks.values()) == blocks
    assert config.num_warps == 1
