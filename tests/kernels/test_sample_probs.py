"""kernels.sample_probs against its eager reference, transformers' own processors and the law of a race."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lib.laws import assert_sample_has_law, random_logits, random_parents
from lib.tensors import DEVICE, FLOATS, int32
from lib.tolerances import FLOOR
from specdec.kernels.common import kept_set
from specdec.kernels.reference import sample_probs as reference
from specdec.kernels.sample_probs import WarpSettings, sample_probs, sample_race, warp_logits

SETTINGS = {
    "nothing": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 5},
    "top-k of one": {"top_k": 1},
    "top-k over all": {"top_k": 100_000},
    "top-p": {"top_p": 0.8},
    "top-p of nothing": {"top_p": 0.0},
    "top-p of all": {"top_p": 1.0},
    "min-p": {"min_p": 0.1},
    "penalty": {"repetition_penalty": 1.5},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
}


def random_call(generator, *, batch=2, num_nodes=3, vocab=40, dtype=torch.float32):
    logits = random_logits(generator, batch, num_nodes, vocab, dtype=dtype)
    tokens = torch.randint(0, vocab, (batch, num_nodes), generator=generator, dtype=torch.int32).to(DEVICE)
    history = torch.randint(-1, vocab, (batch, 11), generator=generator, dtype=torch.int32).to(DEVICE)
    return logits, tokens, random_parents(generator, num_nodes), history


def settings_of(**values):
    return WarpSettings(**values).on(DEVICE)


def warp(logits, *tree, op=warp_logits, backend="triton", **values):
    """By the kernel, with one set of settings for all rows."""
    return op(logits, settings_of(**values), *tree, **({"backend": backend} if op is warp_logits else {}))


def assert_same_kept(got, expected):
    """The same tokens kept, and their logits equal up to fp32 rounding of a few operations."""
    assert got.dtype == torch.float32
    assert torch.equal(got == float("-inf"), expected == float("-inf"))
    finite = expected > float("-inf")
    error = (got[finite].double() - expected[finite].double()).abs().max().item()
    assert error <= FLOOR[torch.float32] * expected[finite].abs().max().item()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocab", [7, 300, 5000])
def test_matches_the_reference(generator, vocab, name):
    call = random_call(generator, vocab=vocab)
    expected = warp(*call, op=reference.warp_logits, **SETTINGS[name])
    assert_same_kept(warp(*call, **SETTINGS[name]), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_matches_the_reference(generator, dtype):
    call = random_call(generator, vocab=5000, dtype=dtype)
    expected = warp(*call, op=reference.warp_logits, **SETTINGS["all"])
    assert_same_kept(warp(*call, **SETTINGS["all"]), expected)


PROCESSORS = {
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


def by_transformers(logits, ids, chosen):
    scores = logits[None].float()
    for name, processor in PROCESSORS.items():
        if name in chosen:
            scores = processor(chosen[name])(ids[None].long(), scores)
    return scores[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_node_is_processed_as_transformers_processes_its_own_sequence(generator, name):
    """The sequence of a node is the row's history and the node's path."""
    logits, tokens, _, history = random_call(generator, num_nodes=4, vocab=300)
    parent, paths = int32([[-1, 0, 0, 2]]), [[0], [0, 1], [0, 2], [0, 2, 3]]
    got = warp(logits, tokens, parent, history, **SETTINGS[name])
    for b in range(2):
        for n, path in enumerate(paths):
            ids = torch.cat([history[b][history[b] >= 0], tokens[b, path]]).cpu()
            assert_same_kept(got[b, n].cpu(), by_transformers(logits[b, n].cpu(), ids, SETTINGS[name]))


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_every_row_is_processed_by_its_own_settings(data):
    """Against transformers' processors, one row at a time; neither knows a tie, of which there are none here."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    batch, vocab = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([5, 90, 700]))
    logits = data.draw(st.sampled_from([0.5, 3.0, 40.0])) * torch.randn(batch, 1, vocab, generator=generator)
    history = torch.randint(0, vocab, (batch, 9), generator=generator, dtype=torch.int32)
    values = {
        "temperature": st.floats(0.05, 5),
        "top_k": st.integers(1, 2 * vocab),
        "top_p": st.floats(0.01, 0.999),
        "min_p": st.floats(0.001, 0.9),
        "repetition_penalty": st.floats(0.5, 3),
    }
    rows = [
        {name: data.draw(value) for name, value in values.items() if data.draw(st.booleans())} for _ in range(batch)
    ]
    every_row = torch.cat([settings_of(**row) for row in rows])
    got = warp_logits(logits.to(DEVICE), every_row, history=history.to(DEVICE), backend="triton").cpu()
    assert_same_kept(got, reference.warp_logits(logits, every_row.cpu(), history=history))
    for b, row in enumerate(rows):
        expected = by_transformers(logits[b, 0], history[b], row)
        # a mass that is within rounding of the goal may fall on either side
        differing = (got[b, 0] > float("-inf")) != (expected > float("-inf"))
        assert differing.sum() <= (1 if {"top_p", "min_p"} & row.keys() else 0)
        both = (got[b, 0] > float("-inf")) & ~differing
        torch.testing.assert_close(got[b, 0][both], expected[both], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_settings_that_ask_for_nothing_change_no_bit(generator, dtype):
    logits, tokens, parent, history = random_call(generator, vocab=5000, dtype=dtype)
    for backend in ("triton", "reference"):
        for nothing in (None, settings_of(), settings_of(top_k=5000, top_p=1.0)):
            got = warp_logits(logits, nothing, tokens, parent, history, backend=backend)
            assert torch.equal(got, logits.float())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, "temperature: expected more than 0, got 0.0"),
        ({"top_k": 0}, "top_k: expected 1 or more, got 0"),
        ({"top_p": 1.1}, "top_p: expected 0 to 1, got 1.1"),
        ({"min_p": -0.1}, "min_p: expected 0 to 1, got -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected more than 0, got 0.0"),
    ],
)
def test_settings_out_of_range_are_refused(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        WarpSettings(**values)


# logits that put many tokens in doubt, or all at one distance, or further apart than bins reach
SHAPES = {
    "flat": lambda x: 0.01 * x,
    "wide": lambda x: 300 * x,
    "wider than bins": lambda x: 1e6 * x,
    "peaked": lambda x: x.index_fill(-1, torch.tensor([3], device=DEVICE), 60.0),
    "two levels": lambda x: (x > 1).float(),
    "all equal": torch.zeros_like,
    "coarse": lambda x: (4 * x).round() / 8,
    "far below one": lambda x: (x - 5000).index_fill(-1, torch.tensor([0], device=DEVICE), 0.0),
}


@pytest.mark.parametrize("capacity", [16, 16384])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_law_is_cut_as_in_the_reference(generator, shape, capacity, monkeypatch):
    """With a list that holds what is in doubt, and one that does not."""
    monkeypatch.setattr(kept_set, "_CAPACITY", capacity)
    logits = SHAPES[shape](3 * torch.randn(1, 2, 4500, generator=generator).to(DEVICE))
    for values in (
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 3000},
        {"top_p": 0.0},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"top_k": 200, "top_p": 0.5},
        {"top_k": 2000, "top_p": 0.97, "min_p": 0.01},
    ):
        got, expected = (warp(logits, op=op, **values) for op in (warp_logits, reference.warp_logits))
        assert torch.equal(got, expected), values


def test_equal_logits_are_kept_or_dropped_together():
    """Four tokens share the place of the second: top-k keeps them as transformers does, top-p by the mass above."""
    logits = torch.tensor([[[2.0, 1.0, 1.0, -0.0, 1.0, 1.0, 0.0]]], device=DEVICE)
    second = [0, 1, 2, 4, 5]
    for kept_by in ({"top_k": 2}, {"top_k": 5}, {"top_p": 0.5}, {"top_p": 0.85}):
        for backend in ("triton", "reference"):
            kept = warp(logits, **kept_by, backend=backend)[0, 0] > float("-inf")
            assert kept.nonzero()[:, 0].tolist() == second, kept_by
    # 0.0 and -0.0 are equal too
    assert (warp(logits, top_k=6) > float("-inf")).all()


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_top_k_and_top_p_are_what_they_say(data):
    """Few levels of logits, so that most are tied."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    vocab = data.draw(st.integers(1, 60))
    logits = torch.randint(-4, 4, (1, 1, vocab), generator=generator).float().to(DEVICE) / 2
    top_k, top_p = data.draw(st.integers(1, vocab)), data.draw(st.floats(0.05, 0.97))
    x = logits[0, 0].double()
    larger = x[None, :] > x[:, None]  # [v, w]: w has a larger logit than v
    kept = warp(logits, top_k=top_k)[0, 0] > float("-inf")
    assert torch.equal(kept, larger.sum(1) < top_k)
    above = (larger * x.softmax(-1)).sum(1)
    if ((above - top_p).abs() > 1e-6).all():
        kept = warp(logits, top_p=top_p)[0, 0] > float("-inf")
        assert torch.equal(kept, above < top_p)


def test_impossible_tokens_stay_impossible():
    logits = torch.full((2, 1, 5000), float("nan"), device=DEVICE)
    logits[0, 0, 4100], logits[0, 0, 8] = 1.0, float("-inf")
    got = warp(logits, top_k=3, top_p=0.5, min_p=0.1)
    assert (got > float("-inf")).nonzero().tolist() == [[0, 0, 4100]]
    sampled = sample_race(logits, int32([0, 1]), int32([0]), seed=1, backend="triton")
    assert sampled.tolist() == [[4100], [0]]


def test_tokens_outside_the_vocabulary_are_not_penalised(generator):
    logits = random_logits(generator, 1, 1, 6)
    got = warp(logits, None, None, int32([[-1, 6, 99]]), repetition_penalty=2.0)
    assert torch.equal(got, logits)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("vocab", [1, 300, 1025, 9000])
def test_races_end_as_in_the_reference(generator, vocab, dtype):
    logits = random_logits(generator, 2, 5, vocab, dtype=dtype)
    row_ids, step = int32([3, -9]), int32([2**30 + 5])
    for seed in (0, 2**40 + 12345):
        got = sample_race(logits, row_ids, step, seed=seed, backend="triton")
        assert torch.equal(got, reference.sample_race(logits, row_ids, step, seed=seed))


def test_a_draw_depends_on_its_names_and_not_on_its_place(generator):
    logits = random_logits(generator, 1, 3, 500).expand(4, -1, -1)
    row_ids = int32([5, 6, 7, 5])
    draw = {"step": int32([1]), "seed": 11, "backend": "triton"}
    together = sample_race(logits, row_ids, **draw)
    alone = sample_race(logits[:1], row_ids[1:2], **draw)
    assert torch.equal(together[1:2], alone)
    assert torch.equal(together[0], together[3])
    different = [
        sample_race(logits, row_ids, **{**draw, "step": int32([2])}),
        sample_race(logits, row_ids, **{**draw, "seed": 11 + 2**32}),
        sample_race(logits, row_ids + 1, **draw),
        together.flip(1),
    ]
    assert all(not torch.equal(together, other) for other in different)


@pytest.mark.parametrize("race", ["reference", "triton"])
def test_a_sample_has_the_law_of_its_logits(generator, race):
    num_nodes = 20000 if race == "reference" or DEVICE == "cuda" else 400
    logits = random_logits(generator, 1, 1, 12)
    call = logits.expand(-1, num_nodes, -1), int32([4]), int32([0])
    sampled = (reference.sample_race if race == "reference" else sample_race)(*call, seed=5)
    probs = logits[0, 0].double().softmax(-1)
    assert_sample_has_law(sampled[0], probs)


def test_the_law_test_rejects_a_wrong_race(generator, monkeypatch):
    """Uniform instead of exponential times: the most probable token wins too often."""
    logits = random_logits(generator, 1, 1, 12)
    call = logits.expand(-1, 20000, -1), int32([4]), int32([0])
    monkeypatch.setattr(torch, "log1p", lambda x: x)
    sampled = reference.sample_race(*call, seed=5)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_sample_has_law(sampled[0], logits[0, 0].double().softmax(-1))


def test_rare_tokens_win_as_often_as_they_should():
    """3 million draws of a token of probability 1e-5: exponentials rounded near 0 would show."""
    rare = torch.tensor([0.0, torch.tensor(1e-5).log()], device=DEVICE)
    wins = 0
    for step in range(3):
        sampled = reference.sample_race(rare.expand(1, 10**6, -1), int32([0]), int32([step]), seed=3, upcast=False)
        wins += int(sampled.sum())
    assert 30 - 4 * 30**0.5 < wins < 30 + 4 * 30**0.5


def test_sample_probs_is_both_in_turn(generator):
    logits, tokens, parent, history = random_call(generator)
    names, everything = {"row_ids": int32([0, 1]), "step": int32([7])}, settings_of(**SETTINGS["all"])
    for backend in ("triton", "reference"):
        sampled, processed = sample_probs(
            logits, *names.values(), everything, tokens, parent, history, seed=3, backend=backend
        )
        expected = warp_logits(logits, everything, tokens, parent, history, backend=backend)
        assert torch.equal(processed, expected)
        assert torch.equal(sampled, sample_race(processed, **names, seed=3, backend=backend))
        assert (processed.gather(2, sampled.long()[..., None]) > float("-inf")).all()
