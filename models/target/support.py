"""Which models can be targets, and what their configurations say of them."""

from typing import Any, cast

from torch import nn

__all__ = ["check_model", "decoder_layers", "sliding_window_of"]

_CHANGING_ROPE = ("longrope", "dynamic")


def check_model(model: Any) -> None:
    """Refuse, with the reason, whatever is not a decoder-only causal LM on one device."""
    is_module = isinstance(model, nn.Module)
    if not is_module or not hasattr(model, "config"):
        raise TypeError(f"model: expected a transformers causal LM, got {type(model).__name__}")
    name = type(model).__name__
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"model: expected a transformers causal LM, got {name}, which has a config but no LM head")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"model: expected a decoder-only model, got the encoder-decoder {name}")
    if model.get_output_embeddings() is None:
        raise ValueError(f"model: expected a model with an LM head, got {name}")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise ValueError(f"model: expected all parameters on one device, got {', '.join(devices)}")
    if not getattr(model, "_supports_attention_backend", False):
        raise NotImplementedError(f"model: {name} does not let its attention function be replaced, which specdec needs")
    decoder_layers(model.get_decoder())
    _check_rope(model)
    layer_types = set(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [])
    unknown = layer_types - {"full_attention", "sliding_attention"}
    if unknown:
        raise NotImplementedError(f"model: {name} has layers of the kinds {', '.join(sorted(unknown))}")


def _check_rope(model: Any) -> None:
    """Refuse rotary embeddings that change with the length of the text.

    A pass over a tree would change them for all of its nodes, as soon as its deepest node is long enough.
    """
    settings = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for one in (settings, *settings.values()):
        if isinstance(one, dict) and one.get("rope_type") in _CHANGING_ROPE:
            raise NotImplementedError(
                f"model: {type(model).__name__} has rotary embeddings of the type {one['rope_type']}, which change "
                "with the length of the text, so that drafts would not be scored as plain decoding scores them"
            )


def sliding_window_of(config: object) -> int | None:
    """The window of the sliding layers, None if every layer sees everything."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    if not getattr(config, "use_sliding_window", True):
        return None
    return window


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """The decoder layers, which OPT keeps one module deeper, and GPT-2 under another name.

    Raises:
        NotImplementedError: they are somewhere else.
    """
    owner = decoder.decoder if hasattr(decoder, "decoder") else decoder
    for name in ("layers", "h"):
        if hasattr(owner, name):
            return cast(nn.ModuleList, getattr(owner, name))
    raise NotImplementedError(f"model: {type(decoder).__name__} keeps its layers where specdec does not find them")
