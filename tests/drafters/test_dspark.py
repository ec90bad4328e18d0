"""The DSpark drafter: every path of its trees is the chain of speculators' model along it; its cut by confidence."""

import pytest
import torch

from lib.drafter_checks import Nudged, Recording, propose
from lib.dspark_cases import CHANGES, HEADS, Theirs, random_network
from lib.families import build_model, random_prompts
from specdec.drafters.dspark import DSpark
from specdec.loop.decoder import Decoder
from specdec.loop.rules import choose_rule
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

STATIC = TreeShape.from_paths([[0], [2], [3], [0, 1], [2, 0], [2, 3], [2, 3, 0], [2, 3, 1], [2, 3, 0, 1]])
SIZES = {"": {}, **CHANGES}


def path_to(tokens, parent, node):
    """Tokens from below the root to a node."""
    return [] if node == 0 else [*path_to(tokens, parent, parent[node]), tokens[node]]


def assert_close(got, expected):
    """Equal but for the order of fp32 sums."""
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)


@torch.no_grad()
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sizes", ["", "own vocabulary"])
def test_every_node_of_a_static_tree_has_the_law_of_its_path(heads, sizes, generator):
    model = build_model("llama")
    network = random_network(model, **HEADS[heads], **SIZES[sizes])
    (text,) = random_prompts(generator, [7])
    theirs, ids, seen = Theirs(network, model), network.target_ids, Recording()
    tree = propose(DSpark(network, STATIC), model, text, 7, seen)
    tokens, inner = tree.tokens[0].tolist(), sorted(set(STATIC.parent) - {-1})
    for node, logits in zip(inner, torch.cat(seen.logits, 1)[0], strict=True):
        expected = theirs.behind(text, 7, path_to(tokens, STATIC.parent, node))
        assert_close(logits, expected)
        best = ids[expected.topk(STATIC.max_rank + 1).indices].tolist()
        assert [tokens[child] for child in STATIC.children[node]] == [
            best[STATIC.rank[child]] for child in STATIC.children[node]
        ]


@torch.no_grad()
@pytest.mark.parametrize("heads", HEADS)
def test_grown_trees_hold_the_most_probable_paths(heads, generator):
    model = build_model("llama")
    network = random_network(model, **HEADS[heads], **SIZES["own vocabulary"])
    shape = DynamicTree(num_nodes=22, depth=3, top_k=3)
    (text,) = random_prompts(generator, [6])
    theirs, ids = Theirs(network, model), network.target_ids
    tree = propose(DSpark(network, shape), model, text, 9)

    beam, pool = [(0.0, [])], []
    for _ in range(shape.max_depth):
        level = []
        for logp, path in beam:
            best = theirs.behind(text, 9, path).log_softmax(-1).topk(shape.top_k)
            level += [
                (logp + value, [*path, token])
                for value, token in zip(best.values.tolist(), ids[best.indices].tolist(), strict=True)
            ]
        pool += level
        # without a bias no beam is needed
        beam = sorted(level, key=lambda path: -path[0])[: shape.top_k if network.markov_head else None]
    expected = {tuple(path) for _, path in sorted(pool, key=lambda path: -path[0])[: shape.num_nodes - 1]}
    tokens, parent = tree.tokens[0].tolist(), tree.parent[0].tolist()
    assert {tuple(path_to(tokens, parent, node)) for node in range(1, shape.num_nodes)} == expected
    assert int(tree.deepest) == max(map(len, expected)) > 2


@torch.no_grad()
@pytest.mark.parametrize("heads", ["vanilla", "rnn"])
def test_steps_with_a_cache_equal_their_model_on_the_whole_text(heads, generator):
    """Prompts of several lengths in chunks, and steps that accept none, some and all of a chain."""
    model = build_model("llama")
    network = random_network(model, **HEADS[heads], tap_layers=(-1, 1))
    prompts = random_prompts(generator, [11, 4, 8])
    plain = Decoder(model).decode(prompts, 24).tokens
    nudged = Nudged(DSpark(network, TreeShape.chain(4)), plain, prompts)
    result = Decoder(model, nudged).decode(prompts, 24, prefill_chunk_size=5)
    assert result.tokens == plain
    assert {1, 2} < {count for row in result.stats.num_emitted for count in row}
    theirs = Theirs(network, model)
    drafts = [draft for drafts in nudged.drafts for draft in drafts]
    for draft in drafts:
        expected, _ = theirs.block(draft.text, draft.root, draft.tokens[1:])
        assert_close(torch.cat(draft.logits), expected)
    assert len(drafts) > 20


def test_a_row_alone_is_not_changed_by_a_causal_block(generator):
    """Where no row sees those behind it, rows that a tree does not need are not run; the others say the same."""
    model = build_model("llama")
    (text,) = random_prompts(generator, [6])
    trees = []
    for changes in ({}, {"block_size": 2}):
        network = random_network(model, causal=True, **changes)
        drafter = DSpark(network, TreeShape.from_k_config((3, 2)))
        trees.append(propose(drafter, model, text, 5).tokens.tolist())
    assert trees[0] == trees[1]


@torch.no_grad()
@pytest.mark.parametrize("heads", ["vanilla", "rnn", "bare confidence"])
def test_a_chain_ends_where_deepspec_cuts_it(heads, generator):
    """Their proposal restated: tokens one by one, and none from the first place on that is less sure than asked for."""
    model = build_model("llama")
    network = random_network(model, **HEADS[heads])
    theirs, lengths = Theirs(network, model), set()
    chain = DynamicTree(num_nodes=5, depth=3, top_k=1)
    for text in random_prompts(generator, [5, 8, 3, 9]):
        path = []
        while len(path) < 4:
            path.append(int(theirs.behind(text, 5, path).argmax()))
        _, odds = theirs.block(text, 5, path)
        probabilities = odds.sigmoid().tolist()
        for confidence in (0.0, 1.0, *(value + 1e-4 for value in probabilities if value < 0.999)):
            unsure = [place for place, value in enumerate(probabilities) if value < confidence]
            kept = path[: min(unsure, default=4)]
            tree = propose(DSpark(network, chain, confidence=confidence), model, text, 5)
            is_node = tree.parent[0] >= 0
            assert tree.tokens[0, is_node].tolist() == kept
            assert int(tree.deepest) == len(kept)
            lengths.add(len(kept))
    assert lengths >= {0, 1, 4}


@torch.no_grad()
def test_a_tree_has_no_nodes_behind_one_of_which_the_network_is_not_sure(generator):
    model = build_model("llama")
    network = random_network(model)
    (text,) = random_prompts(generator, [6])
    theirs, shape = Theirs(network, model), DynamicTree(num_nodes=16, depth=3, top_k=3)
    confidence = 0.9 * float(theirs.block(text, 5, [])[1][0].sigmoid())
    tree = propose(DSpark(network, shape, confidence=confidence), model, text, 5)
    tokens, parent = tree.tokens[0].tolist(), tree.parent[0].tolist()
    inner = set(parent) - {-1}
    leaves = {node for node in range(1, 16) if parent[node] >= 0} - inner
    sure = {}
    for node in inner | leaves:
        path = path_to(tokens, parent, node)
        sure[node] = len(path) < 4 and float(theirs.block(text, 5, path)[1][len(path)].sigmoid()) >= confidence
    assert all(sure[node] for node in inner)
    assert not all(sure.values())
    assert len(inner) > 2


def test_grown_trees_are_not_drawn(generator):
    model = build_model("llama")
    network = random_network(model)
    grown, static = DSpark(network, DSpark.default_tree(network.config)), DSpark(network, STATIC)
    assert grown.shape == DSpark(network, DynamicTree(depth=7)).shape == DynamicTree(depth=3)
    assert choose_rule("auto", grown, do_sample=True).name == "naive"
    assert choose_rule("auto", DSpark(network, TreeShape.chain(4)), do_sample=True).name == "traversal"
    with pytest.raises(ValueError, match="rejection needs a drafter that draws its candidates"):
        choose_rule("rejection", DSpark(network, grown.shape, confidence=0.5), do_sample=True)
    assert static.with_tree(TreeShape.chain(2)).confidence is None


@pytest.mark.parametrize(
    ("changes", "shape", "confidence", "match"),
    [
        ({}, TreeShape.chain(5), None, "tree: expected a depth of 1 to 4, the tokens that a block drafts, got 5"),
        ({"block_size": 10}, DynamicTree(depth=9, top_k=16), None, "depth: expected at most 2048 candidates"),
        ({}, TreeShape.chain(4), 0.5, "confidence: expected None with a static tree, .* use a DynamicTree"),
        ({}, DynamicTree(depth=3), 1.5, "confidence: expected a probability or None, got 1.5"),
        ({"has_confidence": False}, DynamicTree(depth=3), 0.5, "confidence: .* the network has no confidence head"),
    ],
)
def test_rejects_what_it_cannot_draft(changes, shape, confidence, match):
    network = random_network(build_model("llama"), **changes)
    with pytest.raises(ValueError, match=match):
        DSpark(network, shape, confidence=confidence)
