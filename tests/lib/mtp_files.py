"""Targets with MTP heads in their own files, and files that hold a head alone."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 6
NUM_LAYERS = 3
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen2": {},
    "qwen3": {},
    "glm4_moe": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
    "qwen3_next": {
        **_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "qwen3_5_text": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
}


def config_of(family, **changes):
    """A small configuration of the family."""
    sizes = dict(_SIZES) if family != "deepseek_v3" else {k: v for k, v in _SIZES.items() if k != "head_dim"}
    return AutoConfig.for_model(family, **{**sizes, **FAMILIES[family], **changes})


def new_target(family, **changes):
    """A small random model of the family."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(family, **changes)).eval()
    model.generation_config.eos_token_id = None
    return model


def randomized(module, seed=1):
    """The module with weights so large that guesses differ from place to place; norms near one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if "inv_freq" in name or "embed_tokens" in name or "head.weight" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            is_norm = tensor.ndim == 1 and "norm" in name
            tensor.copy_(1 + 0.3 * noise if is_norm else noise / tensor.shape[-1] ** 0.5)
    return module.eval()


def separate_experts(tensors):
    """Tensors with one for every expert and projection, as most files have them."""
    separate = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                start = name.removesuffix("gate_up_proj")
                separate |= {f"{start}{expert}.gate_proj.weight": gate, f"{start}{expert}.up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                separate[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            separate[name] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in separate.items()}


def save_target(model, folder, head, *, config=None):
    """Save a model with the tensors of a head, in several shards with an index: its own, and two more of the head."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    own = load_file(file)
    file.unlink()
    names = sorted(head)
    shards = own, {name: head[name] for name in names[::2]}, {name: head[name] for name in names[1::2]}
    weight_map = {}
    for index, shard in enumerate(shards):
        name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        save_file({key: tensor.detach().clone().contiguous() for key, tensor in shard.items()}, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    edit_config(folder, **(config or {}))
    return folder


def edit_config(folder, **changes):
    """Change fields of the `config.json` in a folder."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def behind_layers(mtp, num_layers=NUM_LAYERS):
    """Tensors of transformers' `MtpModel` under the names of DeepSeek's and GLM's files."""
    renamed = {}
    for name, tensor in mtp.state_dict().items():
        if name.startswith("layers."):
            _, depth, rest = name.split(".", 2)
            rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            renamed[f"model.layers.{num_layers + int(depth)}.{rest}"] = tensor
    return separate_experts(renamed)
