"""The kinds of drafters that can be trained, by name: what each learns. Nothing is imported before it is asked for."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.training.objectives.base import Objective

__all__ = ["TRAINABLE_KINDS", "objective_class", "training_settings"]

# "module:class" under specdec.training.objectives
_OBJECTIVES = {
    "draft_model": "draft_model:DraftModelObjective",
    "medusa": "medusa:MedusaObjective",
    "hydra": "hydra:HydraObjective",
    "hydra++": "hydra:HydraPlusPlusObjective",
    "eagle": "eagle:EagleObjective",
    "eagle3": "eagle:EagleObjective",
    "amphista": "amphista:AmphistaObjective",
    "parallelspec": "parallelspec:ParallelSpecObjective",
    "falcon": "falcon:FalconObjective",
}
TRAINABLE_KINDS = tuple(_OBJECTIVES)
# settings that make this kind out of an objective that has several
_SETTINGS: dict[str, dict[str, Any]] = {"eagle3": {"version": 3}}


def objective_class(kind: str) -> "type[Objective]":
    """The training objective of a kind.

    Raises:
        ValueError: no such kind, or one that has nothing to train.
    """
    if kind not in _OBJECTIVES:
        raise ValueError(f"drafter: expected a kind that can be trained ({', '.join(TRAINABLE_KINDS)}), got {kind!r}")
    module, name = _OBJECTIVES[kind].split(":")
    return getattr(importlib.import_module(f"specdec.training.objectives.{module}"), name)


def training_settings(kind: str) -> dict[str, Any]:
    """Settings of a kind's objective that make the kind; a user's settings go on top."""
    return dict(_SETTINGS.get(kind, {}))
