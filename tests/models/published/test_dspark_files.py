"""Files of DSpark in every layout: what is read equals what was written, and traps are refused by name."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import specdec
from lib.drafter_checks import propose
from lib.dspark_cases import HEADS, Theirs, random_network, their_config
from lib.families import build_model, random_prompts
from lib.references import reference
from specdec.drafters.dspark import DSpark
from specdec.models.published.files import read_config, tensor_files
from specdec.models.published.readers import READERS, recognise
from specdec.trees.shape import TreeShape

TREE = TreeShape.from_k_config((3, 2, 1))
NAMES = ("block_size", "target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type")
LAYOUTS = {
    "deepspec": lambda fields: fields,
    "prefixed": lambda fields: _moved(fields, lambda own: {f"dspark_{name}": own[name] for name in own}),
    "nested": lambda fields: _moved(fields, lambda own: {"dspark_config": own}),
    "nested as dflash": lambda fields: _moved(fields, lambda own: {"dflash_config": own}),
}


def _moved(fields, place):
    own = {name: fields[name] for name in NAMES if name in fields}
    if "mask_token_id" in own:
        own["noise_token_id"] = own.pop("mask_token_id")
    return {**{name: value for name, value in fields.items() if name not in NAMES}, **place(own)}


def deepspec_fields(network):
    """DeepSpec's `config.json`."""
    config = network.config
    layer = config.layer
    fields = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": layer.max_position_embeddings,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_parameters": dict(layer.rope_parameters),
        "num_hidden_layers": config.num_layers,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_window_layers": 28,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "num_target_layers": 3,
        "target_layer_ids": list(config.tap_layers),
        "mask_token_id": config.mask_token_id,
        "num_anchors": 512,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.has_confidence,
    }
    if config.markov_rank:
        fields["markov_head_type"] = config.markov_head_type
    if config.has_confidence:
        fields["confidence_head_with_markov"] = config.confidence_with_markov
    return fields


def deepspec_network(model, **changes):
    """A network with copies of the target's embedding and LM head, as DeepSpec's files have them."""
    sizes = {"tap_layers": (-1, 1), "own_embedding": True, "shares_lm_head": False}
    network = random_network(model, **{**sizes, **changes})
    network.start_from(model.get_output_embeddings().weight, model.get_input_embeddings().weight)
    return network


def write(folder, network, fields, tensors=None):
    """A folder with these fields and the network's tensors, or others."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    kept = network.state_dict() if tensors is None else tensors
    save_file({name: tensor.clone().contiguous() for name, tensor in kept.items()}, folder / "model.safetensors")
    return folder


def read(folder, **settings):
    return READERS["dspark"].read(tensor_files(folder), read_config(folder), **settings)


def trees(drafters, model, text):
    return [propose(drafter, model, text, 7).tokens.tolist() for drafter in drafters]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", HEADS)
def test_a_file_of_deepspec_is_read_as_it_was_written(heads, layout, tmp_path, generator):
    model = build_model("llama")
    network = deepspec_network(model, **HEADS[heads])
    folder = write(tmp_path / "x", network, LAYOUTS[layout](deepspec_fields(network)))
    assert recognise(set(tensor_files(folder)), read_config(folder)) == "dspark"
    with_markov = network.config.confidence_with_markov and network.config.has_confidence
    assert read(folder).config == replace(network.config, confidence_with_markov=with_markov)
    drafter = specdec.load_drafter(folder, model, tree=TREE)
    assert isinstance(drafter, DSpark)
    config = drafter.network.config
    assert config.shares_lm_head, "the copy of the target's LM head is kept"
    assert not config.own_embedding, "the copy of the target's embedding is kept"
    (text,) = random_prompts(generator, [6])
    got, expected = trees([drafter, DSpark(network, TREE)], model, text)
    assert got == expected


def test_heads_of_its_own_are_kept(tmp_path, generator):
    model = build_model("llama")
    network = deepspec_network(model)
    with torch.no_grad():
        network.lm_head.weight.mul_(torch.rand(network.lm_head.weight.shape, generator=generator))
    drafter = specdec.load_drafter(write(tmp_path / "x", network, deepspec_fields(network)), model, tree=TREE)
    assert not drafter.network.config.shares_lm_head
    assert torch.equal(drafter.network.lm_head.weight, network.lm_head.weight)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 30, "shares_lm_head": False}], ids=["whole", "reduced"])
def test_a_file_that_speculators_saved_gives_what_their_model_gives(heads, changes, tmp_path, generator):
    model = build_model("llama")
    network = random_network(model, tap_layers=(-1, 1), **HEADS[heads], **changes)
    theirs = Theirs(network, model)
    theirs.theirs.save_pretrained(tmp_path / "x")
    assert recognise(set(tensor_files(tmp_path / "x")), read_config(tmp_path / "x")) == "dspark"
    drafter = specdec.load_drafter(tmp_path / "x", model, tree=TREE)
    assert drafter.network.config.tap_layers == (-1, 1)
    (text,) = random_prompts(generator, [6])
    got, expected = trees([drafter, DSpark(network, TREE)], model, text)
    assert got == expected
    best = drafter.network.target_ids[theirs.behind(text, 7, []).topk(3).indices]
    assert [got[0][node] for node in TREE.children[0]] == best.tolist()


def test_speculators_dflash_whose_anchor_drafts_is_dspark(tmp_path):
    model = build_model("llama")
    network = random_network(model, tap_layers=(0, 1), **HEADS["without bias"])
    theirs, sizes = reference("speculators.models.dflash"), their_config(network.config)
    names = ("transformer_layer_config", "draft_vocab_size", "block_size", "aux_hidden_state_layer_ids")
    fields = {name: getattr(sizes, name) for name in (*names, "mask_token_id")}
    config = theirs.DFlashSpeculatorConfig(**fields, sample_from_anchor=True)
    theirs.DFlashDraftModel(config).save_pretrained(tmp_path / "x")
    assert recognise(set(tensor_files(tmp_path / "x")), read_config(tmp_path / "x")) == "dspark"
    expected = replace(network.config, confidence_with_markov=False, window_from="anchor")
    assert read(tmp_path / "x").config == expected


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"target_layer_ids": [0, 2]}, ValueError, r"target_layer_ids: expected layers below 2, the last one"),
        ({"target_layer_ids": [-2, 1]}, ValueError, r"target_layer_ids: expected layers from -1 on, got \[-2, 1\]"),
        ({"target_layer_ids": None}, ValueError, "tap_layers: expected the setting with a target of 3 layers"),
        ({"num_target_layers": 4}, ValueError, "num_target_layers: expected 3 as the target has, got 4"),
        ({"mask_token_id": 96}, ValueError, "mask_token_id: expected a token below 96"),
        ({"mask_token_id": None}, ValueError, "config.json: expected mask_token_id"),
        ({"block_size": 0}, ValueError, "block_size: expected at least 1, got 0"),
        ({"dspark_block_size": 5}, ValueError, "block_size: expected one value, got 4 and dspark_block_size 5"),
        ({"dspark_config": {"markov_rank": 4}}, ValueError, "markov_rank: expected one value, got 6 and dspark_config"),
        ({"markov_rank": -1}, ValueError, "markov_rank: expected 0 or more, got -1"),
        (
            {"markov_rank": 4},
            ValueError,
            r"confidence_head.proj.weight: expected shape|markov_w1.weight: expected shape",
        ),
        ({"markov_head_type": "lstm"}, ValueError, "markov_head_type: expected vanilla or gated or rnn, got 'lstm'"),
        ({"markov_head_type": "gated"}, ValueError, r"missing tensors \['markov_head.gate_proj"),
        ({"enable_confidence_head": False}, ValueError, r"unexpected tensors \['confidence_head.proj.bias'"),
        ({"confidence_head_with_markov": False}, ValueError, r"confidence_head.proj.weight: expected shape \[1, 64\]"),
        ({"sample_from_anchor": False}, NotImplementedError, "sample_from_anchor: expected true of DSpark, got False"),
        ({"architectures": ["Gemma4DSparkModel"]}, NotImplementedError, "architectures: expected Qwen3DSparkModel"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "use_sliding_window": True},
            NotImplementedError,
            "layer_types: expected full attention of DeepSpec",
        ),
        ({"attention_bias": True}, NotImplementedError, "attention_bias: expected False"),
        ({"final_logit_softcapping": 30.0}, NotImplementedError, "final_logit_softcapping"),
        ({"xpress_rank": 256}, NotImplementedError, "xpress_rank"),
    ],
    ids=str,
)
def test_traps_are_refused_by_name(changes, error, match, tmp_path):
    model = build_model("llama")
    network = deepspec_network(model)
    folder = write(tmp_path / "x", network, {**deepspec_fields(network), **changes})
    with pytest.raises(error, match=match):
        specdec.load_drafter(folder, model, tree=TREE)


def test_tensors_that_are_missing_or_unknown_are_named(tmp_path):
    network = deepspec_network(build_model("llama"))
    tensors = dict(network.state_dict())
    bias = tensors.pop("confidence_head.proj.bias")
    with pytest.raises(ValueError, match=r"missing tensors \['confidence_head.proj.bias'\]"):
        read(write(tmp_path / "x", network, deepspec_fields(network), tensors))
    tensors |= {"confidence_head.proj.bias": bias, "markov_head.other": bias.clone()}
    with pytest.raises(ValueError, match=r"unexpected tensors \['markov_head.other'\]"):
        read(write(tmp_path / "x", network, deepspec_fields(network), tensors))
