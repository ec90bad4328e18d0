"""Trees grown on a corpus: arithmetic by hand, simulated steps against real decoding, and the command."""

import json
import random
from collections import Counter

import pytest
import torch

import specdec
from lib.law_drafters import DRAFTERS, VOCAB_SIZE, build_target, make_drafter
from specdec.bundled.load import TINY_FOLDER, load_tiny, tiny_drafter
from specdec.commands.cli import main
from specdec.loop.decoder import Decoder
from specdec.models.target.target import Target
from specdec.trees.plan import TreePlan
from specdec.trees.shape import TreeShape
from specdec.tuning.grown import tune_grown
from specdec.tuning.growth import grow, simulate
from specdec.tuning.measure import with_tree
from specdec.tuning.ranks import NO_RANK, rank_texts

RANKING = [kind for kind in DRAFTERS if make_drafter(kind).can_sample]
# one text of seven places; its tokens are the drafter's first guess, or its second, or no guess
TEXT = [(0, 1), (1, 0), (0, 0), (0, -1), (-1, 0), (0, 1), (0, 1)]


def paths_of(ranks):
    return [[tuple(row) for row in text.tolist()] for text in ranks]


@pytest.fixture(scope="module")
def tiny():
    model, tokenizer = load_tiny()
    prompts = json.loads((TINY_FOLDER / "prompts.json").read_text())
    return Target(model), [tokenizer(text, return_tensors="pt").input_ids[0] for text in prompts]


# Arithmetic


def test_simulated_decoding_by_hand():
    alone = simulate([TEXT], [])
    assert (alone.num_steps, alone.tau) == (7, 1)
    assert alone.missed == {(0,): 5, (1,): 1, (-1,): 1}
    # steps at 0 (accepts 0), 2 (accepts 0), 4 (nothing), 5 (accepts 0); the next would begin behind the text
    found = simulate([TEXT, TEXT[:1]], [(0,)])
    assert (found.num_steps, found.num_emitted) == (5, 9)
    assert found.missed == {(0, 1): 3, (0, 0): 1, (-1,): 1}
    assert simulate([TEXT], [(0,), (0, 1)]).num_emitted == 3 + 2 + 3  # steps at 0, 3 and 5


def test_a_tree_grows_by_hand():
    growth = grow([torch.tensor(TEXT)], 9)
    # the second tree misses (0, 1) twice and (0, 0) once; but a node's first child is of the first rank. The last tree
    # misses (0, -1) alone, which no drafter proposes
    assert growth.order == ((0,), (0, 0), (0, 1))
    assert growth.tau == (1, 7 / 4, 7 / 3, 8 / 3)
    assert [growth.tree(size).num_nodes for size in range(1, len(growth.tau) + 1)] == [*range(1, len(growth.tau) + 1)]
    with pytest.raises(ValueError, match="num_nodes: expected at least 2"):
        grow([torch.tensor(TEXT)], 1)
    with pytest.raises(ValueError, match="texts: expected some that are longer than the tree is deep"):
        grow([torch.zeros(0, 2, dtype=torch.int64)], 4)


def test_every_tree_has_the_child_that_steps_missed_most():
    chance = random.Random(3)
    ranks = [
        torch.tensor([[min(int(chance.expovariate(0.8)), 6) for _ in range(3)] for _ in range(60)]) for _ in range(5)
    ]
    growth = grow(ranks, 25)
    assert len(growth.order) == 24
    texts = paths_of(ranks)
    for size in range(1, 25):
        nodes = set(growth.order[: size - 1])
        taken, steps, tokens = Counter(), 0, 0
        for text in texts:  # written anew: where steps lie, and by which child each would have gone further
            at = 0
            while at < len(text):
                kept = max((depth for depth in (1, 2, 3) if text[at][:depth] in nodes), default=0)
                taken[text[at][: kept + 1]] += kept < 3
                steps, tokens, at = steps + 1, tokens + kept + 1, at + kept + 1
        assert growth.tau[size - 1] == tokens / steps
        allowed = {
            (*node, rank)
            for node in ((), *nodes)
            for rank in range(7)
            if all((*node, lower) in nodes for lower in range(rank)) and (*node, rank) not in nodes and len(node) < 3
        }
        assert taken[growth.order[size - 1]] == max(taken[child] for child in allowed)
    assert growth == grow(ranks, 25)
    assert growth.order[:9] == grow(ranks, 10).order


# Against real decoding


@pytest.mark.parametrize("kind", RANKING)
def test_simulated_steps_are_those_of_decoding(kind):
    """Whatever the drafter: where steps of real decoding begin, and what they accept, follows from the ranks."""
    target, drafter = Target(build_target()), make_drafter(kind)
    shape = drafter.shape
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in (3, 9, 5)]
    real = Decoder(target, drafter).decode(prompts, 30)
    ranks = rank_texts(target, drafter, prompts, real.tokens, shape.max_depth, batch_size=2)
    nodes, accepted = set(shape.rank_paths), 0
    for text, emitted, row in zip(paths_of(ranks), real.stats.num_emitted, real.tokens, strict=True):
        assert len(text) == len(row) - shape.max_depth
        found, place = [], 0
        while place < len(text) - 1:  # a step from the last place may be cut by the end of the text
            found.append(max(depth + 1 for depth in range(shape.max_depth + 1) if text[place][:depth] in nodes))
            place += found[-1]
        assert found == emitted[: len(found)]
        assert simulate([text[: sum(found)]], shape.rank_paths[1:]).num_steps == len(found)
        accepted += sum(found) - len(found)
    assert accepted > 0
    assert (torch.cat(ranks) == NO_RANK).any() == (make_drafter(kind).proposes is not None)


def test_texts_of_several_lengths_and_batches_rank_alike():
    target, drafter = Target(build_target()), make_drafter("hydra")
    prompts = [torch.tensor([2, 4, 1]), torch.tensor([3]), torch.tensor([0, 5, 5, 1]), torch.tensor([6, 6])]
    texts = [[1, 2, 3, 4, 5], [1], [], [2, 2, 2]]
    done = []
    together = rank_texts(target, drafter, prompts, texts, 2, on_progress=done.append)
    alone = rank_texts(target, drafter, prompts, texts, 2, batch_size=1, on_progress=done.append)
    assert [tuple(ranks.shape) for ranks in together] == [(3, 2), (0, 2), (0, 2), (1, 2)]
    assert all(map(torch.equal, together, alone))
    assert done == [4, 1, 2, 3, 4]


def test_a_grown_tree_is_no_worse_than_the_published_one_of_its_size(tiny):
    target, prompts = tiny
    drafter = specdec.load_drafter(tiny_drafter("hydra"), target)
    published = type(drafter).default_tree(drafter.network.config)
    prompts = prompts[:5]
    texts = Decoder(target, drafter).decode(prompts, 48).tokens
    ranks = rank_texts(target, drafter, prompts, texts, 3)
    growth = grow(ranks, published.num_nodes)
    sizes = [4, 8, 12, 16, 24, len(growth.tau)]
    for size in sizes:
        cut = published.rank_paths[1:size] if size > 8 else [(rank,) for rank in range(size - 1)]
        assert growth.tau[size - 1] >= simulate(paths_of(ranks), cut).tau
    # the bundled drafter's own tree was grown in the same way, on more texts
    own = simulate(paths_of(ranks), drafter.shape.rank_paths[1:]).tau
    assert growth.tau[drafter.shape.num_nodes - 1] == pytest.approx(own, rel=0.03)
    # and for real: the texts once more, with both trees of the same size
    size = 12
    found = [
        Decoder(target, with_tree(drafter, tree)).decode(prompts, 48).stats.tau
        for tree in (growth.tree(size), TreeShape.from_paths(published.rank_paths[1:size]))
    ]
    assert found[0] > found[1]


# What comes of it


def test_a_grown_plan_needs_no_clock_and_holds_every_tree(tiny, tmp_path):
    target, prompts = tiny
    drafter = specdec.load_drafter(tiny_drafter("hydra"), target)
    stages, times = [], iter(range(1, 100))

    def measure(function):
        function()
        return float(next(times))

    sizes = {"num_nodes": 10, "context": 16, "max_new_tokens": 24, "batch_size": 2}
    plan = tune_grown(
        target, drafter, prompts[:3], **sizes, measure=measure, on_progress=lambda *progress: stages.append(progress)
    )
    assert [row.num_nodes for row in plan.rows] == [*range(1, len(plan.order) + 2)]
    assert plan.rows[0].tau == 1
    assert plan.tree_of(plan.tree.num_nodes) == plan.tree
    assert max(map(len, plan.order)) <= drafter.network.config.num_heads
    assert "grown on 3 texts" in plan.place
    assert {stage for stage, _, _ in stages} == {"writing texts", "ranking their tokens", "growing trees"}
    plan.save(tmp_path / "plan.json")
    assert TreePlan.load(tmp_path / "plan.json") == plan
    data = json.loads(plan.to_json())
    del data["plan"]["order"]
    assert TreePlan.from_dict(data).order == ()  # as plans had none
    data["plan"]["order"] = ["0", "0.0"]
    with pytest.raises(ValueError, match="plan: expected what specdec tune writes"):
        TreePlan.from_dict(data)
    with pytest.raises(ValueError, match="num_nodes: expected 1 to"):
        plan.tree_of(len(plan.order) + 2)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("prompt_lookup", {}, "drafter: expected one that ranks its candidates, got prompt_lookup"),
        ("lookahead", {}, "drafter: expected one whose tree can be changed, got lookahead"),
        ("hydra", {"depth": 4}, "tree: expected a depth of 1 to 2, one level per head, got 4"),
        ("hydra", {"num_nodes": 1}, "num_nodes: expected 2 to 512, got 1"),
        ("hydra", {"context": 99}, "batch_size, context: expected at least 1 row"),
    ],
)
def test_what_cannot_grow_is_refused(kind, settings, message):
    settings = {"num_nodes": 8, "context": 8, "max_new_tokens": 8, **settings}
    with pytest.raises(ValueError, match=message):
        tune_grown(Target(build_target()), make_drafter(kind), [torch.tensor([1, 2])], **settings)


def test_the_command_grows_trees(tmp_path, capsys):
    file, prompts = str(tmp_path / "plan.json"), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n{"text": "import os"}\n')
    arguments = ["--model", "tiny", "--drafter", "hydra"]
    sizes = ["--context", "16", "--max-new-tokens", "16", "--output", file]
    assert main(["tune", *arguments, *sizes, "--grow", "30", "--prompts", str(prompts)]) == 0
    out = capsys.readouterr()
    assert "grown on 2 texts" in out.out
    assert "ranking their tokens: 2 of 2" in out.err
    assert "nodes, not 30: no step would have taken another" in out.err
    assert len(TreePlan.load(file).order) > 2
    for wrong, message in (
        (["--grow", "1"], "--grow: expected 2 to 512 nodes, got 1"),
        (["--depth", "3"], "--depth: expected --grow with it, got none"),
        (["--max-new-tokens", "1023", "--prompts", str(prompts)], "--prompts: expected some of at most 1 tokens"),
    ):
        capsys.readouterr()
        assert main(["tune", *arguments, *sizes, *wrong]) == 2
        assert message in capsys.readouterr().err
    assert TreePlan.load(file).order  # and the good file is still there
