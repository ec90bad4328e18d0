"""Drafters that are chosen and sized at every step: a union of what is at hand, by costs measured on this machine."""

import logging
import os
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from specdec.drafters.union.costs import WayCosts
from specdec.drafters.union.union import Union
from specdec.drafters.weightless.none import NoDrafter
from specdec.drafting.base import Drafter
from specdec.loop.decoder import Decoder
from specdec.loop.graphs import CudaGraphs
from specdec.models.target.target import Target
from specdec.tuning.measure import MAX_ROWS, Measure, check_context, measure_ms, replayed, time_drafts, time_passes

__all__ = ["CONTEXT", "measured"]

logger = logging.getLogger(__name__)

_KNOWN: WeakKeyDictionary[nn.Module, dict[object, WayCosts]] = WeakKeyDictionary()
"""What was measured before, by model: a union that is made anew for every call is measured once."""

CONTEXT = 256
"""Tokens of text at which passes and drafts are timed."""

_SHORT, _STEPS = 16, 12
_CPU_TOKENS = 1024


def measured(
    target: Target,
    union: Union,
    *,
    batch_size: int = 1,
    context: int | None = None,
    measure: Measure | None = None,
) -> Union:
    """The union with costs that were measured here, which takes seconds the first time.

    Args:
        target: the target.
        union: what drafts.
        batch_size: rows that will be decoded together; drafts of other batches are taken to last as long.
        context: tokens of text per row; by default `CONTEXT`, or half of what a smaller model has room for, and on a
            CPU at most 1024 of all rows.
        measure: what times a function; by default `measure_ms`, on a GPU of replays.

    Raises:
        ValueError: sizes that do not fit the target.
    """
    budget = union.shape.num_nodes
    setting = target.device, target.dtype, target.backend, target.fused
    key = tuple(map(_sizes, union.members)), budget, batch_size, context, setting
    known = _KNOWN.setdefault(target.model, {})
    if key in known:
        return union.with_costs(known[key])
    if context is None:
        context = min(CONTEXT, (target.max_positions - budget) // 2)
        if target.device.type == "cpu":  # which reads a text of many rows for longer than anybody waits
            context = min(context, max(_SHORT, _CPU_TOKENS // batch_size))
    check_context(target, budget, batch_size=batch_size, context=context)
    if measure is None:
        measure = replayed(CudaGraphs(target.device)) if target.device.type == "cuda" else measure_ms
    text = torch.randint(0, target.vocab_size, (batch_size, context), generator=torch.Generator().manual_seed(0))
    pass_ms = time_passes(target, text, budget, max(MAX_ROWS, 2 * budget), measure)
    # one way of every set of members, as the size of the tree changes what the target does
    asked = union.with_costs(WayCosts(pass_ms, {}))
    groups: dict[int, float] = {}
    for way, time in zip(asked.choices.ways, time_drafts(target, asked, text, measure), strict=True):
        groups[way.group] = max(time, groups.get(way.group, 0.0))
    # merging, learning, acceptance and commit: what all members together take, for any of them
    beside = _beside_ms(target, union.with_costs(None), text)
    plain_ms = groups.pop(0, 0.0) + _beside_ms(target, NoDrafter(), text)
    costs = WayCosts(pass_ms, {group: time + beside for group, time in groups.items()}, plain_ms, is_corrected=True)
    known[key] = costs
    logger.info("union of %s: %s", ", ".join(union.names), costs)
    return union.with_costs(costs)


def _sizes(drafter: Drafter) -> tuple[object, ...]:
    """What the time of a draft depends on: its kind, its tree and how many weights it has."""
    networks = [value for value in vars(drafter).values() if isinstance(value, nn.Module)]
    return drafter.kind, drafter.shape, sum(one.numel() for network in networks for one in network.parameters())


def _beside_ms(target: Target, drafter: Drafter, text: torch.Tensor) -> float:
    """What acceptance, commit and learning take per step; 0 on a GPU, where replayed passes outweigh them."""
    if target.device.type != "cpu":
        return 0.0
    decoder = Decoder(target, drafter)
    times = []
    for _ in range(2):  # the first call makes tables
        stats = decoder.decode([*text[:, -_SHORT:]], max(3, _STEPS // len(text))).stats
        times.append((stats.times_ms["verify"] + stats.times_ms["commit"]) / max(stats.num_target_passes, 1))
    return times[-1]


def names_of(sources: Sequence[object]) -> list[str]:
    """What members are called in reports: by where they came from, shortened to the last part of a path."""
    return [_name_of(one) for one in sources]


def _name_of(source: object) -> str:
    if isinstance(source, Drafter):
        return source.kind
    if isinstance(source, str | os.PathLike):
        return os.fspath(source).rstrip("/").rsplit("/", 1)[-1]
    return type(source).__name__
