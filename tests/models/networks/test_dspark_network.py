"""DSpark's network computes what an implementation that is not ours computes, at every row of every block."""

import pytest
import torch

from lib.dspark_cases import HEADS, random_network, their_blocks, their_model
from lib.families import VOCAB_SIZE, build_model, random_prompts
from lib.tensors import assert_near
from specdec.models.target.target import Target


def features_of(model, network, tokens):
    """[1, T, F] what the target's layers say."""
    target = Target(model, tap_layers=network.config.tap_layers)
    with torch.no_grad():
        return torch.cat(target.read(tokens).taps, -1)


def blocks_of(network, model, features, tokens):
    """Logits and log-odds of all blocks of a text, as training has them."""
    block = network.config.block_size
    anchors = torch.arange(tokens.shape[1] - block)[None]
    told = tokens[:, anchors[0][:, None] + torch.arange(block)]
    embedded = network.read_anchors(tokens[:, : anchors.shape[1]], model.get_input_embeddings())
    states = network.see_blocks(network.read(features), embedded, anchors)
    head = model.get_output_embeddings() if network.lm_head is None else network.lm_head
    confidence = network.confidence(told, states)[0] if network.confidence_head is not None else None
    logits = head(states)
    if network.markov_head is not None:
        logits = logits + network.markov_head.markov_w2(network.factors(told, states))
    return logits[0], confidence


@torch.no_grad()
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("sizes", [{}, {"block_size": 1}, {"draft_vocab_size": 30, "shares_lm_head": False}], ids=str)
def test_every_block_equals_speculators(heads, sizes, generator):
    model = build_model("llama")
    network = random_network(model, **HEADS[heads], **sizes)
    if network.has_own_vocabulary:
        network.set_draft_vocabulary(torch.randperm(VOCAB_SIZE, generator=generator)[:30])
    (text,) = random_prompts(generator, [17])
    features = features_of(model, network, text[None])
    logits, confidence = blocks_of(network, model, features, text[None])
    expected, odds = their_blocks(their_model(network, model), features, text[None])
    assert_near(logits, expected)
    assert (confidence is None) == (odds is None)
    if odds is not None:
        assert_near(confidence, odds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size: expected at least 1, got 0"),
        ({"markov_rank": -1}, "markov_rank: expected at least 0, got -1"),
        ({"markov_head_type": "lstm"}, "markov_head_type: expected vanilla or gated or rnn, got 'lstm'"),
        ({"markov_rank": 0}, "confidence_with_markov: expected False with markov_rank 0, got True"),
    ],
)
def test_rejects_sizes(changes, message):
    with pytest.raises(ValueError, match=message):
        random_network(build_model("llama"), **changes)
