"""The kinds of drafters, by name: where their classes live. Nothing is imported before it is asked for."""

import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.drafting.base import Drafter
    from specdec.drafting.network import NetworkDrafter

__all__ = ["DRAFTER_KINDS", "KINDS_WITHIN_TARGETS", "KINDS_WITHOUT_WEIGHTS", "NETWORK_KINDS", "drafter_class"]
__all__ += ["network_class", "settings_of"]


@dataclass(frozen=True, slots=True)
class _Kind:
    """The class of a kind, as "module:class" under `specdec.drafters`.

    Attributes:
        needs_weights: whether the drafter is more than its settings.
        within_target: whether its weights stand in the files of the target, so that its name alone says where.
    """

    drafter: str
    needs_weights: bool = True
    within_target: bool = False


_KINDS = {
    "none": _Kind("weightless.none:NoDrafter", needs_weights=False),
    "prompt_lookup": _Kind("weightless.prompt_lookup:PromptLookup", needs_weights=False),
    "lookahead": _Kind("weightless.lookahead:Lookahead", needs_weights=False),
    "suffix": _Kind("weightless.suffix:Suffix", needs_weights=False),
    "draft_model": _Kind("draft_model:DraftModel"),
    "medusa": _Kind("medusa:Medusa"),
    "hydra": _Kind("hydra:Hydra"),
    "hydra++": _Kind("hydra:Hydra"),
    "eagle": _Kind("eagle:Eagle"),
    "eagle3": _Kind("eagle3:Eagle3"),
    "peagle": _Kind("peagle:PEagle"),
    "amphista": _Kind("amphista:Amphista"),
    "parallelspec": _Kind("parallelspec:ParallelSpec"),
    "falcon": _Kind("falcon:Falcon"),
    "dflash": _Kind("dflash:DFlash"),
    "mtp": _Kind("mtp:Mtp", within_target=True),
    "dspark": _Kind("dspark:DSpark"),
}

DRAFTER_KINDS = tuple(_KINDS)
KINDS_WITHOUT_WEIGHTS = tuple(name for name, kind in _KINDS.items() if not kind.needs_weights)
NETWORK_KINDS = tuple(name for name, kind in _KINDS.items() if kind.needs_weights and name != "draft_model")
"""Kinds whose drafters are a `NetworkDrafter`."""
KINDS_WITHIN_TARGETS = tuple(name for name, kind in _KINDS.items() if kind.within_target)


def drafter_class(kind: str) -> "type[Drafter]":
    """The drafter class of a kind.

    Raises:
        ValueError: no such kind; the message lists them.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind: expected one of {', '.join(DRAFTER_KINDS)}, got {kind!r}")
    return _load(_KINDS[kind].drafter)


def network_class(kind: str) -> "type[NetworkDrafter]":
    """The drafter class of a kind in `NETWORK_KINDS`."""
    if kind not in NETWORK_KINDS:
        raise ValueError(f"kind: expected one of {', '.join(NETWORK_KINDS)}, got {kind!r}")
    return _load(_KINDS[kind].drafter)


def settings_of(kind: str) -> tuple[str, ...]:
    """Names of the settings that a kind's drafter takes beside its network and its tree."""
    parameters = inspect.signature(drafter_class(kind).__init__).parameters
    return tuple(name for name in parameters if name not in ("self", "network", "model", "shape"))


def _load(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(f"specdec.drafters.{module}"), name)
