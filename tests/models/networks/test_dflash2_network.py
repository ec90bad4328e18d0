"""DFlash2's network computes what an implementation that is not ours computes, and drafts as it was trained."""

import pytest
import torch

from lib.dflash2_cases import CONVOLUTION, SELECTOR, shaken, their_model
from lib.dflash_cases import drafted_states
from lib.tensors import assert_near
from specdec.models.common.packing import pack_network
from specdec.models.networks.blocks.dflash2 import DFlash2Config, DFlash2Network
from specdec.models.networks.layer import DraftLayerConfig

VOCAB, WIDTH, BLOCK, LENGTH = 40, 24, 4, 15
SIZES = {
    "vocab_size": VOCAB,
    "layer": DraftLayerConfig(WIDTH, 40, 3, 1, 8, 128, qk_norm=True),
    "tap_layers": (0, 2),
    "block_size": BLOCK,
    "mask_token_id": VOCAB - 1,
    "num_layers": 2,
    **SELECTOR,
    **CONVOLUTION,
}
BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.interpreter)]


def make_network(**changes):
    torch.manual_seed(0)
    return shaken(DFlash2Network(DFlash2Config(**{**SIZES, **changes})))


@torch.no_grad()
@pytest.mark.parametrize("taps", [1, 2, 3])
def test_states_and_scores_are_those_of_speculators(taps):
    network = make_network(conv_kernel_size=taps, **({"conv_group_size": 8} if taps == 3 else {}))
    theirs = their_model(network.config)
    missing, unexpected = theirs.load_state_dict(network.state_dict(), strict=False)
    assert not unexpected
    assert not [name for name in missing if name.startswith(("layers.", "fc.", "norm.", "candidate_"))]
    embed = torch.nn.Embedding(VOCAB, WIDTH)
    theirs.embed_tokens.weight.copy_(embed.weight)
    theirs.lm_head.weight.copy_(torch.randn(VOCAB, WIDTH))
    features, tokens = torch.randn(1, LENGTH, 2 * WIDTH), torch.randint(0, VOCAB, (1, LENGTH))
    num_anchors = LENGTH - BLOCK
    hidden, logits, *_ = theirs._backbone_forward(
        features,
        tokens,
        torch.ones(1, LENGTH),
        torch.zeros(1, LENGTH, WIDTH),
        torch.zeros(1, LENGTH, dtype=torch.long),
        max_anchors=num_anchors,
    )
    anchors = torch.arange(num_anchors)[None]
    got = network.see_blocks(network.read(features), network.read_anchors(tokens[:, :num_anchors], embed), anchors)
    assert_near(got.flatten(1, 2), hidden)
    # every row of every block, behind every token
    best = logits.topk(4, -1)
    before = torch.arange(VOCAB).expand(1, got[0].numel() // WIDTH, -1)
    scores = network.candidate_selector(got.flatten(1, 2), before, best.indices, best.values)
    for token in range(VOCAB):
        expected = theirs.candidate_selector.score_candidates(logits, hidden, before[..., token], best.indices)
        assert_near(scores[:, :, token], expected)


@torch.no_grad()
def test_scores_of_pairs_are_those_worked_out():
    selector = make_network().candidate_selector
    state, before, tokens = torch.randn(WIDTH), torch.tensor([7, 30]), torch.tensor([5, 6, 7])
    logits = torch.tensor([3.0, 2.0, 1.0])
    scores = selector(state, before, tokens, logits)
    for i, token in enumerate(before):
        for j, candidate in enumerate(tokens):
            pair = selector.predecessor_codebook[token] * selector.successor_codebook[candidate]
            expected = logits[j] + pair @ (selector.hidden_projection.weight @ state)
            torch.testing.assert_close(scores[i, j], expected)


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("changes", [{}, {"windows": (5, 2), "window_from": "anchor"}], ids=["plain", "windows"])
def test_a_cached_block_is_that_of_the_whole_text(changes, backend):
    network = make_network(**changes)
    embed = torch.nn.Embedding(VOCAB, WIDTH)
    features, tokens = torch.randn(2, 26, 2 * WIDTH), torch.randint(0, VOCAB, (2, 26))
    accepted = [[11, 7], [2, 0], [0, 3], [1, 1]]
    anchors = torch.tensor(accepted).cumsum(0).T + torch.arange(4)
    expected = network.see_blocks(
        network.read(features), network.read_anchors(tokens.gather(1, anchors), embed), anchors
    )
    pack_network(network, torch.float32)
    states = drafted_states(network, embed, features, tokens, accepted, backend)
    assert_near(torch.stack(states, 1), expected)


@torch.no_grad()
def test_a_shorter_causal_block_gives_the_front_of_a_longer_one():
    network = make_network(causal=True)
    features, embed = torch.randn(1, LENGTH, 2 * WIDTH), torch.nn.Embedding(VOCAB, WIDTH)
    context, anchors = network.read(features), torch.tensor([[6]])
    blocks = network.read_anchors(torch.tensor([[5]]), embed)
    long = network.see_blocks(context, blocks, anchors)
    for num_rows in (1, 2, 3):
        short = network.see_blocks(context, blocks[:, :, :num_rows], anchors)
        assert_near(short, long[:, :, :num_rows])


@torch.no_grad()
def test_an_untrained_convolution_changes_nothing():
    torch.manual_seed(0)
    network = DFlash2Network(DFlash2Config(**{**SIZES, **SELECTOR})).eval()
    plain = DFlash2Network(DFlash2Config(**{**SIZES, "conv_kernel_size": 0, "selector_rank": 0})).eval()
    plain.load_state_dict({name: network.state_dict()[name] for name in plain.state_dict()})
    features, embed = torch.randn(1, LENGTH, 2 * WIDTH), torch.nn.Embedding(VOCAB, WIDTH)
    anchors, blocks = torch.tensor([[6]]), network.read_anchors(torch.tensor([[5]]), embed)
    states = [one.see_blocks(one.read(features), blocks, anchors) for one in (network, plain)]
    torch.testing.assert_close(*states)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_kernel_size": 5}, "conv_kernel_size: expected 0 to 4, the rows of a block, got 5"),
        ({"conv_group_size": 5}, "conv_group_size: expected a divisor of 24, the hidden_size, got 5"),
        ({"selector_rank": -1}, "selector_rank: expected at least 0, got -1"),
        ({"selector_top_k": 41}, "selector_top_k: expected 1 to 40, got 41"),
        ({"draft_vocab_size": 8, "shares_lm_head": False}, "draft_vocab_size: expected 40, the whole vocabulary, with"),
        ({"output_multiplier": 2.0}, "output_multiplier: expected 1 with a selector, got 2.0"),
    ],
)
def test_impossible_sizes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        DFlash2Config(**{**SIZES, **changes})
