"""Trees are cut to the nodes that they use where asking costs nothing, and nobody can tell by the result."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

import specdec
from lib.law_drafters import DRAFTERS, build_target, make_drafter
from lib.tensors import assert_near
from specdec.drafters.eagle import Eagle
from specdec.drafters.weightless.prompt_lookup import PromptLookup
from specdec.drafting.draft_tree import DraftTree
from specdec.kernels.common.words import pack_words, unpack_words
from specdec.loop.decoder import Decoder
from specdec.loop.processing import Processing
from specdec.loop.rules import Naive, choose_rule
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree

PROMPTS = [torch.tensor(row) for row in ([3, 1, 4, 1, 5, 1, 4, 1], [2, 6], [5, 3, 5, 3, 5])]
SHRINKING = ("prompt_lookup", "suffix", "lookahead")
EVERYTHING = {"temperature": 0.7, "top_k": 5, "top_p": 0.95, "repetition_penalty": 1.2}


def drafter_of(kind):
    if kind == "dynamic":
        return Eagle(make_drafter("eagle").network, DynamicTree(num_nodes=8, depth=2, top_k=3))
    return make_drafter(kind)


@pytest.fixture
def sizes(monkeypatch):
    """Nodes of every tree that a target scores."""
    sizes, score = [], Target.score

    def seen(self, tokens, *args, **kwargs):
        if kwargs.get("first_node", 0) == 0 and self.model is build_target():
            sizes.append(tokens.shape[1])
        return score(self, tokens, *args, **kwargs)

    monkeypatch.setattr(Target, "score", seen)
    return sizes


def both_ways(run, sizes, monkeypatch):
    """What `run` gives with trees cut and with whole ones, and how many nodes the target scored."""
    cut, num_cut = run(), sum(sizes)
    sizes.clear()
    with monkeypatch.context() as patch:
        patch.setattr(DraftTree, "cut", lambda tree: tree)
        whole = run()
    return cut, whole, num_cut, sum(sizes)


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", [*DRAFTERS, "dynamic"])
def test_texts_and_counts_are_those_of_whole_trees(kind, sampling, sizes, monkeypatch):
    rule = choose_rule("auto", drafter_of(kind), do_sample=sampling)
    plan = {"prompt_lengths": [*map(len, PROMPTS)], "max_new_tokens": 30, "width": 8}
    processing = Processing(GenerationConfig(**EVERYTHING), do_sample=True, **plan) if sampling else None

    def run():
        decoder = Decoder(build_target(), drafter_of(kind), acceptance=rule)
        result = decoder.decode(PROMPTS, 30, seed=[1, 2, 3], processing=processing)
        return result.tokens, result.stats.num_emitted, result.stats.deepest

    cut, whole, num_cut, num_whole = both_ways(run, sizes, monkeypatch)
    assert cut == whole
    assert (num_cut < num_whole) == (kind in (*SHRINKING, "dspark, grown", "union"))


@pytest.mark.parametrize("kind", SHRINKING)
@pytest.mark.parametrize("do_sample", [False, True])
def test_logits_scores_and_cache_are_those_of_whole_trees(kind, do_sample, sizes, monkeypatch):
    def run():
        return specdec.generate(
            build_target(),
            make_drafter(kind),
            PROMPTS[0][None],
            generation_config=GenerationConfig(max_new_tokens=24, do_sample=do_sample, no_repeat_ngram_size=7),
            seed=4,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
        )

    cut, whole, num_cut, num_whole = both_ways(run, sizes, monkeypatch)
    assert num_cut < num_whole
    assert torch.equal(cut.sequences, whole.sequences)
    for name in ("logits", "scores"):
        for ours, theirs in zip(getattr(cut, name), getattr(whole, name), strict=True):
            assert_near(ours, theirs)
    for ours, theirs in zip(cut.past_key_values.layers, whole.past_key_values.layers, strict=True):
        assert_near(ours.keys, theirs.keys)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", SHRINKING)
def test_kernels_take_trees_that_were_cut(kind, sizes, monkeypatch):
    def run():
        return Decoder(build_target(), make_drafter(kind), acceptance=Naive(), backend="triton").decode(
            PROMPTS, 8, seed=0
        )

    cut, whole, num_cut, num_whole = both_ways(run, sizes, monkeypatch)
    assert num_cut < num_whole
    assert cut.tokens == whole.tokens


def test_where_nothing_matches_the_root_alone_is_scored(sizes):
    prompt = torch.tensor([0, 1, 2, 3])
    (root,) = Decoder(build_target()).decode([prompt], 1).tokens[0]
    Decoder(build_target(), PromptLookup(num_draft_tokens=6)).decode([prompt], 2)
    assert sizes == [len(prompt) - root + 1 if root in prompt else 1]


def test_a_step_that_may_not_ask_scores_whole_trees(sizes, monkeypatch):
    decoder = Decoder(build_target(), make_drafter("prompt_lookup"))
    decoder.decode(PROMPTS, 12)
    assert min(sizes) < 4
    sizes.clear()
    made = decoder._new_state
    monkeypatch.setattr(decoder, "_new_state", lambda room, device: made(replace(room, may_ask=False), device))
    decoder.decode(PROMPTS, 12)
    assert {*sizes} == {4}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_what_is_cut_is_padding_behind_the_last_node_in_use(data):
    num_nodes, batch = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 3))
    num_fixed = data.draw(st.integers(1, num_nodes))
    rows = [[-1] + [data.draw(st.integers(-1, node - 1)) for node in range(1, num_nodes)] for _ in range(batch)]
    length = data.draw(st.integers(1, num_nodes))
    rows = [row[:length] + [-1] * (num_nodes - length) for row in rows]
    tokens = torch.arange(batch * num_nodes, dtype=torch.int32).view(batch, num_nodes)
    depth = torch.arange(num_nodes, dtype=torch.int32)[None]
    seen = torch.ones(num_nodes, num_nodes).tril().bool()[None]
    tree = DraftTree(
        tokens, torch.tensor(rows, dtype=torch.int32), depth, pack_words(seen), depth[:, 0], 70, num_fixed=num_fixed
    )
    if data.draw(st.booleans()):
        tree = replace(tree, logps=-tokens.float())
    cut = tree.cut()
    kept = cut.tokens.shape[1]
    in_use = [node for row in rows for node in range(num_nodes) if row[node] >= 0]
    assert kept == max([num_fixed - 1, *in_use]) + 1
    assert torch.equal(cut.tokens, tokens[:, :kept])
    assert torch.equal(cut.parent, tree.parent[:, :kept])
    assert torch.equal(cut.depth, depth[:, :kept])
    assert cut.ancestors.shape[2] == -(-kept // 32)
    assert (cut.logps is None) == (tree.logps is None)
    assert cut.logps is None or torch.equal(cut.logps, tree.logps[:, :kept])
    assert torch.equal(unpack_words(cut.ancestors, kept), seen[:, :kept, :kept])
    assert (cut.max_depth, cut.deepest) == (tree.max_depth, tree.deepest)


def test_drawn_trees_and_those_that_say_nothing_stay_whole():
    parent, depth = torch.tensor([[-1, -1]], dtype=torch.int32), torch.tensor([[0, 1]], dtype=torch.int32)
    whole = DraftTree(parent, parent, depth, depth[..., None], depth[:, 0], 1)
    assert whole.cut() is whole
    laws = torch.zeros(1, 1, 7)
    drawn = DraftTree(parent, parent, depth, depth[..., None], depth[:, 0], 1, laws, depth[0], num_fixed=1)
    assert drawn.cut() is drawn
