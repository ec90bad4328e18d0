"""Falcon's files: the network's tensors under the names that it has here, beside the target's embedding."""

from collections.abc import Mapping
from typing import Any

import torch

from specdec.models.networks.base import load_strictly
from specdec.models.networks.falcon import FalconConfig, FalconNetwork
from specdec.models.networks.layer import DraftLayerConfig

__all__ = ["EMBEDDING", "read", "recognises"]

EMBEDDING = "embed_tokens.weight"


def recognises(names: set[str], _config: Mapping[str, Any]) -> bool:
    """Whether there is an LSTM in front of a decoder layer."""
    return {"lstm.weight_ih_l0", "layers.0.self_attn.q_proj.weight"} <= names


def read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> FalconNetwork:
    """Build a network. The authors' code trains the LSTM at every token by itself, so that it runs like that.

    Raises:
        ValueError: a missing, unexpected or misshapen tensor, or a missing field of the configuration, by name.
    """
    network = FalconNetwork(_config(tensors, config))
    expected = [network.config.vocab_size, network.config.hidden_size]
    embedding = tensors.get(EMBEDDING)
    if embedding is not None and list(embedding.shape) != expected:
        raise ValueError(f"{EMBEDDING}: expected shape {expected}, got {list(embedding.shape)}")
    load_strictly(network, tensors, ignored=frozenset({EMBEDDING}))  # equal to the target's
    return network


def _config(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> FalconConfig:
    """The configuration of the authors' file, from its `config.json`; defaults are those of the authors' code."""
    needed = ("k_mask", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if name not in config]
    if missing:
        raise ValueError(f"config.json: expected {', '.join(missing)} beside the tensors, got {sorted(config)}")
    heads = config["num_attention_heads"]
    return FalconConfig(
        vocab_size=config["vocab_size"],
        layer=DraftLayerConfig(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config["hidden_size"] // heads,
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
            # the authors' rotary embedding has this base whatever the file says
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        block_size=config["k_mask"],
        recurrent=False,
        lstm_bias=config.get("bias", True),
    )
