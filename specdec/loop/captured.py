"""The captured loop: one step is recorded once and replayed, and the host never stands in the way.

    step = captured.find(...)            a recording that fits the call, and the memory that it works on
    ... prefill fills step.state ...     eagerly: prompts differ in length
    captured.run(step, follower, ..)     replays, with the host some replays ahead of what it knows

A CUDA graph is bound to addresses, so the memory of a generation (`DecodeState` and a drafter's state) is laid out for
a bucket of sizes, and stays. Calls of similar sizes share it, and whatever differs between them is data in it. The host
learns from a copy to pinned memory whether any row still runs, and what code of the caller's wants to know; it looks at
the copy of `LAG` replays before, so that the device always has work. A surplus replay at the end changes nothing
(`specdec.loop.state`), or is taken back (`specdec.loop.follower`).

Nothing here calls back: the decoder lays out memory, begins a generation on it and hands both over to be recorded.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

from specdec.drafting.base import Drafter, Room
from specdec.loop.follower import Follower
from specdec.loop.graphs import CannotCaptureError, Graphs, Recording
from specdec.loop.memory import tensors_of
from specdec.loop.state import DecodeState
from specdec.loop.step import Generation

__all__ = ["LAG", "CapturedStep", "CapturedSteps", "Memory", "batch_bucket", "length_bucket"]

LAG = 1
"""Replays that the host is ahead of what it knows; at most as many are surplus when a text ends.

One keeps the device busy as long as a step takes longer than its launch; every further one would waste a step per text.
"""

MAX_RECORDINGS = 8
"""Recordings that share one memory; the one that was not used for longest makes room."""

_LOG = logging.getLogger("specdec")


def batch_bucket(batch_size: int) -> int:
    """Rows that memory is laid out for: the next of 1, 2, 3, 4, 6, 8, 12, 16, ..., at most a third of them padding."""
    power = 1
    while power < batch_size:
        if batch_size <= power * 3 // 2 and power > 1:
            return power * 3 // 2
        power *= 2
    return power


def length_bucket(max_length: int, max_positions: int) -> int:
    """Tokens per row that memory is laid out for: a quarter more than needed at most, or 256 more.

    Args:
        max_length: tokens that are needed.
        max_positions: the model's context, which no text outgrows.
    """
    unit = max(256, 1 << max(max_length.bit_length() - 3, 0))
    return max(max_length, min(-(-max_length // unit) * unit, max_positions))


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """Recordings, one for each way of the drafter, and the generation that they were made of.

    What the recordings read lives as long as it does.
    """

    generation: Generation
    recordings: tuple[Recording, ...]

    @property
    def state(self) -> DecodeState:
        """What the step changes."""
        return self.generation.state


@dataclass(frozen=True, slots=True)
class Memory:
    """What recordings of one batch bucket share.

    Attributes:
        state: the loop's.
        drafter: a shallow copy of the decoder's, with a state of its own; networks and tables are shared.
        steps: what was recorded on it, by what a step depends on beside sizes; the one used last at the end.
    """

    state: DecodeState
    drafter: Drafter
    steps: OrderedDict[Hashable, CapturedStep] = field(default_factory=OrderedDict)


class CapturedSteps:
    """The captured steps of one decoder, by batch bucket and what else a step depends on.

    Per batch bucket there is one memory. A longer text gets a larger one in its place, a shorter one uses it as it is.

    Args:
        graphs: what records.
        max_positions: the target's context.
    """

    def __init__(self, graphs: Graphs, max_positions: int) -> None:
        self.graphs = graphs
        self.cannot_capture = False
        self._max_positions = max_positions
        self._memories: dict[int, Memory] = {}

    def room(self, batch_size: int, max_length: int) -> Room:
        """The sizes that a call's memory is laid out for; `max_length` is the most tokens of a row."""
        length = length_bucket(max_length, self._max_positions)
        return Room(batch_bucket(batch_size), length, max_prompt=length - 1, max_new_tokens=length - 1)

    def memory(self, batch_size: int, max_length: int) -> Memory | None:
        """The memory of these sizes; one that is too small is freed, and None says that a new one has to be kept."""
        rows = batch_bucket(batch_size)
        memory = self._memories.get(rows)
        if memory is not None and memory.state.room.max_length < max_length:
            del self._memories[rows]
            return None
        return memory

    def keep(self, memory: Memory) -> Memory:
        """Keep a new memory, which takes the place of one for as many rows."""
        self._memories[memory.state.room.batch_size] = memory
        return memory

    def find(self, batch_size: int, max_length: int, key: Hashable) -> CapturedStep | None:
        """The captured step of a call; None if none was captured yet.

        Args:
            batch_size: rows of the call.
            max_length: most tokens of a row.
            key: what the step depends on beside sizes: the acceptance rule, whether logits are processed, the number of
                stop tokens.
        """
        memory = self._memories.get(batch_bucket(batch_size))
        if memory is None or memory.state.room.max_length < max_length or key not in memory.steps:
            return None
        memory.steps.move_to_end(key)
        return memory.steps[key]

    def record(self, memory: Memory, key: Hashable, generation: Generation) -> CapturedStep | None:
        """Record the step of a generation that has begun on `memory`, and that nobody needs.

        Args:
            memory: one that was kept.
            key: as for `find`.
            generation: on that memory.

        Returns:
            The step; None if steps of this decoder cannot be captured, which is logged once.
        """
        if len(memory.steps) >= MAX_RECORDINGS:
            memory.steps.popitem(last=False)
        try:
            recordings = []
            for way in range(memory.drafter.num_ways):
                step = partial(generation.step, way)
                _check_state_stays(memory.drafter, step)
                recordings.append(self.graphs.record(step))
        except CannotCaptureError as error:
            _LOG.warning("the step of this model cannot be captured, so that it runs eagerly: %s", error)
            self.release()
            self.cannot_capture = True
            return None
        memory.steps[key] = CapturedStep(generation, tuple(recordings))
        return memory.steps[key]

    def run(self, step: CapturedStep, follower: Follower, max_steps: int) -> None:
        """Replay until all rows have finished; `max_steps` are enough in any case.

        Args:
            step: on whose memory a generation has begun.
            follower: of that generation, whose first message is the prompt's; its errors end the loop.
            max_steps: tokens that a row may emit after the prompt's.
        """
        reader = self.graphs.reader(LAG + 1, follower.message_size)
        reader.push(follower.message())
        for sent in range(1, max_steps + 1):
            step.recordings[follower.way()].replay()
            reader.push(follower.message())
            if sent >= LAG and not follower.take(reader.pop()):
                return
        for _ in range(min(LAG, max_steps + 1)):
            if not follower.take(reader.pop()):
                return

    def release(self) -> None:
        """Free all recordings and their memory."""
        self._memories.clear()

    def memories(self) -> list[Memory]:
        """The memories there are."""
        return list(self._memories.values())


def _check_state_stays(drafter: Drafter, step: Callable[[], object]) -> None:
    """Refuse a drafter, of the user's making perhaps, that keeps state where a replay would not find it.

    Raises:
        CannotCaptureError: a step binds an attribute to a new tensor, or changes a number.
    """

    def numbers() -> dict[str, object]:
        return {name: value for name, value in vars(drafter).items() if isinstance(value, (int, float))}

    step()  # what only the first step makes, such as tables, may stay
    tensors, before = tensors_of(drafter), numbers()
    step()
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    if storages != {tensor.untyped_storage()._cdata for tensor in tensors_of(drafter)} or before != numbers():
        raise CannotCaptureError(f"the drafter {drafter.kind} binds its state anew instead of changing it in place")
