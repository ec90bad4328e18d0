"""DFlash files as their trainers write them: names of tensors, and what `config.json` says.

Layouts:    z-lab's (`dflash_config`, or the same fields at the top level; JetSpec's are these with `causal_head`),
            speculators' (`speculators_model_type: dflash`, the sizes under `transformer_layer_config`), transformers'
            (`encoder.fc`, `encoder.output_norm_enc`); any of them below `model.`
Layer ids:  z-lab and transformers count layers whose *outputs* are read, as here; speculators the states between
            layers, so that theirs are one more and 0 is what enters the first layer
Windows:    `BlockView` and docs/drafters/dflash.md say whose means what
DFlash2:    z-lab's and speculators' (`dflash2`), by the sizes of its convolutions and its selector
Refused:    relatives with more than this network (Domino, LiLiCorr, XPress), files whose anchor drafts a token
            too (DSpark's), and fields that change the arithmetic, by name

The table of who writes what, with sources, is in docs/drafters/dflash.md.
"""

from collections.abc import Mapping
from typing import Any

import torch

from specdec.models.networks.base import load_strictly
from specdec.models.networks.blocks.dflash2 import DFlash2Config, DFlash2Network
from specdec.models.networks.dflash import DFlashNetwork, default_tap_layers
from specdec.models.networks.layer import DraftLayerConfig
from specdec.models.published.files import MASK_EMBEDDING, MASK_TOKEN
from specdec.models.published.layers import layer_sizes, layer_windows
from specdec.models.published.vocabulary import check_tables, complete_tables

__all__ = ["EMBEDDING", "HEAD", "SPECULATORS", "Fields", "config_of", "plain_name", "read", "recognises"]

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
SPECULATORS = "speculators_model_type"
_RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
# Fields and the values with which the arithmetic is that of our network; None is always one of them.
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "projector_type": ("dflash",),
    "lilicorr_enabled": (False,),
    "markov_rank": (0,),
    "xpress_rank": (0,),
    "shift_label": (False,),
    "draft_shift": (False,),
    "sample_from_anchor": (False,),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0,),
    "attention_bias": (False,),
    "fc_norm": (False,),
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1.0,),
}
_SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Who has such a field, where its name does not tell.
_OWNERS = {
    "markov_rank": "DSpark",
    "xpress_rank": "XPress",
    "sample_from_anchor": "DSpark",
    "lilicorr_enabled": "LiLiCorr",
}


def recognises(names: set[str], config: Mapping[str, Any]) -> bool:
    """Whether there is a projection with a norm, and layers that are not EAGLE-3's, none of them DSpark's."""
    plain = {plain_name(name) for name in names}
    needed = {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.k_proj.weight"}
    is_sparks = any(name.startswith("markov_head.") for name in plain) or "DSpark" in str(config.get("architectures"))
    return needed <= plain and "layers.0.hidden_norm.weight" not in plain and not is_sparks


def read(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    vocab_size: int | None = None,
    num_target_layers: int | None = None,
) -> DFlashNetwork:
    """Build a network. An embedding in a file becomes the network's own; `share_embedding` gives it up again.

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
    fields = Fields(config if vocab_size is None else {"vocab_size": vocab_size, **config})
    depth = fields.depth(num_target_layers)
    fields.check_plain()
    named = {plain_name(name): tensors[name] for name in tensors}
    mask_token = named.pop(MASK_TOKEN, None)
    layer = layer_sizes(fields.sizes, has_qk_norm="layers.0.self_attn.q_norm.weight" in named)
    network = DFlash2Network(DFlash2Config(**config_of(fields, named, layer, depth), **_second(fields)))
    if mask_token is not None and int(mask_token) != network.config.mask_token_id:
        raise ValueError(
            f"mask_token_id: expected {int(mask_token)}, which the file of the mask's embedding has, got "
            f"{network.config.mask_token_id}"
        )
    load_strictly(network, named)
    check_tables(network)
    return network


class Fields:
    """The fields of a `config.json`, wherever they stand in it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.is_speculators = SPECULATORS in config
        self._own = config.get("dflash_config") or {}
        self.sizes: dict[str, Any] = {**config, **(config.get("transformer_layer_config") or {})}
        self.is_transformers = config.get("model_type") == "muse_glimmer_assistant"
        if self.is_speculators and config[SPECULATORS] not in ("dflash", "dflash2"):
            raise NotImplementedError(f"{SPECULATORS}: expected 'dflash' or 'dflash2', got {config[SPECULATORS]!r}")
        self.is_second = config.get(SPECULATORS) == "dflash2" or "DFlash2" in str(config.get("architectures"))

    def __call__(self, *names: str) -> Any:
        """The value of a field under the first of its names that has one, None if there is none.

        Raises:
            ValueError: two places that disagree.
        """
        found = {
            f"{place}{name}": group[name]
            for place, group in (("dflash_config.", self._own), ("", self.sizes))
            for name in names
            if group.get(name) is not None
        }
        values = list(found.values())
        if any(value != values[0] for value in values):
            raise ValueError(f"{names[0]}: expected one value, got {found}")
        return values[0] if values else None

    def needed(self, name: str) -> Any:
        """As a call, of a field without a default."""
        value = self(name)
        if value is None:
            raise ValueError(f"config.json: expected {name} of a DFlash drafter, got none")
        return value

    def depth(self, num_target_layers: int | None) -> int | None:
        """Layers of the target, of which the caller may know the number.

        Raises:
            ValueError: the file has another number.
        """
        depth: int | None = self("num_target_layers") or num_target_layers
        if num_target_layers not in (None, depth):
            raise ValueError(f"num_target_layers: expected {num_target_layers} as the target has, got {depth}")
        return depth

    def check_plain(self) -> None:
        """Raise NotImplementedError for a field that asks for arithmetic which our network does not have."""
        for name, plain in _PLAIN_VALUES.items():
            value = self(name)
            if value is not None and value not in plain:
                owner = f"; it is a field of {_OWNERS[name]}" if name in _OWNERS else ""
                expected = " or ".join(map(repr, plain))
                raise NotImplementedError(f"{name}: expected {expected} of DFlash, got {value!r}{owner}")
        width, hidden_size = self("target_hidden_size"), self.sizes.get("hidden_size")
        if width not in (None, hidden_size):
            raise NotImplementedError(
                f"target_hidden_size: expected {hidden_size}, the drafter's hidden_size (hidden_dim_adapter is not "
                f"read), got {width}"
            )


def plain_name(name: str) -> str:
    """A tensor's name as z-lab has it."""
    name = name.removeprefix("model.")
    if name.endswith("_codebook.weight"):
        return name.removesuffix(".weight")
    return _RENAMED.get(name, name)


def config_of(
    fields: Fields,
    named: dict[str, torch.Tensor],
    layer: DraftLayerConfig,
    depth: int | None,
    *,
    reads_input: bool = False,
) -> dict[str, Any]:
    """The fields of a `DFlashConfig`, or of one of a relative's.

    Args:
        fields: of the file.
        named: its tensors by plain names; tables of the draft vocabulary are completed.
        layer: sizes of its layers.
        depth: layers of the target, if they are known.
        reads_input: whether a layer id of -1 is what enters the first layer.

    Raises:
        ValueError: a field that is missing or cannot be.
    """
    vocab_size, num_layers = fields.sizes["vocab_size"], fields.sizes.get("num_hidden_layers")
    if num_layers is None:
        raise ValueError("config.json: expected num_hidden_layers of a DFlash drafter, got none")
    head_size = named[HEAD].shape[0] if HEAD in named else vocab_size
    draft_vocab_size = fields("draft_vocab_size") or head_size
    complete_tables(named, vocab_size, draft_vocab_size)
    return {
        "vocab_size": vocab_size,
        "layer": layer,
        "tap_layers": _taps(fields, num_layers, depth, least=-1 if reads_input else 0),
        "block_size": fields("block_size") or 8 if fields.is_speculators else fields.needed("block_size"),
        "mask_token_id": fields.needed("mask_token_id"),
        "num_layers": num_layers,
        "windows": _windows(fields, num_layers),
        "window_from": "anchor" if fields.is_speculators else "row",
        **_causality(fields),
        "draft_vocab_size": draft_vocab_size,
        "own_embedding": EMBEDDING in named,
        "own_mask_embedding": MASK_EMBEDDING in named,
        "shares_lm_head": HEAD not in named and draft_vocab_size == vocab_size,
        "input_embedding_scale": _factor(fields, "input_embedding_scale"),
        "output_multiplier": _factor(fields, "output_multiplier"),
    }


def _taps(fields: Fields, num_layers: int, depth: int | None, least: int) -> tuple[int, ...]:
    """The layers whose outputs are read, from 0, of a target of `depth` layers; -1 is what enters the first."""
    name = "aux_hidden_state_layer_ids" if fields.is_speculators else "target_layer_ids"
    ids = fields(name)
    if ids is None:
        if fields.is_speculators or fields.is_transformers or depth is None:
            raise ValueError(f"config.json: expected {name} of a DFlash drafter, got none")
        return default_tap_layers(depth, num_layers)
    least = 0 if fields.is_speculators else least
    if not isinstance(ids, list) or not ids or not all(isinstance(layer, int) and layer >= least for layer in ids):
        raise ValueError(f"{name}: expected layers from {least} on, got {ids}")
    if fields.is_speculators:
        return tuple(layer - 1 for layer in ids)
    if depth is not None and max(ids) >= depth - 1:  # the authors' code would read the last one behind the final norm
        raise ValueError(f"{name}: expected layers below {depth - 1}, the last one of the target, got {ids}")
    return tuple(ids)


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...] | None:
    """How far back each layer sees."""
    types, from_layer, is_on = fields("layer_types"), fields("max_window_layers"), fields("use_sliding_window")
    window = fields("sliding_window", "swa_window_size")
    if types is None and is_on and from_layer is not None:  # as transformers, where a window is set
        sliding, full = "sliding_attention" if window is not None else "full_attention", "full_attention"
        types = [sliding if layer >= from_layer else full for layer in range(num_layers)]
    said = {"layer_types": types, "sliding_window": window, "use_sliding_window": is_on}
    windows = layer_windows(said, num_layers)
    if not any(windows):
        return None
    beside_own = int(fields.is_transformers)  # positions that the window does not count
    return tuple(None if window is None else window + beside_own for window in windows)


def _causality(fields: Fields) -> dict[str, bool]:
    """Which layers are causal inside the block."""
    said = fields("causal", "is_causal", "causal_head")
    if said is not None and not isinstance(said, bool):
        raise ValueError(f"causal: expected true or false, got {said!r}")
    if fields.is_transformers:
        return {"causal": False, "causal_windows": False}
    if fields.is_speculators:
        sees_all = fields("sliding_window_non_causal")
        return {"causal": False, "causal_windows": not (fields.is_second if sees_all is None else sees_all)}
    return {"causal": bool(said), "causal_windows": said is not False}


def _second(fields: Fields) -> dict[str, Any]:
    """Sizes of DFlash2's convolutions and its selector; nothing in files of DFlash."""
    said = {name: fields(name) for name in _SECOND}
    if not fields.is_second and not any(said.values()):
        return {}
    missing = [name for name, size in said.items() if not isinstance(size, int) or size < 1]
    if missing:
        raise ValueError(f"config.json: expected {', '.join(missing)} of a DFlash2 drafter, got {said}")
    return said


def _factor(fields: Fields, name: str) -> float:
    """A factor, 1 where nothing is said."""
    value = fields(name)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name}: expected a positive number, got {value!r}")
    return float(value)
