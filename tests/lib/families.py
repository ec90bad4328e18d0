"""Small random models of every checked family, with weights large enough that greedy decoding is not one loop."""

from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 96
HIDDEN_SIZE = 64

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LLAMA_SIZES = {"intermediate_size": 96, "num_key_value_heads": 2, "initializer_range": 0.2}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _new_model(model_type: str, **changes: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_SIZES, **changes))


_llama = partial(_new_model, **_LLAMA_SIZES)
FAMILIES = {
    "llama": partial(_llama, "llama"),
    "llama3": partial(_llama, "llama", tie_word_embeddings=True, rope_parameters=_LLAMA3_ROPE),
    "mistral": partial(_llama, "mistral", sliding_window=None),
    "mistral_window": partial(_llama, "mistral", sliding_window=12),
    "qwen2": partial(_llama, "qwen2"),
    "qwen2_window": partial(_llama, "qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "qwen3": partial(_llama, "qwen3", head_dim=16),
    "opt": partial(_new_model, "opt", word_embed_proj_dim=HIDDEN_SIZE, ffn_dim=96, init_std=0.2),
}


def build_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A model of the family, in eval mode, fp32; the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = FAMILIES[family]().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def random_prompts(generator: torch.Generator, lengths: list[int]) -> list[torch.Tensor]:
    """One 1-D int64 prompt per length, without the pad token 0."""
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def pad(prompts: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T] ids and attention mask, padded with 0 on the left or on the right."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        where = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, where] = prompt
        mask[row, where] = 1
    return ids, mask
