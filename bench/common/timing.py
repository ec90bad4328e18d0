"""Time of one call: CUDA-graph replays between events on a GPU, wall time elsewhere. Shared by all measurements.

On a GPU one round is a replay of up to `_LAUNCHES` calls between two events. The calls take turns on copies of the
inputs that together exceed four times the L2 cache, and the cache is overwritten before every round, so every call
finds its inputs in device memory.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from specdec.kernels.common.scratch import Scratch

__all__ = ["CPU_TIMING", "ROUNDS", "WARMUP_ROUNDS", "Call", "elapsed_us", "quantiles", "rotation", "time_calls"]
__all__ += ["time_on_gpu"]

ROUNDS = 30
WARMUP_ROUNDS = 3
CPU_TIMING = "CPU wall time, eager PyTorch"
_LAUNCHES = 40  # enough that the start of a graph, some us, is a small part of a call's share of it


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one call of an op.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self, function: Callable[..., Any]) -> Any:
        """Call `function` with these arguments."""
        return function(*self.args, **self.kwargs)

    def num_bytes(self) -> int:
        """Size of all tensor arguments in bytes."""
        values = (*self.args, *self.kwargs.values())
        return sum(value.untyped_storage().nbytes() for value in values if isinstance(value, torch.Tensor))


def time_calls(function: Callable[..., Any], make: Callable[[], Call], touched_bytes: int) -> tuple[list[float], str]:
    """Time a function outside pytest, on the GPU if there is one.

    Args:
        function: what to time; it can be captured in a CUDA graph.
        make: builds the arguments of a call, in memory of their own each time.
        touched_bytes: what one call reads and writes.

    Returns:
        Times of one call in us, one per round, and how they were taken.
    """
    if torch.cuda.is_available():
        return time_on_gpu(function, make, touched_bytes, pedantic=_run_rounds)
    call = make()
    return [elapsed_us(lambda: call.run(function)) for _ in range(WARMUP_ROUNDS + ROUNDS)][-ROUNDS:], CPU_TIMING


def time_on_gpu(
    function: Callable[..., Any],
    make: Callable[[], Call],
    touched_bytes: int,
    *,
    pedantic: Callable[..., Any],
    capturable: bool = True,
) -> tuple[list[float], str]:
    """Time a function on the GPU.

    Args:
        function: what to time.
        make: builds the arguments of a call, in memory of their own each time.
        touched_bytes: what one call reads and writes.
        pedantic: runs the rounds, as `benchmark.pedantic` of pytest-benchmark does.
        capturable: the function can be captured in a CUDA graph; False if it waits for the GPU.

    Returns:
        Times of one call in us, one per round, and how they were taken.
    """
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    torch.cuda.empty_cache()  # or the free memory that it keeps does not count as free
    calls = [make()]
    num_copies, num_launches = rotation(
        touched_bytes, calls[0].num_bytes(), l2_bytes, torch.cuda.mem_get_info()[0] // 2, _LAUNCHES
    )
    calls += [make() for _ in range(num_copies - 1)]

    scratch = Scratch()  # as in a step, where launches share their counters

    def run_all() -> None:
        with scratch.active():
            for i in range(num_launches):
                calls[i % num_copies].run(function)

    run_all()  # compiles the kernels and loads them, which a capture must not
    torch.cuda.synchronize()
    launch = run_all
    if capturable:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_all()
        launch = graph.replay

    flush = torch.empty(4 * l2_bytes, dtype=torch.int8, device="cuda")
    times_us: list[float] = []

    def overwrite_l2() -> None:
        flush.zero_()
        torch.cuda.synchronize()

    def timed_round() -> None:
        times_us.append(elapsed_us(launch) / num_launches)

    pedantic(timed_round, setup=overwrite_l2, rounds=ROUNDS, warmup_rounds=WARMUP_ROUNDS)
    how = "CUDA-graph replays" if capturable else "eager calls, not capturable"
    return times_us[-ROUNDS:], f"{how}, {num_launches} calls on {num_copies} copies of the inputs, cold L2"


def rotation(touched_bytes: int, call_bytes: int, l2_bytes: int, free_bytes: int, max_launches: int) -> tuple[int, int]:
    """Copies of the inputs and launches in a round, such that no launch finds its inputs in the L2 cache.

    The cache is overwritten before a round, so a copy's first use is cold; it is used again only if all copies
    together exceed four times the cache, and there is only so much memory for copies.

    Args:
        touched_bytes: what one call reads and writes.
        call_bytes: size of the arguments of one call.
        l2_bytes: size of the cache.
        free_bytes: memory for copies.
        max_launches: calls in a round at most.

    Returns:
        Number of copies and number of launches.
    """
    num_copies = min(max_launches, 4 * l2_bytes // max(touched_bytes, 1) + 1, free_bytes // max(call_bytes, 1))
    num_copies = max(num_copies, 1)
    cold_again = num_copies * touched_bytes > 4 * l2_bytes
    return num_copies, max_launches if cold_again else num_copies


def elapsed_us(function: Callable[[], Any]) -> float:
    """Time of a call in us: between two events on the current stream of the GPU, or on the clock without one."""
    if not torch.cuda.is_available():
        start_s = time.perf_counter()
        function()
        return 1e6 * (time.perf_counter() - start_s)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))


def quantiles(times_us: Sequence[float]) -> dict[str, float | None]:
    """p20, p50 and p80 of times in us, as a record has them; None if nothing was timed."""
    return {f"p{q}_us": float(np.percentile(times_us, q)) if times_us else None for q in (20, 50, 80)}


def _run_rounds(target: Callable[[], Any], *, setup: Callable[[], Any], rounds: int, warmup_rounds: int) -> None:
    """What `benchmark.pedantic` does, without statistics."""
    for _ in range(warmup_rounds + rounds):
        setup()
        target()
