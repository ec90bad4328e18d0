"""Choosing ways through steps, simulated: costs are tables, acceptance is drawn from laws that are known."""

import random
from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest

from specdec.drafters.union.costs import WayCosts, time_at
from specdec.drafters.union.planner import FIXED_POINT, Choices, WayPlanner, ladder

NAMES = ("lookup", "network")
LOOKUP, NETWORK, BOTH = 1, 2, 3
BUDGET, DEPTH = 64, 11
BACKLOG = 2 * DEPTH + 64

# milliseconds by nodes; simulated, in proportions that targets of these kinds have
TABLES = {
    "7B, one row": {1: 5.0, 16: 5.1, 64: 5.6, 128: 6.9, 256: 11.0},
    "8B, large vocabulary": {1: 5.6, 8: 5.8, 32: 6.6, 64: 7.9, 128: 10.8},
    "mixture of experts, steep": {1: 3.0, 2: 4.2, 4: 6.0, 8: 8.5, 16: 11.0, 32: 13.0, 64: 14.0},
    "a CPU": {1: 3.3, 2: 3.6, 4: 4.4, 8: 5.9, 16: 9.0, 32: 15.0, 64: 27.0},
}
DRAFTS = {LOOKUP: 0.1, NETWORK: 1.4, BOTH: 1.6}

# expected draft tokens of a tree with n draft nodes: of the lookup, of the network
TEXTS = {
    "prose": (lambda n: 0.15 * min(n, 3) / 3, lambda n: 2.0 * (1 - 0.9**n)),
    "list": (lambda n: sum(0.94**k for k in range(1, min(n, DEPTH - 1) + 1)), lambda n: 2.2 * (1 - 0.9**n)),
    "nothing accepted": (lambda n: 0.0, lambda n: 0.0),
    "weak network": (lambda n: 0.05, lambda n: 0.3 * (1 - 0.8**n)),
}


def gain_of(text, group, num_nodes):
    """Expected draft tokens of a set of drafters; both together have the better one's and a little more."""
    lookup, network = (law(num_nodes - 1) for law in TEXTS[text])
    both = max(lookup, network) + 0.3 * min(lookup, network)
    return {0: 0.0, LOOKUP: lookup, NETWORK: network, BOTH: both}[group]


def choices_of(table, *, drafts=None):
    costs = WayCosts(TABLES[table], DRAFTS if drafts is None else drafts)
    return Choices(NAMES, BUDGET, costs, most_emitted=DEPTH)


def planner_of(choices, *, may_ask=False):
    return WayPlanner(choices, 1, backlog=BACKLOG, may_ask=may_ask)


def simulate(choices, texts, *, lag, noise, seed=0, planner=None, finish=list):
    """Decode a text of these natures, one a step; returns tokens, milliseconds and the ways taken."""
    draw = random.Random(seed)
    is_cut = 2 in choices.costs.pass_ms and choices.costs.pass_ms[2] < 1.2 * choices.costs.pass_ms[1]  # as on a CPU
    planner = planner_of(choices, may_ask=is_cut) if planner is None else planner
    planner.begin(finish)
    waiting, taken = deque(), []
    tokens = spent = 0.0
    for text in texts:
        way = choices.ways[planner.choose()]
        common = 1 + noise * draw.uniform(-1, 1)  # what a step offers is more or less for all
        told = []
        for part in way.parts:
            factor = common * (1 + 0.2 * noise * draw.uniform(-1, 1))
            told.append([gain_of(text, part, size) * factor for size in choices.sizes])
        if is_cut and told:
            way = replace(way, num_nodes=planner.cut(told[0]))
        taken.append(way)
        emitted = 1 + gain_of(text, way.group, way.num_nodes)
        tokens += emitted
        spent += choices.costs.of(way.group, way.num_nodes, 1)
        accepted = int(emitted - 1 + draw.random())  # a whole number, right on average
        numbers = [1, 1 + min(DEPTH - 1, accepted), accepted]
        numbers += [round(gain * FIXED_POINT) for gains in told for gain in gains]
        waiting.append(numbers)
        if len(waiting) > lag:
            planner.observe(waiting.popleft())
    return tokens, spent, taken


def best_fixed(choices, texts):
    """Tokens per millisecond of the one way that would have been best for all of the text."""
    return max(
        sum(1 + gain_of(text, way.group, way.num_nodes) for text in texts)
        / (len(texts) * choices.costs.of(way.group, way.num_nodes, 1))
        for way in choices.ways
    )


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("text", TEXTS)
def test_regret_against_the_best_fixed_choice_in_hindsight_is_below_5_percent(table, text, lag):
    choices, texts = choices_of(table), [text] * 400
    tokens, spent, _ = simulate(choices, texts, lag=lag, noise=0.5)
    assert tokens / spent > 0.95 * best_fixed(choices, texts)


@pytest.mark.parametrize("table", TABLES)
def test_a_text_of_changing_nature_beats_every_fixed_choice_or_comes_within_5_percent(table):
    texts = (["prose"] * 100 + ["list"] * 100) * 3
    choices = choices_of(table)
    tokens, spent, _ = simulate(choices, texts, lag=1, noise=0.5)
    assert tokens / spent > 0.95 * best_fixed(choices, texts)


@pytest.mark.parametrize("table", TABLES)
def test_the_choice_follows_a_change_within_8_steps(table):
    choices = choices_of(table)
    texts = ["prose"] * 120 + ["list"] * 60 + ["prose"] * 120
    _, _, taken = simulate(choices, texts, lag=1, noise=0.3)
    settled = {text: best_ways(choices, text) for text in ("prose", "list")}
    for begin, text in ((120, "list"), (180, "prose")):
        # of the steps after the change some are asking again; most are near the best
        after = taken[begin + 8 : begin + 28]
        assert sum(way in settled[text] for way in after) >= 15


def best_ways(choices, text):
    """The ways that are worth at least 90 % of the best."""

    def rate(way):
        return (1 + gain_of(text, way.group, way.num_nodes)) / choices.costs.of(way.group, way.num_nodes, 1)

    every = [*choices.ways, *(replace(way, num_nodes=size) for way in choices.ways[1:] for size in choices.sizes)]
    return [way for way in every if rate(way) > 0.9 * max(map(rate, choices.ways))]


def test_every_drafter_is_asked_again_however_long_it_was_not_worth_it():
    choices = choices_of("7B, one row")
    _, _, taken = simulate(choices, ["nothing accepted"] * 600, lag=1, noise=0.0)
    for bit in (LOOKUP, NETWORK):
        drafted = [step for step, way in enumerate(taken) if way.group & bit]
        assert max(later - one for one, later in pairwise(drafted)) <= 65
    # asking scores nothing but the root
    assert sum(way.num_nodes == 1 for way in taken) >= len(taken) - 1


def test_a_cheap_drafter_is_asked_again_soon():
    choices = choices_of("7B, one row")
    _, _, taken = simulate(choices, ["nothing accepted"] * 300, lag=0, noise=0.0)
    drafted = [step for step, way in enumerate(taken) if way.group & LOOKUP]
    assert max(later - one for one, later in pairwise(drafted)) <= 5


def promise(planner, *, gain, came, steps):
    """Steps whose drafters promise `gain` draft tokens with every size, and get `came`; the ways that were taken."""
    taken = []
    for _ in range(steps):
        way = planner.choices.ways[planner.choose()]
        taken.append(way)
        told = [gain * FIXED_POINT * (size > 1) for _ in way.parts for size in planner.choices.sizes]
        planner.observe([1, 1 + came if way.group else 1, came if way.group else 0, *told])
    return taken


def test_drafters_that_promise_more_than_comes_are_left_for_plain_decoding():
    choices = choices_of("7B, one row", drafts=dict.fromkeys(DRAFTS, 1.0))
    planner = planner_of(choices)
    taken = promise(planner, gain=1.0, came=0, steps=100)
    assert taken[5].num_nodes > 1  # it was believed
    assert sum(way.num_nodes > 1 for way in taken[40:]) <= 6  # of each set now and then one
    predicted = [step.predicted for step in planner.report([1] * 100).steps if step.num_nodes > 1]
    assert predicted[0] == 2.0
    assert predicted[-1] < 1.4
    # and believed again where it comes
    assert sum(way.num_nodes > 1 for way in promise(planner, gain=3.0, came=3, steps=40)) >= 30


def timed(choices, clock):
    """A planner that reads `clock[0]`, in seconds."""
    return WayPlanner(choices, 1, backlog=BACKLOG, may_ask=False, clock=lambda: clock[0])


def test_plain_decoding_is_timed_again_and_chosen_where_it_is_faster_than_it_was_measured():
    clock, choices = [0.0], choices_of("7B, one row")
    planner, taken = timed(choices, clock), []
    for _ in range(200):
        way = choices.ways[planner.choose()]
        taken.append(way)
        clock[0] += 1e-3 * choices.costs.of(way.group, way.num_nodes, 1) * (1.0 if way.group else 0.5)
        planner.observe([1, 1, 0.5, *[0.5 * FIXED_POINT] * (len(way.parts) * len(choices.sizes))])
    assert all(way.group for way in taken[:40])  # by the table it is behind
    assert sum(not way.group for way in taken[-60:]) > 50


def test_steps_of_any_drafters_tell_how_fast_plain_decoding_would_be_now():
    clock, choices = [0.0], choices_of("7B, one row")
    planner = timed(choices, clock)
    for factor in (1.0, 3.0):  # the machine has become slower
        for _ in range(60):
            way = choices.ways[planner.choose()]
            assert way.group  # never plain decoding
            clock[0] += 1e-3 * factor * choices.costs.of(way.group, way.num_nodes, 1)
            planner.observe([1, 4, 3, *[3 * FIXED_POINT] * (len(way.parts) * len(choices.sizes))])
        plain_ms = planner.report([4] * 200).steps[-1].plain_ms
        assert plain_ms == pytest.approx(factor * choices.costs.of(0, 1, 1), rel=0.25)


@pytest.mark.parametrize("lag", [0, 1])
def test_no_more_waits_for_a_drafter_than_it_can_hold(lag):
    drafts = {LOOKUP: 0.1, NETWORK: 50.0, BOTH: 50.1}  # the network is never worth it
    choices = choices_of("7B, one row", drafts=drafts)
    _, _, taken = simulate(choices, ["list"] * 300, lag=lag, noise=0.0)
    waiting = 0
    for way in taken:
        waiting = 0 if way.group & NETWORK else waiting
        waiting += max(1, min(DEPTH, round(1 + gain_of("list", way.group, way.num_nodes))))
        assert waiting <= BACKLOG


def test_without_costs_all_drafters_propose_in_every_step():
    choices = Choices(NAMES, BUDGET, None, most_emitted=DEPTH)
    planner = planner_of(choices)
    chosen = {choices.ways[planner.choose()] for _ in range(50)}
    assert [(way.group, way.num_nodes) for way in chosen] == [(BOTH, BUDGET)]


def test_a_step_is_cut_to_the_size_that_is_worth_most():
    choices = choices_of("a CPU")
    planner = planner_of(choices, may_ask=True)
    planner.choose()
    sizes = ladder(BUDGET)
    rates = {size: (1 + 0.5 * (size > 3)) / choices.costs.of(BOTH, size, 1) for size in sizes}
    assert planner.cut([0.5 * (size > 3) for size in sizes]) == max(sizes, key=rates.get)


def test_the_report_says_what_was_chosen_and_what_came():
    choices = choices_of("7B, one row")
    planner = planner_of(choices)
    simulate(choices, ["list"] * 50, lag=0, noise=0.0, planner=planner, finish=lambda: [30, 20])
    report = planner.report([7] * 50)
    assert len(report.steps) == 50
    assert report.members == NAMES
    assert report.steps[0].members == NAMES
    assert report.predicted_speedup > 1
    assert "accepted tokens proposed by lookup 30, network 20" in str(report)


@pytest.mark.parametrize(("rows", "expected"), [(1, 5.0), (8, 5.0 + 0.1 * 7 / 15), (300, 11.0 + 44 * 4.1 / 128)])
def test_times_between_and_beyond_what_was_measured_lie_on_lines(rows, expected):
    assert time_at(TABLES["7B, one row"], rows) == pytest.approx(expected)


def test_costs_that_make_no_sense_are_named():
    with pytest.raises(ValueError, match="pass_ms: expected positive times"):
        WayCosts({}, {})
    with pytest.raises(ValueError, match="draft_ms"):
        WayCosts({1: 1.0}, {1: -1.0})
