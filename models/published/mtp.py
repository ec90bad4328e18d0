"""MTP heads as they stand in the files of the target itself, or by themselves as `speculators` saves them.

Layouts, L being the target's number of layers:

    DeepSeek-V3, GLM    model.layers.{L+k}.{enorm,hnorm,eh_proj,shared_head.norm}, and a decoder layer of that name
    Qwen3-Next, 3.5     mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc,norm}, mtp.layers.0
    MiMo                model.mtp_layers.{k}.{token_layernorm,hidden_layernorm,input_proj,final_layernorm}, and a
                        decoder layer; states are joined in front of embeddings
    speculators `mtp`   MiMo's names, `mtp_layers.0`; embeddings in front of states

Copies of the target's embedding and LM head, which some files hold beside them, are not read here: `copies` names them,
and whoever knows the target compares them. Experts that have a tensor each are put together as transformers has them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from specdec.models.networks.base import load_strictly
from specdec.models.networks.layer import DraftLayerConfig
from specdec.models.networks.mtp import MtpConfig, MtpNetwork
from specdec.models.published.layers import layer_sizes

__all__ = ["copies", "read", "recognises"]

# families whose decoder layers are a `DraftLayer`
_DENSE = ("llama", "qwen2", "qwen3", "mimo")
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_COPIES = {"embed_tokens.weight": "embedding", "shared_head.head.weight": "LM head"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True, slots=True)
class _Layout:
    """Names in files: of the norm of embeddings, of that of states, of the projection, and of the norm behind."""

    pattern: re.Pattern[str]
    parts: tuple[str, str, str, str]
    states_first: bool = False


_LAYOUTS = (
    _Layout(
        re.compile(r"(?P<root>(?:.*\.)?layers\.)(?P<index>\d+)\.(?:enorm|hnorm|eh_proj|shared_head\.norm)\.weight"),
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    ),
    _Layout(
        re.compile(r"(?P<root>(?:.*\.)?mtp\.)(?:fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\.weight"),
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    ),
    _Layout(
        re.compile(
            r"(?P<root>(?:.*\.)?mtp_layers\.)(?P<index>\d+)\.(?:token_layernorm|hidden_layernorm|input_proj|final_layernorm)\.weight"
        ),
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        states_first=True,
    ),
)


def recognises(names: set[str], config: Mapping[str, Any]) -> bool:
    """Whether there is an MTP head and no more: of a target with one, `kind` says which of both is meant."""
    heads = _places(names, config)
    return bool(heads) and all(
        any(name.startswith(place.prefixes) for place in heads) for name in names - _target(names)
    )


def copies(names: set[str], config: Mapping[str, Any]) -> dict[str, str]:
    """By name, tensors of the head that ought to be copies: of the target's "embedding" or "LM head"."""
    found: dict[str, str] = {}
    for place in _places(names, config):
        for end, what in _COPIES.items():
            found |= {prefix + end: what for prefix in place.prefixes if prefix + end in names}
    return found


def read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> MtpNetwork:
    """Build a network from the tensors of the head; no others are read.

    Raises:
        ValueError: files without such a head, a missing, unexpected or misshapen tensor, or a missing field, by name.
        NotImplementedError: quantized files, or a field that asks for what is not built here.
    """
    fields = _fields(config)
    _check(fields, config)
    places = _places(set(tensors), config)
    if not places:
        expected = "model.layers.{L}.eh_proj.weight, mtp.fc.weight or model.mtp_layers.0.input_proj.weight"
        raise ValueError(f"checkpoint: expected the tensors of an MTP head ({expected}), got none of them")
    found: dict[str, torch.Tensor] = {}
    given = copies(set(tensors), config)
    for depth, place in enumerate(places):
        mine = [name for name in tensors if name.startswith(place.prefixes) and name not in given]
        found |= {f"depths.{depth}.{place.ours(name)}": tensors[name] for name in mine if "rotary_emb" not in name}
    found = _with_experts_together(found)
    network = MtpNetwork(_config(fields, found, len(places), places[0].states_first(fields, config)))
    load_strictly(network, found)
    return network


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tensors of one depth are.

    Attributes:
        layout: their names.
        prefix: in front of the names of the parts.
        block: in front of the names of the decoder layer's tensors.
    """

    layout: _Layout
    prefix: str
    block: str

    @property
    def prefixes(self) -> tuple[str, ...]:
        """How its names begin."""
        return tuple(dict.fromkeys((self.prefix, self.block)))

    def ours(self, name: str) -> str:
        """Our name below the depth, for one of its names."""
        parts = dict(zip(self.layout.parts, ("token_norm", "state_norm", "fc", "final_norm"), strict=True))
        part = name.removeprefix(self.prefix).removesuffix(".weight")
        return f"{parts[part]}.weight" if part in parts else "block." + name.removeprefix(self.block)

    def states_first(self, fields: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
        """Whether states are joined in front of embeddings."""
        by_name = self.layout.states_first and "speculators_model_type" not in config
        return bool(fields.get("mtp_hidden_states_first", by_name))


def _places(names: set[str], config: Mapping[str, Any]) -> list[_Place]:
    """Where the depths of a head are; the config counts when it asks for more than is there, so that it is named."""
    fields = config.get("text_config") or config
    for layout in _LAYOUTS:
        matches = [match for match in map(layout.pattern.fullmatch, names) if match is not None]
        if not matches:
            continue
        root = min(match["root"] for match in matches)
        if "index" not in layout.pattern.groupindex:
            return [_Place(layout, root, root + "layers.0.")]
        indices = {int(match["index"]) for match in matches}
        # behind the target's own layers, or from 0 on; a smaller target's files may hold those of a larger one
        is_behind = layout is _LAYOUTS[0]
        first = int(fields.get("num_hidden_layers", min(indices))) if is_behind else 0
        count = max([len(indices), *(int(fields.get(name) or 0) for name in _COUNTS)])
        return [_Place(layout, f"{root}{index}.", f"{root}{index}.") for index in range(first, first + count)]
    return []


def _target(names: set[str]) -> set[str]:
    """Tensors of the target's that stand beside a head in files of their own."""
    return {name for name in names if name.rpartition("model.")[2] in ("embed_tokens.weight", "lm_head.weight")}


def _fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is said of the layers, with the defaults of the family where transformers knows it."""
    fields = dict(config.get("transformer_layer_config") or config.get("text_config") or config)
    family = fields.get("model_type")
    try:
        known = AutoConfig.for_model(
            family, **{name: fields[name] for name in fields if name != "model_type"}
        ).to_dict()
    except (ValueError, KeyError):  # MiMo's, which comes with code of its own
        return fields
    # what the class knows under another name stays under that of the file too
    return {**fields, **known}


def _check(fields: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse what changes the result and is not built here."""
    for name, expected, is_other in (
        ("quantization_config", "weights that are not quantized", bool(config.get("quantization_config"))),
        ("chain_hidden_post_norm", "a norm behind every layer", "chain_hidden_post_norm" in fields),
        ("hidden_act", "silu", fields.get("hidden_act", "silu") != "silu" and fields.get("model_type") in _DENSE),
        ("use_sliding_window", "false", bool(fields.get("use_sliding_window"))),
    ):
        if is_other:
            got = fields.get(name, config.get(name))
            raise NotImplementedError(f"{name}: expected {expected} in files with an MTP head, got {got!r}")


def _config(
    fields: Mapping[str, Any], found: Mapping[str, torch.Tensor], num_layers: int, states_first: bool
) -> MtpConfig:
    """The configuration of the head."""
    attention = "depths.0.block.self_attn."
    sizes = layer_sizes(
        fields, has_bias=f"{attention}q_proj.bias" in found, has_qk_norm=f"{attention}q_norm.weight" in found
    )
    family = None
    if fields.get("model_type") not in _DENSE:
        sizes, family = _without_rope(sizes), dict(fields)
    return MtpConfig(fields["vocab_size"], sizes, num_layers, states_first, family)


def _without_rope(sizes: DraftLayerConfig) -> DraftLayerConfig:
    """The sizes of a family's own layers, whose rotary embedding is the family's."""
    return DraftLayerConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.max_position_embeddings,
        rms_norm_eps=sizes.rms_norm_eps,
    )


def _with_experts_together(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts' tensors as `gate_up_proj [E, 2 I, C]` and `down_proj [E, C, I]`; all others as they are."""
    together: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            together[name] = tensor
        else:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    for name, parts in experts.items():
        indices = range(1 + max(index for index, _ in parts))
        wanted = [(index, part) for index in indices for part in ("gate_proj", "up_proj", "down_proj")]
        missing = [f"{name}.{index}.{part}.weight" for index, part in wanted if (index, part) not in parts]
        if missing:
            raise ValueError(f"checkpoint: missing tensors {missing[:5]}")
        pairs = [torch.cat((parts[index, "gate_proj"], parts[index, "up_proj"])) for index in indices]
        together[f"{name}.gate_up_proj"] = torch.stack(pairs)
        together[f"{name}.down_proj"] = torch.stack([parts[index, "down_proj"] for index in indices])
    return together
