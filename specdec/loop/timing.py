"""Wall time per phase of decoding: CUDA events on a GPU (no synchronisation until asked), the clock elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["PhaseTimer"]


class PhaseTimer:
    """Notes when named phases begin and end on one device.

    Args:
        device: where the work runs.
        enabled: False for a timer that times nothing: a captured step holds no events.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._device = device
        self._cuda = device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._times: list[tuple[str, float, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as part of `name`."""
        if not self._enabled:
            yield
        elif self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(torch.cuda.current_stream(self._device))
            yield
            end.record(torch.cuda.current_stream(self._device))
            self._events.append((name, start, end))
        else:
            begin = time.perf_counter()
            yield
            self._times.append((name, begin * 1e3, time.perf_counter() * 1e3))

    def spans_ms(self) -> list[tuple[str, float, float]]:
        """Name, begin and end of every phase so far, in milliseconds since the first one began; waits for the GPU."""
        if self._events:
            torch.cuda.synchronize(self._device)
            first = self._events[0][1]
            return [(name, first.elapsed_time(start), first.elapsed_time(end)) for name, start, end in self._events]
        origin = self._times[0][1] if self._times else 0.0
        return [(name, begin - origin, end - origin) for name, begin, end in self._times]

    def times_ms(self) -> dict[str, float]:
        """Milliseconds per phase so far; waits for the GPU."""
        times: dict[str, float] = {}
        for name, begin, end in self.spans_ms():
            times[name] = times.get(name, 0.0) + end - begin
        return times
