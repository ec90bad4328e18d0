"""Sizes of decoder layers from other people's `config.json`, whose names are those of transformers, of v4 or of v5."""

from collections.abc import Mapping
from typing import Any

from specdec.models.networks.layer import DraftLayerConfig

__all__ = ["layer_sizes", "layer_windows"]


def layer_sizes(
    fields: Mapping[str, Any], *, has_bias: bool = False, has_qk_norm: bool = False, rope_theta: float | None = None
) -> DraftLayerConfig:
    """Sizes of the layer of a `config.json`; defaults are those of EAGLE's authors' code.

    Args:
        fields: its content.
        has_bias: whether the file holds a bias of the queries.
        has_qk_norm: whether it holds norms of the heads of queries and keys.
        rope_theta: base of the rotary embedding, whatever the fields say.

    Raises:
        ValueError: a size that is missing, or out of range.
    """
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if name not in fields]
    if missing:
        raise ValueError(f"config.json: expected {', '.join(missing)} beside the tensors, got {sorted(fields)}")
    if rope_theta is not None and not rope_theta > 0:
        raise ValueError(f"rope_theta: expected more than 0, got {rope_theta}")
    heads = fields["num_attention_heads"]
    rope = _rope(fields)
    return DraftLayerConfig(
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        # the drafter of Vicuna-33B has another name for it; it sizes nothing but tables of scaled rotary embeddings
        max_position_embeddings=fields.get("max_position_embeddings", fields.get("max_sequence_length", 2048)),
        rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
        attention_bias=fields.get("qkv_bias", has_bias),
        qk_norm=has_qk_norm,
        rope_parameters=rope if rope_theta is None else {**rope, "rope_theta": float(rope_theta)},
    )


def layer_windows(fields: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Of each layer of a `config.json` how many positions a token sees, its own included; None for all.

    Args:
        fields: its content: `layer_types`, which say which layers have one, and `sliding_window`.
        num_layers: how many layers there are.

    Raises:
        NotImplementedError: fields that leave open which layers have a window, or how large it is.
    """
    types, size = tuple(fields.get("layer_types") or ()), fields.get("sliding_window")
    if not types and fields.get("use_sliding_window"):
        raise NotImplementedError("use_sliding_window: expected False without layer_types, got True")
    if "sliding_attention" not in types:
        return (None,) * num_layers
    if len(types) != num_layers or set(types) - {"sliding_attention", "full_attention"}:
        raise NotImplementedError(
            f"layer_types: expected full_attention or sliding_attention for each of {num_layers} layers, got {types}"
        )
    if not isinstance(size, int) or fields.get("use_sliding_window") is False:
        raise NotImplementedError(
            f"sliding_window: expected a number, and use_sliding_window not False, with {types}, got {size}"
        )
    return tuple(size if of_layer == "sliding_attention" else None for of_layer in types)


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings under the names of transformers v5, from files that were written for v4."""
    if fields.get("rope_parameters"):
        return dict(fields["rope_parameters"])
    scaling = dict(fields.get("rope_scaling") or {})
    plain_type = scaling.pop("type", "default")
    return {"rope_type": plain_type, "rope_theta": float(fields.get("rope_theta") or 10000.0), **scaling}
