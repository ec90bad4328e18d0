"""Arrival counters that launches share: zero before a launch, and zero again behind it.

Programs that split a sum count themselves in, and the last to arrive goes on (`weight_first.arrives_last`). Counters
that are made for a call have to be zeroed for it, by a launch of their own that costs as much as a small kernel. So a
`Scratch` keeps counters from launch to launch, and the last program to arrive sets its counter back to zero.

That is safe where launches follow each other and never overlap, which the owner of the scratch has to promise. A
`Decoder` owns one, as it owns the rest of the memory that its steps share, and uses it for steps that are captured
and for those that are not. Whoever calls an op without a scratch gets counters of the call's own, zeroed by it: from
several threads, on several streams and in a graph of their own making that is always right.

Addresses   counters never move and are never freed while their `Scratch` lives, so graphs may read them. A capture
            takes only what is there: counters that it would have to make are the call's own, zeroed in the graph
Errors      a launch that raises may leave counts behind (in Triton's interpreter; a GPU either launches a kernel whole
            or fails for good), so its counters are not used again
Programmatic dependent launch    a kernel must wait for those before it (`tl.extra.cuda.gdc_wait`) before it counts
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import triton

__all__ = ["Scratch", "arrival_counters"]

_MIN_COUNTERS = 4096


class Scratch:
    """Counters of one chain of launches, of which each begins after the one before it has ended."""

    def __init__(self) -> None:
        self._counters: dict[torch.device, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the launches of this thread inside the block share these counters."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def counters(self) -> list[torch.Tensor]:
        """All counters there are, one int32 tensor per device and size; zeros, unless a launch is under way."""
        return [*self._counters.values(), *self._outgrown]

    def take(self, count: int, device: torch.device) -> torch.Tensor:
        """[count] int32 zeros, those of every call."""
        kept = self._counters.get(device)
        if kept is None or kept.shape[0] < count:
            made = max(_MIN_COUNTERS, triton.next_power_of_2(count))
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return torch.zeros(count, dtype=torch.int32, device=device)
            self.drop(device)
            kept = self._counters[device] = torch.zeros(made, dtype=torch.int32, device=device)
        return kept[:count]

    def drop(self, device: torch.device) -> None:
        """Use the counters of a device no more; graphs that read them still may."""
        if device in self._counters:
            self._outgrown.append(self._counters.pop(device))


_active: ContextVar[Scratch | None] = ContextVar("_active", default=None)


@contextmanager
def arrival_counters(count: int, device: torch.device) -> Iterator[torch.Tensor]:
    """[count] int32 zeros for the launch inside the block, which leaves zeros.

    Args:
        count: counters; may be 0.
        device: of the launch, whose GPU is the current one.
    """
    scratch = _active.get()
    if scratch is None or count == 0:
        make = torch.zeros if count else torch.empty
        yield make(count, dtype=torch.int32, device=device)
        return
    try:
        yield scratch.take(count, device)
    except BaseException:
        scratch.drop(device)
        raise
