"""kernels.accept_greedy against its eager reference and against what a greedy walk is."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.accept_calls import greedy_call as random_call
from lib.laws import assert_same
from lib.tensors import DEVICE, int32
from specdec.kernels.accept_greedy import _launch_config, accept_greedy
from specdec.kernels.reference.accept_greedy import accept_greedy as reference


@st.composite
def trees(draw, max_nodes=24):
    """One random tree as lists: tokens, parent, target_tokens; few tokens, so that many nodes agree."""
    num_nodes = draw(st.integers(1, max_nodes))
    token = st.integers(0, draw(st.integers(1, 3)))
    tokens = draw(st.lists(token, min_size=num_nodes, max_size=num_nodes))
    target_tokens = draw(st.lists(token, min_size=num_nodes, max_size=num_nodes))
    # -1 makes padding; its children, if any, cannot be reached either
    parent = [-1] + [draw(st.integers(-1, j - 1)) for j in range(1, num_nodes)]
    return tokens, parent, target_tokens


# a tree of five nodes:  0 - 1 - 3        tokens 9 (root); 4, 5 below it; 6 below node 1; 7 below node 2
#                         \- 2 - 4
HAND_TOKENS = [[9, 4, 5, 6, 7]]
HAND_PARENT = [[-1, 0, 0, 1, 2]]
HAND_CASES = {
    "no child agrees": ([[1, 0, 0, 0, 0]], {}, [0, -1, -1], [1, -1, -1]),
    "one accepted": ([[4, 1, 0, 0, 0]], {}, [0, 1, -1], [4, 1, -1]),
    "a leaf is reached": ([[5, 0, 7, 0, 8]], {}, [0, 2, 4], [5, 7, 8]),
    "the other branch": ([[4, 6, 0, 3, 0]], {}, [0, 1, 3], [4, 6, 3]),
    "budget of one": ([[5, 0, 7, 0, 8]], {"budget": [1]}, [0, -1, -1], [5, -1, -1]),
    "budget of two": ([[5, 0, 7, 0, 8]], {"budget": [2]}, [0, 2, -1], [5, 7, -1]),
    "more budget than tree": ([[5, 0, 7, 0, 8]], {"budget": [99]}, [0, 2, 4], [5, 7, 8]),
    "finished": ([[5, 0, 7, 0, 8]], {"budget": [0]}, [-1, -1, -1], [-1, -1, -1]),
    "stop at the root": ([[5, 0, 7, 0, 8]], {"stop_tokens": [2, 5]}, [0, -1, -1], [5, -1, -1]),
    "stop on the way": ([[5, 0, 7, 0, 8]], {"stop_tokens": [7]}, [0, 2, -1], [5, 7, -1]),
    "stop at the leaf": ([[5, 0, 7, 0, 8]], {"stop_tokens": [8]}, [0, 2, 4], [5, 7, 8]),
    "no stop tokens": ([[5, 0, 7, 0, 8]], {"stop_tokens": []}, [0, 2, 4], [5, 7, 8]),
}


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("case", HAND_CASES)
def test_a_tree_written_by_hand(case, backend):
    target_tokens, limits, path, emitted = HAND_CASES[case]
    limits = {name: int32(values) for name, values in limits.items()}
    verdict = accept_greedy(
        int32(HAND_TOKENS), int32(HAND_PARENT), int32(target_tokens), max_depth=2, **limits, backend=backend
    )
    accepted = sum(node >= 0 for node in path) - 1
    assert verdict.path.tolist() == [path]
    assert verdict.emitted.tolist() == [emitted]
    assert verdict.num_accepted.tolist() == [accepted]
    assert verdict.num_emitted.tolist() == [accepted + 1]
    assert verdict.next_root.tolist() == [emitted[accepted] if accepted >= 0 else 9]


@pytest.mark.parametrize("shared", [False, True], ids=["own parents", "shared parents"])
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 64, 300, 512])
def test_matches_the_reference(generator, num_nodes, shared):
    tokens, parent, target_tokens = random_call(generator, batch=3, num_nodes=num_nodes, shared=shared)
    limits = {"max_depth": 5, "budget": int32([9, 2, 0]), "stop_tokens": int32([0, 77])}
    verdict = accept_greedy(tokens, parent, target_tokens, **limits, backend="triton")
    assert_same(verdict, reference(tokens, parent, target_tokens, **limits))


def test_decides_as_the_reference_on_a_thousand_trees(generator):
    call = random_call(generator, batch=1000, num_nodes=12)
    limits = {"max_depth": 4, "budget": torch.arange(1000, dtype=torch.int32, device=DEVICE) % 7}
    expected = reference(*call, **limits)
    assert_same(accept_greedy(*call, **limits, backend="triton"), expected)
    assert expected.num_accepted.unique().tolist() == [-1, 0, 1, 2, 3, 4]


@settings(deadline=None, max_examples=25)
@given(tree=trees(), max_depth=st.integers(0, 5))
def test_the_path_is_the_longest_that_the_target_agrees_with(tree, max_depth):
    tokens, parent, target_tokens = tree
    verdict = accept_greedy(
        int32([tokens]), int32([parent]), int32([target_tokens]), max_depth=max_depth, backend="triton"
    )
    path = [node for node in verdict.path[0].tolist() if node >= 0]
    assert verdict.path[0].tolist() == path + [-1] * (max_depth + 1 - len(path))
    assert path[0] == 0
    for node, child in itertools.pairwise(path):
        equals = [j for j in range(len(tokens)) if parent[j] == node and tokens[j] == target_tokens[node]]
        assert child == equals[0]
    last = path[-1]
    if len(path) <= max_depth:
        assert all(parent[j] != last or tokens[j] != target_tokens[last] for j in range(len(tokens)))
    assert verdict.num_accepted.item() == len(path) - 1
    assert verdict.emitted[0].tolist()[: len(path)] == [target_tokens[node] for node in path]
    assert verdict.next_root.item() == target_tokens[last]


@settings(deadline=None, max_examples=25)
@given(tree=trees(max_nodes=12), num_padding=st.integers(1, 6), token=st.integers(-1, 3))
def test_padding_is_never_accepted(tree, num_padding, token):
    tokens, parent, target_tokens = tree
    padding = [token] * num_padding
    tokens_padded, target_padded = int32([tokens + padding]), int32([target_tokens + padding])
    parent_padded = int32([parent + [-1] * num_padding])
    verdict = accept_greedy(tokens_padded, parent_padded, target_padded, max_depth=4, backend="triton")
    assert verdict.path.max() < len(tokens)
    assert_same(verdict, reference(int32([tokens]), int32([parent]), int32([target_tokens]), max_depth=4))


def test_the_lowest_of_equal_siblings_is_taken():
    for backend in ("triton", "reference"):
        # nodes 1 and 2 carry the same token; only below node 2 would the walk go on
        call = int32([[9, 4, 4, 6]]), int32([[-1, 0, 0, 2]]), int32([[4, 6, 6, 8]])
        verdict = accept_greedy(*call, max_depth=2, backend=backend)
        assert verdict.path.tolist() == [[0, 1, -1]]
        assert verdict.next_root.tolist() == [6]


def test_the_walk_goes_no_deeper_than_max_depth():
    chain = int32([[0, 0, 0, 0]]), int32([[-1, 0, 1, 2]]), int32([[0, 0, 0, 0]])
    for backend in ("triton", "reference"):
        assert accept_greedy(*chain, max_depth=0, backend=backend).path.tolist() == [[0]]
        assert accept_greedy(*chain, max_depth=2, backend=backend).path.tolist() == [[0, 1, 2]]
        assert accept_greedy(*chain, max_depth=1, budget=int32([9]), backend=backend).path.tolist() == [[0, 1]]
        assert accept_greedy(*chain, max_depth=4, backend=backend).path.tolist() == [[0, 1, 2, 3, -1]]


@pytest.mark.parametrize(
    ("num_nodes", "max_depth", "block_n", "block_d", "num_warps"),
    [(1, 0, 1, 1, 1), (64, 5, 64, 8, 1), (65, 7, 128, 8, 1), (512, 8, 512, 16, 4)],
)
def test_launch_config(num_nodes, max_depth, block_n, block_d, num_warps):
    config = _launch_config(num_nodes, max_depth)
    assert config.blocks == {"BLOCK_N": block_n, "BLOCK_D": block_d}
    assert config.num_warps == num_warps
