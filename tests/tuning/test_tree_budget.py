"""The size of a draft tree: arithmetic by hand and by brute force, and measurements without a clock."""

import itertools
import json
import random

import pytest
import torch
from torch.utils._pytree import tree_leaves

import specdec
from lib.recorder import Recorder
from lib.scripted_drafters import oracle
from specdec.bundled.load import load_tiny, tiny_drafter
from specdec.commands.cli import main
from specdec.drafters.weightless.none import NoDrafter
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.loop.decoder import Decoder
from specdec.loop.graphs import CannotCaptureError
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree, load_tree
from specdec.trees.plan import TreePlan, read_plan
from specdec.trees.shape import TreeShape
from specdec.tuning.budget import StepCosts, plan_tree, subtree
from specdec.tuning.measure import measure_ms, measure_reach, probe_prompts, replayed, tune, with_tree

TREE = TreeShape.from_k_config((2, 2))  # 0; 1 2; 3 4 below 1, 5 6 below 2
REACH = [1.0, 0.6, 0.2, 0.4, 0.1, 0.1, 0.0]
FLAT = StepCosts({1: 10.0, 64: 10.0}, [0.0, 1.0, 2.0])


@pytest.fixture(scope="module")
def tiny():
    model, tokenizer = load_tiny()
    return Target(model), tokenizer


# The choice


def test_a_plan_by_hand():
    plan = plan_tree(TREE, REACH, FLAT, batch_size=1)
    assert [row.num_nodes for row in plan.rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row.max_depth for row in plan.rows] == [0, 1, 2, 2, 2, 2, 2]
    assert [row.tau for row in plan.rows] == pytest.approx([1, 1.6, 2.0, 2.2, 2.3, 2.4, 2.4])
    assert [row.step_ms for row in plan.rows] == [10, 11, 12, 12, 12, 12, 12]
    # the last node is never reached, so that the smaller of two equally fast trees is taken
    assert plan.tree == TreeShape.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    assert plan.speedup == pytest.approx(2.4 / 1.2)
    assert plan.chosen.tokens_per_second == pytest.approx(200)
    assert plan.pays


def test_a_batch_shares_the_rows_of_the_pass():
    costs = StepCosts({1: 10.0, 8: 10.0, 16: 20.0, 32: 40.0}, [0.0, 1.0, 2.0], other_ms=0.5)
    alone, together = (plan_tree(TREE, REACH, costs, batch_size=size) for size in (1, 8))
    assert alone.tree.num_nodes == 6
    assert together.tree.num_nodes < alone.tree.num_nodes
    assert [row.num_nodes for row in together.rows] == [1, 2, 3, 4]  # 5 * 8 rows were not measured
    assert together.rows[1].step_ms == 20 + 1 + 0.5
    assert together.rows[1].tokens_per_second == pytest.approx(1e3 * 8 * 1.6 / 21.5)


def test_plain_decoding_where_speculation_cannot_pay():
    for reach, costs in (([1.0] + [0.0] * 6, FLAT), (REACH, StepCosts({1: 10.0, 7: 70.0}, [0.0, 1.0, 2.0]))):
        plan = plan_tree(TREE, reach, costs, batch_size=1)
        assert plan.tree == TreeShape.none()
        assert not plan.pays
        assert plan.speedup == 1
        assert "no tree is expected to be faster" in str(plan)


def test_no_other_part_of_the_tree_is_faster():
    """Against all subsets of nodes that are trees."""
    for seed in range(20):
        chance = random.Random(seed)
        reach = [1.0] * 7
        for node in range(1, 7):
            reach[node] = reach[TREE.parent[node]] * chance.random() * (0.5 if TREE.rank[node] else 0.9)
        costs = StepCosts({n: 5 + n * chance.random() for n in range(1, 8)}, [0, chance.random(), 2.0])
        plan = plan_tree(TREE, reach, costs, batch_size=1)
        fastest = 0.0
        for size in range(7):
            for nodes in itertools.combinations(range(1, 7), size):
                if all(TREE.parent[node] in (0, *nodes) for node in nodes):
                    depth = max((int(TREE.depth[node]) for node in nodes), default=0)
                    step_ms = costs.at(1 + size) + costs.draft_ms[depth]
                    fastest = max(fastest, 1e3 * (1 + sum(reach[node] for node in nodes)) / step_ms)
        # all trees of one size cost the same but for drafting, so a shallower one of less reach may win by that
        assert plan.chosen.tokens_per_second <= fastest * (1 + 1e-9)
        flat = StepCosts(costs.pass_ms, [1.0, 1.0, 1.0])
        best = plan_tree(TREE, reach, flat, batch_size=1).chosen.tokens_per_second
        for row in plan_tree(TREE, reach, flat, batch_size=1).rows:
            taus = [
                1 + sum(reach[node] for node in nodes)
                for nodes in itertools.combinations(range(1, 7), row.num_nodes - 1)
                if all(TREE.parent[node] in (0, *nodes) for node in nodes)
            ]
            assert row.tau == pytest.approx(max(taus))
            assert best >= row.tokens_per_second


def test_a_plan_is_a_function_of_its_table():
    plans = {plan_tree(TREE, REACH, FLAT, batch_size=2).to_json() for _ in range(3)}
    assert len(plans) == 1


def test_costs_are_interpolated_and_never_extrapolated():
    costs = StepCosts({2: 4.0, 4: 8.0, 16: 20.0}, [0.0])
    assert [costs.at(rows) for rows in (1, 2, 3, 4, 7, 16)] == [4, 4, 6, 8, 11, 20]
    with pytest.raises(ValueError, match="num_rows: expected at most 16"):
        costs.at(17)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: StepCosts({}, [0.0]), "pass_ms: expected positive times"),
        (lambda: StepCosts({1: -1.0}, [0.0]), "pass_ms: expected positive times"),
        (lambda: StepCosts({1: 1.0}, []), "draft_ms, other_ms: expected times"),
        (lambda: plan_tree(TREE, REACH[:3], FLAT, batch_size=1), "reach: expected 7 entries"),
        (lambda: plan_tree(TREE, [1, 0.1, 0.2, 0.3, 0, 0, 0], FLAT, batch_size=1), "reach: expected node 3 below"),
        (lambda: plan_tree(TREE, REACH, StepCosts({1: 1.0}, [0.0]), batch_size=1), "draft_ms: expected an entry"),
        (lambda: plan_tree(TREE, REACH, FLAT, batch_size=65), "num_rows: expected at most 64"),
    ],
)
def test_bad_tables_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Files


def test_a_plan_survives_its_file(tmp_path):
    plan = plan_tree(TREE, REACH, FLAT, batch_size=1, place="somewhere")
    plan.save(tmp_path / "plan.json")
    assert TreePlan.load(tmp_path / "plan.json") == plan == read_plan(tmp_path / "plan.json")
    assert load_tree(tmp_path / "plan.json") == plan.tree
    assert "somewhere" in str(plan)
    assert "<- chosen" in str(plan)
    TREE.save(tmp_path / "tree.json")
    assert read_plan(tmp_path / "tree.json") is None
    data = json.loads(plan.to_json())
    for broken in (
        {**data, "plan": {**data["plan"], "rows": []}},
        {**data, "plan": {**data["plan"], "rows": [{"num_nodes": 1}]}},
        {**data, "plan": {"batch_size": 1}},
        {**data, "plan": 3},
    ):
        with pytest.raises(ValueError, match="plan: plan: expected what specdec tune writes"):
            TreePlan.from_dict(broken)


# Measuring


def test_reach_is_counted_per_node(tiny):
    target, _ = tiny
    prompt = torch.tensor([5, 6, 7])
    expected = Decoder(target).decode([prompt], 25).tokens
    drafter = oracle(TREE, expected, target.vocab_size)
    assert measure_reach(Decoder(target, drafter), [prompt], 25) == [1, 1, 0, 1, 0, 0, 0]  # path 0, 1, 3
    with pytest.raises(ValueError, match="max_new_tokens: expected enough"):
        measure_reach(Decoder(target, drafter), [prompt], 3)


def test_a_measured_plan_needs_no_clock(tiny):
    """Costs are injected; acceptance is the bundled drafter's own."""
    target, _ = tiny
    drafter = specdec.load_drafter(tiny_drafter("medusa"), target)
    calls = []

    def measure(function):
        function()
        calls.append(function)
        return float(len(calls))  # 1, 2, 3, 4 and 5 ms for passes of 1, 2, 4, 8 and 11 rows, then the drafter's

    prompts = probe_prompts(target, num_prompts=2, length=8)
    plan = tune(target, drafter, prompts, context=16, max_new_tokens=24, measure=measure)
    assert plan.rows[0].step_ms == 1
    assert plan.rows[1].step_ms >= 2
    assert plan.rows[-1].num_nodes == drafter.shape.num_nodes == 11
    assert plan.place == "context 16, cpu, float32, medusa"
    again = Decoder(target, with_tree(drafter, plan.tree)).decode(prompts, 16)
    assert again.tokens == Decoder(target).decode(prompts, 16).tokens
    wide = tune(target, drafter, prompts, batch_size=4, context=16, max_new_tokens=24, max_rows=16, measure=measure)
    assert wide.rows[-1].num_nodes == 4  # 16 rows at most


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["medusa", "eagle", "hydra++", "draft_model"])
def test_passes_and_drafts_can_be_replayed(kind, tiny):
    """As on a GPU; a replay drafts what the call did, however often it ran before."""
    target, _ = tiny
    engine = Recorder()
    times = iter(range(1, 100))

    def measure(function):
        results = []
        for _ in range(3):
            function()
            results.append(tree_leaves(engine.recordings[-1].calls[-1][-1])[-1].clone())
        assert all(torch.equal(result, results[0]) for result in results)
        return float(next(times))

    drafter = specdec.load_drafter(tiny_drafter(kind), target)
    prompts = probe_prompts(target, num_prompts=1, length=8)
    plan = tune(target, drafter, prompts, context=16, max_new_tokens=12, measure=replayed(engine, measure))
    assert plan.rows[-1].num_nodes == drafter.shape.num_nodes
    assert engine.num_replays == 3 * engine.num_recorded > 0


def test_what_cannot_be_replayed_is_timed_as_it_is():
    class Refuses(Recorder):
        def record(self, step):
            raise CannotCaptureError("no")

    assert replayed(Refuses(), lambda function: function())(lambda: 7.0) == 7.0


@pytest.mark.parametrize("kind", ["medusa", "eagle", "hydra++", "falcon", "draft_model", "parallelspec", "amphista"])
def test_every_static_drafter_takes_a_smaller_tree(kind, tiny):
    target, tokenizer = tiny
    drafter = specdec.load_drafter(tiny_drafter(kind), target)
    prompt = tokenizer("def f(x):", return_tensors="pt").input_ids[0]
    smaller = subtree(drafter.shape, range(4))
    changed = with_tree(drafter, smaller)
    assert changed.shape == smaller
    assert Decoder(target, changed).decode([prompt], 12).tokens == Decoder(target).decode([prompt], 12).tokens
    assert isinstance(with_tree(drafter, TreeShape.none()), NoDrafter)


def test_what_cannot_be_cut_is_refused(tiny):
    target, _ = tiny
    eagle3 = specdec.load_drafter(tiny_drafter("eagle3"), target, tree=DynamicTree(8, 2, 3))
    with pytest.raises(ValueError, match="tree: expected a static tree .* num_nodes is its budget"):
        tune(target, eagle3, measure=lambda function: 1.0)
    with pytest.raises(ValueError, match="drafter: expected one whose tree can be changed, got lookahead"):
        tune(target, specdec.load_drafter("lookahead", target), measure=lambda function: 1.0)
    with pytest.raises(ValueError, match="drafter: expected one that proposes tokens, got none with the root alone"):
        tune(target, specdec.load_drafter("none", target))
    assert isinstance(specdec.load_drafter("none", target, tree="auto"), NoDrafter)
    with pytest.raises(ValueError, match="batch_size, context: expected at least 1 row"):
        tune(target, specdec.load_drafter("prompt_lookup", target), context=10**6)
    changed = with_tree(PromptLookup(max_ngram=2), TreeShape.chain(3))
    assert (changed.max_ngram, changed.shape) == (2, TreeShape.chain(3))


def test_the_clock_gives_milliseconds(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr("specdec.tuning.measure.time.perf_counter", lambda: float(next(ticks)))
    assert measure_ms(lambda: None) == 1000


# Where plans are used


def test_a_plan_is_a_tree_wherever_one_is_asked_for(tiny, tmp_path):
    target, _ = tiny
    tree = TreeShape.from_paths([(0,), (1,), (0, 0)])
    reach = [1.0, 0.5, 0.2, 0.3]
    plan_tree(tree, reach, FLAT, batch_size=1).save(tmp_path / "pays.json")
    assert specdec.load_drafter(tiny_drafter("medusa"), target, tree=tmp_path / "pays.json").shape == tree
    plan_tree(tree, [1.0, 0, 0, 0], FLAT, batch_size=1).save(tmp_path / "plain.json")
    assert isinstance(specdec.load_drafter(tiny_drafter("medusa"), target, tree=tmp_path / "plain.json"), NoDrafter)


def test_auto_sizes_every_step_by_costs_that_are_measured(tiny):
    target, tokenizer = tiny
    prompts = [tokenizer("def add(a, b):", return_tensors="pt").input_ids[0]]
    drafter = specdec.load_drafter(tiny_drafter("medusa"), target, tree="auto")
    assert drafter.names == ("medusa",)
    assert drafter.costs.of(1, 4, 1) > drafter.costs.of(0, 1, 1) > 0
    expected = Decoder(target).decode(prompts, 20).tokens
    stats = (result := Decoder(target, drafter).decode(prompts, 20)).stats
    assert result.tokens == expected
    assert len(stats.plan.steps) == stats.num_target_passes
    # nothing is measured unasked
    assert specdec.load_drafter(tiny_drafter("medusa"), target).num_ways == 1


def test_the_command_writes_a_plan_that_generate_reads(tmp_path, capsys):
    file = str(tmp_path / "plan.json")
    arguments = ["--model", "tiny", "--drafter", "medusa"]
    tuning = ["--context", "16", "--max-new-tokens", "12", "--prompt", "def f(x):"]
    assert main(["tune", *arguments, *tuning, "--output", file]) == 0
    assert "speedup" in capsys.readouterr().out
    assert TreePlan.load(file).batch_size == 1
    assert main(["generate", *arguments, "--tree", file, "--prompt", "def f(", "--max-new-tokens", "4"]) == 0
    assert main(["tune", *arguments, "--batch-size", "0", "--output", file]) == 2
    assert "--batch-size: expected at least 1" in capsys.readouterr().err
