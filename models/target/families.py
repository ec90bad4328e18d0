"""Which models can be targets: the one table of what is known of their families, and what any other has to show.

A new family is an entry in `FAMILIES`, beside a small model of it in `tests/lib/families.py`, on which every test of
targets then runs.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from torch import nn
from transformers import OPTForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

__all__ = ["FAMILIES", "Family", "check_model", "decoder_layers", "is_decoder_and_head"]
__all__ += ["sliding_window_of"]


@dataclass(frozen=True, slots=True)
class Family:
    """A tested family. Of another one, a model is compared once with its own forward pass.

    Attributes:
        causal_lm: its model with the LM head, whose forward pass is its decoder's and then the LM head: no scaling of
            logits, no cap on them.
        decoder: the decoder, if it is an embedding, a rotary embedding, layers and a norm, one after the other.
        layer: its decoder layer, if the fused path computes what that does, from the three parts below.
        attention: self-attention with q_proj, k_proj, v_proj and o_proj; q_norm and k_norm where it has some.
        mlp: a gated MLP with gate_proj, up_proj and down_proj.
        norm: an RMS norm with `weight` and `variance_epsilon`.
        rotary: the rotary embedding, which makes cosines and sines of `inv_freq`.
        has_one_window: all attention layers have the sliding window of the configuration; else each knows its own.
    """

    causal_lm: type[PreTrainedModel]
    decoder: type[nn.Module] | None = None
    layer: type[nn.Module] | None = None
    attention: type[nn.Module] | None = None
    mlp: type[nn.Module] | None = None
    norm: type[nn.Module] | None = None
    rotary: type[nn.Module] | None = None
    has_one_window: bool = False


def _llama_shaped(modeling: ModuleType, name: str, *, has_one_window: bool = False) -> Family:
    """A family whose classes are named, and do, as LLaMA's."""
    parts = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
    causal_lm, decoder, layer, attention, mlp, norm, rotary = (getattr(modeling, name + part) for part in parts)
    return Family(causal_lm, decoder, layer, attention, mlp, norm, rotary, has_one_window)


FAMILIES = {
    "llama": _llama_shaped(modeling_llama, "Llama"),
    "mistral": _llama_shaped(modeling_mistral, "Mistral", has_one_window=True),
    "qwen2": _llama_shaped(modeling_qwen2, "Qwen2"),
    "qwen3": _llama_shaped(modeling_qwen3, "Qwen3"),
    "opt": Family(OPTForCausalLM),
}
"""By `model_type` of their configurations."""

_CHANGING_ROPE = ("longrope", "dynamic")


def is_decoder_and_head(model: PreTrainedModel) -> bool:
    """Whether a model's forward pass is its decoder's, then its LM head on the states, and nothing else."""
    return (
        type(model) in (family.causal_lm for family in FAMILIES.values())
        and "forward" not in vars(model)
        and not (model._forward_hooks or model._forward_pre_hooks)
        and model._compiled_call_impl is None
    )


def check_model(model: Any, *, may_lack_data: bool = False) -> None:
    """Refuse, with the reason, whatever is not a decoder-only causal LM on one device, which is not "meta".

    Args:
        model: of any type.
        may_lack_data: allow the meta device too.
    """
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
    if len(devices) != 1 or (devices == ["meta"] and not may_lack_data):
        raise ValueError(f"model: expected all parameters on one device, got {', '.join(devices)}")
    if not getattr(model, "_supports_attention_backend", False):
        raise NotImplementedError(f"model: {name} does not let its attention function be replaced, which specdec needs")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise NotImplementedError(
            f"model: {name} puts trained states before the text (PEFT prompt learning), which passes over trees would "
            "leave out; adapters in the layers, as LoRA's, are kept"
        )
    decoder_layers(model.get_decoder())
    _check_rope(model)
    if getattr(model.config.get_text_config(decoder=True), "is_heterogeneous", False):  # gemma4
        raise NotImplementedError(f"model: {name} has layers of different sizes, which one cache cannot hold")
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
