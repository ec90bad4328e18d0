"""Prompts on their way into rows: read chunk by chunk in a memory of their own, while the rows go on in theirs."""

from collections.abc import Sequence

import torch

from specdec.drafting.base import Prompt, to_device
from specdec.engine.memory import RowMemory
from specdec.engine.tasks import Task
from specdec.kernels.sample_probs import WarpSettings
from specdec.models.target.target import PrefillOutput

__all__ = ["Refill", "together"]


class Refill:
    """The prompts of some tasks, read side by side.

    Args:
        memory: with a row for each of them, or more.
        tasks: whose prompts are read.
        num_tokens: prompt tokens of all rows together that a call of `advance` may read.
    """

    def __init__(self, memory: RowMemory, tasks: Sequence[Task], num_tokens: int) -> None:
        self.memory = memory
        self.tasks = tasks
        state, device = memory.state, memory.state.root.device
        num_padding = memory.num_rows - len(tasks)
        settings = [task.settings for task in tasks]
        rows = [one.row() for one in settings] + [WarpSettings().on("cpu")[0]] * num_padding
        prompt = Prompt.padded(
            [torch.tensor(task.prompt) for task in tasks], memory.num_rows, state.room.max_length, device
        )
        state.begin(
            prompt,
            [one.max_new_tokens for one in settings] + [1] * num_padding,
            to_device(torch.tensor([one.seed for one in settings]), device),
            to_device(torch.stack(rows), device),
            is_greedy=to_device(torch.tensor([one.is_greedy for one in settings] + [True] * num_padding), device),
        )
        self._tells_logits = any(one.logprobs is not None for one in settings)
        self._generation = memory.generation(
            reads_logits=any(one.reads_logits for one in settings), tells_logits=self._tells_logits
        )
        chunk_size = max(1, num_tokens // memory.num_rows)
        self._num_chunks = -(-prompt.tokens.shape[1] // chunk_size)
        self._chunks = self._generation.read(prompt, chunk_size)
        self._last: PrefillOutput | None = None
        self._first_logits: torch.Tensor | None = None
        for task in tasks:
            task.begin()

    def advance(self) -> bool:
        """Read the next chunk; whether the prompts were read and their first tokens are there."""
        self._last = next(self._chunks)
        self._num_chunks -= 1
        if self._num_chunks > 0:
            return False
        output = self._generation.emit_first(self._last)
        if self._tells_logits:
            self._first_logits = output.scores.logits[:, 0].clone()
        return True

    def first_logits(self, row: int) -> torch.Tensor | None:
        """[V] that decided the first token of a task, if its log-probabilities are asked for."""
        return None if self._first_logits is None else self._first_logits[row]


def together(tasks: Sequence[Task], most: int) -> int:
    """How many of the first tasks are read side by side: `most`, and none that would make half of it padding."""
    longest = total = count = 0
    for task in tasks[:most]:
        longest, total = max(longest, len(task.prompt)), total + len(task.prompt)
        if longest * (count + 1) > 2 * total:
            break
        count += 1
    return count
