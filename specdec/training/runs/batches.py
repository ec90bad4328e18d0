"""Which texts a step learns from, which of them a process runs, and in how many passes through the model.

All of it is decided by the number of texts, the batch and the seed: every process knows the whole batch, runs every
n-th text of it, and can say what part of the batch's loss its own texts are. So one process, several, and one that has
to divide its share to save memory follow the same path.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Sampler

__all__ = ["TOKENS_PER_PASS", "Passes", "Reading", "Share", "TextOrder", "ran_out_of_memory"]

TOKENS_PER_PASS = 8192
"""Most tokens, padding included, that go through the model at a time if nobody says otherwise."""


class TextOrder(Sampler[list[int]]):
    """The batches of a whole run as indices: all texts in a new order every epoch, whose last batch may be short.

    Args:
        num_texts: texts to learn from.
        batch_size: texts per step.
        num_steps: batches in all.
        seed: of the orders.
    """

    def __init__(self, num_texts: int, batch_size: int, num_steps: int, seed: int) -> None:
        self.num_texts, self.batch_size, self.num_steps, self.seed = num_texts, batch_size, num_steps, seed

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        left = self.num_steps
        while left:
            order = torch.randperm(self.num_texts, generator=generator).tolist()
            for first in range(0, self.num_texts, self.batch_size)[:left]:
                yield order[first : first + self.batch_size]
                left -= 1


@dataclass(frozen=True, slots=True)
class Share:
    """What one process runs of a batch.

    Attributes:
        items: its texts.
        weights: what each counts in the batch's loss; zero for a text that stands in where a process has none.
        total: of the weights of the whole batch, over all processes.
        num_tokens: of the whole batch, without padding.
    """

    items: list[Any]
    weights: list[float]
    total: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Reading:
    """How the loop reads the texts of a data set.

    Attributes:
        collate: makes the keywords of the model's `forward` from some of them.
        num_tokens: tokens of one.
        num_learnt: places of one that are learnt, by which it counts in a batch's loss; None if all count the same.
    """

    collate: Callable[[list[Any]], Mapping[str, Any]]
    num_tokens: Callable[[Any], int]
    num_learnt: Callable[[Any], int] | None = None

    def share(self, items: Sequence[Any], rank: int, num_ranks: int, *, most_learnt: float = math.inf) -> Share:
        """What process `rank` of `num_ranks` runs of a batch, of which a text teaches `most_learnt` places at most."""
        weights = [1.0 if self.num_learnt is None else min(self.num_learnt(item), most_learnt) for item in items]
        own = list(range(rank, len(items), num_ranks))
        mine = [weights[index] for index in own] or [0.0]
        num_tokens = sum(self.num_tokens(item) for item in items)
        return Share([items[index] for index in own or [0]], mine, sum(weights) or 1.0, num_tokens)


@dataclass(slots=True)
class Passes:
    """How many of a share's texts go through the model at a time.

    Attributes:
        num_tokens: tokens of a text.
        texts: most texts of a pass.
        tokens: most tokens of a pass, padding included; a longer text goes by itself. None for no limit.
        current: the texts of the pass that runs.
    """

    num_tokens: Callable[[Any], int]
    texts: int
    tokens: int | None
    current: list[Any] = field(default_factory=list)

    def split(self, share: Share) -> Iterator[tuple[list[Any], float]]:
        """The passes of a share in its order, each with its part of the whole batch's loss."""
        taken: list[Any] = []
        weight = 0.0
        for item, item_weight in zip(share.items, share.weights, strict=True):
            if taken and not self._fits([*taken, item]):
                yield self._run(taken), weight / share.total
                taken, weight = [], 0.0
            taken, weight = [*taken, item], weight + item_weight
        yield self._run(taken), weight / share.total

    def halve(self) -> bool:
        """Let later passes have half the tokens of the one that runs; False if that is a single text."""
        if len(self.current) == 1:
            return False
        self.tokens = self._size(self.current) // 2
        return True

    def _run(self, items: list[Any]) -> list[Any]:
        self.current = items
        return items

    def _fits(self, items: list[Any]) -> bool:
        return len(items) <= self.texts and (self.tokens is None or self._size(items) <= self.tokens)

    def _size(self, items: list[Any]) -> int:
        return len(items) * max(self.num_tokens(item) for item in items)


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory did not suffice; if so, what the failed pass had left is freed."""
    from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

    if not (isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)):
        return False
    error.__traceback__ = None  # its frames hold the tensors of the pass
    gc.collect()
    clear_device_cache()
    return True
