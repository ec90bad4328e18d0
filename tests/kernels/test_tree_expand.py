"""kernels.tree_expand against its eager reference and against hand-written trees."""

import pytest
import torch

from lib.tensors import DEVICE, int32
from specdec.kernels.reference.tree_expand import tree_expand as reference
from specdec.kernels.tree_expand import _launch_config, tree_expand


def random_call(generator, *, batch=2, lists=3, ranks=4, num_nodes=9, dtype=torch.int64):
    """Arguments of tree_expand for a random tree; about one node in ten is padding."""
    row = torch.randint(0, lists, (num_nodes,), generator=generator, dtype=torch.int32)
    rank = torch.randint(0, ranks, (num_nodes,), generator=generator, dtype=torch.int32)
    padded = torch.rand(num_nodes, generator=generator) < 0.1
    padded[0] = True
    args = {
        "candidates": torch.randint(0, 32000, (batch, lists, ranks), generator=generator).to(dtype),
        "root": torch.randint(0, 32000, (batch,), generator=generator, dtype=torch.int32),
        "lengths": torch.randint(0, 5000, (batch,), generator=generator, dtype=torch.int32),
        "row": row.masked_fill(padded, -1),
        "rank": rank.masked_fill(padded, -1),
        "depth": torch.randint(0, 6, (num_nodes,), generator=generator, dtype=torch.int32),
    }
    return {name: tensor.to(DEVICE) for name, tensor in args.items()}


def assert_equals_reference(args):
    tokens, positions = tree_expand(**args, backend="triton")
    expected_tokens, expected_positions = reference(**args)
    assert tokens.dtype == positions.dtype == torch.int32
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(positions, expected_positions)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_tree_written_by_hand(backend):
    tokens, positions = tree_expand(
        torch.tensor([[[11, 12], [21, 22]], [[31, 32], [41, 42]]], device=DEVICE),
        root=int32([7, 8]),
        lengths=int32([100, 0]),
        row=int32([-1, 0, 0, 1, 1]),
        rank=int32([-1, 0, 1, 0, 1]),
        depth=int32([0, 1, 1, 2, 2]),
        backend=backend,
    )
    assert tokens.tolist() == [[7, 11, 12, 21, 22], [8, 31, 32, 41, 42]]
    assert positions.tolist() == [[100, 101, 101, 102, 102], [0, 1, 1, 2, 2]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 64, 129, 512])
def test_matches_the_reference(generator, num_nodes, dtype):
    assert_equals_reference(random_call(generator, num_nodes=num_nodes, dtype=dtype))


@pytest.mark.parametrize(("batch", "lists", "ranks"), [(1, 1, 1), (3, 1, 5), (2, 4, 1), (0, 3, 4)])
def test_matches_the_reference_on_narrow_candidates(generator, batch, lists, ranks):
    assert_equals_reference(random_call(generator, batch=batch, lists=lists, ranks=ranks))


def test_a_tree_of_the_root_alone_needs_no_candidates():
    nothing = torch.empty(2, 0, 4, dtype=torch.int64, device=DEVICE)
    root, lengths = int32([5, 6]), int32([3, 9])
    for backend in ("triton", "reference"):
        tokens, positions = tree_expand(nothing, root, lengths, int32([-1]), int32([-1]), int32([0]), backend=backend)
        assert tokens.tolist() == [[5], [6]]
        assert positions.tolist() == [[3], [9]]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_without_lengths_there_are_no_positions(generator, backend):
    args = random_call(generator, num_nodes=40)
    tokens, positions = tree_expand(**args | {"lengths": None}, backend=backend)
    assert torch.equal(tokens, reference(**args)[0])
    assert positions.shape == (2, 0)


def test_padding_takes_the_token_of_the_root(generator):
    args = random_call(generator, num_nodes=6)
    args["row"] = int32([-1, 0, -1, 1, -1, -1])
    tokens, _ = tree_expand(**args, backend="triton")
    assert torch.equal(tokens[:, [0, 2, 4, 5]], args["root"][:, None].expand(2, 4))


def test_the_reference_refuses_a_rank_beyond_the_candidates(generator):
    args = {name: tensor.cpu() for name, tensor in random_call(generator, ranks=4, num_nodes=2).items()}
    args["row"], args["rank"] = torch.tensor([-1, 0]).int(), torch.tensor([-1, 4]).int()
    with pytest.raises(IndexError, match="out of bounds"):
        tree_expand(**args, backend="reference")


@pytest.mark.parametrize(("num_nodes", "block"), [(1, 1), (60, 64), (128, 128), (512, 128)])
def test_launch_config(num_nodes, block):
    assert _launch_config(num_nodes).blocks["BLOCK_N"] == block
