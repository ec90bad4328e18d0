"""kernels.tree_merge against paths written out, against its reference and against what a merged tree is."""

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, float32, int32
from specdec.kernels.common.check import MAX_NODES
from specdec.kernels.reference import tree_merge as reference
from specdec.kernels.tree_merge import MAX_DRAFTERS, MAX_POOL, _launch_config, tree_merge

FIELDS = ("tokens", "parent", "depth", "ancestors", "deepest", "index")
BACKENDS = ["triton", "reference"]
INT_BOUND = 2**32
GAINS = 2 * MAX_POOL * 2.0**-24  # of a sum: at most a rounding to nearest per addition, in the kernel and here


def assert_same(got, expected):
    for field in FIELDS:
        a, b = getattr(got, field), getattr(expected, field)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"{field}: {a.tolist()} is not {b.tolist()}"
    torch.testing.assert_close(got.gains, expected.gains, rtol=GAINS, atol=0)


def random_pool(generator, *, batch=2, size=12, vocab=3, drafters=2, ties=False, deep=False, invalid=0.0):
    """Positional arguments of a call; with ties, chances of a handful of values; some are none, above 1 or NaN."""
    places = torch.arange(size)
    parent = torch.minimum(torch.randint(-1, size, (batch, size), generator=generator), places - 1)
    if not deep:
        parent = torch.minimum(parent, places // 3 - 1)
    chance = torch.rand(batch, size, generator=generator)
    if ties:
        chance = torch.randint(1, 5, (batch, size), generator=generator) / 4
    odd = torch.tensor([math.nan, 0.0, -1.0, 1.5])[torch.randint(0, 4, (batch, size), generator=generator)]
    chance = torch.where(torch.rand(batch, size, generator=generator) < invalid, odd, chance)
    tokens = torch.randint(0, vocab, (batch, size), generator=generator).int()
    member = torch.randint(0, drafters, (size,), generator=generator).int()
    root = torch.randint(0, vocab, (batch,), generator=generator).int()
    groups = torch.tensor([2**drafters - 1, 1, 2])[: 1 + drafters].int()
    return [value.to(DEVICE) for value in (tokens, parent.int(), chance, member, root, groups)]


def paths_of(tokens, parent, chance, taken, max_depth):
    """Reach and first candidate of every path of tokens, by climbing from each candidate on its own."""
    best = {}
    for index in range(len(tokens)):
        climb, place = [], index
        while place >= 0:
            climb.append(place)
            place = parent[place]
        if len(climb) > max_depth or not all(taken[i] and chance[i] > 0 for i in climb):
            continue
        reach = torch.tensor(1.0)
        for i in reversed(climb):
            reach = reach * torch.tensor(min(chance[i], 1.0))
        path = tuple(tokens[i] for i in reversed(climb))
        before, first = best.get(path, (0.0, index))
        if reach > 0:
            best[path] = max(before, reach.item()), first
    return best


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_written_by_hand(backend):
    # drafter 0 proposes 5 6, drafter 1 proposes 5, behind it 7 and 6, and 8
    tokens, parent = int32([[5, 6, 5, 7, 6, 8]]), int32([[-1, 0, -1, 2, 2, -1]])
    chance, member = float32([[0.5, 0.5, 0.75, 0.5, 0.125, 0.25]]), int32([0, 0, 1, 1, 1, 1])
    tree = tree_merge(
        *(tokens, parent, chance, member, int32([9]), int32([0b11, 0b01, 0b10])),
        num_nodes=5,
        num_gains=6,
        max_depth=2,
        backend=backend,
    )
    # 5 (0.75), 7 behind it (0.375), of 0.25 each 8 and then 6 behind 5, which drafter 0 holds for likelier
    assert tree.tokens.tolist() == [[9, 5, 7, 8, 6]]
    assert tree.parent.tolist() == [[-1, 0, 1, 0, 1]]
    assert tree.depth.tolist() == [[0, 1, 2, 1, 2]]
    assert tree.index.tolist() == [[-1, 0, 3, 5, 1]]
    assert tree.ancestors.tolist() == [[[0b1], [0b11], [0b111], [0b1001], [0b10011]]]
    assert tree.deepest.tolist() == [2]
    assert tree.gains.tolist() == [
        [[0.0, 0.75, 1.125, 1.375, 1.625, 1.625]],
        [[0.0, 0.5, 0.75, 0.75, 0.75, 0.75]],
        [[0.0, 0.75, 1.125, 1.375, 1.46875, 1.46875]],
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_cannot_be_filled_is_padding(backend):
    nan = math.nan
    tokens, parent = int32([[1, 2, 3, 4, 5, 6]]), int32([[-1, 0, -1, 2, -1, 4]])
    chance = float32([[nan, 1.0, 0.0, 1.0, 7.0, -0.5]])  # above 1 counts as 1
    call = tokens, parent, chance, int32([0] * 6), int32([9]), int32([1])
    tree = tree_merge(*call, num_nodes=3, num_gains=3, max_depth=4, backend=backend)
    assert tree.tokens.tolist() == [[9, 5, 9]]
    assert tree.parent.tolist() == [[-1, 0, -1]]
    assert tree.index.tolist() == [[-1, 4, -1]]
    assert tree.ancestors.tolist() == [[[1], [3], [4]]]
    assert tree.deepest.tolist() == [1]
    assert tree.gains.tolist() == [[[0.0, 1.0, 1.0]]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("max_depth", [0, 1, 3])
def test_deeper_candidates_are_dropped(backend, max_depth):
    tokens, parent = int32([[1, 2, 3, 4]]), int32([[-1, 0, 1, 2]])
    call = tokens, parent, float32([[0.5] * 4]), int32([0] * 4), int32([9]), int32([1])
    tree = tree_merge(*call, num_nodes=6, num_gains=2, max_depth=max_depth, backend=backend)
    assert tree.depth.tolist() == [[*range(max_depth + 1), *[0] * (5 - max_depth)]]
    assert tree.gains.tolist() == [[[0.0, 0.5 * (max_depth > 0)]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reach_that_underflows_is_none(backend):
    """The smallest numbers count; half of the smallest of all rounds to 0."""
    tokens, parent = int32([[1, 2, 3]]), int32([[-1, 0, 1]])
    call = tokens, parent, float32([[1e-45, 0.75, 0.5]]), int32([0] * 3), int32([9]), int32([1])
    tree = tree_merge(*call, num_nodes=4, num_gains=1, max_depth=3, backend=backend)
    assert tree.index.tolist() == [[-1, 0, 1, -1]]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=25)
@given(st.integers(0, INT_BOUND), st.integers(1, 20), st.integers(1, 4), st.integers(1, 24), st.booleans())
def test_the_best_paths_are_the_nodes(backend, seed, size, max_depth, num_nodes, ties):
    generator = torch.Generator().manual_seed(seed)
    call = random_pool(generator, size=size, ties=ties, deep=True, invalid=0.1)
    tree = tree_merge(*call, num_nodes=num_nodes, num_gains=size + 2, max_depth=max_depth, backend=backend)
    tokens, parent, chance, member, _, groups = (value.tolist() for value in call)
    for row in range(len(tokens)):
        for place, group in enumerate(groups):
            taken = [group >> one & 1 for one in member]
            found = paths_of(tokens[row], parent[row], chance[row], taken, max_depth)
            best = sorted(found, key=lambda path: (-found[path][0], len(path), found[path][1]))
            worth = torch.tensor([0.0, *(found[path][0] for path in best), *[0.0] * (size + 1)])[: size + 2].cumsum(0)
            torch.testing.assert_close(tree.gains[place, row].cpu(), worth, rtol=GAINS, atol=0)
            if place > 0:
                continue
            chosen, nodes = best[: num_nodes - 1], {0: ()}
            for node in range(1, len(chosen) + 1):
                nodes[node] = (*nodes[tree.parent[row, node].item()], tree.tokens[row, node].item())
            assert [nodes[node] for node in range(1, len(nodes))] == chosen
            padding = [-1] * (num_nodes - 1 - len(chosen))
            assert tree.index[row].tolist() == [-1, *(found[path][1] for path in chosen), *padding]


@pytest.mark.parametrize(
    ("size", "num_nodes", "num_gains"), [(1, 1, 1), (1, 2, 3), (2, 3, 2), (16, 9, 9), (33, 20, 40), (64, 64, 65)]
)
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_matches_the_reference(generator, size, num_nodes, num_gains, ties):
    call = random_pool(generator, size=size, ties=ties, invalid=0.1)
    sizes = {"num_nodes": num_nodes, "num_gains": num_gains, "max_depth": 6}
    assert_same(tree_merge(*call, **sizes, backend="triton"), reference.tree_merge(*call, **sizes))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, INT_BOUND), st.integers(1, 40), st.integers(1, 3), st.integers(0, 9), st.integers(1, 40))
def test_equal_paths_and_ties_match_the_reference(seed, size, vocab, max_depth, num_nodes):
    generator = torch.Generator().manual_seed(seed)
    call = random_pool(generator, size=size, vocab=vocab, ties=True, deep=seed % 2 == 0, invalid=0.2)
    sizes = {"num_nodes": num_nodes, "num_gains": 7, "max_depth": max_depth}
    assert_same(tree_merge(*call, **sizes, backend="triton"), reference.tree_merge(*call, **sizes))


def test_the_largest_pool_and_tree(generator):
    call = random_pool(generator, batch=1, size=MAX_POOL, vocab=32000, drafters=1)
    call[2] = call[2] * 0.25 + 0.75
    sizes = {"num_nodes": MAX_NODES, "num_gains": MAX_POOL + 1, "max_depth": MAX_POOL}
    tree = tree_merge(*call, **sizes, backend="triton")
    assert (tree.index[:, 1:] >= 0).all()
    assert_same(tree, reference.tree_merge(*call, **sizes))


def test_a_chain_as_long_as_the_pool(generator):
    """Every depth is a level of its own; a token does not tell a path from its prefix, not even token 0."""
    size = 40
    parent = int32([[*range(-1, size - 1)]])
    call = int32([[0] * size]), parent, torch.ones(1, size, device=DEVICE), int32([0] * size), int32([0]), int32([1])
    tree = tree_merge(*call, num_nodes=size + 1, num_gains=2, max_depth=10**6, backend="triton")
    assert tree.depth.tolist() == [[*range(size + 1)]]
    assert tree.parent.tolist() == [[*range(-1, size)]]


def test_the_front_of_a_tree_is_the_smaller_tree(generator):
    call = random_pool(generator, size=40, ties=True)
    large = tree_merge(*call, num_nodes=25, num_gains=4, max_depth=5, backend="triton")
    small = tree_merge(*call, num_nodes=11, num_gains=4, max_depth=5, backend="triton")
    for field in ("tokens", "parent", "depth", "index"):
        assert torch.equal(getattr(large, field)[:, :11], getattr(small, field))


def test_a_drafter_alone_is_the_pool_of_its_candidates(generator):
    """What the others propose changes neither the tree of a group without them nor its gains."""
    call = random_pool(generator, size=24, ties=True)
    sizes = {"num_nodes": 12, "num_gains": 12, "max_depth": 5, "backend": "triton"}
    for drafter in (0, 1):
        is_own = call[3] == drafter
        alone = [*call[:2], torch.where(is_own, call[2], 0.0), *call[3:5]]
        assert_same(tree_merge(*call[:5], int32([1 << drafter]), **sizes), tree_merge(*alone, int32([3]), **sizes))


def test_every_bit_is_a_drafter():
    tokens, parent = int32([[*range(MAX_DRAFTERS)]]), int32([[-1] * MAX_DRAFTERS])
    call = tokens, parent, torch.full((1, MAX_DRAFTERS), 0.5, device=DEVICE), tokens[0], int32([99])
    groups = int32([2**MAX_DRAFTERS - 1, *(1 << drafter for drafter in range(MAX_DRAFTERS)), 0])
    tree = tree_merge(*call, groups, num_nodes=MAX_DRAFTERS + 1, num_gains=2, max_depth=1, backend="triton")
    assert tree.index.tolist() == [[-1, *range(MAX_DRAFTERS)]]
    assert tree.gains[:, 0, 1].tolist() == [0.5] * (MAX_DRAFTERS + 1) + [0.0]


def test_a_candidate_of_a_wild_parent_is_none(monkeypatch):
    """A GPU is not asked; below -1 is the root, and what is not earlier is nothing."""
    module = importlib.import_module("specdec.kernels.tree_merge")
    monkeypatch.setattr(module, "check_parent", lambda *_, **__: None)
    tokens, sizes = int32([[1, 2, 3, 4, 5, 6]]), {"num_nodes": 7, "num_gains": 3, "max_depth": 6}
    tail = int32([0] * 6), int32([9]), int32([1])
    got = tree_merge(tokens, int32([[-7, 0, 2, 5, 10**6, 1]]), float32([[0.5] * 6]), *tail, **sizes, backend="triton")
    chance = float32([[0.5, 0.5, 0.0, 0.0, 0.0, 0.5]])
    assert_same(got, reference.tree_merge(tokens, int32([[-1, 0, -1, -1, -1, 1]]), chance, *tail, **sizes))


@pytest.mark.parametrize(
    ("sizes", "blocks", "num_warps"),
    [((1, 1, 1), (1,) * 5, 1), ((200, 64, 65), (256, 16, 64, 2, 128), 8), ((512, 512, 9), (512, 16, 512, 16, 16), 8)],
)
def test_launch_config(sizes, blocks, num_warps):
    config = _launch_config(*sizes)
    assert tuple(config.blocks[f"BLOCK_{letter}"] for letter in "MTNWL") == blocks
    assert config.num_warps == num_warps
