"""The EAGLE drafter, static and dynamic trees, against the papers' equations; and its state from step to step."""

import pytest
import torch

from lib.drafter_checks import propose
from lib.eagle_checks import DRAFT_TOKENS, SWITCHES, TAPS, Literal, drafter_of, random_network, record_logits
from lib.families import build_model, random_prompts
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3
from specdec.drafting.candidates import Best, Candidates
from specdec.loop.decoder import Decoder
from specdec.loop.rules import choose_rule
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree, as_tree, load_tree
from specdec.trees.levels import plan_levels
from specdec.trees.shape import TreeShape

SHAPES = {
    "chain": TreeShape.chain(4),
    "k_config": TreeShape.from_k_config((3, 2, 2)),
    "published": TreeShape.preset("eagle/mc_sim_7b_63"),
    "leaves at every depth": TreeShape.from_paths([[0], [2], [3], [0, 1], [2, 0], [2, 3], [2, 3, 0]]),
    "dynamic": DynamicTree(num_nodes=14, depth=3, top_k=4),
    "one pass": DynamicTree(num_nodes=5, depth=0, top_k=6),
}


NETWORKS = {"first": (1, {}), "third": (3, {}), **{name: (3, switches) for name, switches in SWITCHES.items()}}


@torch.no_grad()
@pytest.mark.parametrize(("version", "switches"), NETWORKS.values(), ids=NETWORKS)
def test_static_trees_follow_the_equations(version, switches, generator):
    model = build_model("llama")
    network = random_network(model, version, num_key_value_heads=4, **switches)
    shape = SHAPES["leaves at every depth"]
    (text,) = random_prompts(generator, [5])
    literal = Literal(network, model)
    root = 7
    passes = record_logits(network, model)
    tree = propose(drafter_of(network, shape), model, text, root)
    logits_of = dict(zip(sorted(set(shape.parent) - {-1}), torch.cat(passes, 1)[0], strict=True))

    pairs = {0: literal.true_pairs(model, text, root)}
    for node in range(shape.num_nodes):
        if node > 0:
            pairs[node] = literal.extend(pairs[shape.parent[node]], int(tree.tokens[0, node]))
        if node in logits_of:
            expected = literal.logits(literal.state_after(pairs[node]))
            assert_close(logits_of[node], expected[expected.isfinite()])
            best = expected.topk(shape.max_rank + 1).indices
            children = shape.children[node]
            assert tree.tokens[0, children].tolist() == [best[shape.rank[child]] for child in children]


@torch.no_grad()
@pytest.mark.parametrize(
    ("version", "switches"), [(1, {}), (3, {}), (3, SWITCHES["each"]), (3, SWITCHES["own_embedding"])]
)
def test_dynamic_trees_follow_the_equations(version, switches, generator):
    model = build_model("llama")
    network = random_network(model, version, **switches)
    shape = DynamicTree(num_nodes=24, depth=3, top_k=4)
    (text,) = random_prompts(generator, [4])
    literal = Literal(network, model)
    passes = record_logits(network, model)
    tree = propose(drafter_of(network, shape), model, text, root=9)

    # a path is (log-probability, tokens, pairs); expansion keeps the best top_k of each level
    beam, pool = [(0.0, (), literal.true_pairs(model, text, 9))], []
    for logits in passes:
        level = []
        for (logp, tokens, pairs), own in zip(beam, logits[0], strict=True):
            expected = literal.logits(literal.state_after(pairs))
            assert_close(own, expected[expected.isfinite()])
            best = expected.log_softmax(-1).topk(shape.top_k)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                level.append((logp + value, (*tokens, token), pairs))
        pool += level
        level = sorted(level, key=lambda path: -path[0])[: shape.top_k]
        beam = [(logp, tokens, literal.extend(pairs, tokens[-1])) for logp, tokens, pairs in level]
    expected = {tokens for _, tokens, _ in sorted(pool, key=lambda path: -path[0])[: shape.num_nodes - 1]}
    assert paths_of(tree) == expected
    assert max(map(len, expected)) > 2, "the tree is flat: the last passes were not seen"


def assert_close(own, expected):
    """Equal but for rounding: some hundred sums of fp32 numbers, the largest of which are a few times the result."""
    assert (own - expected).abs().max() < 1e-4 * expected.abs().max()


def paths_of(tree) -> set[tuple[int, ...]]:
    """Tokens from the root to every node of a tree of one row, checked against its depths, words and reach."""
    tokens, parent = tree.tokens[0].tolist(), tree.parent[0].tolist()
    paths = {0: ()}
    for node in range(1, len(tokens)):
        paths[node] = (*paths[parent[node]], tokens[node])
        assert tree.depth[0, node] == len(paths[node])
        words = int(tree.ancestors[0, node, 0])
        assert words == int(tree.ancestors[0, parent[node], 0]) | 1 << node
    assert tree.deepest[0] == max(map(len, paths.values())) <= tree.max_depth
    return set(paths.values()) - {()}


@torch.no_grad()
def test_a_network_that_knows_the_target_is_always_right(generator):
    """A perfect guess of the states gives the target's own tokens at every depth: tau is max_depth + 1."""
    model = build_model("llama")
    network = random_network(model, 1)
    shape = TreeShape.chain(3)
    drafter = drafter_of(network, shape)
    prompts = random_prompts(generator, [5, 8])
    plain = [
        prompt.tolist() + row for prompt, row in zip(prompts, Decoder(model).decode(prompts, 21).tokens, strict=True)
    ]
    truth = [model.model(torch.tensor(text)[None]).last_hidden_state[0] for text in plain]

    def perfect(states, embedded, _, attend):
        positions = attend.visible.positions.expand(states.shape[:2])
        rows = [row[position + 1] for row, position in zip(truth, positions.clamp(max=20), strict=True)]
        return torch.stack(rows)

    network.forward = perfect
    result = Decoder(model, drafter).decode(prompts, 13)
    assert result.stats.num_emitted == [[4, 4, 4]] * 2


def sampled(logits, num_ranks):
    """Stands for a rule that samples: other tokens than the best, and laws."""
    order = logits.argsort(-1)[..., :num_ranks]
    return Candidates(order, logits.float() / 2)


@pytest.mark.parametrize("version", [1, 3])
def test_dynamic_trees_take_the_most_probable_tokens_whatever_the_rule(version, generator):
    model = build_model("llama")
    (text,) = random_prompts(generator, [5])
    static = drafter_of(random_network(model, version), SHAPES["k_config"])
    assert choose_rule("auto", static, do_sample=True).name == "traversal"
    drafter = drafter_of(random_network(model, version), SHAPES["dynamic"])
    assert not drafter.can_sample
    assert choose_rule("auto", drafter, do_sample=True).name == "naive"
    tree, expected = propose(drafter, model, text, 3, sampled), propose(drafter, model, text, 3, Best())
    assert tree.tokens.tolist() == expected.tokens.tolist()
    assert tree.parent.tolist() == expected.parent.tolist()
    assert tree.laws is None


def test_a_draft_vocabulary_is_all_that_is_proposed(generator):
    model = build_model("llama")
    (text,) = random_prompts(generator, [5])
    tokens = propose(drafter_of(random_network(model, 3), SHAPES["published"]), model, text, 3).tokens[0, 1:]
    assert set(tokens.tolist()) <= set(DRAFT_TOKENS.tolist())
    whole = random_network(model, 3, draft_vocab_size=None)
    assert not whole.has_own_vocabulary
    assert "d2t" not in whole.state_dict()
    tokens = propose(drafter_of(whole, SHAPES["published"]), model, text, 3).tokens[0, 1:]
    assert not set(tokens.tolist()) <= set(DRAFT_TOKENS.tolist())


def test_passes_run_the_nodes_with_children():
    """The figures of the authors' code for their tree: 4, 4, 1 and 1 nodes, after the pass over the text."""
    shape = SHAPES["published"]
    levels = plan_levels(shape, torch.device("cpu"))
    assert [level.parent.tolist() for level in levels] == [[0, 0, 0, 0], [0, 0, 0, 1], [0], [0]]
    assert [level.candidate.tolist() for level in levels] == [[0, 1, 2, 3], [0, 1, 2, 4], [0], [0]]
    assert [level.first_slot for level in levels] == [0, 4, 8, 9]
    assert [level.depth.tolist() for level in levels] == [[[0] * 4], [[1] * 4], [[2]], [[3]]]
    assert levels[1].ancestors[0, :, 0].tolist() == [1 | 16, 1 | 32, 1 | 64, 2 | 128]
    assert levels[3].ancestors.tolist() == [[[1 | 16 | 256 | 512]]]
    assert plan_levels(TreeShape.from_k_config((5,)), torch.device("cpu")) == ()


def test_passes_of_a_large_tree_have_words_for_every_slot():
    shape = TreeShape.from_k_config((8, 5, 1))
    words = plan_levels(shape, torch.device("cpu"))[1].ancestors[0]
    assert words.shape == (40, 2)
    assert words[23].tolist() == [1 << 4 | -(1 << 31), 0]
    assert words[24].tolist() == [1 << 4, 1]


def test_tap_layers():
    model = build_model("llama")  # three layers
    network = random_network(model, 3)
    drafter = drafter_of(network, TreeShape.chain(2), tap_layers=(2, 0, 1))
    target = Target(model)
    drafter.bind(target)
    assert set(target.tap_layers) == {0, 1, 2}
    assert drafter.tap_layers == (2, 0, 1)
    assert drafter_of(network, TreeShape.chain(2)).tap_layers == TAPS
    assert (drafter.kind, Eagle.kind) == ("eagle3", "eagle")
    (text,) = random_prompts(torch.Generator().manual_seed(0), [6])
    trees = [
        propose(drafter_of(network, SHAPES["published"], tap_layers=taps), model, text, 5).tokens.tolist()
        for taps in ((0, 1, 1), (1, 0, 1))
    ]
    assert trees[0] != trees[1], "the order of the taps does not matter?"


@pytest.mark.parametrize(
    ("version", "shape", "settings", "match"),
    [
        (3, DynamicTree(top_k=33, depth=1), {}, r"top_k: expected ranks below 32"),
        (1, DynamicTree(num_nodes=60, depth=21), {}, r"depth: expected at most 2048 candidates .* got 2110"),
        (1, DynamicTree(num_nodes=60, depth=600, top_k=1), {}, r"depth: expected depth \* top_k up to 512, got 600"),
        (3, TreeShape.chain(2), {"tap_layers": (0, 1)}, r"tap_layers: expected 3 layers for this network"),
    ],
)
def test_rejects_what_it_cannot_draft(version, shape, settings, match):
    network = random_network(build_model("llama"), version)
    with pytest.raises(ValueError, match=match):
        drafter_of(network, shape, **settings)


def test_rejects_another_target():
    llama = build_model("llama")
    network = random_network(llama, 3)
    with pytest.raises(ValueError, match=r"tap_layers: expected layers between 0 and 2, .* got \[7\]"):
        drafter_of(network, TreeShape.chain(2), tap_layers=(0, 1, 7)).bind(Target(llama))


def test_dynamic_tree_sizes():
    shape = DynamicTree()
    assert (shape.num_nodes, shape.max_depth, shape.max_rank, shape.num_candidates) == (60, 6, 9, 510)
    assert Eagle3.default_tree(random_network(build_model("llama"), 3).config) == shape
    assert Eagle.default_tree(random_network(build_model("llama"), 1).config) == SHAPES["published"]


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"num_nodes": 1}, ValueError, r"num_nodes: expected at least 2, got 1"),
        ({"top_k": 0}, ValueError, r"top_k: expected at least 1, got 0"),
        ({"depth": -1}, ValueError, r"depth: expected at least 0, got -1"),
        ({"num_nodes": 12, "depth": 0}, ValueError, r"num_nodes: expected at most 11 with depth 0 and top_k 10"),
        ({"num_nodes": 513, "depth": 9}, ValueError, r"num_nodes: expected at most 512"),
        ({"depth": 2.0}, TypeError, r"depth: expected an int, got float"),
    ],
)
def test_dynamic_tree_rejects(settings, error, match):
    with pytest.raises(error, match=match):
        DynamicTree(**settings)


def test_trees_of_either_kind_are_read_from_files(tmp_path):
    dynamic, static = DynamicTree(30, 3, 5), TreeShape.from_k_config((2, 1))
    for tree in (dynamic, static):
        file = tmp_path / "tree.json"
        file.write_text(tree.to_json())
        assert load_tree(file) == as_tree(file) == as_tree(str(file)) == as_tree(tree) == tree
    assert as_tree("dynamic") == DynamicTree()
    assert as_tree((2, 1)) == static
    file.write_text('{"version": 1, "dynamic": {"num_nodes": 30, "width": 3}}')
    with pytest.raises(ValueError, match=r"tree.json: dynamic: .*width"):
        load_tree(file)
    with pytest.raises(ValueError, match="tree: expected the name of a preset"):
        as_tree("dynamic_60")
