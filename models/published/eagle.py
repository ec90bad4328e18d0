"""EAGLE files as their trainers write them, brought into one layout: names of tensors, and what `config.json` says.

Layouts:    the authors' and SpecForge's (`midlayer.*`), speculators' and ModelOpt's (`layers.0.*` with a
            `hidden_norm`; speculators keep the sizes under `transformer_layer_config`); any of them below `model.`
Layer ids:  which layers of the target EAGLE-3 reads; trainers count layers by their outputs or by their inputs, see
            `_tap_layers`. Ours are outputs
Refused:    fields that change the arithmetic without adding a tensor, by name (`_check_fields`); those that add one are
            seen by the strict loading of tensors

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

__all__ = ["EMBEDDING", "read", "recognises", "recognises_third"]

EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Names that some trainers have for the same thing; what they count is not known well enough to read them.
_OTHER_LAYER_IDS = ("aux_hidden_state_layer_ids", "aux_hidden_states_layer_ids", "target_layer_ids")
# Fields of `config.json`, and the values with which the arithmetic is that of our networks.
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "speculators_model_type": ("eagle3",),
    "hidden_act": ("silu",),
    "logit_scale": (1.0,),
    "parallel_drafting": (False,),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (False,),
    "eagle_config.use_aux_hidden_state": (True,),
    "eagle_config.parallel_draft_step": (0, 1),
}


def recognises(names: set[str], _config: Mapping[str, Any]) -> bool:
    """Whether there are an input projection and a layer of EAGLE-3, or a layer 0 without input norm."""
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
    is_third = _is_third(tensors)
    if is_third:
        tensors = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in tensors.items()}
    fields = {**config, **(config.get("transformer_layer_config") or {})}
    bias = f"{'midlayer' if is_third else 'layers.0'}.self_attn.q_proj.bias"
    layer = _layer(fields, has_bias=bias in tensors, rope_theta=rope_theta)
    _check_fields(fields)
    if is_third:
        third = Eagle3Network(_third_config(tensors, config, fields, layer, given))
        load_strictly(third, tensors)
        _check_vocabulary(third)
        return third
    if given is not None:
        raise ValueError(f"tap_layers: expected None with EAGLE-1 and EAGLE-2, got {given}")
    _drop_embedding(tensors, [fields["vocab_size"], layer.hidden_size])
    network = EagleNetwork(EagleConfig(fields["vocab_size"], layer, fc_bias=fields.get("bias", True)))
    load_strictly(network, tensors)
    return network


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
    _complete_tables(tensors, vocab_size, draft_vocab_size)
    return Eagle3Config(
        vocab_size=vocab_size,
        layer=layer,
        tap_layers=_taps(tensors, config, layer.hidden_size, tap_layers),
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=_norm_before_residual(fields),
        norm_output=_switch(fields, "norm_output"),
        feature_norm=_feature_norm(tensors, fields),
        own_embedding=EMBEDDING in tensors,
        shares_lm_head=shares_lm_head,
    )


def _is_third(names: Collection[str]) -> bool:
    """Whether tensors of these names, without `model.`, are EAGLE-3's."""
    return "layers.0.hidden_norm.weight" in names or any(name.startswith("midlayer.") for name in names)


def _drop_embedding(tensors: dict[str, torch.Tensor], expected: list[int]) -> None:
    """Leave out the embedding of EAGLE-1 and EAGLE-2, which is a copy of the target's."""
    embedding = tensors.pop(EMBEDDING, None)
    if embedding is not None and list(embedding.shape) != expected:
        raise ValueError(f"{EMBEDDING}: expected shape {expected}, got {list(embedding.shape)}")


def _complete_tables(tensors: dict[str, torch.Tensor], vocab_size: int, draft_vocab_size: int) -> None:
    """Make the tables of the draft vocabulary what the network wants: `t2d` follows from `d2t`, and may be absent."""
    if draft_vocab_size == vocab_size:  # nothing to map
        tensors.pop("d2t", None)
        tensors.pop("t2d", None)
        return
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].long()
        if "t2d" not in tensors:
            ids = tensors["d2t"] + torch.arange(tensors["d2t"].numel())
            if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or ids.unique().numel() != ids.numel():
                raise ValueError(
                    f"d2t: expected offsets that lead to distinct tokens below {vocab_size}, got "
                    f"{ids.unique().numel()} of {ids.numel()} from {int(ids.min())} to {int(ids.max())}"
                )
            tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if "t2d" in tensors:
        tensors["t2d"] = tensors["t2d"].bool()


def _check_vocabulary(network: Eagle3Network) -> None:
    """Refuse tables that contradict each other; `d2t` read as ids instead of offsets would show here."""
    if not network.has_own_vocabulary:
        return
    ids = network.target_ids
    if not torch.equal(ids.sort().values, network.t2d.nonzero()[:, 0]):
        raise ValueError(
            f"d2t: expected offsets that lead to the {int(network.t2d.sum())} tokens marked in t2d, got "
            f"ids from {int(ids.min())} to {int(ids.max())}"
        )


def _layer(fields: Mapping[str, Any], *, has_bias: bool, rope_theta: float | None) -> DraftLayerConfig:
    """Sizes of the layer; defaults are those of the authors' code."""
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
        rope_parameters=rope if rope_theta is None else {**rope, "rope_theta": float(rope_theta)},
    )


def _rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings under the names of transformers v5, from files that were written for v4."""
    if fields.get("rope_parameters"):
        return dict(fields["rope_parameters"])
    scaling = dict(fields.get("rope_scaling") or {})
    plain_type = scaling.pop("type", "default")
    return {"rope_type": plain_type, "rope_theta": float(fields.get("rope_theta") or 10000.0), **scaling}


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for a field that asks for arithmetic which our networks do not have."""
    for name, plain in _PLAIN_VALUES.items():
        value = _lookup(fields, name)
        if value is not None and value not in plain:
            raise NotImplementedError(f"{name}: expected {' or '.join(map(repr, plain))} of EAGLE, got {value!r}")
    width, hidden_size = fields.get("target_hidden_size"), fields["hidden_size"]
    if width not in (None, hidden_size):
        raise NotImplementedError(f"target_hidden_size: expected {hidden_size}, the drafter's hidden_size, got {width}")
    if "sliding_attention" in (fields.get("layer_types") or ()):
        raise NotImplementedError(f"layer_types: expected full attention, got {fields['layer_types']}")


def _lookup(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field, or of a field of `eagle_config`; None if there is none."""
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
    return _tap_layers(named, count)


def _tap_layers(named: Mapping[str, Sequence[int]], count: int) -> tuple[int, ...]:
    """Outputs of layers from the ids of a file, by what their place and the lowest of them tell.

    SpecForge and ModelOpt write ids of layers whose *outputs* are read into `eagle_config`, by default 1, L // 2 - 1
    and L - 4. speculators write ids of layers whose *inputs* are read to the top level, by default 2, L // 2 and L - 3.
    vLLM reads all ids as inputs; SGLang tells them apart by the first: outputs if it is 1, else inputs. Whatever their
    order in the file, all of them gather states on the way through the layers, from the lowest up.

    Args:
        named: ids by the name of their field.
        count: how many the network reads.

    Raises:
        ValueError: another number of ids, fields that contradict each other, or ids that can be read in two ways.
    """
    field, ids = list(named.items())[-1]  # eagle_config behind the top level
    if any(list(other) != list(ids) for other in named.values()):
        raise ValueError(f"{field}: expected the same ids as in {', '.join(named)}, got {list(named.values())}")
    if len(ids) != count or not all(isinstance(layer, int) and layer >= 0 for layer in ids):
        raise ValueError(f"{field}: expected {count} layers, as fc.weight has, got {ids}")
    outputs = tuple(sorted(ids))
    inputs = tuple(layer - 1 for layer in outputs)
    if field == f"eagle_config.{_LAYER_IDS}" and outputs[0] in (1, 2):
        return outputs if outputs[0] == 1 else inputs
    if field == _LAYER_IDS and outputs[0] > 1:
        return inputs
    raise ValueError(
        f"{field}: expected ids that begin with 1 in eagle_config, or with 2 or more outside it, got {ids}, which "
        f"toolchains read in two ways; give tap_layers={outputs} if they count layers by their outputs, "
        f"tap_layers={inputs} if by their inputs"
    )
