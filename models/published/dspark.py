"""DSpark files as their trainers write them: names of tensors, and what `config.json` says.

Layouts:    DeepSpec's (`Qwen3DSparkModel`, fields at the top level, an embedding and an LM head that are copies of the
            target's); the same with fields that begin with `dspark_`, or in a `dspark_config` or `dflash_config`;
            speculators' `dspark`, and its `dflash` with `sample_from_anchor`
Layer ids:  DeepSpec counts layers whose *outputs* are read, as here, -1 is what enters the first, and the last one is
            refused, as it would be read behind the final norm; speculators count the states between layers, from 0
Trap:       what DeepSpec publishes as DFlash is this with `markov_rank` 0, and not z-lab's layout: its anchor drafts
Refused:    what `specdec.models.published.dflash` refuses, and the networks for Gemma 4, which have layers of their own

Everything but the heads is DFlash's, and read as such.
"""

from collections.abc import Mapping
from typing import Any

import torch

from specdec.models.networks.base import load_strictly
from specdec.models.networks.dspark import DSparkConfig, DSparkNetwork
from specdec.models.published.dflash import EMBEDDING, HEAD, SPECULATORS, Fields, config_of, plain_name
from specdec.models.published.layers import layer_sizes
from specdec.models.published.vocabulary import check_tables

__all__ = ["EMBEDDING", "HEAD", "read", "recognises"]

_PREFIX = "dspark_"
_GROUPS = ("dspark_config", "dflash_config")
_ALIASES = {"noise_token_id": "mask_token_id"}
_W1, _GATE, _JOINT = (f"markov_head.{name}.weight" for name in ("markov_w1", "gate_proj", "joint_proj"))
_CONFIDENCE = "confidence_head.proj.weight"


def recognises(names: set[str], config: Mapping[str, Any]) -> bool:
    """Whether there is a projection with a norm, and a head of DSpark's or a word that the anchor drafts."""
    plain = {plain_name(name) for name in names}
    if not {"fc.weight", "hidden_norm.weight"} <= plain:
        return False
    says = "DSpark" in str(config.get("architectures")) or config.get(SPECULATORS) == "dspark"
    return says or _W1 in plain or _CONFIDENCE in plain or bool(config.get("sample_from_anchor"))


def read(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    vocab_size: int | None = None,
    num_target_layers: int | None = None,
) -> DSparkNetwork:
    """Build a network. An embedding and an LM head in a file become the network's own, until they are shared.

    Args:
        tensors: the file's tensors by name, in any of the layouts.
        config: content of the `config.json` beside it.
        vocab_size: of the target, for files that do not say.
        num_target_layers: layers of the target; a file that has another number is refused.

    Raises:
        ValueError: a missing, unexpected or misshapen tensor, by name; contradicting fields or tables; a layer, token
            or size that cannot be; a configuration that does not say what has to be known.
        NotImplementedError: a field of the configuration asks for other arithmetic than the network's.
    """
    config = _flat(config)
    _check_kind(config)
    named = {plain_name(name): tensors[name] for name in tensors}
    heads = _heads(config, named)
    given = {} if vocab_size is None else {"vocab_size": vocab_size}
    fields = Fields({**given, **config})
    depth = fields.depth(num_target_layers)
    fields.check_plain()
    layer = layer_sizes(fields.sizes, has_qk_norm="layers.0.self_attn.q_norm.weight" in named)
    settings = config_of(fields, named, layer, depth, reads_input=True)
    if settings["windows"] is None:
        settings["causal_windows"] = False
    elif not fields.is_speculators:  # none of DeepSpec's files has any, and its attention backends differ on them
        raise NotImplementedError(f"layer_types: expected full attention of DeepSpec, got {fields('layer_types')}")
    network = DSparkNetwork(DSparkConfig(**settings, **heads))
    load_strictly(network, named)
    check_tables(network)
    return network


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields under their plain names, wherever they stand.

    Raises:
        ValueError: two places that disagree.
    """
    flat = {name: value for name, value in config.items() if name not in _GROUPS and not name.startswith(_PREFIX)}
    groups = {f"{group}.": config.get(group) or {} for group in _GROUPS}
    groups[_PREFIX] = {
        name.removeprefix(_PREFIX): value
        for name, value in config.items()
        if name.startswith(_PREFIX) and name not in _GROUPS
    }
    for place, group in groups.items():
        for name, value in group.items():
            plain = _ALIASES.get(name, name)
            if flat.get(plain) not in (None, value):
                raise ValueError(f"{plain}: expected one value, got {flat[plain]} and {place}{name} {value}")
            flat[plain] = value
    return flat


def _check_kind(config: dict[str, Any]) -> None:
    """Refuse relatives by name; what is left reads as a DFlash file, but for the heads."""
    architectures = config.get("architectures") or ()
    if any("Gemma" in name for name in architectures):
        raise NotImplementedError(
            f"architectures: expected Qwen3DSparkModel, whose layers are Qwen3's, got {architectures}"
        )
    drafts = config.pop("sample_from_anchor", None)
    if drafts is False or (drafts is None and config.get(SPECULATORS) == "dflash"):
        raise NotImplementedError(f"sample_from_anchor: expected true of DSpark, got {drafts}")
    if config.get(SPECULATORS) == "dspark":
        config[SPECULATORS] = "dflash"


def _heads(config: dict[str, Any], named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What the fields say of the heads, which are taken out of them; where they are silent, the tensors."""
    width = config.get("hidden_size") or (config.get("transformer_layer_config") or {}).get("hidden_size")
    rank = config.pop("markov_rank", None)
    kind = config.pop("markov_head_type", None)
    has_confidence = config.pop("enable_confidence_head", None)
    with_markov = config.pop("confidence_head_with_markov", None)
    if rank is None:
        rank = named[_W1].shape[1] if _W1 in named else 0
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise ValueError(f"markov_rank: expected 0 or more, got {rank!r}")
    if kind is None or not rank:
        kind = "rnn" if _JOINT in named else "gated" if _GATE in named else "vanilla"
    if has_confidence is None:
        has_confidence = _CONFIDENCE in named
    if with_markov is None or not has_confidence:
        with_markov = has_confidence and _CONFIDENCE in named and named[_CONFIDENCE].shape[1] != width
    return {
        "markov_rank": rank,
        "markov_head_type": str(kind).lower(),
        "has_confidence": bool(has_confidence),
        "confidence_with_markov": bool(with_markov),
    }
