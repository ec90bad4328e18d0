"""Implementations that are not ours, which networks are compared with: `make references` installs them."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_FOLDER = Path(__file__).parents[2] / ".venv" / "references"


def reference(module: str) -> ModuleType:
    """A module of theirs, or the test is skipped by the name of what it lacks."""
    if str(_FOLDER) not in sys.path:
        sys.path.append(str(_FOLDER))  # behind our own packages
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"needs {module.partition('.')[0]}, which `make references` installs ({error})")


def block_settings(config: Any, **layer_settings: Any) -> dict[str, Any]:
    """What speculators' configurations of blocks (DFlash, DFlash2, DSpark) have in common, of a network of ours."""
    return {
        "transformer_layer_config": _qwen3_config(config, **layer_settings),
        "draft_vocab_size": config.num_draft_tokens,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.tap_layers],
        "mask_token_id": config.mask_token_id,
    }


def _qwen3_config(config: Any, **settings: Any) -> Any:
    """transformers' configuration of Qwen3 layers of the sizes of a network of ours."""
    from transformers import Qwen3Config

    layer = config.layer
    sizes = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=layer.num_attention_heads,
        num_key_value_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        max_position_embeddings=layer.max_position_embeddings,
        rms_norm_eps=layer.rms_norm_eps,
        rope_parameters=dict(layer.rope_parameters),
        **settings,
    )
    sizes._attn_implementation = "eager"
    return sizes
