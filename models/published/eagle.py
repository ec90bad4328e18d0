"""EAGLE files as their trainers write them, brought into one layout: names of tensors, and what `config.json` says.

Layouts:    the authors' and SpecForge's (`midlayer.*`), speculators', ModelOpt's and DeepSpec's (`layers.0.*` with a
            `hidden_norm`, further layers behind it; speculators keep the sizes under `transformer_layer_config`); any
            of them below `model.`
Layer ids:  which layers of the target EAGLE-3 reads; trainers count layers by their outputs or by their inputs, see
            `_tap_layers`. Ours are outputs
Refused:    fields that change the arithmetic without adding a tensor, by name (`_check_fields`); those that add one are
            seen by the strict loading of tensors; EAGLE-4's files, whose format is not open

The table of who writes what, with sources, is in docs/drafters/eagle.md.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch

from specdec.models.networks.base import load_strictly
from specdec.models.networks.eagle import EagleConfig, EagleNetwork
from specdec.models.networks.eagle3 import DEFAULT_NUM_TAPS, Eagle3Config, Eagle3Network
from specdec.models.networks.layer import DraftLayerConfig
from specdec.models.published.layers import layer_sizes, layer_windows
from specdec.models.published.vocabulary import check_tables, complete_tables

__all__ = ["EMBEDDING", "PLAIN_VALUES", "load_third", "read", "read_third", "recognises", "recognises_third"]

EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_DEEPSPEC = "Qwen3Eagle3Model"
# Names that some trainers have for the same thing; what they count is not known well enough to read them.
_OTHER_LAYER_IDS = ("aux_hidden_state_layer_ids", "aux_hidden_states_layer_ids", "target_layer_ids")
# Fields of `config.json`, and the values with which the arithmetic is that of our networks.
PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "speculators_model_type": ("eagle3",),
    "hidden_act": ("silu",),
    "logit_scale": (1.0,),
    "partial_rotary_factor": (1.0,),
    "rope_parameters.partial_rotary_factor": (1.0,),
    "rope_scaling.partial_rotary_factor": (1.0,),
    "parallel_drafting": (False,),
    "eagle_config.use_aux_hidden_state": (True,),
    "eagle_config.parallel_draft_step": (0, 1),
}


def recognises(names: set[str], config: Mapping[str, Any]) -> bool:
    """Whether there are an input projection and a layer of EAGLE-3, or a layer 0 without input norm; or EAGLE-4."""
    if _is_fourth(names, config):
        return True
    plain = {name.removeprefix("model.") for name in names}
    has_first_layer = any(name.startswith("layers.0.") for name in plain)
    is_first = has_first_layer and "layers.0.input_layernorm.weight" not in plain
    return "fc.weight" in plain and (is_first or _is_third(plain))


def recognises_third(names: set[str], config: Mapping[str, Any]) -> bool:
    """Whether the file is EAGLE-3's."""
    return recognises(names, config) and _is_third({name.removeprefix("model.") for name in names})


def read(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    tap_layers: Sequence[int] | None = None,
    rope_theta: float | None = None,
) -> EagleNetwork | Eagle3Network:
    """Build a network. Files hold fp32 as a rule; the target's dtype is taken on when a drafter is bound.

    An embedding in a file of EAGLE-3 becomes the network's own; `share_embedding` gives it up again.

    Args:
        tensors: the file's tensors by name, in any of the layouts of docs/drafters/eagle.md.
        config: content of the `config.json` beside it.
        tap_layers: decoder layers (0-based) whose outputs EAGLE-3 reads, whatever the file says.
        rope_theta: base of the rotary embedding, whatever the file says.

    Raises:
        ValueError: a missing, unexpected or misshapen tensor, by name; contradicting vocabulary tables; or a
            configuration that does not say what has to be known.
        NotImplementedError: a field of the configuration asks for other arithmetic than the network's.
    """
    given = None if tap_layers is None else tuple(tap_layers)
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if _is_fourth(tensors, config):
        raise NotImplementedError("checkpoint: expected EAGLE-1, 2 or 3, got EAGLE-4, whose format is not open")
    if _is_third(tensors):
        third, tensors = read_third(tensors, config, PLAIN_VALUES, tap_layers=given, rope_theta=rope_theta)
        network = Eagle3Network(third)
        load_third(network, tensors)
        return network
    fields = _all_fields(config)
    _check_fields(fields, PLAIN_VALUES)
    layer = layer_sizes(fields, has_bias="layers.0.self_attn.q_proj.bias" in tensors, rope_theta=rope_theta)
    if given is not None:
        raise ValueError(f"tap_layers: expected None with EAGLE-1 and EAGLE-2, got {given}")
    if any(layer_windows(fields, 1)) or fields.get("target_hidden_size") not in (None, layer.hidden_size):
        name = "target_hidden_size" if fields.get("target_hidden_size") else "layer_types"
        raise NotImplementedError(f"{name}: expected none in EAGLE-1 and EAGLE-2, got {fields[name]}")
    _drop_embedding(tensors, [fields["vocab_size"], layer.hidden_size])
    first = EagleNetwork(EagleConfig(fields["vocab_size"], layer, fc_bias=fields.get("bias", True)))
    load_strictly(first, tensors)
    return first


def read_third(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    plain_values: Mapping[str, tuple[Any, ...]],
    *,
    tap_layers: tuple[int, ...] | None,
    rope_theta: float | None,
) -> tuple[Eagle3Config, dict[str, torch.Tensor]]:
    """What a file of EAGLE-3's family says, and its tensors under our names; errors as of `read`.

    Args:
        tensors: the file's tensors by name.
        config: content of the `config.json` beside it.
        plain_values: by the name of a field, the values with which the arithmetic is that of our network.
        tap_layers: decoder layers (0-based) whose outputs are read, whatever the file says.
        rope_theta: base of the rotary embedding, whatever the file says.
    """
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    renamed = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in plain.items()}
    if len(renamed) < len(tensors):
        raise ValueError("checkpoint: expected its first layer once, as midlayer or as layers.0, got both")
    fields = _all_fields(config)
    _check_fields(fields, plain_values)
    layer = layer_sizes(
        fields,
        has_bias="midlayer.self_attn.q_proj.bias" in renamed,
        has_qk_norm="midlayer.self_attn.q_norm.weight" in renamed,
        rope_theta=rope_theta,
    )
    return _third_config(renamed, config, fields, layer, tap_layers), renamed


def load_third(network: Eagle3Network, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the tensors of `read_third`, and refuse tables that contradict each other.

    Raises:
        ValueError: a missing, unexpected or misshapen tensor, or such tables.
    """
    load_strictly(network, tensors)
    check_tables(network)


def _third_config(
    tensors: dict[str, torch.Tensor],
    config: Mapping[str, Any],
    fields: Mapping[str, Any],
    layer: DraftLayerConfig,
    tap_layers: tuple[int, ...] | None,
) -> Eagle3Config:
    """The configuration of an EAGLE-3 file, whose tables of the draft vocabulary are completed in `tensors`."""
    vocab_size = fields["vocab_size"]
    head_size = tensors[_HEAD].shape[0] if _HEAD in tensors else vocab_size
    draft_vocab_size = fields.get("draft_vocab_size") or head_size
    shares_lm_head = _HEAD not in tensors and draft_vocab_size == vocab_size
    if shares_lm_head and fields.get("tie_word_embeddings"):
        raise NotImplementedError(f"tie_word_embeddings: expected False in a file without {_HEAD}, got True")
    complete_tables(tensors, vocab_size, draft_vocab_size)
    indices = [int(found[1]) for name in tensors if (found := re.match(r"layers\.(\d+)\.", name))]
    num_layers = 1 + max(indices, default=0)
    windows = layer_windows(fields, num_layers)
    width = fields.get("target_hidden_size")
    return Eagle3Config(
        vocab_size=vocab_size,
        layer=layer,
        tap_layers=_taps(tensors, config, width or layer.hidden_size, tap_layers),
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=_norm_before_residual(fields),
        norm_output=_switch(fields, "norm_output"),
        feature_norm=_feature_norm(tensors, fields),
        own_embedding=EMBEDDING in tensors,
        shares_lm_head=shares_lm_head,
        num_layers=num_layers,
        windows=windows if any(windows) else None,
        target_hidden_size=None if width == layer.hidden_size else width,
    )


def _is_third(names: Collection[str]) -> bool:
    """Whether tensors of these names, without `model.`, are EAGLE-3's."""
    return "layers.0.hidden_norm.weight" in names or any(name.startswith("midlayer.") for name in names)


def _is_fourth(names: Collection[str], config: Mapping[str, Any]) -> bool:
    """Whether a file is EAGLE-4's."""
    named = any("Eagle4" in str(name) for name in config.get("architectures") or ())
    return named or any(name.removeprefix("model.").startswith("efficient_lm_head") for name in names)


def _all_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `config.json`, those of the layer among them wherever they stand."""
    return {**config, **(config.get("transformer_layer_config") or {})}


def _drop_embedding(tensors: dict[str, torch.Tensor], expected: list[int]) -> None:
    """Leave out the embedding of EAGLE-1 and EAGLE-2, which is a copy of the target's."""
    embedding = tensors.pop(EMBEDDING, None)
    if embedding is not None and list(embedding.shape) != expected:
        raise ValueError(f"{EMBEDDING}: expected shape {expected}, got {list(embedding.shape)}")


def _check_fields(fields: Mapping[str, Any], plain_values: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise NotImplementedError for a field that asks for arithmetic which our networks do not have."""
    for name, plain in plain_values.items():
        value = _lookup(fields, name)
        if value is not None and value not in plain:
            raise NotImplementedError(f"{name}: expected {' or '.join(map(repr, plain))} of EAGLE, got {value!r}")
    rope = fields.get("rope_parameters") or {}
    if any(isinstance(part, Mapping) for part in rope.values()):
        raise NotImplementedError(f"rope_parameters: expected the same for all layers, got {rope}")


def _lookup(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field, or of a field of another; None if there is none."""
    group, _, inner = name.rpartition(".")
    return ((fields.get(group) or {}) if group else fields).get(inner)


def _switch(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A boolean field, which may be null."""
    value = fields.get(name)
    return default if value is None else bool(value)


def _norm_before_residual(fields: Mapping[str, Any]) -> bool:
    """False where the authors' layout does not say; speculators have had both defaults, so that their files must."""
    if "transformer_layer_config" in fields and fields.get("norm_before_residual") is None:
        raise ValueError(
            "norm_before_residual: expected true or false in the config.json of a speculators file, got none; vLLM "
            "takes true for it, speculators false"
        )
    return _switch(fields, "norm_before_residual")


def _feature_norm(tensors: Mapping[str, torch.Tensor], fields: Mapping[str, Any]) -> Literal["joined", "each"] | None:
    """The norm in front of the input projection: what the switches say, or where they are silent, the tensors."""
    joined = _switch(fields, "norm_before_fc", "input_norm.weight" in tensors)
    each = _switch(fields, "fc_norm", "fc_norm.0.weight" in tensors)
    if joined and each:
        raise NotImplementedError("fc_norm: expected false beside norm_before_fc, got both")
    return "joined" if joined else "each" if each else None


def _taps(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], width: int, given: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The layers that EAGLE-3 reads: those given, else those that the file names, else None for the published rule."""
    inputs = tensors["fc.weight"].shape[1] if "fc.weight" in tensors else 0
    count = inputs // width if inputs and inputs % width == 0 else DEFAULT_NUM_TAPS  # strict loading names the rest
    if given is not None:
        if len(given) != count:
            raise ValueError(f"tap_layers: expected {count} layers for this network, got {given}")
        return given
    places = [place for name in (_LAYER_IDS, *_OTHER_LAYER_IDS) for place in (name, f"eagle_config.{name}")]
    named = {place: ids for place in places if (ids := _lookup(config, place))}
    if not named:
        if count != DEFAULT_NUM_TAPS:
            raise ValueError(
                f"tap_layers: expected the setting with {count} layers, for so many fc.weight reads; config.json does "
                "not name them"
            )
        return None
    return _tap_layers(named, count, config)


def _tap_layers(named: Mapping[str, Sequence[int]], count: int, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Outputs of layers from the ids of a file, by what their place and the lowest of them tell.

    SpecForge and ModelOpt write ids of layers whose *outputs* are read into `eagle_config`, by default 1, L // 2 - 1
    and L - 4. speculators write ids of layers whose *inputs* are read to the top level, by default 2, L // 2 and L - 3;
    L is what leaves the last layer. DeepSpec writes ids of outputs as `target_layer_ids`.
    vLLM reads all ids as inputs; SGLang tells them apart by the first: outputs if it is 1, else inputs. Whatever their
    order in the file, all of them gather states on the way through the layers, from the lowest up.

    Args:
        named: ids by the name of their field.
        count: how many the network reads.
        config: what else the file says, which may tell who wrote it.

    Raises:
        ValueError: another number of ids, fields that contradict each other, or ids that can be read in two ways.
    """
    field, ids = list(named.items())[-1]  # eagle_config behind the top level
    if any(list(other) != list(ids) for other in named.values()):
        raise ValueError(f"{field}: expected the same ids as in {', '.join(named)}, got {list(named.values())}")
    if all(isinstance(layer, int) for layer in ids) and min(ids, default=0) < 0:
        raise ValueError(
            f"{field}: expected ids from 0 on, as the file does not tell how many layers the target has, got {ids}; "
            "give tap_layers"
        )
    if len(ids) != count or not all(isinstance(layer, int) for layer in ids):
        raise ValueError(f"{field}: expected {count} layers, as fc.weight has, got {ids}")
    outputs = tuple(sorted(ids))
    inputs = tuple(layer - 1 for layer in outputs)
    if field == _LAYER_IDS and "transformer_layer_config" in config:
        return inputs
    if field == "target_layer_ids" and _DEEPSPEC in (config.get("architectures") or ()):
        return outputs
    if field == f"eagle_config.{_LAYER_IDS}" and outputs[0] in (1, 2):
        return outputs if outputs[0] == 1 else inputs
    if field == _LAYER_IDS and outputs[0] > 1:
        return inputs
    raise ValueError(
        f"{field}: expected ids that begin with 1 in eagle_config, or with 2 or more outside it, got {ids}, which "
        f"toolchains read in two ways; give tap_layers={outputs} if they count layers by their outputs, "
        f"tap_layers={inputs} if by their inputs"
    )
