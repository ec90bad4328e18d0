"""DFlash's files, saved by their authors' code or made up as theirs are: read strictly, traps named."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec
from lib.dflash_cases import drafted_states, make_network
from lib.families import HIDDEN_SIZE, VOCAB_SIZE, build_model
from lib.references import reference
from lib.tensors import assert_near
from specdec.drafters.dflash import DFlash
from specdec.trees.dynamic import DynamicTree

MASK = 3
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6, "use_sliding_window": True}


def zlab_config(inner=None, **changes):
    """As z-lab writes it; `None` takes a field away."""
    config = {
        **SIZES, "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
        "block_size": 5, "hidden_act": "silu", "layer_types": ["full_attention"] * 2, "max_window_layers": 2,
        "model_type": "qwen3", "num_target_layers": 3, "rope_theta": 1000000.0, "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1], **(inner or {})}, **changes,
    }  # fmt: skip
    config["dflash_config"] = {name: value for name, value in config["dflash_config"].items() if value is not None}
    return {name: value for name, value in config.items() if value is not None}


def speculators_config(**layer):
    """As speculators write it, of the same network; `layer` are changes of the layers."""
    sizes = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, **layer}
    return {
        "architectures": ["DFlashDraftModel"], "aux_hidden_state_layer_ids": [1, 2], "block_size": 5,
        "draft_vocab_size": VOCAB_SIZE, "mask_token_id": MASK, "sample_from_anchor": False,
        "sliding_window_non_causal": False, "speculators_config": {"algorithm": "dflash"},
        "speculators_model_type": "dflash", "target_hidden_size": None, "transformer_layer_config": sizes,
    }  # fmt: skip


def zlab_network(**changes):
    """The network of `zlab_config`."""
    layer = {"head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 256}
    rope = {"rope_type": "default", "rope_theta": 1000000.0}
    return make_network(build_model("llama"), **{"tap_layers": (0, 1), **layer, "rope_parameters": rope, **changes})


def write(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def model():
    return build_model("llama")


def load(folder, model):
    drafter = specdec.load_drafter(folder, model)
    assert type(drafter) is DFlash
    return drafter


LAYOUTS = {
    "z-lab": (zlab_config(), {}),
    "z-lab, all in dflash_config": (zlab_config({"block_size": 5}, block_size=None), {}),
    "z-lab, sliding": (zlab_config(**SLIDING), {"windows": (None, 6), "causal_windows": True}),
    "z-lab, sliding, not causal": (zlab_config({"causal": False}, **SLIDING), {"windows": (None, 6)}),
    "z-lab, causal": (zlab_config(is_causal=True), {"causal": True, "causal_windows": True}),
    "z-lab, max_window_layers": (
        zlab_config(layer_types=None, max_window_layers=1, sliding_window=6, use_sliding_window=True),
        {"windows": (None, 6), "causal_windows": True},
    ),
    "z-lab, factors": (
        zlab_config({"input_embedding_scale": 2.0, "output_multiplier": 0.5}),
        {"input_embedding_scale": 2.0, "output_multiplier": 0.5},
    ),
    "JetSpec": (zlab_config({"causal_head": True}), {"causal": True, "causal_windows": True}),
    "speculators": (speculators_config(), {}),
    "speculators, sliding": (
        speculators_config(**SLIDING),
        {"windows": (None, 6), "window_from": "anchor", "causal_windows": True},
    ),
    "DFlash2": (zlab_config(SECOND, architectures=["DFlash2DraftModel"]), SECOND),
    "DFlash2 of speculators": (
        {
            **speculators_config(**SLIDING),
            **SECOND,
            "speculators_model_type": "dflash2",
            "sliding_window_non_causal": None,
        },
        {"windows": (None, 6), "window_from": "anchor", **SECOND},
    ),
    "own head and vocabulary": (zlab_config(draft_vocab_size=40), {"draft_vocab_size": 40, "shares_lm_head": False}),
    "own embedding": (zlab_config(), {"own_embedding": True}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read(name, model, tmp_path):
    config, changes = LAYOUTS[name]
    network = zlab_network(**changes)
    drafter = load(write(tmp_path / "file", network.state_dict(), config), model)
    assert drafter.network.config.views == network.config.views
    without_windows = dict.fromkeys(("causal_windows", "window_from"))
    if network.config.windows is None:  # say nothing then
        without_windows = {name: getattr(network.config, name) for name in without_windows}
        assert replace(drafter.network.config, **without_windows) == network.config
    else:
        assert drafter.network.config == network.config
    state = drafter.network.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in network.state_dict().items())
    assert drafter.shape == DynamicTree(60, 3)
    check_greedy(drafter, model)


def check_greedy(drafter, model):
    ids = torch.tensor([[5, 9, 70, 11, 8]])
    plain = specdec.generate(model, None, ids, max_new_tokens=12)
    assert torch.equal(specdec.generate(model, drafter, ids, max_new_tokens=12), plain)


def test_names_below_model_and_the_targets_own_embedding(model, tmp_path, caplog):
    tensors = {f"model.{name}": tensor for name, tensor in zlab_network().state_dict().items()}
    embedding = {"model.embed_tokens.weight": model.get_input_embeddings().weight.detach().clone()}
    drafter = load(write(tmp_path / "file", {**tensors, **embedding}, zlab_config()), model)
    assert not drafter.network.config.own_embedding
    other = {"model.embed_tokens.weight": torch.randn(VOCAB_SIZE, HIDDEN_SIZE)}
    with caplog.at_level(logging.WARNING):
        drafter = load(write(tmp_path / "other", {**tensors, **other}, zlab_config()), model)
    assert drafter.network.config.own_embedding
    assert "differs from the target's embedding; the file's is used" in caplog.text


@pytest.mark.parametrize("content", ["dict", "bare", "other token", "numbers"])
def test_an_embedding_of_the_mask_beside_the_file(content, model, tmp_path):
    folder = write(tmp_path / "file", zlab_network().state_dict(), zlab_config())
    row = torch.randn(HIDDEN_SIZE)
    saved = {
        "dict": {"mask_token_id": MASK, "embedding": row},
        "bare": row[None],
        "other token": {"mask_token_id": MASK + 1, "embedding": row},
        "numbers": [1, 2],
    }[content]
    torch.save(saved, folder / "mask_embedding.pt")
    if content == "other token":
        with pytest.raises(ValueError, match="mask_token_id: expected 4, which the file of the mask's embedding"):
            load(folder, model)
    elif content == "numbers":
        with pytest.raises(ValueError, match=r"mask_embedding.pt: expected a tensor, or one named 'emb.* got list"):
            load(folder, model)
    else:
        network = load(folder, model).network
        rows = network.read_anchors(torch.tensor([5]), model.get_input_embeddings())
        assert torch.equal(rows[0, 1:], row.expand(4, -1))
        assert torch.equal(rows[0, 0], model.get_input_embeddings().weight[5])


# what dflash_config has, what stands at the top level, and what is said about it
WRONG = [
    ({}, {"block_size": 1}, "block_size: expected at least 2, got 1"),
    ({}, {"block_size": None}, "config.json: expected block_size of a DFlash drafter, got none"),
    ({"block_size": 7}, {}, "block_size: expected one value, got .*7.*5"),
    ({"mask_token_id": None}, {}, "config.json: expected mask_token_id"),
    ({"mask_token_id": 96}, {}, "mask_token_id: expected a token below 96, .* got 96"),
    ({"target_layer_ids": None}, {}, "tap_layers: expected the setting with a target of 3 layers"),
    ({"target_layer_ids": [0, 2]}, {}, "target_layer_ids: expected layers below 2, the last one of the target"),
    ({"target_layer_ids": [0, 7]}, {"num_target_layers": None}, "target_layer_ids: expected layers below 2"),
    ({"target_layer_ids": [-1, 1]}, {}, "target_layer_ids: expected layers from 0 on"),
    ({"target_layer_ids": [1, 1]}, {}, "tap_layers: expected .* each of them once"),
    ({"target_layer_ids": [0]}, {}, "fc.weight: expected shape .64, 64."),
    ({}, {"num_target_layers": 9}, "num_target_layers: expected 3 as the target has, got 9"),
    ({"swa_window_size": 8}, SLIDING, "sliding_window: expected one value"),
    ({"causal": "yes"}, {}, "causal: expected true or false, got 'yes'"),
    ({"causal": True}, {"is_causal": False}, "causal: expected one value"),
    ({"input_embedding_scale": 0}, {}, "input_embedding_scale: expected a positive number, got 0"),
    ({}, {"vocab_size": 97}, "drafter: expected vocab_size 96 as the target's, got 97"),
]
WRONG += [({"conv_kernel_size": 2}, {}, "expected conv_group_size, selector_rank, selector_top_k of a DFlash2 drafter")]
REFUSED = [
    ({}, {"layer_types": ["sliding_attention", "linear"]}, "layer_types: expected full_attention or sliding_attention"),
    ({}, {**SLIDING, "use_sliding_window": False}, "sliding_window: expected a number, and use_sliding_window not"),
    ({}, {"layer_types": SLIDING["layer_types"]}, "sliding_window: expected a number"),
    ({"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping: expected 0.0 of DFlash, got 30.0"),
    ({"attention_sink_bias": True}, {}, "attention_sink_bias: expected False of DFlash"),
    ({"attention_value_scale": 0.5}, {}, "attention_value_scale: expected 1.0 of DFlash"),
    ({"use_swa": True, "swa_window_size": 8}, {}, "use_swa: expected False"),
    ({}, {"attention_bias": True}, "attention_bias: expected False"),
    ({"projector_type": "domino"}, {}, "projector_type: expected 'dflash' of DFlash, got 'domino'"),
    ({"lilicorr_enabled": True}, {}, "lilicorr_enabled: .* a field of LiLiCorr"),
    ({}, {"xpress_rank": 256}, "xpress_rank: .* a field of XPress"),
    ({}, {"speculators_model_type": "xpress"}, "speculators_model_type: expected 'dflash' or 'dflash2', got 'xpress'"),
    ({"target_hidden_size": 32}, {}, "target_hidden_size: expected 64, .* .hidden_dim_adapter is not read., got 32"),
]


@pytest.mark.parametrize(
    ("inner", "outer", "message", "error"),
    [*((*case, ValueError) for case in WRONG), *((*case, NotImplementedError) for case in REFUSED)],
)
def test_traps_are_named(inner, outer, message, error, model, tmp_path):
    folder = write(tmp_path / "file", zlab_network().state_dict(), zlab_config(inner, **outer))
    with pytest.raises(error, match=message):
        load(folder, model).bind(specdec.Target(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.1.mlp.up_proj.weight": None}, r"missing tensors \['layers.1.mlp.up_proj.weight'\]"),
        ({"prefix_gru.weight": torch.zeros(2)}, r"unexpected tensors \['prefix_gru.weight'\]"),
        ({"hidden_norm.weight": torch.zeros(3)}, r"hidden_norm.weight: expected shape \[64\], got \[3\]"),
    ],
)
def test_wrong_tensors_are_named(change, message, model, tmp_path):
    tensors = {**zlab_network().state_dict(), **change}
    folder = write(tmp_path / "file", {name: one for name, one in tensors.items() if one is not None}, zlab_config())
    with pytest.raises(ValueError, match=message):
        load(folder, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": torch.zeros(40, dtype=torch.int64)}, "d2t: expected offsets that lead to the 40 tokens marked in t2d"),
        ({"d2t": torch.arange(40), "t2d": None}, None),
        (
            {"d2t": torch.arange(40) * 2, "t2d": None},
            "d2t: expected offsets that lead to distinct tokens below 96",
        ),
        (
            {"d2t": -torch.arange(40), "t2d": None},
            "d2t: expected .* distinct tokens below 96, got 1 of 40",
        ),
        ({"d2t": None}, r"missing tensors \['d2t'\]"),
    ],
)
def test_a_draft_vocabulary_with_holes(change, message, model, tmp_path):
    tensors = {**zlab_network(draft_vocab_size=40, shares_lm_head=False).state_dict(), **change}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    folder = write(tmp_path / "file", tensors, zlab_config(draft_vocab_size=40))
    if message is None:
        assert int(load(folder, model).network.t2d.sum()) == 40
        return
    with pytest.raises(ValueError, match=message):
        load(folder, model)


# Files that others' code saved, and what it computes


def check_states(network, theirs, embed, num_taps=2):
    """Cached drafting behind steps of different lengths, against `theirs(features, tokens, anchor)` of whole texts."""
    features, tokens = torch.randn(2, 26, num_taps * HIDDEN_SIZE), torch.randint(0, VOCAB_SIZE, (2, 26))
    accepted = [[11, 7], [2, 0], [0, 3], [1, 1]]
    anchors = torch.tensor(accepted).cumsum(0) + torch.arange(4)[:, None]
    got = drafted_states(network.eval(), embed, features, tokens, accepted, "reference")
    for states, places in zip(got, anchors.tolist(), strict=True):
        for row, anchor in enumerate(places):
            expected = theirs(features[row : row + 1], tokens[row : row + 1], anchor)
            assert_near(states[row], expected.float())


@torch.no_grad()
@pytest.mark.parametrize(
    ("layers", "switches", "draft_vocab"),
    [({}, {}, 40), (SLIDING, {}, VOCAB_SIZE), (SLIDING, {"sliding_window_non_causal": True}, VOCAB_SIZE)],
    ids=["reduced vocabulary", "sliding", "sliding, not causal"],
)
def test_what_speculators_save(layers, switches, draft_vocab, model, tmp_path):
    package = reference("speculators.models.dflash")
    from transformers import Qwen3Config

    sizes = Qwen3Config(**SIZES, **layers, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    sizes._attn_implementation = "eager"
    ids = {"aux_hidden_state_layer_ids": [0, 3], "mask_token_id": MASK, "block_size": 4}
    config = package.DFlashSpeculatorConfig(
        transformer_layer_config=sizes, draft_vocab_size=draft_vocab, **ids, **switches
    )
    saved = package.DFlashDraftModel(config).eval()
    for name, parameter in saved.named_parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape) + ("norm" in name))
    if draft_vocab < VOCAB_SIZE:
        saved.t2d.copy_(torch.arange(VOCAB_SIZE) % 2 == 1)
        saved.t2d[2 * draft_vocab :] = False
        saved.d2t.copy_(saved.t2d.nonzero()[:, 0] - torch.arange(draft_vocab))
    embed = model.get_input_embeddings()
    saved.embed_tokens.weight.copy_(embed.weight)
    saved.save_pretrained(tmp_path / "theirs")
    drafter = load(tmp_path / "theirs", model)
    assert drafter.network.config.tap_layers == (-1, 2)  # what enters the first layer, and the output of the last
    assert drafter.network.config.block_size == 4
    assert ("lm_head.weight" in load_file(tmp_path / "theirs" / "model.safetensors")) == (draft_vocab < VOCAB_SIZE)
    if draft_vocab < VOCAB_SIZE:
        assert torch.equal(drafter.network.target_ids, saved.t2d.nonzero()[:, 0])
    picked = []
    saved.lm_head.register_forward_pre_hook(lambda module, args: picked.append(args[0]))

    def theirs(features, tokens, anchor):
        only = torch.zeros(1, features.shape[1])
        only[0, anchor] = 1
        rest = torch.zeros(1, features.shape[1], HIDDEN_SIZE), torch.zeros_like(tokens)
        saved._backbone_forward(features, tokens, only, *rest, max_anchors=1)
        return picked[-1][0]

    check_states(drafter.network, theirs, embed)
    check_greedy(drafter, model)


@torch.no_grad()
@pytest.mark.parametrize("window", [5, 64])
def test_what_transformers_saves(window, model, tmp_path):
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    from transformers.cache_utils import DFlashCache

    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = MuseGlimmerAssistantConfig(
        **sizes, block_size=4, mask_token_id=MASK, target_layer_ids=[0, 1], sliding_window=window
    )
    config._attn_implementation = "eager"
    saved = MuseGlimmerAssistantModel(config).eval()
    for name, parameter in saved.named_parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape) + ("norm" in name))
    saved.save_pretrained(tmp_path / "theirs")
    drafter = load(tmp_path / "theirs", model)
    embed = model.get_input_embeddings()

    def theirs(features, tokens, anchor):
        block = torch.tensor([[int(tokens[0, anchor]), MASK, MASK, MASK]])
        cache = DFlashCache(config=config)
        cache.set_previous_accepted_tokens(anchor)
        inputs = {"noise_embeds": embed(block), "context_hidden_states": features[:, :anchor], "past_key_values": cache}
        return saved(**inputs, position_ids=torch.arange(anchor + 4)[None]).last_hidden_state[0]

    check_states(drafter.network, theirs, embed)
