"""The kinds of drafters that can be trained, by name: what each learns. Nothing is imported before it is asked for."""

import importlib
import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from specdec.drafters.kinds import NETWORK_KINDS, network_class

if TYPE_CHECKING:
    from specdec.training.objectives.base import Objective

__all__ = ["TRAINABLE_KINDS", "objective_class", "setting_names", "training_settings"]

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
    "dflash": "dflash:DFlashObjective",
    "mtp": "mtp:MtpObjective",
    "dspark": "dspark:DSparkObjective",
    "peagle": "peagle:PEagleObjective",
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


def setting_names(kind: str) -> tuple[str, ...]:
    """Settings that a kind takes, sorted: switches of its loss, and sizes and switches of its network.

    Sizes of a network's decoder layer, which are the target's unless they are given, are not among them, and of a draft
    model, whose settings are those of `LlamaConfig`, no sizes at all.
    """
    objective = objective_class(kind)
    takers: list[Any] = [objective, objective.new_network]
    names: set[str] = set()
    if kind != "draft_model":
        drafter = network_class(kind) if kind in NETWORK_KINDS else objective.drafter_class
        config: Any = drafter.network_class.config_class
        takers.append(config.for_target)
        names = {field.name for field in fields(config)} - {"layer", "prefix"}
    for taker in takers:
        parameters = inspect.signature(taker).parameters.values()
        names |= {one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    return tuple(sorted(names - set(training_settings(kind))))
