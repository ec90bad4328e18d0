"""kernels.tree_rerank against a heap in plain Python, against EAGLE-2's own selection and against what a tree is."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, float32, int32
from specdec.kernels.common.check import MAX_NODES
from specdec.kernels.reference import tree_rerank as reference
from specdec.kernels.tree_rerank import MAX_POOL, _beam_config, _rerank_config, beam_step, tree_rerank

BEAM_FIELDS = ("index", "row", "tokens", "logps", "candidate_logps")
TREE_FIELDS = ("tokens", "parent", "depth", "ancestors", "deepest", "index")
INT_BOUND = 2**32


def assert_same(got, expected, fields):
    for field in fields:
        a, b = getattr(got, field), getattr(expected, field)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"{field}: {a.tolist()} is not {b.tolist()}"


def random_level(generator, *, batch=2, lists=3, ranks=4, ties=False, token_dtype=torch.int32):
    """Tokens, log-probabilities and beam log-probabilities; with ties, of a handful of values only."""
    shape = batch, lists, ranks
    if ties:
        logps = -torch.randint(0, 4, shape, generator=generator).float()
        beam = -torch.randint(0, 3, shape[:2], generator=generator).float()
    else:
        logps, beam = -8 * torch.rand(shape, generator=generator), -8 * torch.rand(shape[:2], generator=generator)
    tokens = torch.randint(0, 32000, shape, generator=generator).to(token_dtype)
    return tokens.to(DEVICE), logps.to(DEVICE), beam.to(DEVICE)


def random_pool(generator, *, batch=2, lists=9, ranks=4, ties=True, invalid=0.1, token_dtype=torch.int64):
    """A pool whose lists hang on any candidate; lists that hang on each other in a circle are never reached."""
    tokens, logps, _ = random_level(
        generator, batch=batch, lists=lists, ranks=ranks, ties=ties, token_dtype=token_dtype
    )
    bad = torch.rand(logps.shape, generator=generator).to(DEVICE) < invalid
    logps = torch.where(bad, torch.where(tokens % 2 == 0, math.nan, -math.inf), logps)
    parent = torch.randint(-1, lists * ranks, (batch, lists), generator=generator, dtype=torch.int32)
    parent[torch.rand(parent.shape, generator=generator) < 0.2] = -1
    root = torch.randint(0, 32000, (batch,), generator=generator, dtype=torch.int32)
    return tokens, logps, parent.to(DEVICE), root.to(DEVICE)


def grow_pool(generator, *, batch, width, ranks, passes):
    """The pool of EAGLE-2: every pass expands the beam of the pass before; log-probabilities without ties."""
    beam_logps, pool, parents = torch.zeros(batch, 1, device=DEVICE), [], [int32([[-1]] * batch)]
    num_candidates = 0
    for _ in range(passes):
        tokens, logps, _ = random_level(generator, batch=batch, lists=beam_logps.shape[1], ranks=ranks)
        beam = beam_step(tokens, logps, beam_logps, width=width, first_index=num_candidates, backend="triton")
        pool.append((tokens, beam.candidate_logps))
        parents.append(beam.index)
        beam_logps = beam.logps
        num_candidates += tokens[0].numel()
    return (
        torch.cat([tokens for tokens, _ in pool], dim=1),
        torch.cat([logps for _, logps in pool], dim=1),
        torch.cat(parents[:-1], dim=1),
        torch.zeros(batch, dtype=torch.int32, device=DEVICE),
    )


# Two lists below the root's list: its candidates are 0 and 1, list 1 hangs on 0, list 2 on 1.
HAND_TOKENS = [[[10, 11], [20, 21], [30, 31]]]
HAND_LOGPS = [[[-1.0, -2.0], [-1.5, -4.0], [-2.0, -2.5]]]
HAND_PARENT = [[-1, 0, 1]]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_pool_written_by_hand(backend):
    tree = tree_rerank(
        int32(HAND_TOKENS),
        float32(HAND_LOGPS),
        int32(HAND_PARENT),
        int32([7]),
        num_nodes=5,
        max_depth=2,
        backend=backend,
    )
    # best first: 0 (-1), 2 (-1.5), then 1 and its child 4 (-2 each): the tie keeps the parent
    assert tree.index.tolist() == [[-1, 0, 1, 2, 4]]
    assert tree.tokens.tolist() == [[7, 10, 11, 20, 30]]
    assert tree.parent.tolist() == [[-1, 0, 0, 1, 2]]
    assert tree.depth.tolist() == [[0, 1, 1, 2, 2]]
    assert tree.ancestors.tolist() == [[[0b1], [0b11], [0b101], [0b1011], [0b10101]]]
    assert tree.deepest.tolist() == [2]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_tie_keeps_the_parent(backend):
    call = int32(HAND_TOKENS), float32(HAND_LOGPS), int32(HAND_PARENT), int32([7])
    tree = tree_rerank(*call, num_nodes=4, max_depth=2, backend=backend)
    assert tree.index.tolist() == [[-1, 0, 1, 2]]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_beam_written_by_hand(backend):
    beam = beam_step(
        int32([[[10, 11, 12], [20, 21, 22]]]),
        float32([[[-1.0, -2.0, -3.0], [-0.5, -1.0, -9.0]]]),
        float32([[-0.5, -0.5]]),
        width=3,
        first_index=100,
        backend=backend,
    )
    # totals -1.5 -2.5 -3.5 and -1 -1.5 -9.5: of the two -1.5 the lower list comes first
    assert beam.index.tolist() == [[103, 100, 104]]
    assert beam.row.tolist() == [[1, 0, 1]]
    assert beam.tokens.tolist() == [[20, 10, 21]]
    assert beam.logps.tolist() == [[-1.0, -1.5, -1.5]]
    assert beam.candidate_logps.tolist() == [[[-1.5, -2.5, -3.5], [-1.0, -1.5, -9.5]]]


@pytest.mark.parametrize(
    ("lists", "ranks", "width"), [(1, 1, 1), (1, 10, 10), (10, 10, 10), (7, 3, 5), (3, 5, 15), (16, 32, 20)]
)
@pytest.mark.parametrize("ties", [False, True], ids=["no ties", "ties"])
def test_the_beam_matches_the_reference(generator, lists, ranks, width, ties):
    call = random_level(generator, lists=lists, ranks=ranks, ties=ties)
    logsumexp = torch.rand(call[2].shape, generator=generator).to(DEVICE)
    for extra in ({}, {"logsumexp": logsumexp}, {"logsumexp": logsumexp.T.contiguous().T}):
        beam = beam_step(*call, width=width, first_index=7, **extra, backend="triton")
        assert_same(beam, reference.beam_step(*call, width=width, first_index=7, **extra), BEAM_FIELDS)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, INT_BOUND), st.integers(1, 5), st.integers(1, 6), st.data())
def test_the_beam_is_the_front_of_a_stable_sort(seed, lists, ranks, data):
    generator = torch.Generator().manual_seed(seed)
    tokens, logps, beam_logps = random_level(generator, lists=lists, ranks=ranks, ties=True)
    width = data.draw(st.integers(1, lists * ranks))
    beam = beam_step(tokens, logps, beam_logps, width=width, backend="triton")
    totals = (logps + beam_logps[..., None]).flatten(1)
    order = totals.sort(dim=1, descending=True, stable=True).indices[:, :width]
    assert torch.equal(beam.index, order.int())
    assert torch.equal(beam.row, beam.index // ranks)
    assert torch.equal(beam.tokens, tokens.flatten(1).gather(1, order))
    assert torch.equal(beam.logps, totals.gather(1, order))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_impossible_candidates_leave_places_of_the_beam_empty(backend):
    nan, inf = math.nan, math.inf
    tokens, logps = int32([[[5, 6], [7, 8], [9, 9]]]), float32([[[-inf, nan], [-1.0, 3.0], [-1.0, -1.0]]])
    beam = beam_step(tokens, logps, float32([[0.0, -1.0, -inf]]), width=3, first_index=10, backend=backend)
    # a positive log-probability counts as 0, below a beam of -inf everything is impossible
    assert beam.index.tolist() == [[13, 12, -1]]
    assert beam.row.tolist() == [[1, 1, 0]]
    assert beam.tokens.tolist() == [[8, 7, 5]]
    assert beam.logps.tolist() == [[-1.0, -2.0, -inf]]
    assert beam.candidate_logps.tolist() == [[[-inf, -inf], [-2.0, -1.0], [-inf, -inf]]]


@pytest.mark.parametrize(
    ("lists", "ranks", "num_nodes"),
    [(1, 1, 1), (1, 1, 2), (4, 5, 8), (9, 4, 33), (12, 10, 64), (30, 1, 12), (51, 10, 60), (64, 16, 512)],
)
def test_the_tree_matches_the_reference(generator, lists, ranks, num_nodes):
    call = random_pool(generator, lists=lists, ranks=ranks, ties=lists % 2 == 1)
    tree = tree_rerank(*call, num_nodes=num_nodes, max_depth=5, backend="triton")
    assert_same(tree, reference.tree_rerank(*call, num_nodes=num_nodes, max_depth=5), TREE_FIELDS)


def test_the_largest_pool_and_tree(generator):
    call = random_pool(generator, batch=1, lists=MAX_POOL, ranks=1)
    call[2][:, : MAX_POOL // 2] = -1  # so that the tree fills up
    tree = tree_rerank(*call, num_nodes=MAX_NODES, max_depth=4, backend="triton")
    assert (tree.index[:, 1:] >= 0).all()
    assert_same(tree, reference.tree_rerank(*call, num_nodes=MAX_NODES, max_depth=4), TREE_FIELDS)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, INT_BOUND), st.integers(1, 12), st.integers(1, 5), st.integers(1, 40), st.integers(0, 5))
def test_heavy_ties_match_the_reference(seed, lists, ranks, num_nodes, max_depth):
    call = random_pool(torch.Generator().manual_seed(seed), batch=1, lists=lists, ranks=ranks)
    tree = tree_rerank(*call, num_nodes=num_nodes, max_depth=max_depth, backend="triton")
    assert_same(tree, reference.tree_rerank(*call, num_nodes=num_nodes, max_depth=max_depth), TREE_FIELDS)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, INT_BOUND), st.integers(1, 12), st.integers(1, 5), st.integers(1, 40))
def test_the_result_is_a_tree_in_order(seed, lists, ranks, num_nodes):
    tokens, logps, parent, root = random_pool(torch.Generator().manual_seed(seed), batch=1, lists=lists, ranks=ranks)
    tree = tree_rerank(tokens, logps, parent, root, num_nodes=num_nodes, max_depth=9, backend="triton")
    index, above, depth = tree.index[0].tolist(), tree.parent[0].tolist(), tree.depth[0].tolist()
    num_kept = sum(i >= 0 for i in index)
    kept = range(1, num_kept + 1)
    assert index[0] == above[0] == -1
    assert [(depth[n], index[n]) for n in kept] == sorted((depth[n], index[n]) for n in kept)
    for node in kept:
        assert 0 <= above[node] < node
        assert depth[node] == depth[above[node]] + 1
        assert index[above[node]] == parent[0, index[node] // ranks]
        assert tree.tokens[0, node] == tokens.flatten()[index[node]]
    assert tree.deepest.item() == max(depth)
    assert above[num_kept + 1 :] == index[num_kept + 1 :] == [-1] * (num_nodes - 1 - num_kept)
    for node in range(num_nodes):  # the ancestor words spell the path
        path = {node}
        while above[min(path)] >= 0:
            path.add(above[min(path)])
        words = tree.ancestors[0, node].tolist()
        assert {j for j in range(32 * len(words)) if words[j // 32] >> j % 32 & 1} == path


@pytest.mark.parametrize(("width", "ranks", "passes", "num_nodes"), [(10, 10, 4, 60), (4, 6, 3, 17), (3, 3, 5, 40)])
def test_selects_what_eagle_selects_where_nothing_is_tied(generator, width, ranks, passes, num_nodes):
    """EAGLE-2 takes the top of the pool by log-probability and sorts the indices; its lists come level by level."""
    tokens, logps, parent, root = grow_pool(generator, batch=2, width=width, ranks=ranks, passes=passes)
    tree = tree_rerank(tokens, logps, parent, root, num_nodes=num_nodes, max_depth=passes, backend="triton")
    expected = logps.flatten(1).topk(min(num_nodes - 1, logps[0].numel()), dim=1).indices.sort(dim=1).values
    assert torch.equal(tree.index[:, 1:], expected.int())
    assert tree.depth.max() > 1


def test_a_beam_of_one_gives_a_chain(generator):
    call = grow_pool(generator, batch=1, width=1, ranks=1, passes=5)
    tree = tree_rerank(*call, num_nodes=6, max_depth=5, backend="triton")
    assert tree.parent.tolist() == [[-1, 0, 1, 2, 3, 4]]
    assert tree.depth.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_a_pool_of_nothing_gives_the_root_and_padding():
    for backend in ("triton", "reference"):
        logps = torch.full((1, 2, 3), -math.inf, device=DEVICE)
        tokens = torch.ones(1, 2, 3, dtype=torch.int32, device=DEVICE)
        tree = tree_rerank(tokens, logps, int32([[-1, 0]]), int32([9]), num_nodes=3, max_depth=2, backend=backend)
        assert tree.tokens.tolist() == [[9, 9, 9]]
        assert tree.parent.tolist() == tree.index.tolist() == [[-1, -1, -1]]
        assert tree.depth.tolist() == [[0, 0, 0]]
        assert tree.ancestors.tolist() == [[[1], [2], [4]]]
        assert tree.deepest.tolist() == [0]


def test_nothing_is_taken_below_max_depth(generator):
    call = grow_pool(generator, batch=1, width=2, ranks=2, passes=4)
    for max_depth in (0, 1, 3):
        tree = tree_rerank(*call, num_nodes=14, max_depth=max_depth, backend="triton")
        assert tree.deepest.item() == max_depth
        assert_same(tree, reference.tree_rerank(*call, num_nodes=14, max_depth=max_depth), TREE_FIELDS)


def test_a_child_that_claims_to_beat_its_parent_does_not():
    # candidate 0 is poor, its child 2 claims to be certain; candidate 1 is in between
    call = int32([[[1, 2], [3, 4]]]), float32([[[-5.0, -3.0], [0.0, -9.0]]]), int32([[-1, 0]]), int32([7])
    for backend in ("triton", "reference"):
        assert tree_rerank(*call, num_nodes=2, max_depth=2, backend=backend).index.tolist() == [[-1, 1]]
        assert tree_rerank(*call, num_nodes=3, max_depth=2, backend=backend).index.tolist() == [[-1, 0, 1]]


@pytest.mark.parametrize(
    ("pool_size", "num_nodes", "blocks", "num_warps"),
    [(10, 5, (16, 8, 1), 1), (510, 60, (512, 64, 2), 4), (2040, 512, (2048, 512, 16), 8), (64, 512, (64, 512, 16), 8)],
)
def test_launch_config_of_the_tree(pool_size, num_nodes, blocks, num_warps):
    config = _rerank_config(pool_size, num_nodes)
    assert tuple(config.blocks[name] for name in ("BLOCK_P", "BLOCK_N", "BLOCK_W")) == blocks
    assert config.num_warps == num_warps


@pytest.mark.parametrize(("pool_size", "width", "num_warps"), [(1, 1, 1), (100, 10, 1), (2048, 64, 8)])
def test_launch_config_of_the_beam(pool_size, width, num_warps):
    assert _beam_config(pool_size, width).num_warps == num_warps
