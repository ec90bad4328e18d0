"""kernels.kv_compact against copying into a fresh tensor, on hand-written and random trees."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, int32
from specdec.kernels.kv_compact import _launch_config, kv_compact
from specdec.kernels.reference.kv_compact import kv_compact as reference


def numbered_cache(shape, dtype=torch.float32):
    """Every element differs from its neighbours in every direction; exact in 16 bits."""
    return (torch.arange(torch.Size(shape).numel(), device=DEVICE) % 2039).reshape(shape).to(dtype)


def copied(cache, lengths, paths, num_accepted):
    """What the cache must become: every accepted node copied from the old cache into a fresh one."""
    fresh = cache.clone()
    for b, (length, path, count) in enumerate(zip(lengths, paths, num_accepted, strict=True)):
        for j in range(1, count + 1):
            fresh[:, :, b, length + j] = cache[:, :, b, length + path[j]]
    return fresh


def padded(paths):
    """[B, P] int32 from lists of different lengths."""
    longest = max(len(path) for path in paths)
    return int32([path + [-1] * (longest - len(path)) for path in paths])


def assert_compacts(cache, lengths, paths, num_accepted):
    expected = copied(cache, lengths, paths, num_accepted)
    arguments = int32(lengths), padded(paths), int32(num_accepted)
    before = [argument.clone() for argument in arguments]
    by_reference = cache.clone()
    reference(by_reference, *arguments)
    kv_compact(cache, *arguments, backend="triton")
    assert torch.equal(by_reference, expected)
    assert torch.equal(cache, expected)
    assert all(torch.equal(*pair) for pair in zip(arguments, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_accepted_nodes_land_behind_the_prefix(dtype):
    cache = numbered_cache((2, 2, 2, 16, 2, 8), dtype)
    assert_compacts(cache, [3, 0], [[0, 2, 5, 9], [0, 1, 4]], [3, 2])


def test_hand_written_move():
    cache = numbered_cache((1, 2, 1, 8, 1, 1))
    kv_compact(cache, int32([2]), int32([[0, 3, 5]]), int32([2]), backend="triton")
    assert cache[0, 0, 0, :, 0, 0].tolist() == [0, 1, 2, 5, 7, 5, 6, 7]
    assert cache[0, 1, 0, :, 0, 0].tolist() == [8, 9, 10, 13, 15, 13, 14, 15]


@pytest.mark.parametrize("count", [0, -1])
def test_nothing_moves_without_accepted_nodes(count):
    assert_compacts(numbered_cache((1, 2, 2, 8, 1, 4)), [1, 2], [[0, 3, 4], [0, 2, 5]], [count, 1])


def test_a_source_may_be_the_target_of_an_earlier_move():
    # slot 2 receives node 3 and slot 3 node 4, after node 2 and node 3 were read
    assert_compacts(numbered_cache((1, 2, 1, 12, 1, 4)), [1], [[0, 2, 3, 4, 9]], [4])


def test_a_chain_stays_where_it_is():
    assert_compacts(numbered_cache((1, 2, 1, 12, 1, 4)), [2], [[0, 1, 2, 3, 4]], [4])


def test_a_path_longer_than_one_tile():
    assert_compacts(numbered_cache((1, 2, 1, 64, 1, 4)), [3], [[0, *range(2, 41, 2)]], [20])


def test_more_columns_than_one_tile():
    assert_compacts(numbered_cache((1, 2, 1, 16, 12, 80)), [3], [[0, *range(2, 10)]], [8])


def test_fewer_accepted_than_the_path_has():
    assert_compacts(numbered_cache((1, 2, 1, 16, 1, 4)), [3], [[0, 4, 6, 8]], [2])


@st.composite
def trees_and_paths(draw):
    """A random tree per request by its parents, and the path from the root to a random node of it."""
    batch = draw(st.integers(1, 3))
    lengths, paths, counts = [], [], []
    for _ in range(batch):
        num_nodes = draw(st.integers(1, 24))
        parents = [-1] + [draw(st.integers(max(0, node - 3), node - 1)) for node in range(1, num_nodes)]
        path = [draw(st.integers(0, num_nodes - 1))]
        while path[0] > 0:
            path.insert(0, parents[path[0]])
        lengths.append(draw(st.integers(0, 6)))
        paths.append(path)
        counts.append(draw(st.integers(-1, len(path) - 1)))
    return lengths, paths, counts


@settings(deadline=None, max_examples=25)
@given(trees_and_paths(), st.sampled_from([(1, 3), (2, 8)]))
def test_any_path_of_any_tree(case, heads):
    lengths, paths, counts = case
    assert_compacts(numbered_cache((2, 2, len(lengths), 32, *heads)), lengths, paths, counts)


def test_cpu_tensors_run_the_reference():
    cache = numbered_cache((1, 2, 1, 8, 1, 4))
    expected = copied(cache, [1], [[0, 3]], [1])
    kv_compact(cache, int32([1]), int32([[0, 3]]), int32([1]))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("shape", [(0, 2, 1, 8, 1, 4), (1, 2, 0, 8, 1, 4)], ids=str)
def test_an_empty_cache_is_left_alone(shape):
    batch = shape[2]
    kv_compact(torch.empty(shape), int32([0] * batch), int32([[0, 1]] * batch).view(batch, 2), int32([1] * batch))


@pytest.mark.gpu
def test_a_large_cache_is_addressed_beyond_32_bits():
    cache = torch.zeros(1, 2, 2, 300_000, 8, 256, dtype=torch.float16, device="cuda")  # 2.5e9 elements
    cache[:, :, :, 299_999] = 1.0
    kv_compact(cache, int32([299_990] * 2), int32([[0, 9]] * 2), int32([1] * 2), backend="triton")
    assert torch.equal(cache.sum(3), torch.full_like(cache[:, :, :, 0], 2.0))
    assert (cache[:, :, :, 299_991] == 1.0).all()


@pytest.mark.parametrize(
    ("max_moves", "num_columns", "block_j", "block_c"),
    [(1, 4096, 1, 4096), (5, 4096, 8, 512), (4, 1024, 4, 1024), (100, 5120, 8, 512), (3, 80, 4, 128)],
)
def test_launch_config(max_moves, num_columns, block_j, block_c):
    config = _launch_config(max_moves, num_columns)
    assert config.blocks == {"BLOCK_J": block_j, "BLOCK_C": block_c}
    assert config.num_stages == 1, "a pipelined loop would read ahead of its own stores"
