"""Which questions are asked: of every category, by the seed, and fairly from the first on."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.evaluation.prompts import Question
from specdec.evaluation.selection import evenly, shuffled, stratified


def questions_of(sizes):
    categories = [chr(ord("a") + index) for index, size in enumerate(sizes) for _ in range(size)]
    return [Question(str(place), category, ("?",)) for place, category in enumerate(categories)]


def counts(questions):
    return Counter(question.category for question in questions)


def test_some_questions_are_of_all_categories():
    questions = [Question(str(i), "abc"[i // 4], ("?",)) for i in range(12)]
    assert [q.category for q in evenly(questions, 3)] == ["a", "b", "c"]
    assert evenly(questions, None) == questions == evenly(questions, 12)
    for select in (evenly, lambda questions, count: stratified(questions, count, 0)):
        for count, message in ((13, "at most 12"), (0, "at least 1")):
            with pytest.raises(ValueError, match=message):
                select(questions, count)


def test_categories_have_their_part_of_the_sample():
    """Spec-Bench: five categories of 80, and eight of 10, which MT-Bench is made of."""
    questions = questions_of([10] * 8 + [80] * 5)
    assert sorted(counts(stratified(questions, 120, 0)).values()) == [2] * 4 + [3] * 4 + [20] * 5
    assert sorted(counts(stratified(questions, 13, 0)).values()) == [1] * 13
    assert set(counts(stratified(questions, 5, 0))) == set("ijklm"), "too few for all: the largest"
    assert stratified(questions, None, 0) == questions == stratified(questions, len(questions), 3)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 3), st.data())
def test_shares_are_due_within_one(sizes, seed, data):
    questions = questions_of(sizes)
    count = data.draw(st.integers(1, len(questions)))
    chosen = stratified(questions, count, seed)
    assert len(set(chosen)) == count
    assert sorted(chosen, key=questions.index) == chosen
    found = counts(chosen)
    for name, size in counts(questions).items():
        assert found[name] <= size
        if count >= len(sizes):
            due = count * size / len(questions)
            assert found[name] >= 1
            # what the smallest get beyond their due, the others pay for
            assert due - len(sizes) < found[name] < max(due, 1) + 1


def test_the_seed_decides_and_a_larger_sample_goes_on_from_a_smaller_one():
    questions = questions_of([40, 40])
    small, large = stratified(questions, 10, 1), stratified(questions, 20, 1)
    assert small == stratified(questions, 10, 1) != stratified(questions, 10, 2)
    assert set(small) < set(large)
    order = shuffled(questions, 1)
    assert order == shuffled(questions, 1) != shuffled(questions, 2)
    assert sorted(order, key=questions.index) == questions
    assert [question.name for question in order[:4]] == ["36", "46", "14", "69"], "the same on every machine"


def test_the_beginning_of_a_shuffled_run_is_a_fair_sample():
    questions = questions_of([50, 50])
    firsts = [counts(shuffled(questions, seed)[:20])["a"] for seed in range(200)]
    # hypergeometric: mean 10, deviation 2.0; of the mean of 200 draws 0.14
    assert abs(sum(firsts) / len(firsts) - 10) < 5 * 0.14
