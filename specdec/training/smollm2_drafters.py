"""The drafters of SmolLM2-135M-Instruct: one table, equal budgets, texts that the target wrote.

Every drafter reads the same texts equally often, in the same order (`_STEPS` batches of `_BATCH`), so that tables of
them compare methods. Heads have no LM head of their own where their paper gives them one: four vocabularies of 49,152
are 113 M parameters beside a target of 135 M; `amphista_low_rank` has its paper's small ones. Learning rates fit some
thousand steps. Everything else is the papers' recipe.
"""

import heapq
from collections.abc import Mapping
from typing import Any

from specdec.training.bundled_drafters import BundledDrafter

__all__ = ["SMOLLM2_DRAFTERS"]


def _likely_tree(num_nodes: int, depth: int) -> tuple[tuple[int, ...], ...]:
    """Rank paths of the most probable nodes, root counted, if a candidate of rank r is right with 0.6 / (r + 1)."""
    paths: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-0.6, (0,))]
    while len(paths) < num_nodes - 1:
        chance, path = heapq.heappop(heap)
        paths.append(path)
        rank = path[-1] + 1
        heapq.heappush(heap, (chance * rank / (rank + 1), (*path[:-1], rank)))
        if len(path) < depth:
            heapq.heappush(heap, (chance * 0.6, (*path, 0)))
    return tuple(paths)


# every text once and a few twice, in small batches: on a budget of few texts more steps win. EAGLE's held-out loss came
# to 1.06 in 240 steps of 4 texts, to 1.12 in 120 of 8
_STEPS, _BATCH = 1550, 4
_HEADS = {"num_heads": 4, "vocab_size": None}
_MASKS = {"num_masks": 3, "num_groups": 48}  # with masks behind all tokens a step would cost four of the others'
# two layers that begin with the target's last ones: from random weights a block learns too slowly for this budget. What
# they read of the target is what EAGLE-3 does, so that it reads the texts once for all of them; a few blocks of a text
# are about as many learnt places as the others have
_BLOCK = {"tap_layers": (1, 14, 26), "num_layers": 2, "start_layers": (28, 29), "qk_norm": False, "num_anchors": 24}
_HEAD_TREE, _DEEP_TREE = _likely_tree(32, 4), _likely_tree(32, 6)
# losses at some places of a text, over some thousand of the tokens: what lets a CPU read more texts. Precision is the
# target's: without AMX, bfloat16 takes 1.75 times as long on a CPU as float32
_SPARSE = {"num_places": 96, "num_candidates": 4096, "mixed_precision": None, "eval_every": _STEPS}

# a block is learnt as a whole, at the places behind its anchors
_WHOLE = {**_SPARSE, "num_places": None}


def _drafter(
    kind: str,
    learning_rate: float,
    paths: tuple[tuple[int, ...], ...],
    settings: Mapping[str, Any],
    *,
    eagle: str | None = None,
    run: Mapping[str, Any] = _SPARSE,
) -> BundledDrafter:
    grown = len(paths) + 1, max(map(len, paths))
    return BundledDrafter(kind, _STEPS, learning_rate, paths, settings, _BATCH, eagle, run=run, grown=grown)


SMOLLM2_DRAFTERS: dict[str, BundledDrafter] = {
    # the first: it reads layers beside the last state, and the target reads the texts once for all of them
    "eagle3": _drafter("eagle3", 1e-3, _DEEP_TREE, {"draft_vocab_size": 4096, "num_unrolled": 2}),
    "medusa": _drafter("medusa", 1e-3, _HEAD_TREE, _HEADS),
    "hydra": _drafter("hydra", 1e-3, _HEAD_TREE, _HEADS),
    "hydra++": _drafter("hydra++", 1e-3, _HEAD_TREE, {**_HEADS, "shared_tail": True, "dropout": 0.0}),
    "amphista": _drafter("amphista", 1e-3, _HEAD_TREE, {"num_heads": 4, "own_lm_heads": False}),
    "amphista_low_rank": _drafter("amphista", 1e-3, _HEAD_TREE, {"num_heads": 4, "head_rank": 64}),
    "eagle": _drafter("eagle", 1e-3, _DEEP_TREE, {}),
    "mtp": _drafter("mtp", 1e-3, _DEEP_TREE, {"teacher_weight": 1.0}),
    "peagle": _drafter("peagle", 1e-3, _HEAD_TREE, {"num_masks": 3, "shares_lm_head": True}),
    "dflash": _drafter("dflash", 1e-3, _DEEP_TREE, {**_BLOCK, "block_size": 8}, run=_WHOLE),
    "dspark": _drafter("dspark", 1e-3, _DEEP_TREE, {**_BLOCK, "block_size": 7, "markov_rank": 64}, run=_WHOLE),
    "parallelspec": _drafter("parallelspec", 1e-3, _HEAD_TREE, {"variant": "eagle", **_MASKS}, eagle="eagle"),
    "parallelspec_medusa": _drafter("parallelspec", 1e-3, _HEAD_TREE, {"variant": "medusa", **_MASKS}),
    "falcon": _drafter("falcon", 1e-3, _DEEP_TREE, {"block_size": 2, "lstm_dropout": 0.0}),
    "draft_model": _drafter(
        "draft_model", 1e-3, _DEEP_TREE, {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ),
}
"""The drafters, by the name of their folder; one that begins with another stands behind it."""
