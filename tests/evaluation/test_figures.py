"""Figures of evaluations that one can compute by hand."""

import dataclasses
import math

import pytest

from lib.evaluations import ARMS, answer, evaluation, question, results_of
from specdec.evaluation.figures import categories, compare_speeds, figures, group_rates, num_finished
from specdec.evaluation.records import ArmInfo

TWO = ARMS[:2]  # plain decoding and medusa


def pair(name, group, plain, ours, **changes):
    """A prompt's answers of plain decoding and of medusa, four tokens each, in these seconds."""
    return [
        answer("none", name, group=group, seconds=plain, **changes),
        answer("medusa", name, group=group, seconds=ours, **changes),
    ]


def by_arm(results, temperature=0.0, **options):
    return {one.arm.name: one for one in figures(results, temperature, **options)}


def test_speeds_are_tokens_by_seconds_over_all_prompts():
    results = results_of(
        [question("1", 0), question("2", 1)],
        pair("1", 0, 1.0, 0.5) + pair("2", 1, 3.0, 3.5),
        arms=TWO,
    )
    found = by_arm(results)
    assert (found["none"].tokens_per_second, found["medusa"].tokens_per_second) == (8 / 4, 8 / 4)
    assert found["medusa"].speedup.value == 1.0  # of the sums, not the mean of 2 and 0.857
    assert [group.speedup for group in found["medusa"].groups] == pytest.approx([2.0, 3.0 / 3.5])
    assert found["medusa"].share_slower == 0.5
    low, high = found["medusa"].speedup.low, found["medusa"].speedup.high
    assert (low, high) == pytest.approx((3.0 / 3.5, 2.0))  # a draw takes one prompt twice in half of all cases


def test_tau_counts_steps_and_efficiency_is_what_of_it_becomes_speed():
    results = results_of([question("1", 0)], pair("1", 0, 1.0, 0.5), arms=TWO)
    found = by_arm(results)["medusa"]
    assert found.tau.value == 3.0  # three tokens in the one step behind the prompt's token
    assert found.efficiency == pytest.approx(2 / 3)
    assert math.isnan(found.speedup.low)  # one prompt tells nothing of others
    assert math.isnan(found.tau.high)
    assert by_arm(results)["none"].tau.value == 1.0


def test_arms_that_do_not_tell_have_no_tau():
    results = results_of([question("1", 0)], [answer("none", "1"), answer("transformers", "1")], arms=ARMS[::2])
    found = by_arm(results)["transformers"]
    assert (found.tau, found.efficiency, found.acceptance_at_depth) == (None, None, [])


def test_a_text_without_a_step_has_no_tau():
    short = {"tokens": [5], "num_emitted": [], "deepest": []}
    results = results_of([question("1", 0)], pair("1", 0, 1.0, 1.0, **short), arms=TWO)
    assert by_arm(results)["medusa"].tau is None


def test_of_repeats_the_median_time_counts_and_tokens_once():
    answers = [
        changed
        for repeat, seconds in enumerate([9.0, 1.0, 2.0])
        for changed in pair("1", 0, 4.0, seconds, repeat=repeat)
    ]
    found = by_arm(results_of([question("1", 0)], answers, arms=TWO, repeats=3))["medusa"]
    assert (found.num_answers, found.num_tokens, found.tokens_per_second) == (1, 4, 2.0)
    assert found.speedup.value == 2.0


def test_a_batch_takes_its_time_once():
    rows = [one for name in "12" for one in pair(name, 0, 4.0, 2.0)]
    found = by_arm(results_of([question("1", 0), question("2", 0)], rows, arms=TWO, batch_size=2))
    assert found["medusa"].tokens_per_second == 8 / 2.0
    (group,) = found["medusa"].groups
    assert (group.questions, group.speedup) == (("1", "2"), 2.0)


def test_turns_of_a_question_are_one_group_whose_times_add_up():
    answers = pair("1", 0, 1.0, 0.5) + pair("1", 0, 3.0, 1.5, turn=2)
    found = by_arm(results_of([question("1", 0, num_turns=2)], answers, arms=TWO))["medusa"]
    assert (found.tokens_per_second, found.num_answers) == (8 / 2.0, 2)
    assert [group.speedup for group in found.groups] == [2.0]


def test_a_group_counts_once_every_arm_has_all_of_it():
    whole = pair("1", 0, 1.0, 0.5)
    questions = [question("1", 0), question("2", 1, num_turns=2)]
    half = pair("2", 1, 1.0, 9.0)  # one of two turns
    results = results_of(questions, whole + half, arms=TWO)
    assert num_finished(results, 0.0) == 1
    assert by_arm(results)["medusa"].speedup.value == 2.0
    late = pair("2", 1, 1.0, 9.0, turn=2)
    assert num_finished(results_of(questions, whole + half + late[:1], arms=TWO), 0.0) == 1
    results = results_of(questions, whole + half + late, arms=TWO)
    assert num_finished(results, 0.0) == 2
    assert by_arm(results)["medusa"].speedup.value == 3 / 18.5


def test_an_arm_that_has_not_begun_holds_the_group_back():
    results = results_of([question("1", 0)], [answer("none", "1")], arms=TWO)
    assert num_finished(results, 0.0) == 0
    assert figures(results, 0.0) == []


def test_an_arm_that_failed_holds_nothing_back():
    arms = [*TWO, ArmInfo("eagle", "specdec")]
    results = results_of([question("1", 0)], pair("1", 0, 1.0, 0.5), arms=arms, missing={"eagle": "no"})
    assert list(by_arm(results)) == ["none", "medusa"]
    begun = results_of(
        [question("1", 0)], [*pair("1", 0, 1.0, 0.5), answer("eagle", "1")], arms=arms, missing={"eagle": "no"}
    )
    assert list(by_arm(begun)) == ["none", "medusa"]


def test_of_several_seeds_a_group_counts_once_every_seed_has_it():
    sampled = {"temperature": 1.0}
    answers = pair("1", 0, 1.0, 0.5, **sampled) + pair("1", 0, 1.0, 0.25, **sampled, seed=1)
    answers += pair("2", 1, 1.0, 9.0, **sampled)
    results = results_of([question("1", 0), question("2", 1)], answers, arms=TWO, seeds=[0, 1], temperatures=[1.0])
    assert num_finished(results, 1.0) == 2  # one group with two seeds
    assert by_arm(results, 1.0)["medusa"].tokens_per_second == pytest.approx(8 / 0.75)


def test_categories_are_computed_apart():
    results = evaluation()
    assert categories(results) == ["writing", "math"]
    writing, math_ = by_arm(results, category="writing"), by_arm(results, category="math")
    assert writing["medusa"].speedup.value == pytest.approx(4.0 / 1.8)
    assert math_["medusa"].speedup.value == pytest.approx(4.0 / 2.6)
    assert figures(results, 0.0, category="cooking") == []


def test_differing_texts_are_counted_of_greedy_answers_alone():
    found = by_arm(evaluation())
    assert (found["transformers"].num_identical, found["transformers"].num_answers) == (3, 4)
    assert [one.question for one in found["transformers"].divergences] == ["112"]
    assert found["medusa"].num_identical == 4
    assert by_arm(evaluation(), 1.0)["transformers"].num_identical is None


def test_acceptance_by_depth_is_that_of_the_steps():
    found = by_arm(evaluation())["medusa"]
    # steps emit 3, 2, 3, 1, 3: the last one tells of what it accepted only
    assert found.acceptance_at_depth == pytest.approx([4 / 5, 3 / 4])


def test_two_arms_are_compared_on_the_same_groups():
    results = evaluation()
    ratio = compare_speeds(results, 0.0, "medusa", "none")
    assert ratio == by_arm(results)["medusa"].speedup
    assert compare_speeds(results, 0.0, "medusa", "eagle") is None


def test_rates_of_groups_are_found_by_their_questions():
    results = results_of(
        [question("1", 0, opening="a"), question("2", 1, opening="b")],
        pair("1", 0, 1.0, 0.5) + pair("2", 1, 1.0, 0.25),
        arms=TWO,
    )
    rates = group_rates(results, 0.0, "medusa")
    assert rates == {(0, (("1", "a"),)): (4, 0.5), (0, (("2", "b"),)): (4, 0.25)}
    assert group_rates(results, 0.0, "eagle") == {}


def test_answers_to_another_temperature_are_others():
    one, other = pair("1", 0, 1.0, 0.5), pair("1", 0, 1.0, 0.25, temperature=1.0)
    results = results_of([question("1", 0)], one + other, arms=TWO)
    assert by_arm(results)["medusa"].speedup.value == 2.0
    assert by_arm(results, 1.0)["medusa"].speedup.value == 4.0
    assert dataclasses.replace(one[0], temperature=1.0).key == other[0].key
