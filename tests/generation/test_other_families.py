"""Families beyond the checked ones: a small random model of each decodes as transformers does, batched and ragged."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

import specdec
from lib.host_code import noisy_copy

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "gemma": {"head_dim": 16},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "glm4": {"head_dim": 16},
    "smollm3": {},
    "starcoder2": {"sliding_window": None},
    "gpt2": {"n_inner": 96, "num_key_value_heads": 4},
    "gpt_neox": {"num_key_value_heads": 4},
    "seed_oss": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**_EXPERTS, "n_routed_experts": 4, "head_dim": 16, "first_k_dense_replace": 1},
}


def build(family):
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    config = AutoConfig.for_model(family, **{**_SIZES, **FAMILIES[family]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_transformers(family, generator):
    model = build(family)
    ids = torch.randint(3, 96, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, :4], mask[1, :4] = 0, 0
    arguments = {"attention_mask": mask, "max_new_tokens": 16}
    expected = model.generate(ids, do_sample=False, **arguments)
    tree = specdec.TreeShape.from_k_config((3, 2))
    assert torch.equal(specdec.generate(model, "prompt_lookup", ids, **arguments), expected)
    assert torch.equal(specdec.generate(model, noisy_copy(model), ids, tree=tree, **arguments), expected)
