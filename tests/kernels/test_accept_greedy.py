"""kernels.accept_greedy against its eager reference and against what a greedy walk is."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels.accept_greedy import _launch_config, accept_greedy
from specdec.kernels.reference.accept_greedy import accept_greedy as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIELDS = ("path", "num_accepted", "next_root", "emitted")


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_same(verdict, expected):
    for field in FIELDS:
        got, want = getattr(verdict, field), getattr(expected, field)
        assert got.dtype == torch.int32
        assert torch.equal(got, want), f"{field}: {got.tolist()} is not {want.tolist()}"


def random_call(generator, *, batch=2, num_nodes=9, vocab=3, shared=False):
    """Tokens, parents and target tokens of random trees; about one node in ten is padding."""
    rows = 1 if shared else batch
    parent = torch.full((rows, num_nodes), -1, dtype=torch.int32)
    for j in range(1, num_nodes):
        parent[:, j] = torch.randint(0, j, (rows,), generator=generator, dtype=torch.int32)
    parent.masked_fill_(torch.rand(rows, num_nodes, generator=generator) < 0.1, -1)
    tokens = torch.randint(0, vocab, (batch, num_nodes), generator=generator, dtype=torch.int32)
    target_tokens = torch.randint(0, vocab, (batch, num_nodes), generator=generator, dtype=torch.int32)
    return tokens.to(DEVICE), parent.to(DEVICE), target_tokens.to(DEVICE)


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
@given(tree=trees(), budget=st.integers(-1, 6), stops=st.lists(st.integers(0, 3), max_size=2))
def test_budget_and_stop_tokens_cut_exactly_there(tree, budget, stops):
    tokens, parent, target_tokens = (int32([values]) for values in tree)
    whole = accept_greedy(tokens, parent, target_tokens, max_depth=4, backend="triton").emitted[0].tolist()
    expected = []
    for token in whole[: max(budget, 0)]:
        expected.append(token)
        if token in stops or token == -1:
            break
    expected = [token for token in expected if token >= 0]

    verdict = accept_greedy(
        tokens,
        parent,
        target_tokens,
        max_depth=4,
        budget=int32([budget]),
        stop_tokens=int32(stops),
        backend="triton",
    )
    assert verdict.emitted[0].tolist() == expected + [-1] * (5 - len(expected))
    assert verdict.num_accepted.item() == len(expected) - 1
    assert verdict.next_root.item() == (expected[-1] if expected else tokens[0, 0].item())


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


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_a_row_of_a_batch_is_the_row_alone(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    batch = data.draw(st.integers(2, 4))
    call = random_call(generator, batch=batch, num_nodes=data.draw(st.integers(1, 40)))
    budget = torch.randint(0, 4, (batch,), generator=generator, dtype=torch.int32).to(DEVICE)
    stop_tokens = int32([2])
    together = accept_greedy(*call, max_depth=4, budget=budget, stop_tokens=stop_tokens, backend="triton")
    b = data.draw(st.integers(0, batch - 1))
    alone = accept_greedy(
        *(tensor[b : b + 1] for tensor in call),
        max_depth=4,
        budget=budget[b : b + 1],
        stop_tokens=stop_tokens,
        backend="triton",
    )
    for field in FIELDS:
        assert torch.equal(getattr(alone, field)[0], getattr(together, field)[b])


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


def test_a_batch_of_no_rows_gives_a_verdict_of_no_rows():
    empty = torch.empty(0, 4, dtype=torch.int32, device=DEVICE)
    for backend in ("triton", "reference"):
        verdict = accept_greedy(empty, int32([[-1, 0, 1, 1]]), empty, max_depth=2, backend=backend)
        assert verdict.path.shape == verdict.emitted.shape == (0, 3)
        assert verdict.num_accepted.shape == verdict.next_root.shape == (0,)


def test_strided_rows_are_read_in_place(generator):
    wide = random_call(generator, batch=3, num_nodes=40)
    call = [tensor[:, :17] for tensor in wide]
    assert not call[0].is_contiguous()
    verdict = accept_greedy(*call, max_depth=5, backend="triton")
    assert_same(verdict, reference(*call, max_depth=5))


def test_the_order_of_programs_does_not_matter(generator, reversed_programs):
    call = random_call(generator, batch=4, num_nodes=30)
    assert_same(accept_greedy(*call, max_depth=5, backend="triton"), reference(*call, max_depth=5))
    assert [x for x, _, _ in reversed_programs] == [3, 2, 1, 0]


@pytest.mark.gpu
def test_a_captured_launch_replays_on_new_inputs(generator):
    tokens, parent, target_tokens = random_call(generator, num_nodes=64)
    budget = int32([9, 9])
    accept_greedy(tokens, parent, target_tokens, max_depth=5, budget=budget)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verdict = accept_greedy(tokens, parent, target_tokens, max_depth=5, budget=budget)
    target_tokens.copy_(target_tokens.flip(1))
    budget.copy_(int32([2, 0]))
    graph.replay()
    assert_same(verdict, reference(tokens, parent, target_tokens, max_depth=5, budget=budget))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"tokens": lambda t: t.long()}, TypeError, r"tokens: expected torch.int32, got torch.int64"),
        ({"tokens": lambda t: t[0]}, ValueError, r"tokens: expected shape \[any, any\], got \[9\]"),
        ({"tokens": lambda t: t[:, :0]}, ValueError, r"tokens: expected 1 to 512 nodes, root included, got 0"),
        ({"parent": lambda t: t.long()}, TypeError, r"parent: expected torch.int32, got torch.int64"),
        ({"parent": lambda t: t[:, :4]}, ValueError, r"parent: expected shape \[any, 9\], got \[2, 4\]"),
        ({"parent": lambda t: t.repeat(2, 1)}, ValueError, r"parent: expected 2 rows or 1, got shape \[4, 9\]"),
        ({"target_tokens": lambda t: t[:1]}, ValueError, r"target_tokens: expected shape \[2, 9\], got \[1, 9\]"),
        ({"target_tokens": lambda t: t.to("meta")}, ValueError, r"target_tokens: expected a tensor on"),
        ({"max_depth": lambda _: -1}, ValueError, r"max_depth: expected 0 or more, got -1"),
        ({"budget": lambda _: int32([1])}, ValueError, r"budget: expected shape \[2\], got \[1\]"),
        ({"stop_tokens": lambda _: int32([[1]])}, ValueError, r"stop_tokens: expected shape \[any\], got \[1, 1\]"),
        ({"stop_tokens": lambda _: [1]}, TypeError, r"stop_tokens: expected a torch.Tensor, got list"),
    ],
)
def test_wrong_arguments_are_named(generator, change, error, match):
    tokens, parent, target_tokens = random_call(generator)
    args = {"tokens": tokens, "parent": parent, "target_tokens": target_tokens, "max_depth": 3}
    for name, function in change.items():
        args[name] = function(args.get(name))
    with pytest.raises(error, match=match):
        accept_greedy(**args)


@pytest.mark.parametrize(
    ("num_nodes", "max_depth", "block_n", "block_d", "num_warps"),
    [(1, 0, 1, 1, 1), (64, 5, 64, 8, 1), (65, 7, 128, 8, 1), (512, 8, 512, 16, 4)],
)
def test_launch_config(num_nodes, max_depth, block_n, block_d, num_warps):
    config = _launch_config(num_nodes, max_depth)
    assert config.blocks == {"BLOCK_N": block_n, "BLOCK_D": block_d}
    assert config.num_warps == num_warps
