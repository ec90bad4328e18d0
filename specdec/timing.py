"""Wall time per phase of decoding: CUDA events on a GPU (no synchronisation until asked), the clock elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["PhaseTimer"]


class PhaseTimer:
    """Adds up the time spent in named phases on one device.

    Args:
        device: where the work runs.
        enabled: False for a timer that times nothing: a captured step holds no events.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._times_ms: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as part of `name`."""
        if not self._enabled:
            yield
        elif self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._spans.append((name, start, end))
        else:
            begin = time.perf_counter()
            yield
            self._times_ms[name] = self._times_ms.get(name, 0.0) + (time.perf_counter() - begin) * 1e3

    def times_ms(self) -> dict[str, float]:
        """Milliseconds per phase so far; waits for the GPU."""
        if self._spans:
            torch.cuda.synchronize()
            for name, start, end in self._spans:
                self._times_ms[name] = self._times_ms.get(name, 0.0) + start.elapsed_time(end)
            self._spans.clear()
        return dict(self._times_ms)
