"""kernels.tree_grow against all paths written out, against its reference and against what a tree is."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, float32, int32
from specdec.kernels.common.check import MAX_NODES
from specdec.kernels.reference import tree_grow as reference
from specdec.kernels.tree_grow import MAX_GROWN_DEPTH, MAX_GROWN_RANKS, _launch_config, tree_grow

FIELDS = ("tokens", "parent", "depth", "ancestors", "deepest", "index")
BACKENDS = ["triton", "reference"]
INT_BOUND = 2**32

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities, under the interpreter


def assert_same(got, expected):
    for field in FIELDS:
        a, b = getattr(got, field), getattr(expected, field)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"{field}: {a.tolist()} is not {b.tolist()}"


def random_logps(generator, *sizes, ties=False, invalid=0.0):
    """Log-probabilities in no order; with ties, of a handful of values only; a share of them -inf, NaN or positive."""
    values = -8 * torch.rand(sizes, generator=generator)
    if ties:
        values = -torch.randint(0, 4, sizes, generator=generator).float()
    odd = torch.tensor([math.nan, -math.inf, 0.5])[torch.randint(0, 3, sizes, generator=generator)]
    return torch.where(torch.rand(sizes, generator=generator) < invalid, odd, values).to(DEVICE)


def random_block(generator, *, batch=2, depth=4, ranks=3, lattice=False, token_dtype=torch.int64, **values):
    """Positional arguments, and `edges` if it is a lattice."""
    tokens = torch.randint(0, 32000, (batch, depth, ranks), generator=generator).to(token_dtype).to(DEVICE)
    root = torch.randint(0, 32000, (batch,), generator=generator, dtype=torch.int32).to(DEVICE)
    logps = random_logps(generator, batch, depth, ranks, **values)
    edges = random_logps(generator, batch, depth - 1, ranks, ranks, **values)
    return (tokens, logps, root), {"edges": edges} if lattice else {}


def steps_of(logps, edges, path):
    """What a path of ranks adds up, position by position, as float32 numbers of at most 0."""
    steps = [logps[0][path[0]]]
    for k in range(1, len(path)):
        steps.append(logps[k][path[k]] if edges is None else edges[k - 1][path[k - 1]][path[k]])
    return [torch.tensor(-math.inf if math.isnan(x) else min(x, 0.0)) for x in steps]


def all_paths(logps, edges, num_nodes):
    """The best paths of one request, by writing out all of them: rank paths in the order of the nodes."""
    depth, ranks = len(logps), len(logps[0])
    total, last = {(): torch.tensor(0.0)}, {}
    for length in range(1, depth + 1):
        for path in itertools.product(range(ranks), repeat=length):
            last[path] = steps_of(logps, edges, path)[-1]
            total[path] = total[path[:-1]] + last[path]
    possible = [path for path in total if path and total[path] > -math.inf]
    chosen = [()]
    while len(chosen) < num_nodes:
        # whatever could be chosen next, in the order that the op documents
        behind = [path for path in possible if path not in chosen and path[:-1] in chosen]
        if not behind:
            break
        chosen.append(
            min(
                behind,
                key=lambda path: (-total[path], len(path), chosen.index(path[:-1]), -last[path], path[-1]),
            )
        )
    best = sorted(-total[path] for path in possible)[: num_nodes - 1]
    assert sorted(-total[path] for path in chosen[1:]) == best  # no path outside is better than one inside
    return chosen[1:]


def paths_of(tree, row, ranks):
    """The rank path of every node of a row, padding left out."""
    paths = {0: ()}
    for node, (parent, index) in enumerate(zip(tree.parent[row].tolist(), tree.index[row].tolist(), strict=True)):
        if index >= 0:
            paths[node] = (*paths[parent], index % ranks)
            assert len(paths[node]) == tree.depth[row, node] == index // ranks + 1
    return [paths[node] for node in sorted(paths) if node]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_written_by_hand(backend):
    tokens, logps = int32([[[10, 11], [20, 21]]]), float32([[[-1.0, -2.0], [-0.5, -1.5]]])
    tree = tree_grow(tokens, logps, int32([7]), num_nodes=6, backend=backend)
    # 10 (-1), 20 behind it (-1.5), 11 (-2), 21 behind 10 and 20 behind 11 (-2.5 both: the earlier parent first)
    assert tree.tokens.tolist() == [[7, 10, 20, 11, 21, 20]]
    assert tree.parent.tolist() == [[-1, 0, 1, 0, 1, 3]]
    assert tree.depth.tolist() == [[0, 1, 2, 1, 2, 2]]
    assert tree.index.tolist() == [[-1, 0, 2, 1, 3, 2]]
    assert tree.ancestors.tolist() == [[[0b1], [0b11], [0b111], [0b1001], [0b10011], [0b101001]]]
    assert tree.deepest.tolist() == [2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lattice_written_by_hand(backend):
    tokens, logps = int32([[[10, 11], [20, 21]]]), float32([[[-1.0, -2.0], [0.0, 0.0]]])
    edges = float32([[[[-3.0, -9.0], [-4.0, -0.1]]]])
    tree = tree_grow(tokens, logps, int32([7]), num_nodes=5, edges=edges, backend=backend)
    # 10 (-1), 11 (-2), 21 behind 11 (-2.1), 20 behind 10 (-4); logps of the second position are not read
    assert tree.tokens.tolist() == [[7, 10, 11, 21, 20]]
    assert tree.parent.tolist() == [[-1, 0, 0, 2, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_come_with_what_they_sum_to(backend):
    tokens, logits = int32([[[1, 2], [3, 4]]]), float32([[[5.0, 4.0], [9.0, 8.9]]])
    logsumexp = float32([[5.5, 10.0]])
    tree = tree_grow(tokens, logits, int32([0]), num_nodes=4, logsumexp=logsumexp, backend=backend)
    assert_same(tree, tree_grow(tokens, logits - logsumexp[..., None], int32([0]), num_nodes=4, backend=backend))
    assert tree.index.tolist() == [[-1, 0, 1, 2]]  # -0.5, -1.5 before -1.5 one deeper


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, INT_BOUND), st.integers(1, 3), st.integers(1, 3), st.integers(1, 45), st.booleans(), st.booleans()
)
def test_no_path_outside_is_better_than_one_inside(backend, seed, depth, ranks, num_nodes, lattice, ties):
    generator = torch.Generator().manual_seed(seed)
    call, kwargs = random_block(generator, depth=depth, ranks=ranks, lattice=lattice, ties=ties, invalid=0.1)
    tree = tree_grow(*call, num_nodes=num_nodes, **kwargs, backend=backend)
    edges = [None, None] if not lattice else kwargs["edges"].tolist()
    for row, logps in enumerate(call[1].tolist()):
        assert paths_of(tree, row, ranks) == all_paths(logps, edges[row], num_nodes)


@pytest.mark.parametrize(
    ("depth", "ranks", "num_nodes"), [(1, 1, 1), (1, 1, 2), (5, 3, 7), (8, 8, 33), (7, 16, 64), (20, 7, 128)]
)
@pytest.mark.parametrize("lattice", [False, True], ids=["product", "lattice"])
@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int64], ids=str)
def test_matches_the_reference(generator, depth, ranks, num_nodes, lattice, token_dtype):
    call, kwargs = random_block(
        generator, depth=depth, ranks=ranks, lattice=lattice, ties=depth % 2 == 1, token_dtype=token_dtype
    )
    tree = tree_grow(*call, num_nodes=num_nodes, **kwargs, backend="triton")
    assert_same(tree, reference.tree_grow(*call, num_nodes=num_nodes, **kwargs))


def test_the_largest_block_and_tree(generator):
    call, kwargs = random_block(generator, batch=1, depth=MAX_GROWN_DEPTH, ranks=MAX_GROWN_RANKS, lattice=True)
    call[1][..., 0] = kwargs["edges"][..., 0] = -1e-4  # one path to the end
    tree = tree_grow(*call, num_nodes=MAX_NODES, **kwargs, backend="triton")
    assert tree.deepest.tolist() == [MAX_GROWN_DEPTH]
    assert (tree.index[:, 1:] >= 0).all()
    assert_same(tree, reference.tree_grow(*call, num_nodes=MAX_NODES, **kwargs))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, INT_BOUND), st.integers(1, 6), st.integers(1, 5), st.integers(1, 40), st.booleans())
def test_heavy_ties_match_the_reference(seed, depth, ranks, num_nodes, lattice):
    generator = torch.Generator().manual_seed(seed)
    call, kwargs = random_block(generator, depth=depth, ranks=ranks, lattice=lattice, ties=True, invalid=0.2)
    tree = tree_grow(*call, num_nodes=num_nodes, **kwargs, backend="triton")
    assert_same(tree, reference.tree_grow(*call, num_nodes=num_nodes, **kwargs))


def test_the_front_of_a_tree_is_the_smaller_tree(generator):
    call, kwargs = random_block(generator, depth=6, ranks=4, lattice=True)
    large = tree_grow(*call, num_nodes=30, **kwargs)
    small = tree_grow(*call, num_nodes=11, **kwargs)
    for field in ("tokens", "parent", "depth", "index"):
        assert torch.equal(getattr(large, field)[:, :11], getattr(small, field))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_cannot_be_filled_is_padding(backend):
    nan, inf = math.nan, math.inf
    tokens, logps = int32([[[5, 6], [7, 8]]]), float32([[[-inf, 3.0], [nan, -1.0]]])
    tree = tree_grow(tokens, logps, int32([9]), num_nodes=5, backend=backend)
    # a positive log-probability counts as 0, below -inf and NaN there is nothing
    assert tree.tokens.tolist() == [[9, 6, 8, 9, 9]]
    assert tree.parent.tolist() == [[-1, 0, 1, -1, -1]]
    assert tree.index.tolist() == [[-1, 1, 3, -1, -1]]
    assert tree.depth.tolist() == [[0, 1, 2, 0, 0]]
    assert tree.ancestors.tolist() == [[[1], [3], [7], [8], [16]]]
    assert tree.deepest.tolist() == [2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_totals_that_overflow_are_no_paths(backend):
    logps = float32([[[-3e38, -1.0], [-3e38, -3e38]]])
    tree = tree_grow(int32([[[1, 2], [3, 4]]]), logps, int32([0]), num_nodes=7, backend=backend)
    assert tree.index.tolist() == [[-1, 1, 0, 2, 3, -1, -1]]


@pytest.mark.parametrize(
    ("num_nodes", "blocks", "num_warps"), [(1, (1, 1), 1), (128, (128, 4), 1), (512, (512, 16), 4)]
)
def test_launch_config(num_nodes, blocks, num_warps):
    config = _launch_config(num_nodes)
    assert (config.blocks["BLOCK_N"], config.blocks["BLOCK_W"]) == blocks
    assert config.num_warps == num_warps
