"""EAGLE-3's files as today's trainers write them: their names, the fields of their configurations, their embeddings."""

import json
import logging

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import specdec
from lib.families import HIDDEN_SIZE, VOCAB_SIZE, build_model
from lib.published_files import DRAFT_VOCAB, check_drafts, eagle3_file, eagle_file, falcon_file, fill
from specdec.drafting.folder import embeds_like
from specdec.models.published import eagle, readers
from specdec.models.target.target import Target

EMBEDDING = "embed_tokens.weight"
IDS = "eagle_aux_hidden_state_layer_ids"
TAPS = (1, 1, 2)  # of three layers; as inputs 2, 2, 3


def speculators_file(**changes):
    """As speculators save it: the layer's sizes apart, the layer called 0, an embedding in every file."""
    tensors, layer = eagle3_file(dtype=torch.float32, rope_theta=500000.0)
    draft_vocab_size = layer.pop("draft_vocab_size")
    config = {
        "architectures": ["Eagle3Speculator"], "draft_vocab_size": draft_vocab_size, IDS: [2, 2, 3],
        "embed_requires_grad": False, "fc_norm": False, "norm_before_fc": False, "norm_before_residual": True,
        "norm_output": False, "speculators_config": {"algorithm": "eagle3"}, "speculators_model_type": "eagle3",
        "target_hidden_size": None, "tie_word_embeddings": False, "transformer_layer_config": layer, **changes,
    }  # fmt: skip
    embedding = build_model("llama").get_input_embeddings().weight.detach().clone()
    return {**as_layer_0(tensors), EMBEDDING: embedding}, config


def modelopt_file(**changes):
    """As ModelOpt exports it: the layer called 0, no `t2d`, layers by their outputs."""
    eagle_config = {
        IDS: list(TAPS), "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
    }  # fmt: skip
    tensors, config = eagle3_file(dtype=torch.float32, eagle_config=eagle_config, attention_bias=False, mlp_bias=False)
    tensors.pop("t2d")
    return as_layer_0(tensors), {**config, "rope_scaling": None, **changes}


def specforge_file(**changes):
    """As SpecForge saves EAGLE-3.1: a norm for every tap, whose outputs the ids count."""
    settings = {"fc_norm": True, "norm_output": True, "use_sliding_window": False, "eagle_config": {IDS: list(TAPS)}}
    tensors, config = eagle3_file(dtype=torch.float32, **settings)
    norms = fill({f"fc_norm.{tap}.weight": (HIDDEN_SIZE,) for tap in range(3)}, torch.float32)
    return {**tensors, **norms}, {**config, **changes}


def joined_file():
    """With the norm over all taps that gpt-oss's drafters have, and every name below `model.` but those of the head."""
    tensors, config = eagle3_file(dtype=torch.float32, norm_before_fc=True, **{IDS: [2, 2, 3]})
    tensors |= fill({"input_norm.weight": (3 * HIDDEN_SIZE,)}, torch.float32)
    outer = ("lm_head.weight", "d2t", "t2d")
    return {name if name in outer else f"model.{name}": tensor for name, tensor in tensors.items()}, config


def as_layer_0(tensors):
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def plain_names(tensors):
    return {name.removeprefix("model.").replace("layers.0.", "midlayer."): value for name, value in tensors.items()}


LAYOUTS = {
    "speculators": (speculators_file, {"norm_before_residual": True}),
    "modelopt": (modelopt_file, {}),
    "specforge": (specforge_file, {"norm_output": True, "feature_norm": "each"}),
    "joined": (joined_file, {"feature_norm": "joined"}),
}


@pytest.fixture(scope="module")
def target():
    return Target(build_model("llama"))


def write(folder, tensors, config):
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
@pytest.mark.parametrize(("make", "switches"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_loads_and_computes_what_its_equations_say(make, switches, target, generator):
    tensors, config = make()
    assert eagle.recognises(set(tensors), config)
    network = eagle.read(tensors, config)
    expected = {"norm_before_residual": False, "norm_output": False, "feature_norm": None, **switches}
    assert {name: getattr(network.config, name) for name in expected} == expected
    assert network.config.tap_layers == TAPS
    assert network.config.own_embedding == (EMBEDDING in tensors)
    saved, given = network.state_dict(), plain_names(tensors)
    assert saved.keys() == given.keys() | {"t2d"}
    assert all(torch.equal(saved[name], given[name]) for name in given)
    check_drafts(network, target.model, generator)


@pytest.mark.parametrize("make", [make for make, _ in LAYOUTS.values()], ids=LAYOUTS)
def test_every_layout_comes_back_from_our_own_folder(make, target, tmp_path, caplog):
    folder = write(tmp_path / "theirs", *make())
    drafter = specdec.load_drafter(folder, target, tree=(2, 1))
    assert drafter.kind == "eagle3"
    assert caplog.messages == []  # an embedding that is the target's is shared without a word
    assert drafter.network.embed_tokens is None
    drafter.save_pretrained(tmp_path / "ours")
    again = specdec.load_drafter(tmp_path / "ours", target)
    assert again.network.config == drafter.network.config
    assert again.tap_layers == drafter.tap_layers == TAPS
    one, other = again.network.state_dict(), drafter.network.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    ids = torch.tensor([[3, 5, 7, 2]])
    plain = specdec.generate(target, None, ids, max_new_tokens=6)
    assert torch.equal(specdec.generate(target, again, ids, max_new_tokens=6), plain)


@pytest.mark.parametrize("make", [make for make, _ in LAYOUTS.values()], ids=LAYOUTS)
def test_missing_and_extra_and_misshapen_tensors_are_named(make):
    tensors, config = make()
    for name, tensor in tensors.items():
        plain = next(iter(plain_names({name: tensor})))
        lacking = {key: value for key, value in tensors.items() if key != name}
        # what follows from other tensors, what tells the layout, and a switch that the configuration leaves open
        if plain not in ("t2d", EMBEDDING, "midlayer.hidden_norm.weight"):
            with pytest.raises(ValueError, match=rf"missing tensors \[.*'{plain}'"):
                eagle.read(lacking, config)
        if plain != "t2d":
            with pytest.raises(ValueError, match=rf"^({plain}: expected|d2t: expected offsets)"):
                eagle.read({**tensors, name: torch.cat((tensor, tensor))}, config)
    for extra in ("midlayer.self_attn.o_norm.weight", "fc.bias", "layers.1.hidden_norm.weight"):
        with pytest.raises(ValueError, match=rf"unexpected tensors \['{extra}'\]"):
            eagle.read({**tensors, extra: torch.zeros(1)}, config)
    for one, lacking in (
        ("midlayer.self_attn.q_norm", "midlayer.self_attn.k_norm"),
        ("layers.2.mlp.up_proj", "layers.1"),
    ):
        with pytest.raises(ValueError, match=rf"missing tensors \['{lacking}"):
            eagle.read({**tensors, f"{one}.weight": torch.zeros(8)}, config)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"eagle_config": {IDS: None, "use_aux_hidden_state": True}}, None),
        ({"eagle_config": {IDS: [1, 15, 28]}}, (1, 15, 28)),
        ({"eagle_config": {IDS: [32, 1, 17]}}, (1, 17, 32)),  # a set's order; states are gathered from the lowest up
        ({"eagle_config": {IDS: [2, 16, 29]}}, (1, 15, 28)),
        ({IDS: [2, 16, 29]}, (1, 15, 28)),
        ({IDS: [24, 30, 36]}, (23, 29, 35)),
        ({IDS: [1, 15, 28], "eagle_config": {IDS: [1, 15, 28]}}, (1, 15, 28)),
    ],
)
def test_layer_ids(fields, expected):
    tensors, config = eagle3_file(**fields)
    assert eagle.read(tensors, config).config.tap_layers == expected
    assert eagle.read(tensors, config, tap_layers=[3, 2, 1]).config.tap_layers == (3, 2, 1)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({IDS: [1, 15, 28]}, rf"^{IDS}: expected ids .* got \[1, 15, 28\].*=\(1, 15, 28\) .*=\(0, 14, 27\) if by"),
        ({IDS: [0, 15, 28]}, rf"^{IDS}: expected ids"),
        ({"eagle_config": {IDS: [24, 30, 36]}}, rf"^eagle_config.{IDS}: expected ids .* got \[24, 30, 36\]"),
        ({"target_layer_ids": [1, 15, 28]}, r"^target_layer_ids: expected ids"),
        ({"eagle_config": {"aux_hidden_state_layer_ids": [1, 2, 3]}}, r"^eagle_config.aux_hidden_state_layer_ids: exp"),
        ({IDS: [2, 16]}, rf"^{IDS}: expected 3 layers, as fc.weight has, got \[2, 16\]"),
        ({IDS: ["low", "mid", "high"]}, rf"^{IDS}: expected 3 layers"),
        ({IDS: [2, 16, -3]}, rf"^{IDS}: expected ids from 0 on, .* got \[2, 16, -3\]; give tap_layers"),
        ({IDS: [2, 16, 29], "eagle_config": {IDS: [1, 15, 28]}}, r"expected the same ids as in eagle_aux_.*, eagle_co"),
    ],
)
def test_layer_ids_that_can_be_read_in_two_ways_are_named(fields, match):
    tensors, config = eagle3_file(**fields)
    with pytest.raises(ValueError, match=match):
        eagle.read(tensors, config)
    assert eagle.read(tensors, config, tap_layers=(1, 15, 28)).config.tap_layers == (1, 15, 28)


def test_the_number_of_taps_is_that_of_the_projection():
    tensors, config = eagle3_file()
    tensors["fc.weight"] = torch.zeros(HIDDEN_SIZE, 2 * HIDDEN_SIZE)
    with pytest.raises(ValueError, match=r"^tap_layers: expected the setting with 2 layers"):
        eagle.read(tensors, config)
    with pytest.raises(ValueError, match=r"^tap_layers: expected 2 layers for this network, got \(0, 1, 2\)"):
        eagle.read(tensors, config, tap_layers=(0, 1, 2))
    assert eagle.read(tensors, {**config, IDS: [2, 4]}).config.tap_layers == (1, 3)
    network = eagle.read(tensors, config, tap_layers=(0, 2))
    assert network.fc.in_features == network.config.feature_size == 2 * HIDDEN_SIZE


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"hidden_act": "gelu"}, r"^hidden_act: expected 'silu' of EAGLE, got 'gelu'"),
        ({"logit_scale": 0.5}, r"^logit_scale: expected 1.0"),
        ({"parallel_drafting": True}, r"^parallel_drafting: expected False"),
        ({"speculators_model_type": "peagle"}, r"^speculators_model_type: expected 'eagle3' of EAGLE, got 'peagle'"),
        ({"use_sliding_window": True}, r"^use_sliding_window: expected False without layer_types, got True"),
        ({"layer_types": ["sliding_attention"]}, r"^sliding_window: expected a number, .* got None"),
        ({"layer_types": ["sliding_attention"] * 2}, r"^layer_types: expected full_attention or .* each of 1 layers"),
        ({"partial_rotary_factor": 0.5}, r"^partial_rotary_factor: expected 1.0 of EAGLE, got 0.5"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            r"^rope_parameters.partial_rotary_factor: expected 1",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {}}},
            r"^rope_parameters: exp",
        ),
        ({"architectures": ["LlamaForCausalLMEagle4"]}, r"^checkpoint: expected EAGLE-1, 2 or 3, got EAGLE-4, whose"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, r"^eagle_config.use_aux_hidden_state: expected True"),
        ({"eagle_config": {"parallel_draft_step": 4}}, r"^eagle_config.parallel_draft_step: expected 0 or 1 .* got 4"),
        ({"norm_before_fc": True, "fc_norm": True}, r"^fc_norm: expected false beside norm_before_fc"),
    ],
)
def test_fields_that_ask_for_other_arithmetic_are_refused(fields, match):
    with pytest.raises(NotImplementedError, match=match):
        eagle.read(*eagle3_file(**fields))


def test_switches_that_files_leave_open():
    with pytest.raises(ValueError, match=r"^norm_before_residual: expected true or false in the config.json of a spec"):
        eagle.read(*speculators_file(norm_before_residual=None))
    assert eagle.read(*eagle3_file(norm_before_residual=True)).config.norm_before_residual
    for make, name, norm in ((specforge_file, "fc_norm", "each"), (joined_file, "norm_before_fc", "joined")):
        tensors, config = make()
        assert eagle.read(tensors, {**config, name: None}).config.feature_norm == norm
        with pytest.raises(ValueError, match=r"unexpected tensors \['(fc_norm.0|input_norm).weight'"):
            eagle.read(tensors, {**config, name: False})


def test_the_table_of_the_targets_tokens_follows_from_that_of_the_drafts():
    tensors, config = eagle3_file()
    t2d = tensors.pop("t2d")
    network = eagle.read({**tensors, "d2t": tensors["d2t"].int()}, config)
    assert torch.equal(network.t2d, t2d)
    assert network.d2t.dtype == torch.int64
    backwards = (network.target_ids.flip(0) - torch.arange(DRAFT_VOCAB)).clone()
    assert torch.equal(eagle.read({**tensors, "d2t": backwards}, config).t2d, t2d)
    for wrong in (tensors["d2t"] + VOCAB_SIZE, network.target_ids, -torch.arange(DRAFT_VOCAB)):
        with pytest.raises(ValueError, match=r"^d2t: expected offsets that lead to distinct tokens below 96, got"):
            eagle.read({**tensors, "d2t": wrong}, config)


@torch.no_grad()
def test_without_an_lm_head_the_targets_speaks(target, generator):
    tensors, config = eagle3_file(dtype=torch.float32, draft_vocab=VOCAB_SIZE, **{IDS: [2, 2, 3]})
    tensors.pop("lm_head.weight")
    for size in (VOCAB_SIZE, None):
        network = eagle.read(tensors, {**config, "draft_vocab_size": size})
        assert network.config.shares_lm_head
        check_drafts(network, target.model, generator)
    with pytest.raises(NotImplementedError, match=r"^tie_word_embeddings: expected False in a file without lm_head"):
        eagle.read(tensors, {**config, "tie_word_embeddings": True})


def test_rope_theta_is_a_setting_of_published_files(target, tmp_path):
    folder = write(tmp_path / "theirs", *modelopt_file(rope_scaling={"rope_type": "dynamic", "factor": 2.0}))
    drafter = specdec.load_drafter(folder, target, rope_theta=5e5)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5}
    assert drafter.network.config.layer.rope_parameters == rope
    drafter.save_pretrained(tmp_path / "ours")
    assert specdec.load_drafter(tmp_path / "ours", target).network.config.layer.rope_parameters == rope
    with pytest.raises(TypeError, match="rope_theta: eagle3 has no such setting; it has tap_layers"):
        specdec.load_drafter(tmp_path / "ours", target, rope_theta=1e4)
    with pytest.raises(ValueError, match="rope_theta: expected more than 0, got -1"):
        specdec.load_drafter(folder, target, rope_theta=-1)
    assert specdec.load_drafter(folder, target, tap_layers=(0, 2, 1)).tap_layers == (0, 2, 1)
    assert eagle.read(*eagle_file(), rope_theta=7e4).config.layer.rope_parameters["rope_theta"] == 7e4


# Embeddings


def test_an_embedding_is_known_in_any_dtype_and_among_others(target, generator):
    weight = target.model.get_input_embeddings().weight.detach()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert embeds_like(target, weight.to(dtype))
    assert not embeds_like(target, torch.randn(weight.shape, generator=generator))
    assert not embeds_like(target, weight * 1.02)


@torch.no_grad()
def test_an_embedding_of_its_own_is_used_and_saved(target, tmp_path, caplog, generator):
    tensors, config = speculators_file()
    tensors[EMBEDDING] = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
    drafter = specdec.load_drafter(write(tmp_path / "theirs", tensors, config), target, tree=(2, 1))
    (message,) = caplog.messages
    assert message.startswith("embed_tokens.weight: differs from the target's embedding; the file's is used. Either")
    drafter.save_pretrained(tmp_path / "ours")
    network = specdec.load_drafter(tmp_path / "ours", target).network
    assert network.config.own_embedding
    assert torch.equal(network.embed_tokens.weight, tensors[EMBEDDING])
    check_drafts(network, target.model, generator)


@pytest.mark.parametrize("kind", ["eagle", "falcon"])
def test_the_embedding_of_another_base_model_is_spoken_of(kind, target, tmp_path, caplog):
    tensors, config = eagle_file() if kind == "eagle" else falcon_file(target.model)
    embedding = target.model.get_input_embeddings().weight.detach()
    for value, count in ((embedding.half().float(), 0), (embedding + 0.01, 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            folder = write(tmp_path / kind, {**tensors, EMBEDDING: value}, config)
            assert specdec.load_drafter(folder, target, tree=3).kind == kind
        assert len(caplog.messages) == count
        assert all("the target's is used. Either" in message for message in caplog.messages)


def test_deepspecs_ids_count_outputs():
    tensors, config = eagle3_file(architectures=["Qwen3Eagle3Model"], target_layer_ids=[1, 15, 28])
    assert eagle.read(tensors, config).config.tap_layers == (1, 15, 28)
    norms = fill({f"midlayer.self_attn.{name}_norm.weight": (8,) for name in "qk"}, torch.float16)
    assert eagle.read({**tensors, **norms}, config).config.layer.qk_norm


@pytest.mark.parametrize("names", [("efficient_lm_head",), ("efficient_lm_head", "efficient_lm_head_down_proj")])
def test_eagle4_is_known_by_its_second_head(names, target, tmp_path):
    tensors, config = eagle3_file(dtype=torch.float32)
    tensors |= {f"{name}.weight": torch.randn(8, HIDDEN_SIZE) for name in names}
    with pytest.raises(NotImplementedError, match=r"^checkpoint: expected EAGLE-1, 2 or 3, got EAGLE-4, whose format"):
        specdec.load_drafter(write(tmp_path / "fourth", tensors, config), target)


def wide_model():
    """A target twice as wide as the drafters of this file."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 2 * HIDDEN_SIZE, "intermediate_size": 96, "num_hidden_layers": 4}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256)
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def test_a_drafter_may_be_narrower_than_its_target(tmp_path, generator):
    """`target_hidden_size` is the width of the taps; the drafter's own one is that of its layer, embedding and head."""
    tensors, config = speculators_file(target_hidden_size=2 * HIDDEN_SIZE)
    tensors |= fill({"fc.weight": (HIDDEN_SIZE, 6 * HIDDEN_SIZE)}, torch.float32)
    wide = wide_model()
    drafter = specdec.load_drafter(write(tmp_path / "narrow", tensors, config), wide, tree=(2, 1))
    assert drafter.network.config.target_hidden_size == 2 * HIDDEN_SIZE
    assert torch.equal(drafter.network.embed_tokens.weight, tensors[EMBEDDING])
    ids = torch.tensor([[3, 5, 7, 2]])
    plain = specdec.generate(wide, None, ids, max_new_tokens=6)
    assert torch.equal(specdec.generate(wide, drafter, ids, max_new_tokens=6), plain)
    with pytest.raises(ValueError, match=r"^drafter: expected target_hidden_size 64 as the target"):
        specdec.load_drafter(tmp_path / "narrow", build_model("llama"))
    tensors.pop(EMBEDDING)
    with pytest.raises(ValueError, match=r"^target_hidden_size: expected 64, .* shares the target's embedding"):
        specdec.load_drafter(write(tmp_path / "bare", tensors, config), wide)


def test_hass_is_read_as_eagle():
    tensors, config = eagle_file(bias=False, config_bias=False, architectures=["LlamaForCausalLMHass"])
    assert readers.recognise(set(tensors), config) == "eagle"
    assert not eagle.read(tensors, config).config.fc_bias
