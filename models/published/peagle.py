"""P-EAGLE's files: EAGLE-3's in all their layouts, with `mask_hidden`, several layers, and an embedding as a rule.

Mask token: under a name of each trainer's (`_MASK_TOKENS`); where several are there they must agree
Masks:      the number that a network was trained for is in speculators' files alone, as the tokens that it proposes
Refused:    PARD, which is a language model of its own with `pard_token` in its configuration
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of
from typing import Any

import torch

from specdec.models.networks.eagle3 import Eagle3Config
from specdec.models.networks.peagle import PEagleConfig, PEagleNetwork
from specdec.models.published.eagle import EMBEDDING, PLAIN_VALUES, load_third, read_third

__all__ = ["EMBEDDING", "read", "recognises"]

_MASK_TOKENS = ("mask_token_id", "ptd_token_id", "pard_token", "dspark_noise_token_id")
_PLAIN_VALUES = {**PLAIN_VALUES, "speculators_model_type": ("peagle",), "parallel_drafting": (True,)}


def recognises(names: set[str], config: Mapping[str, Any]) -> bool:
    """Whether masks have a state of their own, or the configuration speaks of P-EAGLE or of PARD."""
    plain = {name.removeprefix("model.") for name in names}
    is_pard = config.get("pard_token") is not None and "fc.weight" not in plain
    return "mask_hidden" in plain or config.get("speculators_model_type") == "peagle" or is_pard


def read(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    tap_layers: Sequence[int] | None = None,
    rope_theta: float | None = None,
    num_masks: int | None = None,
) -> PEagleNetwork:
    """Build a network; as `specdec.models.published.eagle.read`.

    Args:
        tensors: the file's tensors by name.
        config: content of the `config.json` beside it.
        tap_layers: decoder layers (0-based) whose outputs are read, whatever the file says.
        rope_theta: base of the rotary embedding, whatever the file says.
        num_masks: masks of a pass, whatever the file says; 7 where it says nothing.

    Raises:
        ValueError: as there, or no mask token, or one that the vocabulary does not have.
        NotImplementedError: as there, or PARD's.
    """
    if config.get("pard_token") is not None and {"fc.weight", "model.fc.weight"}.isdisjoint(tensors):
        raise NotImplementedError(
            f"pard_token: expected P-EAGLE's tensors beside it, got PARD's, a language model of its own, with token "
            f"{config['pard_token']}"
        )
    given = None if tap_layers is None else tuple(tap_layers)
    third, renamed = read_third(tensors, config, _PLAIN_VALUES, tap_layers=given, rope_theta=rope_theta)
    settings: dict[str, Any] = {field.name: getattr(third, field.name) for field in fields_of(Eagle3Config)}
    num_masks = _num_masks(config) if num_masks is None else num_masks
    if num_masks is not None:
        settings["num_masks"] = num_masks
    network = PEagleNetwork(PEagleConfig(**settings, mask_token_id=_mask_token(config)))
    load_third(network, renamed)
    return network


def _mask_token(config: Mapping[str, Any]) -> int:
    """The token that masks are embedded as."""
    named = {name: config[name] for name in _MASK_TOKENS if config.get(name) is not None}
    if not named:
        raise ValueError(f"mask_token_id: expected one of {', '.join(_MASK_TOKENS)} in config.json, got none")
    if len(set(named.values())) > 1 or not all(isinstance(token, int) for token in named.values()):
        raise ValueError(f"mask_token_id: expected one token, got {named}")
    return int(next(iter(named.values())))


def _num_masks(config: Mapping[str, Any]) -> int | None:
    """Masks of a pass: one less than the tokens that a pass proposes; None where the file does not say."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or ()
    tokens = [method["speculative_tokens"] for method in methods if method.get("speculative_tokens")]
    return int(max(tokens)) - 1 if tokens else None
