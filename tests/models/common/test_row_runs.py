"""Rows that are attended to at once see what the definition lets them see, and nothing of each other."""

import pytest
import torch

from specdec.kernels.common.words import pack_words
from specdec.kernels.reference.tree_attention import tree_attention
from specdec.models.common.runs import attend_in_runs, visible_runs

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def inputs(generator, lengths, num_nodes, *, heads=(6, 2), dtype=torch.float32, shared=False, first_node=0):
    """Queries of the last nodes of trees whose nodes see random ones before them; slots behind hold large numbers."""
    batch, num_slots = len(lengths), first_node + num_nodes
    capacity = max(lengths) + num_slots + 3
    q = torch.randn(batch, heads[0], num_nodes, 16, generator=generator).to(dtype)
    keys, values = (torch.randn(batch, capacity, heads[1], 16, generator=generator).to(dtype) for _ in range(2))
    for row, length in enumerate(lengths):
        values[row, length + num_slots :] = 1e4
    sees = torch.rand(1 if shared else batch, num_nodes, num_slots, generator=generator) < 0.5
    places = torch.arange(num_nodes)
    sees[:, places, first_node + places] = True
    depth = torch.randint(0, 4, (1 if shared else batch, num_nodes), generator=generator, dtype=torch.int32)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return q, keys.transpose(1, 2), values.transpose(1, 2), lengths, pack_words(sees), num_slots, depth


def attended(q, keys, values, lengths, ancestors, num_slots, depth, window=None):
    groups = q.shape[1] // keys.shape[1]
    runs = visible_runs(lengths, ancestors, num_slots, depth, window, num_groups=groups, dtype=q.dtype)
    return attend_in_runs(q, keys, values, runs, scale=0.25), runs


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("lengths", "num_nodes"),
    [
        ([5], 1),
        ([5], 6),
        ([0, 0], 3),
        ([9, 9, 9], 1),
        ([1, 30, 7, 12], 1),
        ([1, 30, 7, 12], 5),
        ([3, 200, 4, 190, 5], 4),
    ],
    ids=str,
)
def test_it_is_the_definition(generator, lengths, num_nodes, shared, window, dtype):
    for heads in ((6, 2), (3, 3)):
        for first_node in (0, 2):
            args = inputs(generator, lengths, num_nodes, heads=heads, dtype=dtype, shared=shared, first_node=first_node)
            q, keys, values, known, ancestors, num_slots, depth = args
            out, _ = attended(*args, window=window)
            expected = tree_attention(
                q.transpose(1, 2),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                known,
                ancestors,
                scale=0.25,
                num_tree_nodes=num_slots,
                depth=depth,
                window=window,
            )
            torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_row_does_not_know_its_companions(generator):
    lengths = [4, 50, 33, 8]
    q, keys, values, known, ancestors, num_slots, depth = inputs(generator, lengths, 3)
    together, _ = attended(q, keys, values, known, ancestors, num_slots, depth)
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        own = q[one], keys[one], values[one], known[one], ancestors[one], num_slots, depth[one]
        torch.testing.assert_close(attended(*own)[0], together[one])


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [([9] * 8, [8]), ([9, 9, 60, 9], [4]), ([10, 10, 900, 900], [2, 2]), ([10, 900, 10, 900], [1, 1, 1, 1])],
    ids=str,
)
def test_rows_of_like_lengths_are_one_call(generator, lengths, sizes):
    _, runs = attended(*inputs(generator, lengths, 1))
    assert [run.num_rows for run in runs] == sizes
    assert [run.mask is None for run in runs] == [len(set(lengths[r.first_row :][: r.num_rows])) == 1 for r in runs]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_padding_that_sees_nothing_leaves_finite_numbers(generator, dtype):
    q, keys, values, known, ancestors, num_slots, depth = inputs(generator, [0, 3], 4, dtype=dtype)
    out, _ = attended(q, keys, values, known, torch.zeros_like(ancestors), num_slots, depth)
    assert out.isfinite().all()
