"""How a drafter is trained: the paper's recipe, and how one run departs from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from specdec.common.checks import check_at_least

__all__ = ["OPTIMIZERS", "TRACKERS", "Recipe", "Run", "check_decay", "check_weights", "learning_rate_factor"]

OPTIMIZERS = ("adamw", "adamw_8bit")
"""What a run may be optimised with: Adam, or Adam whose two states take a quarter of their memory."""
TRACKERS = ("tensorboard", "wandb")
"""What a run may report to, beside the terminal."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the paper trains: what the optimiser gets. Epochs and batch are defaults that a run may replace.

    Attributes:
        clip_value: element-wise limit of gradients (EAGLE, Falcon); None to clip the norm to `clip_norm` instead.
        final_lr_ratio: learning rate at the end, as a part of the peak.
    """

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: str = "cosine"
    final_lr_ratio: float = 0.0
    warmup_ratio: float = 0.1
    epochs: int = 1
    batch_size: int = 32
    clip_norm: float = 1.0
    clip_value: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """How one run departs from its recipe, and how it is watched. None leaves a recipe's value.

    Attributes:
        steps: optimiser steps; wins over `epochs`.
        epochs: passes over the texts.
        batch_size: texts per step, over all processes.
        accumulate: parts in which a process's share of a batch goes through the model, to save memory; by default as
            few as keep a part at 8192 tokens. When memory does not suffice there are more.
        learning_rate: peak of the schedule.
        eval_every: steps between evaluations and checkpoints; a tenth of the run by default.
        log_every: steps between entries of the loss curve.
        seed: of the order of the texts, and of all noise.
        num_places: places of a text, drawn anew at each step, whose losses are computed; all by default. An evaluation
            has all.
        num_candidates: tokens that the laws of a step are over, drawn so that they stand for the whole vocabulary
            (`specdec.training.objectives.vocabulary`); all of it by default, and in an evaluation.
        mixed_precision: compute in bfloat16 with weights in float32; by default where the target is bfloat16.
        optimizer: one of `OPTIMIZERS`.
        report_to: some of `TRACKERS`.
    """

    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    accumulate: int | None = None
    learning_rate: float | None = None
    eval_every: int | None = None
    log_every: int = 10
    seed: int = 0
    num_places: int | None = None
    num_candidates: int | None = None
    mixed_precision: bool | None = None
    optimizer: str = "adamw"
    report_to: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = ("steps", "epochs", "batch_size", "accumulate", "eval_every", "log_every", "num_places")
        check_at_least(1, {name: getattr(self, name) for name in counts})
        check_at_least(16, {"num_candidates": self.num_candidates})
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if unknown := [name for name in self.report_to if name not in TRACKERS]:
            raise ValueError(f"report_to: expected some of {', '.join(TRACKERS)}, got {unknown}")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"learning_rate: expected more than 0, got {self.learning_rate}")

    def applied_to(self, recipe: Recipe) -> Recipe:
        """The recipe with this run's values in place of its own."""
        changes = {name: getattr(self, name) for name in ("epochs", "batch_size", "learning_rate")}
        return replace(recipe, **{name: value for name, value in changes.items() if value is not None})


def learning_rate_factor(recipe: Recipe, num_steps: int, step: int) -> float:
    """Learning rate after `step` of `num_steps` steps, as a part of the peak.

    Raises:
        ValueError: a schedule that is none of "cosine", "linear" and "constant".
    """
    warmup = round(recipe.warmup_ratio * num_steps)
    if step < warmup:
        return step / warmup
    done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    shapes = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
    if recipe.schedule not in shapes:
        raise ValueError(f"schedule: expected one of {', '.join(shapes)}, got {recipe.schedule!r}")
    return recipe.final_lr_ratio + (1 - recipe.final_lr_ratio) * shapes[recipe.schedule]


def check_decay(decay: float) -> None:
    """Raise ValueError for a decay outside (0, 1]."""
    if not 0 < decay <= 1:
        raise ValueError(f"decay: expected more than 0 and at most 1, got {decay}")


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise ValueError, by name, for a negative weight, and if all are zero."""
    check_at_least(0, weights)
    if not any(weights.values()):
        raise ValueError(f"{', '.join(weights)}: expected one above 0, got {' and '.join('0' for _ in weights)}")
