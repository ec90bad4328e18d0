"""Hydra's published files: the authors' names, aliases and unused tensors, and what is refused."""

from dataclasses import replace

import pytest
import torch

from lib.drafter_checks import propose
from lib.families import build_model, random_prompts
from lib.hydra_equations import LAYER, literal_tokens
from lib.published_files import hydra_file, network_as_published, published_names
from specdec.drafters.hydra import Hydra
from specdec.models.published import hydra
from specdec.trees.shape import TreeShape

PUBLISHED = {"hydra_num_heads": 3, "hydra_num_layers": 4, "hydra_head_arch": "prefix-mlp", "grounded_heads": True}
TREE = TreeShape.from_k_config((3, 2, 2))


def test_the_layout_is_the_one_of_the_published_files():
    names = set(hydra_file(network_as_published(4, num_heads=4)))
    blocks = ("1.linear", "1.res_connection", "3.linear", "5.linear", "7.linear")
    modules = [f"hydra_mlp.{head}.{block}" for head in range(4) for block in blocks]
    modules += [f"hydra_lm_head.{head}.1" for head in range(4)]
    expected = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    assert {name for name in names if name.startswith("hydra")} == expected
    assert "prefix_embeding_layer.layers.0.self_attn.q_proj.weight" in names
    assert "prefix_embeding_layer.norm.weight" in names
    names = set(hydra_file(network_as_published(2, prefix=None)))
    assert {"hydra_mlp.2.0.res_connection.bias", "hydra_mlp.2.1.linear.weight", "hydra_lm_head.2.weight"} <= names


@pytest.mark.parametrize("prefix", [LAYER, None], ids=["prefix-mlp", "mlp"])
@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_published_files_load(num_layers, prefix, tmp_path, generator):
    network = network_as_published(num_layers, prefix)
    torch.save(hydra_file(network), tmp_path / "hydra_lm_head.pt")
    tensors = torch.load(tmp_path / "hydra_lm_head.pt", weights_only=True)
    # the numbers in their config are not to be trusted
    config = {**PUBLISHED, "hydra_head_arch": "prefix-mlp" if prefix else "mlp", "hydra_num_layers": 1}
    assert hydra.recognises(set(tensors), {})
    loaded = hydra.read(tensors, config)
    like_ours = None if prefix is None else replace(LAYER, max_position_embeddings=2048)
    assert loaded.config == replace(network.config, prefix=like_ours)
    model, text = build_model("llama"), random_prompts(generator, [6])[0]
    tree = propose(Hydra(loaded, TREE), model, text, 7)
    assert tree.tokens[0].tolist() == literal_tokens(network, model, text, 7, TREE)


def test_files_keep_their_dtype_and_need_no_config():
    loaded = hydra.read(hydra_file(network_as_published(4), torch.bfloat16), {})
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert loaded.config.shared_tail


def test_tail_blocks_that_differ_stay_apart():
    tensors = hydra_file(network_as_published(3))
    tensors["hydra_mlp.1.5.linear.bias"] = tensors["hydra_mlp.1.5.linear.bias"] + 1
    loaded = hydra.read(tensors, {})
    assert not loaded.config.shared_tail
    assert torch.equal(loaded.heads[1].blocks[2].linear.bias, loaded.heads[1].blocks[1].linear.bias + 1)


@pytest.mark.parametrize("name", sorted(published_names(network_as_published(4))))
def test_a_missing_tensor_is_named(name):
    tensors = hydra_file(network_as_published(4))
    del tensors[name]
    with pytest.raises(ValueError, match=rf"missing tensors \['{name}'\]"):
        hydra.read(tensors, PUBLISHED)


@pytest.mark.parametrize("name", sorted(published_names(network_as_published(2))))
def test_a_misshapen_tensor_is_named(name):
    tensors = hydra_file(network_as_published(2))
    tensors[name] = torch.zeros(3, *tensors[name].shape)
    with pytest.raises(ValueError, match=f"{name}: expected"):
        hydra.read(tensors, PUBLISHED | {"hydra_num_layers": 2})


@pytest.mark.parametrize(
    ("changes", "config", "error", "match"),
    [
        ({"extra.weight": torch.zeros(1)}, {}, ValueError, r"unexpected tensors \['extra.weight'\]"),
        ({}, {"hydra_num_heads": 4}, ValueError, "missing tensors .*hydra_lm_head.3.1.bias"),
        ({}, {"hydra_head_arch": "eagle-attn"}, NotImplementedError, "hydra_head_arch: .* got 'eagle-attn'"),
        ({}, {"grounded_heads": False}, NotImplementedError, "grounded_heads: expected true, got False"),
        ({}, {"hidden_state_offset": 2}, NotImplementedError, "hidden_state_offset: expected 0, .* got 2"),
        ({}, {"rope_theta": 5e5}, ValueError, "rotary_emb.inv_freq: expected the frequencies of base 500000"),
    ],
)
def test_files_of_another_kind_are_refused(changes, config, error, match):
    with pytest.raises(error, match=match):
        hydra.read(hydra_file(network_as_published(4)) | changes, PUBLISHED | config)


def test_heads_of_the_prefix_layer_are_vicunas_where_the_file_does_not_say():
    tensors = hydra_file(network_as_published(4))
    del tensors["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"]
    with pytest.raises(ValueError, match="q_proj.weight: expected rows for heads of 128, got 64"):
        hydra.read(tensors, PUBLISHED)
    with pytest.raises(ValueError, match=r"expected tensors named 'hydra_mlp.0.0.linear.weight', ..., got none"):
        hydra.read({}, {})
