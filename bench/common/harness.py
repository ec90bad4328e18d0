"""How a kernel is timed: thinly over pytest-benchmark, after its result was compared with the definition.

    pytest bench/kernels --benchmark-only                                  # all ops, all shapes of this machine
    pytest bench/kernels/bench_rms_norm.py --benchmark-only --benchmark-json=rms_norm.json
    pytest-benchmark compare before.json after.json                        # what a change did

A file of bench/kernels declares an op or several (`BenchOp.of`) and binds `cases` of it to a name that begins with
"bench_". A wrong kernel gets no number: `BenchOp.run` raises `WrongResultError` before anything is
timed.

On a GPU one round is a CUDA-graph replay of many calls, each on inputs that are not in a cache (`timing.py`).
`extra_info` holds the figures to quote: p20, p50 and p80 of the time of one call in us, bytes and flops by hand
(`cost.py`), the percent of the roofline that the same run measured (`machine.py`), and provenance. The columns that
pytest-benchmark prints are host times of a whole replay; they serve to compare two runs. A provider that synchronises
cannot be captured; it is timed call by call, and `timing` says so.

Without a GPU the times are wall times of eager PyTorch on the CPU, `timing` says so, the Triton providers are skipped,
and the roofline is the one of an H200, as a cost model without a measured percentage beside it.
"""

import dataclasses
import functools
import inspect
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from specdec.bench.common.cost import H200, Cost, Machine
from specdec.bench.common.machine import measure_machine
from specdec.bench.common.shapes import StepShape
from specdec.bench.common.timing import CPU_TIMING, ROUNDS, WARMUP_ROUNDS, Call, quantiles, time_on_gpu
from specdec.common.provenance import provenance

__all__ = ["BenchOp", "Call", "Provider", "WrongResultError", "cases", "compiled", "eager"]

_CPU_ROUND_S = 2e-3

# one rounding of the result, as in the tests: what is left when eager PyTorch happens to be exact
_FLOOR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class WrongResultError(AssertionError):
    """A provider's result is not the definition's; its time would mean nothing."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to compute an op.

    Attributes:
        function: called with the arguments of a `Call`.
        needs_gpu: skipped without a GPU.
        capturable: can be captured in a CUDA graph; False if it waits for the GPU.
        compiled: PyTorch's compiler runs on it. It is checked in the mode in which it is timed, or it would compile
            twice; poison would not reach the memory that compiled code takes.
    """

    function: Callable[..., Any]
    needs_gpu: bool = False
    capturable: bool = True
    compiled: bool = False


def eager(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A reference in the dtype of its inputs; those without floats have no other way to run."""
    has_floats = "upcast" in inspect.signature(reference).parameters
    return functools.partial(reference, upcast=False) if has_floats else reference


def compiled(function: Callable[..., Any], *, eager_on_cpu: bool = False) -> Provider:
    """A provider that runs PyTorch's compiler on an eager function; on a GPU only.

    Args:
        function: what to compile, for static shapes.
        eager_on_cpu: without a GPU run the function as it is instead of skipping it, so that its result is checked.

    Returns:
        The provider. Nothing is compiled, and no compiler imported, before it runs.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = function if eager_on_cpu and not torch.cuda.is_available() else _compile(function)
        return chosen(*args, **kwargs)

    return Provider(call, needs_gpu=not eager_on_cpu, compiled=True)


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


@dataclass(frozen=True, slots=True)
class BenchOp:
    """An op to time.

    Attributes:
        name: name in the records.
        make: builds the arguments for a shape with the random numbers of a generator, on the generator's device; equal
            seeds must give equal arguments.
        definition: the reference of the op, which decides what is right; in float64 inside if the op has floats.
        providers: ways to compute the op, by name. "reference" is the eager one in the op's own dtype, by whose error
            the others are judged.
        cost: bytes and flops of one call.
        outputs: what to compare, from the call and what it returned; an op that works in place names its arguments.
        shapes: where it is timed.
    """

    name: str
    make: Callable[[StepShape, torch.Generator], Call]
    definition: Callable[..., Any]
    providers: Mapping[str, Provider]
    cost: Callable[[StepShape], Cost]
    outputs: Callable[[Call, Any], Any] = lambda _, result: result
    shapes: Sequence[StepShape] = ()

    def __post_init__(self) -> None:
        if "reference" not in self.providers:
            raise ValueError(f"providers: expected one named 'reference', got {', '.join(self.providers) or 'none'}")

    @classmethod
    def of(
        cls,
        op: Callable[..., Any],
        reference: Callable[..., Any],
        *,
        others: Mapping[str, Provider | Callable[..., Any]],
        name: str = "",
        waits: bool = False,
        **settings: Any,
    ) -> "BenchOp":
        """An op of this library and its reference, beside other ways to compute it.

        Args:
            op: the launcher; "triton" among the providers.
            reference: its reference, the definition; "reference" among the providers.
            others: the other providers, by name. A function alone can be captured and runs anywhere.
            name: name in the records, if it is not the op's.
            waits: the reference waits for the GPU.
            **settings: the other attributes.

        Returns:
            The op.
        """
        providers = {
            "reference": Provider(eager(reference), capturable=not waits),
            **{key: found if isinstance(found, Provider) else Provider(found) for key, found in others.items()},
            "triton": Provider(functools.partial(op, backend="triton"), needs_gpu=True),
        }
        return cls(name=name or op.__name__, definition=reference, providers=providers, **settings)

    def run(self, benchmark: Any, provider: str, shape: StepShape) -> None:
        """Check one provider at one shape, time it and record the time.

        Args:
            benchmark: the fixture of pytest-benchmark.
            provider: name of the provider.
            shape: the shape.

        Raises:
            WrongResultError: the result is not the definition's.
        """
        chosen = self.providers[provider]
        has_gpu = torch.cuda.is_available()
        if chosen.needs_gpu and not has_gpu:
            pytest.skip(f"{provider} needs an NVIDIA GPU")
        if has_gpu:
            torch.compiler.reset()  # or the many shapes of one session exceed its limit and it runs eagerly

        self.check(provider, shape)
        cost = self.cost(shape)
        benchmark.group = f"{self.name} {shape}"
        if has_gpu:
            times_us, timing = time_on_gpu(
                chosen.function,
                functools.partial(self.call, shape),
                cost.num_bytes,
                pedantic=benchmark.pedantic,
                capturable=chosen.capturable,
            )
        else:
            times_us, timing = _time_on_cpu(benchmark, chosen, self.call(shape)), CPU_TIMING
        benchmark.extra_info.update(
            {"op": self.name, "provider": provider, "shape": str(shape), "dtype": str(shape.dtype), "timing": timing},
            **_figures(times_us, cost, measure_machine() if has_gpu else H200, measured=has_gpu),
            provenance=provenance(),
        )

    def check(self, provider: str, shape: StepShape) -> None:
        """Compare one provider's result with the definition's, each on inputs and memory of its own.

        Raises:
            WrongResultError: integers that differ, or floats whose error is over twice eager PyTorch's and a rounding.
        """
        chosen = self.providers[provider]
        outputs = []
        for function in (self.definition, self.providers["reference"].function, chosen.function):
            call = self.call(shape)
            with nullcontext() if chosen.compiled and function is chosen.function else _poisoned_memory():
                result = call.run(function)
            outputs.append(_named_tensors(self.outputs(call, result)))
        expected, eager, got = outputs
        if got.keys() != expected.keys():
            raise WrongResultError(f"{self.name}/{provider}: expected outputs {list(expected)}, got {list(got)}")
        for name, tensor in got.items():
            difference = _difference(tensor, expected[name], eager[name])
            if difference:
                raise WrongResultError(f"{self.name}/{provider} at {shape}: {name}: {difference}")

    def call(self, shape: StepShape) -> Call:
        """Arguments of one call at a shape, the same each time, on the GPU if there is one."""
        generator = torch.Generator(device="cuda" if torch.cuda.is_available() else "cpu")
        return self.make(shape, generator.manual_seed(zlib.crc32(f"{self.name} {shape}".encode())))


def cases(ops: BenchOp | Mapping[str, BenchOp]) -> Callable[..., None]:
    """The benchmark that pytest collects: an op, or kinds of one by name, at every shape with every provider."""
    kinds = {"": ops} if isinstance(ops, BenchOp) else ops
    found = [
        pytest.param(op, provider, shape, id="-".join(filter(None, (kind, str(shape), provider))))
        for kind, op in kinds.items()
        for shape in op.shapes
        for provider in op.providers
    ]

    @pytest.mark.parametrize(("op", "provider", "shape"), found)
    def bench(benchmark: Any, op: BenchOp, provider: str, shape: StepShape) -> None:
        op.run(benchmark, provider, shape)

    return bench


def _figures(times_us: list[float], cost: Cost, machine: Machine, *, measured: bool) -> dict[str, Any]:
    """Quantiles, cost and roofline; a percentage only on the machine itself, no quantiles if nothing was timed."""
    floor_us, found = cost.roofline_us(machine), quantiles(times_us)
    return {
        **found,
        "bytes": cost.num_bytes,
        "flops": cost.num_flops,
        "roofline_us": floor_us,
        "roofline_machine": machine.name,
        "percent_of_roofline": 100 * floor_us / found["p50_us"] if measured and found["p50_us"] else None,
    }


def _named_tensors(value: Any) -> dict[str, torch.Tensor]:
    """The tensors of an op's result: one tensor, a tuple of tensors or a dataclass of tensors."""
    if isinstance(value, torch.Tensor):
        return {"output": value}
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {f"output {i}": tensor for i, tensor in enumerate(value)}


def _difference(got: torch.Tensor, expected: torch.Tensor, eager: torch.Tensor) -> str | None:
    """What is wrong with a result, None if nothing is."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"expected {expected.dtype} {list(expected.shape)}, got {got.dtype} {list(got.shape)}"
    if torch.equal(got, expected):
        return None
    if not expected.is_floating_point():
        return f"{int((got != expected).sum())} of {got.numel()} elements differ"
    error, eager_error = _max_error(got, expected), _max_error(eager, expected)
    bound = 2 * eager_error + _FLOOR[got.dtype] * max(1.0, float(expected.abs().max()))
    if error <= bound:  # false for a NaN
        return None
    return f"error {error:.3g}, at most {bound:.3g} allowed (eager PyTorch: {eager_error:.3g})"


def _max_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).abs().max())


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """torch.empty yields NaN or the largest int, so that a kernel that skips an element cannot find an old result."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _time_on_cpu(benchmark: Any, provider: Provider, call: Call) -> list[float]:
    """Wall times of one call in us, one per round; empty if pytest-benchmark is disabled."""
    start = time.perf_counter()
    call.run(provider.function)
    once_s = time.perf_counter() - start
    benchmark.pedantic(
        call.run,
        args=(provider.function,),
        rounds=ROUNDS,
        warmup_rounds=WARMUP_ROUNDS,
        iterations=max(1, math.ceil(_CPU_ROUND_S / once_s)),
    )
    return [1e6 * seconds for seconds in benchmark.stats.stats.data] if benchmark.stats else []
