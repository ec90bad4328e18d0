"""DFlash's network computes what an implementation that is not ours computes, and drafts as it was trained."""

import pytest
import torch

from lib.dflash_cases import drafted_states
from lib.references import block_settings, reference
from lib.tensors import assert_near
from specdec.models.common.packing import pack_network
from specdec.models.networks.dflash import DFlashConfig, DFlashNetwork, default_tap_layers
from specdec.models.networks.layer import DraftLayerConfig

VOCAB, WIDTH, BLOCK = 40, 24, 4
BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.interpreter)]
SWITCHES = {
    "plain": {},
    "causal": {"causal": True},
    "window of each row": {"windows": (None, 6), "window_from": "row"},
    "causal window": {"windows": (3, None), "causal_windows": True},
    "window of the anchor": {"windows": (5, 2), "window_from": "anchor", "causal_windows": True},
    "scales": {"input_embedding_scale": 3.0, "output_multiplier": 0.5},
    "own embeddings": {"own_embedding": True, "own_mask_embedding": True},
}


def make_network(seed=0, **changes):
    layer = DraftLayerConfig(WIDTH, 40, 3, 1, 8, 128, qk_norm=True)
    config = DFlashConfig(
        **{
            "vocab_size": VOCAB,
            "layer": layer,
            "tap_layers": (0, 2),
            "block_size": BLOCK,
            "mask_token_id": VOCAB - 1,
            "num_layers": 2,
            **changes,
        }
    )
    torch.manual_seed(seed)
    network = DFlashNetwork(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return network


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SWITCHES)
def test_a_cached_block_is_that_of_the_whole_text(name, backend):
    network = make_network(**SWITCHES[name])
    embed = torch.nn.Embedding(VOCAB, WIDTH)
    features, tokens = torch.randn(2, 26, 2 * WIDTH), torch.randint(0, VOCAB, (2, 26))
    # prompts of 11 and 7 tokens, then steps of different lengths
    accepted = [[11, 7], [2, 0], [0, 3], [1, 1]]
    anchors = torch.tensor(accepted).cumsum(0).T + torch.arange(4)  # a step adds what it accepted and one
    expected = network.see_blocks(
        network.read(features), network.read_anchors(tokens.gather(1, anchors), embed), anchors
    )
    pack_network(network, torch.float32)
    states = drafted_states(network, embed, features, tokens, accepted, backend)
    assert_near(torch.stack(states, 1), expected)


def their_model(config, mask_of, **changes):
    """A network of speculators with the sizes of ours and random weights."""
    theirs = reference("speculators.models.dflash")
    config = theirs.DFlashSpeculatorConfig(**block_settings(config, **changes), **mask_of)
    return theirs.DFlashDraftModel(config).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("ours", "mask_of", "changes"),
    [
        ({}, {}, {}),
        (
            {"windows": (None, 3), "window_from": "anchor", "causal_windows": True},
            {},
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3, "use_sliding_window": True},
        ),
        (
            {"windows": (3, 3), "window_from": "anchor"},
            {"sliding_window_non_causal": True},
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "use_sliding_window": True},
        ),
    ],
)
def test_equals_speculators(ours, mask_of, changes):
    network = make_network(**ours)
    theirs = their_model(network.config, mask_of, **changes)
    missing, unexpected = theirs.load_state_dict(network.state_dict(), strict=False)
    assert not unexpected
    assert not [name for name in missing if name.startswith(("layers.", "fc.", "norm.", "hidden_norm."))]
    embed = torch.nn.Embedding(VOCAB, WIDTH)
    theirs.embed_tokens.weight.copy_(embed.weight)
    theirs.lm_head.weight.copy_(torch.eye(VOCAB, WIDTH))
    theirs.verifier_lm_head.weight.zero_()
    features, tokens = torch.randn(1, 15, 2 * WIDTH), torch.randint(0, VOCAB, (1, 15))
    loss_mask = torch.ones(1, 15)
    picked = {}

    def remember(module, args):
        picked["states"] = args[0]

    theirs.lm_head.register_forward_pre_hook(remember)
    num_anchors = 15 - BLOCK
    inputs = features, tokens, loss_mask, torch.zeros(1, 15, WIDTH), torch.zeros(1, 15, dtype=torch.long)
    theirs._backbone_forward(*inputs, max_anchors=num_anchors)
    anchors = torch.arange(num_anchors)[None]
    got = network.see_blocks(network.read(features), network.read_anchors(tokens[:, :num_anchors], embed), anchors)
    assert_near(got.flatten(1, 2), picked["states"].float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size: expected at least 2, got 1"),
        ({"mask_token_id": VOCAB}, "mask_token_id: expected a token below 40, the vocabulary's size, got 40"),
        ({"tap_layers": ()}, r"tap_layers: expected at least one layer, each of them once, got \(\)"),
        ({"tap_layers": (1, 1)}, "tap_layers: expected at least one layer"),
        ({"windows": (4,)}, "windows: expected None or at least 1 for each of 2 layers"),
        ({"window_from": "root"}, "window_from: expected 'row' or 'anchor', got 'root'"),
        ({"target_hidden_size": 32}, "target_hidden_size: expected 24, the network's hidden_size, where it shares"),
        ({"draft_vocab_size": 8}, "shares_lm_head: expected False with a draft vocabulary of 8 tokens, got True"),
        ({"num_layers": 0}, "num_layers: expected at least 1, got 0"),
    ],
)
def test_rejects_sizes(changes, message):
    with pytest.raises(ValueError, match=message):
        make_network(**changes)


def test_published_taps():
    assert default_tap_layers(36, 5) == (1, 9, 17, 25, 33)  # Qwen3-8B's files
    assert default_tap_layers(36, 1) == (18,)
    with pytest.raises(ValueError, match="tap_layers: expected the setting with a target of 5 layers"):
        default_tap_layers(5, 5)
