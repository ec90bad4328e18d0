"""kernels.learn_chances against numbers worked out by hand, against its reference and against what a count is."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.tensors import DEVICE, float32, int32
from specdec.kernels.learn_chances import MAX_CELLS, _launch_config, learn_chances
from specdec.kernels.reference.learn_chances import learn_chances as reference
from specdec.kernels.tree_merge import MAX_POOL

BACKENDS = ["triton", "reference"]
INT_BOUND = 2**32
NAMES = ("counts_", "totals_", "chance_", "agreed_")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities, under the interpreter


def empty_table(batch, num_cells, num_drafters, *, beside=-7.0):
    """What is learnt, before the first step; `beside` is what stands behind the last chance."""
    counts, totals = (torch.zeros(batch, num_cells, 2, device=DEVICE) for _ in range(2))
    chance = torch.full((batch, num_cells + 1), beside, device=DEVICE)
    return counts, totals, chance, int32([[0] * num_drafters] * batch)


def random_step(generator, *, batch=3, size=12, places=4, kinds=3, grades=4, drafters=2, vocab=2):
    """Positional arguments but what is learnt, and that; one row has finished."""
    order = torch.arange(size)
    parent = torch.minimum(torch.randint(-1, size, (batch, size), generator=generator), order // 2 - 1).int()
    tokens = torch.randint(0, vocab, (batch, size), generator=generator).int()
    cell = torch.randint(0, kinds * grades + 1, (batch, size), generator=generator).int()
    member = torch.randint(0, drafters, (size,), generator=generator).int()
    emitted = torch.randint(0, vocab, (batch, places), generator=generator).int()
    num_accepted = torch.randint(-1, places, (batch,), generator=generator).int()
    prior = torch.rand(kinds * grades, generator=generator)
    counts = 9 * torch.rand(batch, kinds * grades, 2, generator=generator)
    totals = torch.randint(0, 99, counts.shape, generator=generator).float()
    chance = torch.rand(batch, kinds * grades + 1, generator=generator)
    agreed = torch.randint(0, 9, (batch, drafters), generator=generator).int()
    step = tokens, parent, cell, member, emitted, num_accepted, prior
    return [[value.to(DEVICE) for value in part] for part in (step, (counts, totals, chance, agreed))]


def assert_matches_the_reference(step, table, **numbers):
    got, expected = ([value.clone() for value in table] for _ in range(2))
    learn_chances(*step, *got, **numbers, backend="triton")
    reference(*step, *expected, **numbers)
    for name, ours, theirs in zip(NAMES, got, expected, strict=True):
        assert torch.equal(ours, theirs), f"{name}: {ours.tolist()} is not {theirs.tolist()}"
    return got


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_worked_out_by_hand(backend):
    # the text went 5 6 7, of which 5 was accepted and 6 is the target's own token
    #   drafter 0: 5 (cell 0), 6 behind it (1), 7 behind that (1: too deep to be tried), 4 behind 5 (2)
    #   drafter 1: 5 (3), 8 (4: none), 8 (2), 6 behind the last 8, which is not right
    tokens, parent = int32([[5, 6, 7, 4, 5, 8, 8, 6]]), int32([[-1, 0, 1, 0, -1, -1, -1, 6]])
    cell, member = int32([[0, 1, 1, 2, 3, 4, 2, 0]]), int32([0, 0, 0, 0, 1, 1, 1, 1])
    step = tokens, parent, cell, member, int32([[5, 6, -1]]), int32([1]), float32([0.5, 0.5, 0.25, 0.25])
    table = empty_table(1, 4, 2)
    counts, totals, chance, agreed = table
    counts[:] = totals[:] = float32([[[1, 2], [1, 1], [0, 4], [3, 3]]])
    learn_chances(*step, *table, num_grades=2, decay=0.5, strength=4.0, backend=backend)
    assert counts.tolist() == [[[1.5, 2], [1.5, 1.5], [0, 4], [2.5, 2.5]]]
    assert totals.tolist() == [[[2, 3], [2, 2], [0, 6], [4, 4]]]
    # (1.5 + 2) / (2 + 4), (1.5 + 2) / (1.5 + 4); 1 / 8, 3.5 / 6.5, of which the larger stands behind the smaller
    low, high, least, most = 3.5 / 6, 3.5 / 5.5, 1 / 8, 3.5 / 6.5
    expected = float32([[(low + high) / 2, (low + high) / 2, (least + most) / 2, (least + most) / 2, -7.0]])
    torch.testing.assert_close(chance, expected)
    assert agreed.tolist() == [[1, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_cells_that_are_not_tried_keep_their_counts(backend):
    """Nothing is forgotten without a try, and of a finished row nothing at all."""
    tokens, parent, cell = int32([[1, 2]] * 2), int32([[-1, -1]] * 2), int32([[0, 1]] * 2)
    table = empty_table(2, 3, 1)
    table[0].fill_(8.0)
    step = tokens, parent, cell, int32([0, 0]), int32([[1], [1]]), int32([0, -1]), float32([0.5] * 3)
    learn_chances(*step, *table, num_grades=1, decay=0.25, strength=1.0, backend=backend)
    counts, totals, _, agreed = table
    assert counts.tolist() == [[[3, 3], [2, 3], [8, 8]], [[8, 8]] * 3]
    assert totals.tolist() == [[[1, 1], [0, 1], [0, 0]], [[0, 0]] * 3]
    assert agreed.tolist() == [[0], [0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_chances_do_not_rise_with_the_grade(generator, backend):
    step, table = random_step(generator, kinds=5, grades=6)
    learn_chances(*step, *table, num_grades=6, decay=0.9, strength=2.0, backend=backend)
    chance = table[2][:, :-1].unflatten(1, (5, 6))
    assert (chance.diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_chances_that_fall_stay_what_they_are(backend):
    """The prior of a cell that nothing is known of, to the rounding of a product and a quotient."""
    prior = float32([0.9, 0.5, 0.5, 0.1])
    table = empty_table(1, 4, 1, beside=0.0)
    step = int32([[1]]), int32([[-1]]), int32([[4]]), int32([0]), int32([[1]]), int32([0]), prior
    learn_chances(*step, *table, num_grades=4, decay=0.9, strength=3.0, backend=backend)
    torch.testing.assert_close(table[2], float32([[0.9, 0.5, 0.5, 0.1, 0.0]]))


@pytest.mark.parametrize(
    ("size", "places", "kinds", "grades", "drafters"),
    [(1, 1, 1, 1, 1), (2, 2, 2, 1, 2), (16, 4, 1, 8, 1), (33, 6, 3, 5, 3), (100, 5, 40, 8, 31)],
)
def test_matches_the_reference(generator, size, places, kinds, grades, drafters):
    sizes = {"size": size, "places": places, "kinds": kinds, "grades": grades, "drafters": drafters}
    assert_matches_the_reference(*random_step(generator, **sizes), num_grades=grades, decay=0.97, strength=2.3)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, INT_BOUND), st.integers(1, 40), st.integers(1, 5), st.integers(1, 9), st.floats(0, 1))
def test_any_step_matches_the_reference(seed, size, places, grades, decay):
    generator = torch.Generator().manual_seed(seed)
    step, table = random_step(generator, size=size, places=places, grades=grades, vocab=1 + seed % 3)
    assert_matches_the_reference(step, table, num_grades=grades, decay=decay, strength=0.1 + seed % 7)


def test_the_largest_pool_and_table(generator):
    step, table = random_step(generator, batch=1, size=MAX_POOL, kinds=MAX_CELLS // 8, grades=8, vocab=1, places=16)
    step[5].fill_(15)
    got = assert_matches_the_reference(step, table, num_grades=8, decay=0.9, strength=4.0)
    assert (got[1] - table[1])[..., 1].sum() > MAX_POOL // 2


def test_the_order_of_candidates_of_a_depth_does_not_matter(generator):
    """Counts of whole numbers: exact in any order."""
    step, table = random_step(generator, size=24)
    step[1].fill_(-1)
    order = torch.randperm(24, generator=generator).to(DEVICE)
    turned = [value[..., order].contiguous() for value in step[:4]] + step[4:]
    got = [value.clone() for value in table]
    for now, values in ((step, table), (turned, got)):
        learn_chances(*now, *values, num_grades=4, decay=0.9, strength=4.0, backend="triton")
    for ours, theirs in zip(got, table, strict=True):
        assert torch.equal(ours, theirs)


def test_what_no_launcher_can_ask_for_is_left_out(monkeypatch):
    """A GPU is not asked: a parent that is not earlier, a cell or a drafter that is none."""
    module = importlib.import_module("specdec.kernels.learn_chances")
    monkeypatch.setattr(module, "check_parent", lambda *_, **__: None)
    tokens, parent = int32([[1, 1, 1, 1, 1, 1]]), int32([[-7, 1, 10**6, 5, -1, -1]])
    member, cell = int32([0, 0, 0, 0, 5, -1]), int32([[0, 0, 0, 0, 1, -3]])
    table = empty_table(1, 2, 2)
    step = tokens, parent, cell, member, int32([[1, 1]]), int32([1]), float32([0.5, 0.5])
    learn_chances(*step, *table, num_grades=1, decay=1.0, strength=1.0, backend="triton")
    assert table[1].tolist() == [[[1, 1], [1, 1]]]
    assert table[3].tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("sizes", "blocks", "num_warps"),
    [((1, 1, 1, 1), (1, 1, 1, 1, 1), 1), ((200, 240, 8, 3), (256, 16, 32, 8, 4), 4)],
)
def test_launch_config(sizes, blocks, num_warps):
    config = _launch_config(*sizes)
    assert tuple(config.blocks[f"BLOCK_{letter}"] for letter in "MTRGJ") == blocks
    assert config.num_warps == num_warps
    assert not config.fuses_products
