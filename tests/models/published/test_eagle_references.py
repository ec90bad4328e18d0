"""EAGLE-3's and P-EAGLE's files, as another implementation saves them, compute here what they compute there."""

from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import specdec
from lib.eagle_references import CASES, DRAFT_TOKENS, LENGTH, MASK, VOCAB, WIDTH, their_logits, their_model
from lib.tensors import assert_near
from specdec.loop.decoder import Decoder
from specdec.models.networks.layer import MaskedAttention
from specdec.models.published import eagle, peagle
from specdec.models.published.files import read_config, tensor_files
from specdec.models.published.readers import recognise
from specdec.models.target.target import Target
from specdec.trees.shape import TreeShape


def saved(theirs, folder):
    """What a reader is given of a model that they saved."""
    theirs.save_pretrained(folder)
    return tensor_files(folder), read_config(folder)


def data(network, seed=1):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, LENGTH, network.config.feature_size, generator=generator)
    return features, torch.randint(0, VOCAB, (1, LENGTH), generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_eagle3_equals_speculators(name, tmp_path):
    theirs = their_model("eagle3", **CASES[name])
    tensors, config = saved(theirs, tmp_path)
    assert recognise(set(tensors), config) == "eagle3"
    network = eagle.read(tensors, config).eval()
    assert network.config.num_layers == CASES[name].get("num_layers", 1)
    assert network.config.tap_layers == tuple(index - 1 for index in CASES[name].get("ids", (1, 2, 4)))
    features, tokens = data(network)
    positions = torch.arange(LENGTH)[None]
    states = network(network.read(features), network.embed_tokens(tokens), positions, MaskedAttention())
    expected = their_logits(theirs, features, tokens)
    assert_near(network.lm_head(network.lm_states(states)), expected)
    if network.has_own_vocabulary:
        assert torch.equal(network.target_ids, DRAFT_TOKENS)


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_peagle_equals_speculators(name, tmp_path):
    theirs = their_model("peagle", **CASES[name])
    tensors, config = saved(theirs, tmp_path)
    assert recognise(set(tensors), config) == "peagle"
    network = peagle.read(tensors, config).eval()
    assert (network.config.mask_token_id, network.config.num_masks) == (MASK, 3)
    features, tokens = data(network)
    # all masks of some pairs, the first ones of others, and none of the rest
    groups = torch.tensor([0, 0, 0, 4, 9, 9, 9, 9, 9, LENGTH - 1, LENGTH - 1])
    members = torch.tensor([1, 2, 3, 1, 1, 2, 3, 4, 5, 1, 2])
    states = network.see_groups(features, tokens, groups, members, network.embed_tokens)
    expected = their_logits(theirs, features, tokens, groups, members)
    assert_near(network.lm_head(network.lm_states(states)), expected)


@pytest.fixture(scope="module")
def target():
    """A model of five layers with the sizes of the heads."""
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128}
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.3, pad_token_id=None)).eval()
    model.generation_config.eos_token_id = None
    return Target(model)


def recorded(kind, monkeypatch):
    """Per choice of drafters of a class, the [B] pairs that were committed and the states [B, n, C] that it reads."""
    choices, choose = [], kind._choose

    def choosing(self, states, how):
        choices.append((self._prefix.cache.lengths.clone(), self.network.lm_states(states).clone()))
        return choose(self, states, how)

    monkeypatch.setattr(kind, "_choose", choosing)
    return choices


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize("name", ["two layers of qwen3", "two layers", "windows", "llama"])
def test_cached_drafts_equal_those_of_whole_texts(kind, name, target, tmp_path, monkeypatch):
    theirs = their_model(kind, **CASES[name])
    theirs.save_pretrained(tmp_path)
    drafter = specdec.load_drafter(tmp_path, target, tree=TreeShape.from_paths([[0], [1], [0, 0]]))
    assert drafter.kind == kind
    drafts = recorded(type(drafter), monkeypatch)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, VOCAB, (size,), generator=generator) for size in (9, 4, 14)]
    found = Decoder(target.model, drafter).decode(prompts, 30)
    plain = Decoder(target.model).decode(prompts, 30)
    assert found.tokens == plain.tokens
    num_passes = 2 if kind == "eagle3" else 1
    compared = set()
    for row, (prompt, emitted) in enumerate(zip(prompts, found.tokens, strict=True)):
        text = torch.cat((prompt, torch.as_tensor(emitted)))[None]
        outputs = target.model(text, output_hidden_states=True).hidden_states
        features = torch.cat([outputs[tap + 1] for tap in drafter.tap_layers], -1)
        for lengths, states in drafts[::num_passes]:
            count = int(lengths[row])
            if count + 1 > text.shape[1] or (row, count) in compared:
                continue  # the row has ended
            pairs = features[:, :count], text[:, 1 : count + 1]
            masks = (torch.tensor([count - 1]), torch.tensor([1])) if kind == "peagle" else ()
            expected = their_logits(theirs, *pairs, *masks)[:, count - 1 :]
            assert_near(drafter.network.lm_head(states[row])[None], expected)
            compared.add((row, count))
    starts = [{count for one, count in compared if one == row} for row in range(3)]
    assert all(len(prompt) in found for prompt, found in zip(prompts, starts, strict=True))  # the first block
    assert min(len(one) for one in starts) > 5
    assert {1, 2} <= {later - one for found in starts for one, later in pairwise(sorted(found))}  # steps differ
