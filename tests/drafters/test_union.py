"""Several drafters as one: what is merged, what is learnt, what is refused."""

import math

import pytest
import torch

import specdec
from lib.law_drafters import VOCAB_SIZE, build_target, make_drafter
from specdec.drafters.union.costs import WayCosts
from specdec.drafters.union.deferred import Deferred
from specdec.drafters.union.planner import WayPlanner
from specdec.drafters.union.reach import NUM_GRADES, Evidence, Pool, ReachTables
from specdec.drafters.union.union import Union
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.drafting.draft_tree import DraftTree
from specdec.evaluation.replay import RecordedTarget, RecordedText, Recording
from specdec.kernels.common.verdict import Verdict
from specdec.loop.decoder import Decoder
from specdec.loop.memory import Places
from specdec.loop.rules import Naive, Rejection
from specdec.models.target.target import Target, TargetOutput
from specdec.tuning.auto import split_names
from specdec.tuning.union import measured

PROMPTS = [torch.tensor([1, 2, 3, 1, 2, 3, 1]), torch.tensor([4]), torch.tensor([0, 6, 0, 6, 0])]


def tree_of(paths, logps=None):
    """A tree of one row from token paths, each behind those before it."""
    nodes = {(): 0}
    tokens, parent, depth = [9], [-1], [0]
    for path in paths:
        nodes[path] = len(tokens)
        tokens.append(path[-1])
        parent.append(nodes[path[:-1]])
        depth.append(len(path))
    words = torch.zeros(1, len(tokens), 1, dtype=torch.int32)
    fields = (torch.tensor([values], dtype=torch.int32) for values in (tokens, parent, depth))
    given = None if logps is None else torch.tensor([[0.0, *logps]])
    return DraftTree(*fields, words, torch.tensor([max(depth)]), max_depth=max(depth), logps=given)


def tables(num_members=2, batch_size=1):
    found = ReachTables(
        Evidence(num_members, torch.device("cpu")),
        num_members,
        batch_size=batch_size,
        max_depth=4,
        device=torch.device("cpu"),
        backend="reference",
    )
    found.start()
    return found


def test_a_pool_holds_all_candidates_and_points_at_their_parents():
    first = tree_of([(1,), (1, 2), (1, 2, 3)], logps=[math.log(0.8)] * 3)
    second = tree_of([(1,), (4,), (4, 5)])
    pool = Pool([first, second], [0, 1], tables())
    assert pool.tokens.tolist() == [[1, 2, 3, 1, 4, 5]]
    assert pool.parent.tolist() == [[-1, 0, 1, -1, -1, 4]]
    assert pool.member.tolist() == [0, 0, 0, 1, 1, 1]
    # the drafter's own word, as long as nothing is known; by its rank, where it says nothing
    assert pool.chance[0, :3].tolist() == pytest.approx([0.825] * 3)
    assert pool.chance[0, 3] > pool.chance[0, 4] > 0


def test_padding_is_no_candidate():
    tree = tree_of([(1,), (2,)])
    tree.parent[0, 2] = -1
    pool = Pool([tree], [0], tables(1))
    assert pool.chance[0, 1] == 0
    assert pool.cell[0, 1] == 4 * NUM_GRADES


def verdict_of(tokens):
    emitted = torch.tensor([[*tokens, *[-1] * (5 - len(tokens))]], dtype=torch.int32)
    count = torch.tensor([len(tokens) - 1], dtype=torch.int32)
    return Verdict(torch.zeros_like(emitted), count, emitted[:, 0], emitted)


def test_chances_follow_what_the_text_did_with_candidates_scored_or_not():
    found = tables(1)
    right = tree_of([(1,), (1, 2)], logps=[math.log(0.6)] * 2)
    before = Pool([right], [0], found).chance.clone()
    for _ in range(10):
        found.learn(Pool([right], [0], found), verdict_of([1, 2, 3]))
    assert (Pool([right], [0], found).chance > before + 0.2).all()
    for _ in range(20):
        found.learn(Pool([right], [0], found), verdict_of([5]))
    after = Pool([right], [0], found).chance
    assert after[0, 0] < 0.5 * before[0, 0]  # what stood behind it was not tried


def test_what_a_generation_found_is_where_the_next_one_begins():
    evidence = Evidence(1, torch.device("cpu"))
    prior = evidence.prior()
    totals = torch.zeros(2, prior.shape[0], 2)
    totals[:, 0, 1] = 50.0  # tried, and never right
    evidence.add(totals)
    assert evidence.prior()[0] < 0.6 * prior[0]
    by_grade = evidence.prior().view(-1, NUM_GRADES)
    assert (by_grade.diff(dim=1) <= 1e-6).all()
    for _ in range(100):
        evidence.add(1000 * totals)
    assert evidence.counts.max() < 2001


class Listener:
    """Keeps what a member is told."""

    def __init__(self):
        self.roots, self.tokens = [], []

    def skip(self, root):
        self.roots += root.tolist()

    def commit(self, verdict, output):
        row = verdict.emitted[0, : verdict.num_emitted[0]].tolist()
        assert output.hidden[0, verdict.path[0, : len(row)].long(), 0].tolist() == row  # the states of these tokens
        self.tokens += row


def test_every_member_is_told_once_of_every_step():
    generator = torch.Generator().manual_seed(0)
    members, later = [Listener(), Listener()], Deferred(2)
    text = []
    for step in range(40):
        count = int(torch.randint(1, 4, (), generator=generator))
        tokens = torch.arange(len(text), len(text) + count)[None].int()
        output = TargetOutput(scores=None, hidden=tokens[..., None].float(), taps=())
        path = torch.arange(count, dtype=torch.int32)[None]
        verdict = Verdict(path, torch.tensor([count - 1], dtype=torch.int32), tokens[:, -1], tokens)
        drafted = [number for number in (0, 1) if step % (3, 7)[number] == 0]
        for number in drafted:
            later.tell(number, members[number])
            members[number].commit(verdict, output)
        later.note(torch.tensor([len(text)]), verdict, output, drafted)
        text += tokens[0].tolist()
    for number, member in enumerate(members):
        later.tell(number, member)
        assert member.tokens == text
        assert set(member.roots) <= set(text)


@pytest.mark.parametrize("kinds", [("suffix", "medusa"), ("eagle", "draft_tree"), ("prompt_lookup", "hydra", "dspark")])
def test_greedy_text_is_that_of_plain_decoding_with_merged_trees(kinds):
    union = Union([make_drafter(kind) for kind in kinds])
    expected = Decoder(build_target()).decode(PROMPTS, 30)
    result = Decoder(build_target(), union).decode(PROMPTS, 30)
    assert result.tokens == expected.tokens
    alone = [Decoder(build_target(), make_drafter(kind)).decode(PROMPTS, 30).stats.tau for kind in kinds]
    assert result.stats.tau >= max(alone)  # the members' trees are all in it


def test_the_plan_says_who_proposed_what_was_accepted():
    union = Union([make_drafter("eagle"), make_drafter("suffix")])
    stats = Decoder(build_target(), union).decode(PROMPTS, 30).stats
    plan = stats.plan
    assert len(plan.steps) == stats.num_target_passes
    accepted = sum(count - 1 for row in stats.num_emitted for count in row)
    assert sum(plan.emitted) == sum(map(sum, stats.num_emitted))
    assert max(plan.proposed_by) <= accepted <= sum(plan.proposed_by)
    assert plan.members == ("eagle", "suffix")
    assert math.isnan(plan.predicted_speedup)  # no costs, no times


def test_a_drafter_that_is_never_worth_it_is_left_out_and_asked_again():
    costs = WayCosts({1: 1.0, 8: 8.0}, {1: 5.0})
    union = Union([make_drafter("medusa")], costs=costs)
    stats = Decoder(build_target(), union).decode([PROMPTS[0]], 50).stats
    drafted = [step for step, one in enumerate(stats.plan.steps) if one.members]
    assert drafted[0] == 0
    assert 1 < len(drafted) < 12


def test_steps_that_are_timed_correct_the_table():
    times = iter(range(1000))
    choices = Union([make_drafter("medusa")], costs=WayCosts({1: 1.0}, {1: 0.5})).choices
    planner = WayPlanner(choices, 1, backlog=100, may_ask=True, clock=lambda: next(times) * 2e-3)  # each 2 ms
    for _ in range(40):
        way = choices.ways[planner.choose()]
        if way.group:
            planner.cut([0.0] * len(choices.sizes))
        planner.observe([1, 1, 0, *[0] * len(choices.sizes)])
    steps = planner.report([1] * 40).steps
    assert steps[-1].plain_ms == pytest.approx(2.0, rel=0.05)


def test_a_decoder_looks_for_tensors_once_whatever_is_planned(monkeypatch):
    decoder = Decoder(build_target(), Union([make_drafter("medusa")], costs=WayCosts({1: 1.0, 8: 2.0}, {1: 0.5})))
    for _ in range(2):
        decoder.decode([PROMPTS[0]], 20)
    looks, look = [], Places._look
    monkeypatch.setattr(Places, "_look", lambda places: looks.append(look(places)))
    decoder.decode([PROMPTS[0]], 20)
    assert not looks


def test_it_is_measured_once_per_model():
    target = Target(build_target())
    calls = []

    def measure(function):
        calls.append(function())
        return 1.0 + 0.01 * len(calls)

    union = Union([make_drafter("medusa"), make_drafter("suffix")])
    first = measured(target, union, measure=measure)
    count = len(calls)
    assert count > 0
    assert first.costs.of(1, 4, 1) > 0
    assert measured(target, union, measure=measure).costs == first.costs
    assert len(calls) == count
    # of the same kind and tree, with more weights
    for kind in ("hydra", "hydra++"):
        count = len(calls)
        measured(target, Union([make_drafter(kind), make_drafter("suffix")]), measure=measure)
        assert len(calls) > count


def test_sampling_is_naive_whatever_the_members_could():
    union = Union([make_drafter("medusa"), make_drafter("eagle")])
    with pytest.raises(ValueError, match="use acceptance='naive'"):
        Decoder(build_target(), union, acceptance=Rejection())
    expected = Decoder(build_target(), acceptance=Naive()).decode(PROMPTS, 25, seed=3).tokens
    assert Decoder(build_target(), union, acceptance=Naive()).decode(PROMPTS, 25, seed=3).tokens == expected


@pytest.mark.parametrize(
    ("members", "settings", "message"),
    [
        ([], {}, "members: expected at least one drafter, got none"),
        (
            ["medusa"],
            {"num_nodes": 1},
            "num_nodes: expected at least 2, the root and a node of each of 1 members, got 1",
        ),
        (["medusa", "suffix"], {"num_nodes": 2}, "num_nodes: expected at least 3"),
        (["none"], {}, "expected drafters that propose tokens, got none with the root alone"),
        (["lookahead", "medusa"], {}, "got lookahead, which also reads what the target says at rejected ones"),
        (["union", "eagle"], {}, "expected drafters that are no unions themselves"),
        (["suffix", "suffix"], {}, "members: expected each drafter once, got suffix, suffix"),
    ],
)
def test_what_makes_no_union_is_named(members, settings, message):
    with pytest.raises(ValueError, match=message):
        Union([make_drafter(kind) for kind in members], **settings)


def test_the_same_object_twice_and_no_drafter_at_all_are_named():
    one = make_drafter("medusa")
    with pytest.raises(ValueError, match="members: expected each drafter once, got a, b"):
        Union([one, one], names=["a", "b"])
    with pytest.raises(TypeError, match="members: expected drafters, got 'medusa'"):
        Union(["medusa"])


def test_a_member_for_another_target_is_named():
    union = Union([make_drafter("suffix"), make_drafter("medusa")])
    with pytest.raises(ValueError, match="expected"):
        Decoder(build_target(vocab_size=VOCAB_SIZE + 5), union)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a+b", ["a", "b"]),
        ("hydra++", ["hydra++"]),
        ("prompt_lookup+hydra++", ["prompt_lookup", "hydra++"]),
        ("hydra+++eagle", ["hydra++", "eagle"]),
        ("tiny/hydra+++b+c", ["tiny/hydra++", "b", "c"]),
    ],
)
def test_names_with_plus_between_them_are_several(text, names):
    assert split_names(text) == names


@pytest.mark.parametrize("text", ["a+", "+a", "a++++b"])
def test_a_place_that_names_nothing_is_refused(text):
    with pytest.raises(ValueError, match="drafter: expected names with \\+ between them"):
        split_names(text)


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        (["prompt_lookup"], {}, "drafter: expected two drafters or more for a union"),
        (["prompt_lookup", "suffix"], {"tree": (2, 2)}, "tree: expected none with several drafters"),
        (["prompt_lookup", "suffix"], {"kind": "suffix"}, "kind: expected none with several drafters"),
        (["prompt_lookup", "suffix"], {"max_ngram": 2}, "max_ngram: expected none with several drafters"),
        (["prompt_lookup", "suffix"], {"tree": 6, "num_nodes": 5}, "num_nodes: expected none beside tree=6"),
        (["prompt_lookup", "no_such_thing"], {}, "no_such_thing"),
    ],
)
def test_contradictions_are_named_before_anything_is_measured(source, settings, message, monkeypatch):
    monkeypatch.setattr("specdec.tuning.auto.measured", None)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        specdec.load_drafter(source, build_target(), **settings)


def test_a_number_for_a_tree_is_the_same_budget_in_every_step():
    union = specdec.load_drafter([PromptLookup(), make_drafter("medusa")], build_target(), tree=6)
    stats = Decoder(build_target(), union).decode(PROMPTS, 20).stats
    assert {one.members for one in stats.plan.steps} == {("prompt_lookup", "medusa")}
    assert max(one.num_nodes for one in stats.plan.steps) <= 6


def test_auto_takes_what_is_at_hand():
    model, tokenizer = specdec.load_tiny()
    drafter = specdec.load_drafter("auto", model)
    assert drafter.names == ("suffix", "eagle3")
    ids = tokenizer("def add(a, b):", return_tensors="pt").input_ids
    output = specdec.generate(model, "auto", ids, max_new_tokens=20, return_dict_in_generate=True)
    assert torch.equal(output.sequences, specdec.generate(model, None, ids, max_new_tokens=20))
    assert output.stats.plan.members == drafter.names
    assert specdec.load_drafter("auto", build_target()).names == ("suffix",)


@pytest.fixture(scope="module")
def changing():
    """A target that says prose, then a list that repeats itself, then prose again, and its text."""
    model, _ = specdec.load_tiny()
    target = Target(model)
    generator = torch.Generator().manual_seed(1)
    words = torch.randperm(target.vocab_size, generator=generator)
    text = torch.cat((words[:70], words[100:108].repeat(12), words[200:270]))
    prompt = words[300:310]
    hidden = torch.zeros(len(prompt) + len(text) - 1, target.hidden_size)
    recording = Recording((RecordedText(prompt, text, hidden, ()),), len(text), (), ())
    return RecordedTarget(target, recording), prompt, text.tolist()


@pytest.mark.parametrize("members", [["prompt_lookup"], ["prompt_lookup", "tiny/medusa"]])
def test_the_size_follows_a_text_that_changes_its_nature(members, changing):
    target, prompt, text = changing
    costs = WayCosts({1: 1.0, 4: 1.2, 12: 1.8, 32: 4.0}, {1: 0.05, 2: 0.4, 3: 0.45}, plain_ms=0.02)
    union = Union([specdec.load_drafter(one, target) for one in members], names=members, costs=costs)
    result = Decoder(target, union).decode([prompt], len(text))
    assert result.tokens == [text]
    plan = result.stats.plan
    where, place = [], 1
    for count in plan.emitted:  # what stands at the beginning of every step
        where.append("prose" if place < 70 else "new" if place < 78 else "list" if place < 166 else "end")
        place += count
    nodes = {name: [one.num_nodes for one, at in zip(plan.steps, where, strict=True) if at == name] for name in where}
    assert {*nodes["prose"][8:]} == {1}
    assert max(nodes["list"][:8]) >= 8  # within eight steps
    assert sorted(nodes["list"])[len(nodes["list"]) // 2] >= 8
    assert {*nodes["end"][8:]} == {1}
    assert len(plan.emitted) < len(text) - 60  # the list came in few steps
