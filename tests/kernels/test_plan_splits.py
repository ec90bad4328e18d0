"""kernels.plan_splits against its eager reference and against what a fair plan is."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels.plan_splits import _launch_config, plan_splits
from specdec.kernels.reference.plan_splits import plan_splits as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_equals_reference(lengths, **args):
    work, offsets = plan_splits(lengths, **args, backend="triton")
    expected_work, expected_offsets = reference(lengths, **args)
    assert work.dtype == offsets.dtype == torch.int32
    assert torch.equal(work, expected_work)
    assert torch.equal(offsets, expected_offsets)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_plan_written_by_hand(backend):
    work, offsets = plan_splits(int32([0, 300, 64]), num_tree_nodes=33, block=64, budget=5, max_work=6, backend=backend)
    # tiles: 1, 5 + 1, 1 + 1; in pieces of at most 2 there are 1 + 3 + 1
    assert work.tolist() == [[0, 0, 1], [1, 0, 2], [1, 2, 4], [1, 4, 6], [2, 0, 2], [-1, 0, 0]]
    assert offsets.tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_row_is_cut_evenly(backend):
    work, _ = plan_splits(int32([10 * 64]), num_tree_nodes=64, block=64, budget=4, max_work=4, backend=backend)
    assert work.tolist() == [[0, 0, 2], [0, 2, 5], [0, 5, 8], [0, 8, 11]]


@pytest.mark.parametrize(
    ("batch", "budget", "max_work"), [(1, 1, 1), (1, 132, 132), (2, 7, 300), (33, 132, 140), (300, 400, 400), (0, 3, 5)]
)
def test_matches_the_reference(generator, batch, budget, max_work):
    lengths = torch.randint(0, 9000, (batch,), generator=generator, dtype=torch.int32).to(DEVICE)
    assert_equals_reference(lengths, num_tree_nodes=64, block=64, budget=budget, max_work=max_work)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(0, 2000), min_size=1, max_size=9),
    st.integers(1, 130),
    st.sampled_from([1, 16, 32, 64]),
    st.integers(0, 40),
    st.integers(0, 5),
)
def test_covers_every_tile_once_within_the_budget(lengths, num_tree_nodes, block, spare, unused):
    budget = len(lengths) + spare
    args = {"num_tree_nodes": num_tree_nodes, "block": block, "budget": budget, "max_work": budget + unused}
    assert_equals_reference(int32(lengths), **args)
    work, offsets = (tensor.tolist() for tensor in plan_splits(int32(lengths), **args, backend="triton"))
    assert offsets[0] == 0
    assert offsets[-1] <= budget
    assert work[offsets[-1] :] == [[-1, 0, 0]] * (budget + unused - offsets[-1])
    tiles = [-(-length // block) - (-num_tree_nodes // block) for length in lengths]
    sizes = []
    for row, (begin, end) in enumerate(itertools.pairwise(offsets)):
        pieces = work[begin:end]
        assert [piece[0] for piece in pieces] == [row] * len(pieces)
        assert [i for _, first, last in pieces for i in range(first, last)] == list(range(tiles[row]))
        own = [last - first for _, first, last in pieces]
        assert max(own) - min(own) <= 1
        sizes += own
    # no plan within the budget has a shorter longest piece
    shorter = max(sizes) - 1
    assert shorter == 0 or sum(-(-count // shorter) for count in tiles) > budget


def test_equal_rows_are_treated_alike():
    work, offsets = plan_splits(
        int32([4096] * 8), num_tree_nodes=64, block=64, budget=264, max_work=264, backend="triton"
    )
    assert torch.equal(offsets.diff(), offsets.diff()[:1].expand(8))
    assert work[: offsets[1], 1:].tolist() == work[offsets[1] : offsets[2], 1:].tolist()


def test_strided_lengths_are_refused():
    with pytest.raises(ValueError, match="lengths: expected stride 1"):
        plan_splits(int32([1, 2, 3, 4])[::2], num_tree_nodes=1, block=1, budget=9, max_work=9)


def test_the_order_of_programs_does_not_matter(generator, reversed_programs):
    lengths = torch.randint(0, 900, (4,), generator=generator, dtype=torch.int32)
    assert_equals_reference(lengths, num_tree_nodes=20, block=16, budget=70, max_work=80)
    assert [x for x, _, _ in reversed_programs] == [4, 3, 2, 1, 0]


@pytest.mark.gpu
def test_a_captured_launch_replays_on_new_lengths():
    lengths = int32([100, 5000, 0])
    args = {"num_tree_nodes": 64, "block": 64, "budget": 132, "max_work": 132}
    plan_splits(lengths, **args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work, offsets = plan_splits(lengths, **args)
    lengths.copy_(int32([101, 5000, 8000]))
    graph.replay()
    expected_work, expected_offsets = reference(lengths, **args)
    assert torch.equal(work, expected_work)
    assert torch.equal(offsets, expected_offsets)


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("lengths", torch.zeros(3), TypeError, r"lengths: expected torch.int32, got torch.float32"),
        ("lengths", torch.zeros(3, 1, dtype=torch.int32), ValueError, r"lengths: expected shape \[any\], got \[3, 1\]"),
        ("num_tree_nodes", 0, ValueError, r"num_tree_nodes: expected 1 to 512 nodes, root included, got 0"),
        ("block", 0, ValueError, r"block: expected at least 1, got 0"),
        ("budget", 2, ValueError, r"budget: expected at least 3, got 2"),
        ("max_work", 7, ValueError, r"max_work: expected at least 8, got 7"),
    ],
)
def test_wrong_arguments_are_named(name, value, error, match):
    args = {"lengths": int32([1, 2, 3]), "num_tree_nodes": 4, "block": 16, "budget": 8, "max_work": 8} | {name: value}
    with pytest.raises(error, match=match):
        plan_splits(**args)


@pytest.mark.parametrize(
    ("batch", "max_work", "block_b", "block_w", "num_warps"),
    [(0, 1, 1, 1, 1), (8, 264, 8, 64, 1), (513, 600, 1024, 64, 4)],
)
def test_launch_config(batch, max_work, block_b, block_w, num_warps):
    config = _launch_config(batch, max_work)
    assert config.blocks == {"BLOCK_B": block_b, "BLOCK_W": block_w}
    assert config.num_warps == num_warps
