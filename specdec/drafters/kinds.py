"""The kinds of drafters, by name: where their classes live. Nothing is imported before it is asked for."""

import importlib
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.drafting.base import Drafter
    from specdec.drafting.network import NetworkDrafter
    from specdec.training.objectives.base import Objective

__all__ = [
    "DRAFTER_KINDS",
    "KINDS_WITHOUT_WEIGHTS",
    "NETWORK_KINDS",
    "drafter_class",
    "network_class",
    "objective_class",
    "settings_of",
    "training_settings",
]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Classes of a kind, as "module:class" under `specdec.drafters` and `specdec.training.objectives`.

    Attributes:
        needs_weights: whether the drafter is more than its settings.
        training: settings of the objective that make this kind out of a class that has several.
    """

    drafter: str
    objective: str | None = None
    needs_weights: bool = True
    training: dict[str, Any] = field(default_factory=dict)


_KINDS = {
    "none": _Kind("none:NoDrafter", needs_weights=False),
    "prompt_lookup": _Kind("prompt_lookup:PromptLookup", needs_weights=False),
    "lookahead": _Kind("lookahead:Lookahead", needs_weights=False),
    "draft_model": _Kind("draft_model:DraftModel", "draft_model:DraftModelObjective"),
    "medusa": _Kind("medusa:Medusa", "medusa:MedusaObjective"),
    "hydra": _Kind("hydra:Hydra", "hydra:HydraObjective"),
    "hydra++": _Kind("hydra:Hydra", "hydra:HydraPlusPlusObjective"),
    "eagle": _Kind("eagle:Eagle", "eagle:EagleObjective"),
    "eagle3": _Kind("eagle3:Eagle3", "eagle:EagleObjective", training={"version": 3}),
    "amphista": _Kind("amphista:Amphista", "amphista:AmphistaObjective"),
    "parallelspec": _Kind("parallelspec:ParallelSpec", "parallelspec:ParallelSpecObjective"),
    "falcon": _Kind("falcon:Falcon", "falcon:FalconObjective"),
}

DRAFTER_KINDS = tuple(_KINDS)
KINDS_WITHOUT_WEIGHTS = tuple(name for name, kind in _KINDS.items() if not kind.needs_weights)
NETWORK_KINDS = tuple(name for name, kind in _KINDS.items() if kind.needs_weights and name != "draft_model")
"""Kinds whose drafters are a `NetworkDrafter`."""


def drafter_class(kind: str) -> "type[Drafter]":
    """The drafter class of a kind.

    Raises:
        ValueError: no such kind; the message lists them.
    """
    if kind not in _KINDS:
        raise ValueError(f"kind: expected one of {', '.join(DRAFTER_KINDS)}, got {kind!r}")
    return _load("specdec.drafters", _KINDS[kind].drafter)


def network_class(kind: str) -> "type[NetworkDrafter]":
    """The drafter class of a kind in `NETWORK_KINDS`."""
    if kind not in NETWORK_KINDS:
        raise ValueError(f"kind: expected one of {', '.join(NETWORK_KINDS)}, got {kind!r}")
    return _load("specdec.drafters", _KINDS[kind].drafter)


def training_settings(kind: str) -> dict[str, Any]:
    """Settings of a kind's objective that make the kind; a user's settings go on top."""
    return dict(_KINDS[kind].training)


def objective_class(kind: str) -> "type[Objective]":
    """The training objective of a kind.

    Raises:
        ValueError: no such kind, or one that has nothing to train.
    """
    objective = _KINDS[kind].objective if kind in _KINDS else None
    if objective is None:
        trainable = ", ".join(name for name, one in _KINDS.items() if one.objective)
        raise ValueError(f"drafter: expected a kind that can be trained ({trainable}), got {kind!r}")
    return _load("specdec.training.objectives", objective)


def settings_of(kind: str) -> tuple[str, ...]:
    """Names of the settings that a kind's drafter takes beside its network and its tree."""
    parameters = inspect.signature(drafter_class(kind).__init__).parameters
    return tuple(name for name in parameters if name not in ("self", "network", "model", "shape"))


def _load(package: str, place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(f"{package}.{module}"), name)
