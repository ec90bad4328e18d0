"""Attention of transformers' own layers over our passes, and layers of a family by themselves.

transformers hands keywords that it does not know through to the attention function. So one function of ours,
registered under the name `specdec`, serves every family: the keyword `specdec_pass` says where new keys and values go
and what each query may see. A whole model is hooked this way by `specdec.models.target.target`; a draft network may
hold single layers of a family, such as those with experts, which were made for it from the beginning.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModel

from specdec.models.common.passes import PackedPass, PromptPass, TreePass

__all__ = ["ATTENTION_NAME", "FamilyParts", "family_parts", "register_attention"]

ATTENTION_NAME = "specdec"
# Keywords by which other families change attention itself; ignoring one would change the model's output.
_UNSUPPORTED_ATTENTION = ("softcap", "s_aux", "head_mask", "position_bias")
# of a `config.json`, what says nothing about layers
_NOT_OF_LAYERS = ("architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "_name_or_path")


@dataclass(frozen=True, slots=True)
class FamilyParts:
    """What a network takes from a family.

    Attributes:
        layers: its decoder layers, whose tensors are on "meta" until they are loaded.
        rotary: its rotary embedding, on the CPU.
        new_norm: makes a norm of its kind over states, on "meta".
    """

    layers: list[nn.Module]
    rotary: nn.Module
    new_norm: Callable[[], nn.Module]


def family_parts(fields: Mapping[str, Any], num_layers: int) -> FamilyParts:
    """Decoder layers with full attention, and with experts where the family has layers with and without.

    Args:
        fields: content of its `config.json`.
        num_layers: how many; their indices count from 0.

    Raises:
        NotImplementedError: a family that transformers does not know, or whose model is not made of such layers.
    """
    family = fields.get("model_type")
    settings = {name: value for name, value in fields.items() if name not in (*_NOT_OF_LAYERS, "model_type")}
    settings |= {"num_hidden_layers": num_layers}
    for name, value in (
        ("layer_types", ["full_attention"] * num_layers),
        ("mlp_layer_types", ["sparse"] * num_layers),
        ("first_k_dense_replace", 0),
        ("mlp_only_layers", []),
    ):
        if name in settings:
            settings[name] = value
    try:
        # as a file holds it: configurations change what they are given
        config = AutoConfig.for_model(family, **json.loads(json.dumps(settings)))
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    except (ValueError, KeyError) as error:
        raise NotImplementedError(f"model_type: expected a family of causal LMs of transformers, got {family!r}") from (
            error
        )
    parts: list[Any] = [getattr(model, name, None) for name in ("layers", "rotary_emb", "norm")]
    if None in parts:
        raise NotImplementedError(f"model_type: expected a family with layers, rotary embedding and norm, got {family}")
    layers, rotary, norm = parts
    register_attention()
    model.config._attn_implementation = ATTENTION_NAME
    with torch.device("cpu"):
        own_rotary = type(rotary)(model.config)

    def new_norm() -> nn.Module:
        with torch.device("meta"):
            return type(norm)(config.hidden_size, eps=config.rms_norm_eps)

    return FamilyParts(list(layers), own_rotary, new_norm)


def register_attention() -> None:
    """Make the attention function known to transformers; to do it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    specdec_pass: PackedPass | PromptPass | TreePass | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls while a model is hooked.

    Args:
        module: the attention layer.
        query: [B, HQ, T, D], rotary embedding applied.
        key: [B, HK, S, D] the layer's whole cache.
        value: [B, HK, S, D].
        attention_mask: not used.
        scaling: factor of the scores.
        sliding_window: tokens that a query sees, itself included; None for all.
        specdec_pass: where this pass is and what its queries may see.
        kwargs: must not hold anything that changes attention.

    Returns:
        [B, T, HQ, D] and no weights.
    """
    if specdec_pass is None:
        raise RuntimeError("model: it is hooked by specdec; run it again once specdec has finished with it")
    unsupported = [name for name in _UNSUPPORTED_ATTENTION if kwargs.get(name) is not None]
    if unsupported:
        raise NotImplementedError(f"attention with {', '.join(unsupported)} is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return specdec_pass.attend(query, key, value, scale=float(scale), window=sliding_window), None
