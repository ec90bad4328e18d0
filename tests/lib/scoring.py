"""A draft tree behind ragged prompts, scored by a target."""

from typing import NamedTuple

import torch

from lib.families import VOCAB_SIZE, pad
from specdec.models.common.cache import KVCache
from specdec.models.target.scores import PrefillOutput, TargetOutput
from specdec.models.target.target import Target
from specdec.trees.shape import TreeShape

TREE = TreeShape.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0], [0, 1, 1]])


class Scored(NamedTuple):
    prefill: PrefillOutput
    tree: TargetOutput
    cache: KVCache


def random_tree(generator: torch.Generator, batch_size: int) -> torch.Tensor:
    """[B, N] tokens for the nodes of `TREE`."""
    return torch.randint(1, VOCAB_SIZE, (batch_size, TREE.num_nodes), generator=generator)


@torch.no_grad()
def score(target: Target, prompts: list[torch.Tensor], tree_tokens: torch.Tensor) -> Scored:
    """What the target makes of the prompts and of the tree behind them, and the cache that this leaves."""
    ids, mask = pad(prompts, "right")
    depth = torch.tensor(TREE.depth, dtype=torch.int32)[None]
    ancestors = torch.tensor(TREE.ancestor_words, dtype=torch.int32)[None]
    with target.hooked():
        cache = target.new_cache(len(prompts), ids.shape[1] + TREE.num_nodes)
        prefill = target.prefill(ids, mask.sum(1).int(), cache)
        return Scored(prefill, target.score(tree_tokens, depth, ancestors, cache), cache)
