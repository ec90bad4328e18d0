"""kernels.accept_traversal against its eager reference; tests/loop/test_traversal.py has the law of both."""

import pytest
import torch

from lib.accept_calls import random_tree, traversal_of, two_leaves
from lib.accept_calls import traversal_call as random_call
from lib.laws import FIELDS, assert_same, random_logits, traversal_tables
from lib.tensors import DEVICE, int32
from specdec.kernels.accept_traversal import _launch_config, accept_traversal
from specdec.kernels.common.walk import draw
from specdec.kernels.reference.accept_traversal import accept_traversal as reference
from specdec.kernels.reference.accept_traversal import traversal_weights


def clear_rows(call, gap=1e-5):
    """Rows in which no uniform lies within `gap` of where a decision turns, the draw of the next root included."""
    weight, law = traversal_weights(*call[:5])
    order, rows = call[7].long(), torch.arange(len(weight), device=DEVICE)
    is_accepted = (call[5] < weight)[:, order]
    is_accepted[:, -1] = True
    accepted = order[is_accepted.int().argmax(1)]
    before = is_accepted.int().cumsum(1).roll(1, 1).index_fill(1, torch.tensor([0], device=DEVICE), 0) == 0
    distance = (call[5] - weight).abs()[:, order]
    # the root's weight is no threshold, and one of exactly 0 or 1 is not missed
    certain = ~before | (order == 0) | ((weight == 0) | (weight == 1))[:, order]
    running = law[rows, accepted].cumsum(-1)
    is_sure = ((running - call[6][:, None]).abs() > gap).all(1)
    return (distance.masked_fill(certain, 1.0) > gap).all(1) & is_sure


TREES = {
    "the root alone": [-1],
    "one child": [-1, 0],
    "chain": [-1, 0, 1, 2, 3],
    "five siblings": [-1, 0, 0, 0, 0, 0],
    "siblings apart": [-1, 0, 0, 1, 0, 2, 1, 3],
    "padding": [-1, 0, -1, 1, -1, 2, 4, 0, 7],
}


@pytest.mark.parametrize("parent", TREES.values(), ids=TREES)
def test_trees_of_all_kinds(generator, quick_tiles, parent):
    call, limits = random_call(generator, batch=15, vocab=12, parent=parent), {"max_depth": 4}
    assert clear_rows(call).all()
    assert_same(accept_traversal(*call, **limits, backend="triton"), reference(*call, **limits))


@pytest.mark.parametrize("near", [0.3, 1.0, 20.0], ids=["close", "near", "far apart, some tokens impossible"])
def test_decides_as_the_reference_on_many_trees(generator, quick_tiles, near):
    """Thousands on a GPU. Where a uniform lies within 1e-5 of its threshold, either decision is right."""
    batch = 4000 if DEVICE == "cuda" else 100
    parent = random_tree(generator, 8)
    call = list(random_call(generator, batch=batch, vocab=9, parent=parent, distance=near))
    expected, got = reference(*call, max_depth=7), accept_traversal(*call, max_depth=7, backend="triton")
    clear = clear_rows(call)
    assert clear.float().mean() > 0.99
    for field in FIELDS:
        assert torch.equal(getattr(got, field)[clear], getattr(expected, field)[clear])
    assert expected.num_accepted.unique().numel() >= 3, "the trees are too easy or too hard to tell anything"


def test_tests_turn_at_their_weights(generator, quick_tiles):
    """Both sides of the threshold of every node, with all nodes before it refused."""
    parent, step = [-1, 0, 0, 0, 1, 1, 2], 2e-5
    call = list(random_call(generator, batch=24, vocab=9, parent=parent))
    weight, _ = traversal_weights(*call[:5])
    tried, is_reached = 0, torch.ones(24, dtype=torch.bool)
    for node in call[7].tolist()[:-1]:
        usable = is_reached & ((weight[:, node] > 0.01) & (weight[:, node] < 0.99)).cpu()
        is_reached &= (weight[:, node] < 0.999).cpu()  # what comes after a sure node is never asked
        for sign in (-1, 1):
            call[5] = torch.ones_like(call[5])
            call[5][:, node] = (weight[:, node] + sign * step).float()
            verdict = accept_traversal(*call, max_depth=2, backend="triton")
            depth = (verdict.path.cpu() == node).any(1)
            assert torch.equal(depth[usable], torch.full_like(depth[usable], sign < 0)), node
            tried += int(usable.sum())
    assert tried >= 10, "too few weights are neither 0 nor 1"


def test_fillers_of_a_short_law_are_never_accepted(generator, quick_tiles):
    """A law of two tokens fills a list of four with others, which have probability 0."""
    parent, batch = [-1, 0, 0, 0, 0, 1, 3], 30
    call = list(random_call(generator, batch=batch, vocab=9, parent=parent))
    call[3] = call[3].clone()
    call[3][:, :, 2:] = float("-inf")
    call[0][:, 1:5] = torch.tensor([1, 0, 5, 3], dtype=torch.int32)
    call[0][:, 5:] = torch.tensor([0, 1], dtype=torch.int32)
    expected = reference(*call, max_depth=2)
    assert_same(accept_traversal(*call, max_depth=2, backend="triton"), expected)
    assert set(expected.path[:, 1].tolist()) <= {-1, 1, 2}


def test_a_filler_before_a_drawn_sibling_changes_nothing(generator, quick_tiles):
    call = list(random_call(generator, batch=30, vocab=9, parent=[-1, 0, 0, 0]))
    call[3] = call[3].clone()
    call[3][:, :, 3:] = float("-inf")
    call[0][:, 1:] = torch.tensor([7, 1, 0], dtype=torch.int32)
    expected = reference(*call, max_depth=1)
    assert_same(accept_traversal(*call, max_depth=1, backend="triton"), expected)
    assert set(expected.path[:, 1].tolist()) == {-1, 2, 3}


def test_a_draft_that_is_sure_of_itself_leaves_an_exact_rest():
    """q(0) = 1 - 5e-7: in fp32 1 - q(0) has an error of some per cent, and so would the second child's threshold."""
    target = torch.tensor([0.4, 0.02, 0.28, 0.3], dtype=torch.float64).log().tolist()
    call = *two_leaves(target, [16.0, 0.2, 0.1, 0.0], [1.0, 1.0, 1.0]), *traversal_tables([-1, 0, 0])
    threshold = traversal_weights(*call[:5])[0][0, 2].item()
    assert 0.01 < threshold < 0.99
    for factor, accepted in ((1 - 1e-4, 2), (1 + 1e-4, -1)):
        call[5][0, 2] = threshold * factor
        assert accept_traversal(*call, max_depth=1, backend="triton").path[0, 1].item() == accepted


def test_a_target_that_is_the_draft_accepts_the_first_leaf(generator, quick_tiles):
    """p = q at every node: all weights are 1, up to uniforms that no generator yields below 1 - 1e-6."""
    parent = [-1, 0, 0, 1, 1, 2]
    logits = random_logits(generator, 20, 6, 30)
    call = traversal_of(generator, parent, logits, logits + 3, [*range(6)], exponent=0.1)
    verdict = accept_traversal(*call, max_depth=2, backend="triton")
    assert verdict.path.tolist() == [[0, 1, 3]] * 20
    assert_same(verdict, reference(*call, max_depth=2))
    assert torch.equal(verdict.next_root, draw(logits[:, 3].double().softmax(-1), call[6]).int())


@pytest.mark.parametrize("row", [-1, 9, 10**6])
def test_children_of_a_node_without_draft_law_are_not_accepted(generator, row):
    call = list(random_call(generator))
    call[4] = torch.full_like(call[4], row)
    call[5] = torch.zeros_like(call[5])
    verdict = accept_traversal(*call, max_depth=8, backend="triton")
    assert verdict.num_accepted.tolist() == [0, 0, 0]
    call[4] = torch.full_like(call[4], -1)
    assert_same(verdict, reference(*call, max_depth=8))


@pytest.mark.parametrize("wild", [-1, 9, 10**6])
def test_tokens_that_are_none_are_not_looked_up(generator, wild):
    call = list(random_call(generator, vocab=9, parent=[-1, 0, 0, 1]))
    call[0][:, 1] = wild
    call[5] = torch.zeros_like(call[5])
    verdict = accept_traversal(*call, max_depth=2, backend="triton")
    assert verdict.path[:, 1].tolist() == [2, 2, 2]


def test_tables_without_sense_are_no_danger(generator):
    """Nobody can look at them on a GPU: whatever they say, the verdict is of nodes and tokens, or none."""
    call = list(random_call(generator, batch=2, vocab=9, parent=[-1, 0, 0, 1, 2]))
    for order, steps in (
        ([4, 4, 4, 4, 4], [[2, -7, 10**6], [4, 1, 0], [9, 5, 3]]),
        ([10**6, -1, 3, 1, 0], [[4, 3, 2]]),
        ([3, 4, 1, 2, 0], [[-1]]),
    ):
        call[7:] = int32(order), int32(steps)
        verdict = accept_traversal(*call, max_depth=2, backend="triton")
        assert ((verdict.path >= -1) & (verdict.path < 5)).all()
        assert ((verdict.next_root >= 0) & (verdict.next_root < 9)).all()
    assert verdict.num_accepted.tolist() == [0, 0], "no step, no weight"


def test_not_a_number_counts_as_impossible(generator):
    call = list(random_call(generator, vocab=20))
    call[2], call[3] = call[2].clone(), call[3].clone()
    call[2][..., 5:9], call[3][..., 7:11] = float("nan"), float("nan")
    assert_same(accept_traversal(*call, max_depth=8, backend="triton"), reference(*call, max_depth=8))
    call[2][:] = float("nan")
    verdict = accept_traversal(*call, max_depth=8, backend="triton")
    assert (verdict.num_accepted.tolist(), verdict.next_root.tolist()) == ([0, 0, 0], [0, 0, 0])


def test_a_finished_row_reads_nothing_and_keeps_its_root(generator):
    call = list(random_call(generator))
    call[2], call[3] = call[2].clone(), call[3].clone()
    call[2][1], call[3][1] = float("nan"), float("nan")
    limits = {"max_depth": 8, "budget": int32([9, 0, 2])}
    verdict = accept_traversal(*call, **limits, backend="triton")
    assert_same(verdict, reference(*call, **limits))
    assert verdict.num_accepted[1] == -1
    assert verdict.next_root[1] == call[0][1, 0]


@pytest.mark.gpu
def test_offsets_beyond_31_bits(generator):
    """2.4e9 logits: the last row of the batch lies behind the reach of an int32."""
    vocab, parent = 262144, [-1, *[0] * 8]
    logits = torch.randn(1024, 9, vocab, device="cuda", dtype=torch.float16)
    call = traversal_of(generator, parent, logits[-1:], logits[-1:, :1], [0, *[-1] * 8])
    whole = [tensor if i in (1, 4, 7, 8) else tensor.expand(1024, *tensor.shape[1:]) for i, tensor in enumerate(call)]
    whole[0], whole[2], whole[3] = whole[0].contiguous(), logits, logits[:, :1]
    verdict = accept_traversal(*whole, max_depth=1)
    alone = accept_traversal(*call, max_depth=1)
    for field in FIELDS:
        assert torch.equal(getattr(verdict, field)[-1:], getattr(alone, field))


@pytest.mark.parametrize(
    ("num_nodes", "vocab_size", "chunk", "num_warps"),
    [(1, 300, 1, 1), (64, 32000, 64, 8), (64, 262144, 64, 8), (512, 128256, 8, 8), (2, 1048576, 2, 8)],
)
def test_launch_config(num_nodes, vocab_size, chunk, num_warps):
    config = _launch_config(num_nodes, 5, vocab_size)
    assert config.blocks["BLOCK_C"] == chunk
    assert config.num_warps == num_warps
