"""The table of all positions is what the model's own rotary embedding gives, and is made anew when that changes."""

import pytest
import torch

from lib.families import FAMILIES, build_model, random_prompts
from lib.scoring import random_tree, score
from lib.tensors import assert_near
from specdec.models.target import fused
from specdec.models.target.rotary import RotaryTable
from specdec.models.target.target import Target

FREQUENCIES = {"rope_theta": 10000.0, "factor": 4.0}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear"} | FREQUENCIES,
    "yarn": {"rope_type": "yarn", "original_max_position_embeddings": 64} | FREQUENCIES,
    "dynamic": {"rope_type": "dynamic"} | FREQUENCIES,
}


def build_with(rope):
    model = build_model("llama")
    model.config.rope_parameters = ROPES[rope]
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


def table_of(model, dtype=torch.float32, known=None):
    return RotaryTable.of(model.model.rotary_emb, num_positions=256, dtype=dtype, known=known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["default", "linear", "yarn", "llama3", "qwen3"])
def test_rows_are_bit_by_bit_what_a_pass_would_make(name, dtype, generator, monkeypatch):
    monkeypatch.setattr("specdec.models.target.rotary._CHUNK", 100)
    model = build_with(name) if name in ROPES else build_model(name)
    positions = torch.randint(0, 256, (2, 5), generator=generator)
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=dtype), position_ids=positions)
    half = cos.shape[-1] // 2
    table = table_of(model, dtype)
    assert table.rows.dtype == dtype
    assert torch.equal(table.rows[positions], torch.cat((cos[..., :half], sin[..., :half]), -1))
    assert torch.equal(cos[..., :half], cos[..., half:])


def test_there_is_none_where_cosines_depend_on_more_than_the_position():
    assert table_of(build_with("dynamic")) is None
    model = build_model("llama")
    model.model.rotary_emb.register_forward_hook(lambda module, args, output: output)
    assert table_of(model) is None


def test_a_table_is_kept_until_the_embedding_changes():
    model = build_model("llama")
    embedding, first = model.model.rotary_emb, table_of(model)
    assert table_of(model, known=first) is first
    assert table_of(model, torch.float16, known=first) is not first
    embedding.inv_freq.mul_(0.5)
    second = table_of(model, known=first)
    assert not torch.equal(second.rows, first.rows)
    embedding.inv_freq = embedding.inv_freq.clone()
    assert table_of(model, known=second) is not second


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "opt"])
def test_layers_look_up_what_a_pass_would_make(family, generator, monkeypatch):
    """Bit by bit the same states, whether positions are looked up or given; also past the end of the context."""
    model = build_model(family)
    target = Target(model, fused=True)
    prompts, tree_tokens = random_prompts(generator, [19, 255, 13]), random_tree(generator, 3)
    calls = []
    kept = fused.rope_kv_write
    monkeypatch.setattr(fused, "rope_kv_write", lambda *args, **more: calls.append(more) or kept(*args, **more))
    looked_up = score(target, prompts, tree_tokens)
    assert [call["lengths"] is None for call in calls] == [False] * 3
    model.model.layers[0].register_forward_pre_hook(lambda *_: None)  # somebody looks at what layers are given
    given = score(target, prompts, tree_tokens)
    assert [call["lengths"] is None for call in calls[3:]] == [True] * 3
    assert torch.equal(looked_up.tree.logits, given.tree.logits)
    assert torch.equal(looked_up.cache.data, given.cache.data)


@pytest.mark.parametrize("change", [lambda m: m.inv_freq.mul_(0.5), lambda m: setattr(m, "attention_scaling", 0.5)])
def test_a_changed_embedding_is_noticed_between_two_calls(change, generator):
    model = build_model("llama")
    target = Target(model, fused=True)
    prompts, tree_tokens = random_prompts(generator, [9]), random_tree(generator, 1)
    before = score(target, prompts, tree_tokens).tree.logits
    change(model.model.rotary_emb)
    expected = score(Target(model, fused=False), prompts, tree_tokens).tree.logits
    got = score(target, prompts, tree_tokens).tree.logits
    assert not torch.allclose(got, before, atol=1e-2)
    assert_near(got, expected)
