"""What records a step and replays it: CUDA graphs.

Tests put a `Graphs` in their place that records the operators of a step on a CPU, and replays them on the same memory.
"""

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CannotCaptureError", "CudaGraphs", "Graphs", "NoWaiting", "Reader", "Recording"]


_CAPTURING = threading.RLock()
"""Held while a graph is recorded: garbage collection is off meanwhile, for all threads of the process."""

_WAITS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"})
_WAITS |= {"_unique", "_unique2", "unique_dim", "unique_consecutive"}
_COPIES = frozenset({"_to_copy", "copy_"})
_INDEXES = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})


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


class Graphs(Protocol):
    """What records steps."""

    def record(self, step: Callable[[], object]) -> Recording:
        """Record a step. It may be run a few times before, on whatever its memory holds.

        Raises:
            CannotCaptureError: the step cannot be replayed.
        """
        ...

    def reader(self, depth: int, size: int) -> Reader:
        """A reader of at most `depth` copies at a time, each of `size` int32 numbers."""
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
        self._places: dict[int, list[tuple[torch.Tensor, torch.cuda.Event]]] = {}  # by size

    def record(self, step: Callable[[], object]) -> Recording:
        """As `Graphs`. Two eager steps on the stream of the capture come first.

        The first compiles kernels and makes the libraries' handles and workspaces; the second must not synchronise:
        an error there leaves nothing behind, unlike one in the middle of a capture.
        """
        with _CAPTURING, torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            if not self._graphs:  # the allocator gives up a pool with the last graph in it
                self._pool = torch.cuda.graph_pool_handle()
            current = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    step()
                    with NoWaiting():  # type: ignore[no-untyped-call]
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
                # the same step has just run twice: what fails is the recording, which may leave marks in the allocator
                raise CannotCaptureError(
                    f"recording failed half way, {_first_line(error)}; restart the process if GPU work fails after this"
                ) from error
            finally:
                torch.cuda.set_stream(current)  # a capture that fails to end leaves its own stream behind
        self._graphs.add(graph)
        return graph

    def reader(self, depth: int, size: int) -> Reader:
        """As `Graphs`."""
        places = self._places.setdefault(size, [])
        while len(places) < depth:
            places.append((torch.empty(size, dtype=torch.int32, pin_memory=True), torch.cuda.Event()))
        return _PinnedReader(self._device, places[:depth])


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


class NoWaiting(TorchDispatchMode):
    """Turns whatever makes this thread wait for the device into a `CannotCaptureError`; other threads may wait.

    PyTorch's own check (`torch.cuda.set_sync_debug_mode`) would raise in all of them.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, unless it waits."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        waits = name in _WAITS
        if name in _INDEXES:  # by a mask: as many as there are
            masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
            waits = bool(masks)
        elif name in _COPIES:
            devices = {one.device.type for one in args if isinstance(one, torch.Tensor)}
            if kwargs.get("device") is not None:
                devices.add(torch.device(kwargs["device"]).type)
            waits = len(devices) > 1 and not (kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)))
        if waits:
            raise CannotCaptureError(f"{func} synchronizes with the device")
        return func(*args, **kwargs)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
