"""EAGLE's published files: names and shapes as the authors have them, at a small width; and our own configuration."""

from dataclasses import asdict

import pytest
import torch

from lib.drafter_checks import propose
from lib.eagle_checks import DRAFT_TOKENS, drafter_of
from lib.families import VOCAB_SIZE, build_model, random_prompts
from lib.published_files import WIDTH, check_drafts, eagle3_file, eagle_file
from specdec.models.networks.eagle import EagleConfig
from specdec.models.networks.eagle3 import Eagle3Config, default_tap_layers
from specdec.models.networks.layer import DraftLayerConfig
from specdec.models.published import eagle
from specdec.models.target.target import Target
from specdec.trees.shape import TreeShape


@torch.no_grad()
@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        eagle_file(),
        eagle_file(bias=False, config_bias=False, rope_theta=500000.0, rms_norm_eps=1e-5),
        eagle_file(qkv_bias=True),
        eagle3_file(dtype=torch.float32, rope_theta=500000.0),
        eagle3_file(dtype=torch.float32, draft_vocab=VOCAB_SIZE),
    ],
    ids=["first", "no fc bias", "qkv bias", "third", "third, whole vocabulary"],
)
def test_published_files_load_and_compute_what_their_equations_say(tensors, config, generator):
    model = build_model("llama")
    assert eagle.recognises(set(tensors), config)
    network = eagle.read(tensors, config)
    assert network.config.layer.rms_norm_eps == config["rms_norm_eps"]
    assert network.config.layer.rope_parameters["rope_theta"] == config.get("rope_theta", 10000.0)
    saved = network.state_dict()
    assert saved.keys() == tensors.keys() - {"embed_tokens.weight"}
    assert all(torch.equal(saved[name], tensors[name]) for name in saved)

    settings = {"tap_layers": (0, 0, 1)} if eagle.recognises_third(set(tensors), config) else {}
    check_drafts(network, model, generator, **settings)


def test_the_file_is_cast_to_the_dtype_of_the_target():
    model = build_model("llama").to(torch.bfloat16)
    drafter = drafter_of(eagle.read(*eagle3_file()), TreeShape.chain(2), tap_layers=(0, 1, 2))
    drafter.bind(Target(model))
    network = drafter.network
    assert network.fc.weight.dtype == torch.bfloat16
    assert network.d2t.dtype == torch.int64
    assert network.t2d.dtype == torch.bool
    assert torch.equal(network.target_ids, DRAFT_TOKENS)
    # rounded to bfloat16, these frequencies would be off by a turn at position 1000
    cos, _ = network.rotary(torch.zeros(1), torch.tensor([[1000]]))
    exact = (1000 * 10000.0 ** (-torch.arange(4).double() / 4)).cos()
    assert (cos[0, 0, 0, :4] - exact).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": None, "num_attention_heads": 2}, {"num_key_value_heads": 2, "head_dim": 32}),
        ({"max_position_embeddings": None, "max_sequence_length": 4096}, {"max_position_embeddings": 4096}),
        ({"max_position_embeddings": None}, {"max_position_embeddings": 2048}),
        ({"head_dim": 8}, {"head_dim": 8}),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_theta": 5e5},
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 2.0}},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        ),
    ],
)
def test_fields_of_the_published_configuration(changes, expected):
    tensors, config = eagle_file(**changes)
    if "num_attention_heads" in changes:  # without GQA, keys and values are as wide as queries
        tensors |= {f"layers.0.self_attn.{name}_proj.weight": torch.zeros(WIDTH, WIDTH) for name in "kv"}
    layer = asdict(eagle.read(tensors, config).config.layer)
    assert {name: layer[name] for name in expected} == expected


def test_a_drafter_may_have_fewer_key_heads_than_its_target(generator):
    model = build_model("opt")  # no GQA
    drafter = drafter_of(eagle.read(*eagle_file()), TreeShape.chain(2))
    (text,) = random_prompts(generator, [4])
    assert propose(drafter, model, text, 5).tokens.shape == (1, 3)


@pytest.mark.parametrize("file", [eagle_file, eagle3_file])
def test_missing_and_extra_and_misshapen_tensors_are_named(file):
    tensors, config = file()
    for name, tensor in tensors.items():
        if name not in ("embed_tokens.weight", "t2d"):
            lacking = {key: value for key, value in tensors.items() if key != name}
            with pytest.raises(ValueError, match=rf"missing tensors \['{name}'\]"):
                eagle.read(lacking, config)
            assert eagle.recognises(set(lacking), config) == (name != "fc.weight")
        with pytest.raises(ValueError, match=rf"{name}: expected shape"):
            eagle.read({**tensors, name: torch.cat((tensor, tensor))}, config)
    with pytest.raises(ValueError, match=r"tensors \[.*'layers.1.mlp.(up|gate)_proj.weight'"):
        eagle.read({**tensors, "layers.1.mlp.up_proj.weight": torch.zeros(1)}, config)


def test_the_bias_of_the_projection_is_there_unless_the_configuration_says_no():
    with pytest.raises(ValueError, match=r"missing tensors \['fc.bias'\]"):
        eagle.read(*eagle_file(bias=False))
    tensors, config = eagle_file()
    with pytest.raises(ValueError, match=r"unexpected tensors \['fc.bias'\]"):
        eagle.read(tensors, {**config, "bias": False})
    with pytest.raises(ValueError, match=r"missing tensors .*q_proj.bias"):
        eagle.read(tensors, {**config, "qkv_bias": True})


def test_contradicting_vocabulary_tables_are_refused():
    tensors, config = eagle3_file()
    with pytest.raises(ValueError, match=r"d2t: expected offsets that lead to the 32 tokens marked in t2d"):
        eagle.read({**tensors, "d2t": DRAFT_TOKENS}, config)  # ids instead of offsets
    assert eagle.read({**tensors, "t2d": tensors["t2d"].to(torch.uint8)}, config).t2d.dtype == torch.bool
    whole, config = eagle3_file(draft_vocab=VOCAB_SIZE)
    tables = {"d2t": torch.zeros(VOCAB_SIZE).long(), "t2d": torch.ones(VOCAB_SIZE).bool()}
    assert "d2t" not in eagle.read({**whole, **tables}, config).state_dict()


def test_a_configuration_without_sizes_is_refused():
    with pytest.raises(
        ValueError, match="config.json: expected hidden_size, intermediate_size, num_attention_heads, voc"
    ):
        eagle.read(eagle_file()[0], {})


def test_other_methods_files_are_not_taken_for_eagle():
    hydra = {"prefix_embedding_layer.layers.0.self_attn.q_proj.weight", "0.0.linear.weight"}
    falcon = {"lstm.weight_ih_l0", "layers.0.self_attn.q_proj.weight", "embed_tokens.weight"}
    llama = {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.input_layernorm.weight"}
    assert not any(eagle.recognises(names, {}) for names in (hydra, falcon, llama))


def test_the_published_rule_of_taps():
    assert default_tap_layers(32) == (1, 15, 28)
    assert default_tap_layers(7) == (1, 2, 3)
    for layers in (2, 3, 6):
        with pytest.raises(
            ValueError, match=rf"tap_layers: expected the setting .* {layers} layers, such as tap_layers=\(0, 1"
        ):
            default_tap_layers(layers)
    with pytest.raises(ValueError, match="tap_layers: expected the setting"):
        Eagle3Config.for_target(build_model("llama").config)
    network = eagle.read(*eagle3_file())  # the file does not say
    with pytest.raises(ValueError, match="tap_layers: expected the setting"):
        drafter_of(network, TreeShape.chain(2)).bind(Target(build_model("llama")))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"vocab_size": 0}, r"vocab_size: expected at least 1, got 0"),
        ({"draft_vocab_size": 97}, r"draft_vocab_size: expected 1 to 96, .* got 97"),
        ({"tap_layers": ()}, r"tap_layers: expected at least one layer"),
        ({"feature_norm": "all"}, r"feature_norm: expected None, 'joined' or 'each', got 'all'"),
        (
            {"shares_lm_head": True, "draft_vocab_size": 8},
            r"shares_lm_head: expected False with a draft vocabulary of 8 tokens",
        ),
    ],
)
def test_rejects_configurations(settings, match):
    layer = DraftLayerConfig.like(build_model("llama").config)
    with pytest.raises(ValueError, match=match):
        Eagle3Config(**{"vocab_size": VOCAB_SIZE, "layer": layer, **settings})


def test_unknown_settings_are_named():
    with pytest.raises(TypeError, match="num_heads"):
        EagleConfig.for_target(build_model("llama").config, num_heads=4)
    with pytest.raises(TypeError, match="tap_layers"):  # EAGLE-3's
        EagleConfig.for_target(build_model("llama").config, tap_layers=(0, 1, 2))


def test_taps_are_not_for_files_of_the_first_version():
    with pytest.raises(ValueError, match=r"tap_layers: expected None with EAGLE-1 and EAGLE-2, got \(0, 1\)"):
        eagle.read(*eagle_file(), tap_layers=[0, 1])
