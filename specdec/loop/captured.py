"""The captured loop: one step is recorded once and replayed, and the host never stands in the way.

    step = captured.find(...)            memory and a recording that fit the call; made if there are none yet
    ... prefill fills step.state ...     eagerly: prompts differ in length
    captured.run(step, max_steps)        replays, with the host some replays ahead of what it knows

A CUDA graph is bound to addresses, so the memory of a generation (`DecodeState` and a drafter's state) is laid out for
a bucket of sizes, and stays. Calls of similar sizes share it, and whatever differs between them is data in it. The host
learns from a copy to pinned memory whether any row still runs; it looks at the copy of `LAG` replays before, so that
the device always has work. A surplus replay at the end changes nothing (`specdec.loop.state`).

What records is an `Engine`. `CudaGraphs` is the one that users meet; tests put one in its place that records the
operators of a step on a CPU, and replays them on the same memory.
"""

import copy
import gc
import logging
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from specdec.drafting.base import Drafter, Room
from specdec.loop.memory import tensors_of
from specdec.loop.state import DecodeState

__all__ = [
    "LAG",
    "CannotCaptureError",
    "CapturedStep",
    "CapturedSteps",
    "CudaGraphs",
    "Engine",
    "Reader",
    "Recording",
    "batch_bucket",
    "length_bucket",
    "new_drafter",
]

LAG = 1
"""Replays that the host is ahead of what it knows; at most as many are surplus when a text ends.

One keeps the device busy as long as a step takes longer than its launch; every further one would waste a step per text.
"""

MAX_RECORDINGS = 8
"""Recordings that share one memory; the one that was not used for longest makes room."""

_LOG = logging.getLogger("specdec")


class CannotCaptureError(RuntimeError):
    """The step does something that cannot be replayed, such as waiting for the device."""


class Recording(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Do the same operations on the same memory once more, without waiting for them."""
        ...


class Reader(Protocol):
    """Copies of a small tensor on their way to the host, first in, first out."""

    def push(self, value: torch.Tensor) -> None:
        """Send what `value` holds once all earlier work is done."""
        ...

    def pop(self) -> list[int]:
        """Wait for the oldest copy."""
        ...


class Engine(Protocol):
    """What records steps."""

    def record(self, step: Callable[[], object]) -> Recording:
        """Record a step. It may be run a few times before, on whatever its memory holds.

        Raises:
            CannotCaptureError: the step cannot be replayed.
        """
        ...

    def reader(self, depth: int) -> Reader:
        """A reader of at most `depth` copies at a time."""
        ...


class CudaGraphs:
    """Steps as CUDA graphs, all of one device in one memory pool: no two of them ever run at the same time.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._places: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def record(self, step: Callable[[], object]) -> Recording:
        """As `Engine`. Two eager steps on the stream of the capture come first.

        The first compiles kernels and makes the libraries' handles and workspaces; the second must not synchronise:
        an error there leaves nothing behind, unlike one in the middle of a capture.
        """
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            if not self._graphs:  # the allocator gives up a pool with the last graph in it
                self._pool = torch.cuda.graph_pool_handle()
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    step()
                    with _forbidden_synchronisation():
                        step()
            finally:  # after an error too, nobody may reuse memory that these steps still write
                current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # other threads of the process may go on using the device
                with (
                    _no_garbage_collection(),
                    torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
                ):
                    step()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if "captur" in str(error):
                    raise CannotCaptureError(_first_line(error)) from error
                raise
            finally:
                torch.cuda.set_stream(current)  # a capture that fails to end leaves its own stream behind
        self._graphs.add(graph)
        return graph

    def reader(self, depth: int) -> Reader:
        """As `Engine`."""
        while len(self._places) < depth:
            self._places.append((torch.empty(2, dtype=torch.int32, pin_memory=True), torch.cuda.Event()))
        return _PinnedReader(self._device, self._places[:depth])


class _PinnedReader:
    """Copies through pinned memory, each with an event behind it."""

    def __init__(self, device: torch.device, places: list[tuple[torch.Tensor, torch.cuda.Event]]) -> None:
        self._device = device
        self._free = deque(places)  # what an earlier reader still had under way arrives before anything sent now
        self._sent: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def push(self, value: torch.Tensor) -> None:
        """As `Reader`."""
        place, event = self._free.popleft()
        place.copy_(value, non_blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._sent.append((place, event))

    def pop(self) -> list[int]:
        """As `Reader`."""
        place, event = self._sent.popleft()
        event.synchronize()
        self._free.append((place, event))
        return place.tolist()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage now and not meanwhile: a graph that is freed during a capture makes it fail."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _forbidden_synchronisation() -> Iterator[None]:
    """Turn whatever waits for the device into a `CannotCaptureError`."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" in str(error):
            raise CannotCaptureError(_first_line(error)) from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


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


@dataclass(slots=True)
class CapturedStep:
    """A recording and the memory that it works on.

    Attributes:
        state: what the step changes.
        drafter: a shallow copy of the decoder's, with a state of its own; networks and tables are shared.
        stop_tokens: [E] int32, None without stop tokens; each call fills in its own.
        recording: the recorded step.
        call: what else the recorded step was given, kept because the recording reads its tensors.
    """

    state: DecodeState
    drafter: Drafter
    stop_tokens: torch.Tensor | None
    recording: Recording
    call: object


@dataclass(slots=True)
class _Memory:
    """What recordings of one batch bucket share."""

    state: DecodeState
    drafter: Drafter
    steps: OrderedDict[Hashable, CapturedStep] = field(default_factory=OrderedDict)


class CapturedSteps:
    """The captured steps of one decoder, by batch bucket and what else a step depends on.

    Per batch bucket there is one memory. A longer text gets a larger one in its place, a shorter one uses it as it is.

    Args:
        engine: what records.
        max_positions: the target's context.
    """

    def __init__(self, engine: Engine, max_positions: int) -> None:
        self.engine = engine
        self.cannot_capture = False
        self._max_positions = max_positions
        self._memories: dict[int, _Memory] = {}

    def room(self, batch_size: int, max_length: int) -> Room:
        """The sizes that a call's memory is laid out for."""
        length = length_bucket(max_length, self._max_positions)
        return Room(batch_bucket(batch_size), length, max_prompt=length - 1, max_new_tokens=length - 1)

    def find(self, batch_size: int, max_length: int, key: Hashable, num_stop_tokens: int) -> CapturedStep | None:
        """The captured step of a call; None if none was captured yet.

        Args:
            batch_size: rows of the call.
            max_length: most tokens of a row.
            key: what the step depends on beside sizes: the acceptance rule, processing.
            num_stop_tokens: E.
        """
        memory = self._memories.get(batch_bucket(batch_size))
        if memory is None or memory.state.room.max_length < max_length or (key, num_stop_tokens) not in memory.steps:
            return None
        memory.steps.move_to_end((key, num_stop_tokens))
        return memory.steps[key, num_stop_tokens]

    def capture(
        self,
        batch_size: int,
        max_length: int,
        key: Hashable,
        num_stop_tokens: int,
        lay_out: Callable[[Room], tuple[DecodeState, Drafter]],
        make_step: Callable[[DecodeState, Drafter, torch.Tensor | None], tuple[Callable[[], object], object]],
    ) -> CapturedStep | None:
        """Record a step that `find` does not find; arguments as there.

        Args:
            batch_size: as above.
            max_length: as above.
            key: as above.
            num_stop_tokens: as above.
            lay_out: makes the memory of a state and of the drafter.
            make_step: given state, drafter and stop tokens, begins a generation that is thrown away and returns a
                function that runs a step of it, and what must be kept as long as the recording.

        Returns:
            The step; None if steps of this decoder cannot be captured, which is logged once.
        """
        if self.cannot_capture:
            return None
        rows = batch_bucket(batch_size)
        memory = self._memories.get(rows)
        if memory is None or memory.state.room.max_length < max_length:
            self._memories.pop(rows, None)
            memory = None  # freed before the larger one is made
            memory = self._memories[rows] = _Memory(*lay_out(self.room(batch_size, max_length)))
        if len(memory.steps) >= MAX_RECORDINGS:
            memory.steps.popitem(last=False)
        device = memory.state.root.device
        stops = torch.full((num_stop_tokens,), -1, dtype=torch.int32, device=device) if num_stop_tokens else None
        try:
            step, call = make_step(memory.state, memory.drafter, stops)
            _check_state_stays(memory.drafter, step)
            recording = self.engine.record(step)
        except CannotCaptureError as error:
            _LOG.warning("the step of this model cannot be captured, so that it runs eagerly: %s", error)
            self.release()
            self.cannot_capture = True
            return None
        except BaseException:
            self.release()
            raise
        captured = CapturedStep(memory.state, memory.drafter, stops, recording, call)
        memory.steps[key, num_stop_tokens] = captured
        return captured

    def run(self, step: CapturedStep, max_steps: int) -> None:
        """Replay until all rows have finished, or logits were NaN; `max_steps` are enough in any case."""
        reader = self.engine.reader(LAG + 1)
        for sent in range(max_steps):
            step.recording.replay()
            reader.push(step.state.progress)
            if sent >= LAG:
                is_running, first_nan_step = reader.pop()
                if not is_running or first_nan_step >= 0:
                    break

    def release(self) -> None:
        """Free all recordings and their memory."""
        self._memories.clear()

    def rooms(self) -> list[tuple[Room, int]]:
        """The memories there are, and how many recordings each has."""
        return [(memory.state.room, len(memory.steps)) for memory in self._memories.values()]

    def memories(self) -> list[tuple[DecodeState, Drafter]]:
        """The memories themselves."""
        return [(memory.state, memory.drafter) for memory in self._memories.values()]


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


def new_drafter(drafter: Drafter, room: Room, device: torch.device) -> Drafter:
    """A shallow copy of a bound drafter with a state of its own."""
    own = copy.copy(drafter)
    vars(own).pop("kept_decoder", None)
    own.allocate(room, device)
    return own
