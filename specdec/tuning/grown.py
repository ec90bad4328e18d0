"""Finds the tree for a drafter, a kind of text, a batch and a machine: grown on the text, its size by measured costs.

Source: Hydra (arXiv:2402.05109) section 4: trees of 1 to 100 nodes from simulated decoding of 100 prompts of Alpaca,
and of these the one of the highest throughput. There throughput was measured by decoding with each tree; here it is
what the measured times of the target's pass and of the drafter say, as for `specdec.tuning.measure.tune`.
"""

from collections.abc import Callable, Sequence

import torch

from specdec.drafting.base import Drafter
from specdec.drafting.network import NetworkDrafter
from specdec.loop.decoder import Decoder
from specdec.models.target.target import Target
from specdec.trees.plan import TreePlan
from specdec.trees.shape import MAX_NODES, TreeShape
from specdec.tuning.budget import plan_sizes
from specdec.tuning.growth import grow
from specdec.tuning.measure import MAX_ROWS, Measure, check_context, measure_costs, probe_prompts
from specdec.tuning.ranks import rank_texts

__all__ = ["OnProgress", "tune_grown"]

OnProgress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

DEPTH = 8
"""How deep trees may grow with a drafter that has no limit of its own."""

_BATCH = 16
_NUM_PROBES = 32


def tune_grown(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[torch.Tensor] | None = None,
    *,
    num_nodes: int = 100,
    depth: int | None = None,
    batch_size: int = 1,
    context: int = 512,
    max_new_tokens: int = 64,
    max_rows: int = MAX_ROWS,
    measure: Measure | None = None,
    on_progress: OnProgress | None = None,
) -> TreePlan:
    """Grow trees on greedy texts of the target, and choose the one with the most expected tokens per second.

    Args:
        target: the target.
        drafter: what will draft; its own tree does not matter.
        prompts: 1-D int64 tensors that the target continues; by default texts that it writes itself.
        num_nodes: nodes of the largest tree, root included.
        depth: deepest tree; by default as deep as the drafter can, 8 if there is no limit.
        batch_size: rows that will be decoded together.
        context: tokens of text per row at which passes are timed.
        max_new_tokens: tokens per prompt that trees are grown on.
        max_rows: most tree nodes of all rows together.
        measure: what times a function; as for `tune`.
        on_progress: called as texts are written and read and trees grow.

    Returns:
        The plan; its `order` holds all trees, its rows their acceptance length on these texts.

    Raises:
        ValueError: a drafter that ranks no candidates, or sizes that do not fit it or the target.
    """
    if not 2 <= num_nodes <= MAX_NODES:
        raise ValueError(f"num_nodes: expected 2 to {MAX_NODES}, got {num_nodes}")
    check_context(target, num_nodes, batch_size=batch_size, context=context)
    prompts = probe_prompts(target, num_prompts=_NUM_PROBES) if prompts is None else prompts

    def report(stage: str, done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(stage, done, total)

    depth = min(_depth_of(drafter), num_nodes - 1) if depth is None else depth
    if not drafter.with_tree(TreeShape.chain(depth)).can_sample:
        raise ValueError(f"drafter: expected one that ranks its candidates, got {drafter.kind}")
    texts: list[list[int]] = []
    decoder = Decoder(target, drafter)
    for begin in range(0, len(prompts), _BATCH):
        batch = prompts[begin : begin + _BATCH]
        texts += decoder.decode(batch, max_new_tokens, stop_tokens=target.stop_tokens).tokens
        report("writing texts", len(texts), len(prompts))
    ranks = rank_texts(
        target,
        drafter,
        prompts,
        texts,
        depth,
        batch_size=_BATCH,
        on_progress=lambda done: report("ranking their tokens", done, len(prompts)),
    )
    growth = grow(ranks, num_nodes, on_progress=lambda done: report("growing trees", done, num_nodes))
    largest = growth.tree(len(growth.tau))
    costs, place = measure_costs(
        target, drafter, largest, batch_size=batch_size, context=context, max_rows=max_rows, measure=measure
    )
    grown = f"grown on {len(prompts)} texts, {growth.num_steps} steps with the largest tree"
    return plan_sizes(growth.order, growth.tau, costs, batch_size=batch_size, place=f"{place}, {grown}")


def _depth_of(drafter: Drafter) -> int:
    """The deepest tree to grow."""
    limit = drafter.depth_limit(drafter.network.config) if isinstance(drafter, NetworkDrafter) else None
    return DEPTH if limit is None else limit[0]
