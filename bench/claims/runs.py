"""Short trainings of equal length that differ in one thing: what the papers' ablations compare.

Each is a kind with settings. LM heads of their own, of which Hydra and Amphista have one per draft head, would be most
of what a small target's drafter learns; the ablations share the target's, but for the one about low rank. All of them
learn with one rate, so that no arm is ahead by its recipe.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["SHORT_RUNS", "ShortRun"]


@dataclass(frozen=True, slots=True)
class ShortRun:
    """One training.

    Attributes:
        kind: of the drafter.
        settings: what it departs in, and what all of its kind have in common.
        texts: that it learns from: the target's own, foreign ones, or the target's own to the prompts of the foreign.
    """

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    texts: Literal["own", "foreign", "rewritten"] = "own"


def _hydra(**settings: Any) -> ShortRun:
    return ShortRun("hydra", {"vocab_size": None, **settings})


def _amphista(**settings: Any) -> ShortRun:
    return ShortRun("amphista", {"own_lm_heads": False, **settings})


def _falcon(block_size: int, **settings: Any) -> ShortRun:
    # dropout is for many epochs; in a short run it only slows learning
    return ShortRun("falcon", {"block_size": block_size, "lstm_dropout": 0.0, **settings})


def _parallelspec(texts: Literal["own", "foreign", "rewritten"] = "own", **settings: Any) -> ShortRun:
    # masks behind all tokens would make a step cost several of the others'
    return ShortRun("parallelspec", {"num_groups": 48, **settings}, texts)


SHORT_RUNS: dict[str, ShortRun] = {
    "short-hydra": _hydra(),
    "short-hydra-teacher": _hydra(lm_weight=0.0, teacher_weight=1.0),
    "short-hydra-noise": _hydra(noise_alpha=75.0),
    "short-hydra-prefix": _hydra(prefix_attention=True),
    "short-amphista": _amphista(),
    "short-amphista-no-block": _amphista(auto_embedding=False, position_encoding=False),
    "short-amphista-no-positions": _amphista(position_encoding=False),
    "short-amphista-no-adaptation": _amphista(adaptation_layers=0),
    "short-amphista-one-layer": _amphista(adaptation_layers=1),
    "short-amphista-no-token": _amphista(sampled_token=False),
    "short-amphista-own-heads": _amphista(own_lm_heads=True),
    "short-amphista-low-rank": _amphista(own_lm_heads=True, head_rank=64),
    "short-parallelspec-5-masks": _parallelspec(num_masks=5),
    "short-parallelspec-foreign": _parallelspec("foreign"),
    "short-parallelspec-rewritten": _parallelspec("rewritten"),
    "short-falcon": _falcon(2),
    "short-falcon-3": _falcon(3),
    "short-falcon-4": _falcon(4),
    "short-falcon-no-glance": _falcon(2, glance_ratio=0.0),
}
"""By the names that `table.py` asks for."""
