"""kernels.commit_pairs against its reference, and the reference against lists written by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, FLOATS, int32, int64
from specdec.kernels.commit_pairs import _launch_config, commit_pairs

BACKENDS = ["reference", "triton"]


def memory(features, tokens, counts, width=1, dtype=torch.float32):
    """What is pending: features [B, W, F] that all hold one number per place, tokens, counts and last places."""
    held = torch.tensor(features, dtype=dtype, device=DEVICE)[:, :, None].repeat(1, 1, width)
    return held, int32(tokens), int32(counts), int64([-7] * len(counts))


def states_of(batch, num_nodes, width=1, dtype=torch.float32):
    """Node n of row b has the state 100 b + n."""
    numbers = 100 * torch.arange(batch)[:, None] + torch.arange(num_nodes)
    return numbers[:, :, None].repeat(1, 1, width).to(DEVICE, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_pairs_written_by_hand(backend, dtype):
    held = memory([[9.0] * 4] * 3, [[9] * 4] * 3, [4, 1, 2], width=5, dtype=dtype)
    # nodes 0, 2, 5 accepted and three tokens emitted; the root alone; a finished row
    path, emitted = int32([[0, 2, 5, -1], [0, -1, -1, -1], [-1] * 4]), int32([[7, 8, 4, -1], [6, -1, -1, -1], [-1] * 4])
    commit_pairs(*held, states_of(3, 6, 5, dtype), path, emitted, int32([2, 0, -1]), backend=backend)
    features, tokens, counts, last = held
    assert features[:, :, 0].tolist() == features[:, :, 4].tolist() == [[0, 2, 5, 0], [100] * 4, [200] * 4]
    assert tokens.tolist() == [[7, 8, 4, 0], [6, 0, 0, 0], [0] * 4]
    assert counts.tolist() == [3, 1, 0]
    assert last.tolist() == [2, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_newest_pairs_stay_in_front(backend):
    held = memory([[50.0, 51, 52, 53, 54]] * 3, [[10, 11, 12, 13, 14]] * 3, [4, 1, 2])
    path, emitted = int32([[0, 3, -1], [0, 1, 2], [-1] * 3]), int32([[7, 8, -1], [4, 5, 6], [-1] * 3])
    commit_pairs(*held, states_of(3, 4), path, emitted, int32([1, 2, -1]), keep=2, backend=backend)
    features, tokens, counts, last = held
    assert features[:, :, 0].tolist() == [[52, 53, 0, 3, 0], [50, 100, 101, 102, 100], [50, 51, 200, 200, 200]]
    assert tokens.tolist() == [[12, 13, 7, 8, 0], [10, 4, 5, 6, 0], [10, 11, 0, 0, 0]]
    assert counts.tolist() == [4, 4, 2]
    assert last.tolist() == [3, 3, 1]


@st.composite
def steps(draw):
    """Sizes of a memory and a verdict: W, F, keep, then per row a count and accepted tokens."""
    keep, num_nodes = draw(st.integers(0, 3)), draw(st.integers(1, 6))
    width = draw(st.sampled_from([0, 1, 5, 16, 70]))
    rows = draw(st.lists(st.tuples(st.integers(0, keep + num_nodes), st.integers(-1, num_nodes - 1)), max_size=3))
    return keep, num_nodes, width, rows


@settings(deadline=None, max_examples=40)
@given(steps(), st.integers(0, 2**31))
def test_any_step(case, seed):
    keep, num_nodes, width, rows = case
    g, batch = torch.Generator().manual_seed(seed), len(rows)
    path = torch.full((batch, num_nodes), -1, dtype=torch.int32)
    for b, (_, accepted) in enumerate(rows):
        path[b, : accepted + 1] = torch.randperm(8, generator=g)[: accepted + 1].sort().values
    emitted = torch.where(path >= 0, torch.randint(1, 99, path.shape, generator=g), -1).int()
    features, states = (torch.randn(batch, n, width, generator=g) for n in (keep + num_nodes, 8))
    tokens = torch.randint(0, 99, (batch, keep + num_nodes), generator=g).int()
    counts, accepted = (torch.tensor([row[i] for row in rows], dtype=torch.int32) for i in range(2))
    given_ = [features, tokens, counts, counts.long(), states, path, emitted, accepted]
    results = []
    for backend in BACKENDS:
        held = [tensor.clone().to(DEVICE) for tensor in given_]
        commit_pairs(*held, keep=keep, backend=backend)
        results.append(held)
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
    for b, (count, num_accepted) in enumerate(rows):  # told once more, as lists
        kept = list(range(max(0, count - keep), count)) if keep else []
        nodes = path[b, : num_accepted + 1].tolist()
        pairs = [features[b, t] for t in kept] + [states[b, node] for node in nodes]
        for t, pair in enumerate(pairs):
            assert torch.equal(results[0][0][b, t], pair.to(DEVICE))
        assert results[0][1][b, : len(pairs)].tolist() == tokens[b, kept].tolist() + emitted[b, : len(nodes)].tolist()
        assert results[0][2][b] == len(pairs)


def test_strided_states_and_other_memory_is_left_alone():
    wide = states_of(2, 12, 8)[:, ::2, :5]
    around = torch.full((2, 6, 9), 7.0, device=DEVICE)
    tokens = torch.full((2, 6), 7, dtype=torch.int32, device=DEVICE)
    counts, last = int32([0, 0]), int64([0, 0])
    path = int32([[0, 3], [0, 5]])
    commit_pairs(around[:, 1:3, :5], tokens[:, :2], counts, last, wide, path, path, int32([1, 1]), backend="triton")
    assert around[:, 1:3, 2].tolist() == [[0, 6], [100, 110]]
    assert (around[:, 0] == 7).all()
    assert (around[:, 3:] == 7).all()
    assert (around[:, :, 5:] == 7).all()
    assert (tokens[:, 2:] == 7).all()


@pytest.mark.parametrize(
    ("num_places", "width", "block_w", "block_f", "num_warps"),
    [(6, 4096, 8, 512, 4), (1, 12288, 1, 4096, 4), (16, 64, 16, 64, 1), (512, 4096, 512, 16, 8), (4, 0, 4, 16, 1)],
)
def test_launch_config(num_places, width, block_w, block_f, num_warps):
    config = _launch_config(num_places, width)
    assert config.blocks == {"BLOCK_W": block_w, "BLOCK_F": block_f}
    assert config.num_warps == num_warps
