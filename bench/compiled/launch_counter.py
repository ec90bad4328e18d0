"""What one decoding step launches on a GPU, counted where there is none: the step runs once on tensors without data.

A step asks the device for nothing, so that it can be captured; for the same reason it runs on the meta device, at any
sizes, in no memory. PyTorch's operators are counted as they are dispatched, our kernels where Triton would launch them.

One launch       what the GPU executes: a kernel, a fill, a copy. Views and empty tensors are none. PyTorch's `topk` is
                 the one operator that launches many (`_NUM_KERNELS`)
Bytes            of every tensor that is handed to a launch or comes out of it, each element once; of what is looked up
                 or written by rows (caches, tables), the rows that come out of it
State bytes      the part of them that was there before the step: weights, and keys and values. They must be read in any
                 case, as often as the passes of the step follow from each other: the floor
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from specdec.drafting.base import Drafter, Room
from specdec.loop.decoder import Decoder
from specdec.loop.memory import tensors_of
from specdec.loop.processing import Processing
from specdec.loop.rules import AcceptanceRule
from specdec.loop.state import DecodeState
from specdec.loop.step import Generation
from specdec.loop.timing import PhaseTimer
from specdec.models.target.target import Target

__all__ = ["Launch", "StepLaunches", "count_step"]

_META = torch.device("meta")
_FREE = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided detach alias lift_fresh resize_ set_ expand_as "
    "_local_scalar_dense sym_size is_same_size".split()
)
# these read the rows that they are asked for, not the whole tensor
_ROW_READERS = frozenset({"embedding", "index_select", "gather", "index", "searchsorted"})
_ROW_WRITERS = frozenset({"index_copy_", "scatter_", "index_put_", "scatter"})
# parameters of our kernels that hold caches, tables and texts of which a launch reads or writes some rows
_TOUCHED_BY_ROWS = frozenset({"cache_ptr", "k_cache_ptr", "v_cache_ptr", "table_ptr"})
_APPENDED_TO = {"emit_step": frozenset({"output_ptr", "steps_ptr"})}
# PyTorch's radix selection in several blocks a row: about four kernels for every 8 bits of the numbers, and a sort;
# short rows take one block, and one sort
_TOPK_SHORT = 4096
_TOPK_PER_BYTE, _TOPK_SORT = 4, 2


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of an operator of PyTorch, or one launch of a kernel of ours.

    Attributes:
        name: of the operator or of the jit function.
        phase: of the step.
        num_launches: what the GPU executes for it.
        num_bytes: bytes of what goes in and comes out.
        state_bytes: those of them that are weights, or keys and values.
    """

    name: str
    phase: str
    num_launches: int
    num_bytes: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class StepLaunches:
    """All launches of one step, in order."""

    launches: tuple[Launch, ...]

    def num_launches(self, phase: str | None = None) -> int:
        """Launches of a phase, or of all."""
        return sum(one.num_launches for one in self.launches if phase in (None, one.phase))

    def num_bytes(self, phase: str | None = None) -> int:
        """Bytes of a phase, or of all."""
        return sum(one.num_bytes for one in self.launches if phase in (None, one.phase))

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, and of keys and values, that the step reads."""
        return sum(one.state_bytes for one in self.launches)

    def by_name(self) -> Counter[str]:
        """Launches by operator or kernel, the most frequent first."""
        found: Counter[str] = Counter()
        for one in self.launches:
            found[one.name] += one.num_launches
        return Counter(dict(found.most_common()))


def count_step(
    target: Target,
    drafter: Drafter | None,
    *,
    batch_size: int = 1,
    context: int = 2048,
    acceptance: AcceptanceRule | None = None,
    processing: Processing | None = None,
    on_launch: Callable[..., Any] | None = None,
) -> StepLaunches:
    """Count one step.

    Args:
        target: on the meta device, with the Triton backend.
        drafter: for it, on the same device; None for plain decoding.
        batch_size: rows.
        context: tokens of the text of every row, and room for no more.
        acceptance: the acceptance rule; greedy by default.
        processing: what happens to the logits; nothing by default.
        on_launch: called with each kernel of Triton's that a step would launch, and its arguments.

    Raises:
        ValueError: a target with data, or without kernels.
    """
    if target.device != _META or target.backend != "triton":
        raise ValueError(
            f"target: expected one on the meta device with the triton backend, got {target.device}, {target.backend}"
        )
    decoder = Decoder(target, drafter, acceptance=acceptance, capture=False)
    drafter = decoder.drafter
    shape, room = drafter.shape, Room(batch_size, context, context - 1, context - 1)
    state = DecodeState.new(target, room, num_nodes=shape.num_nodes, max_depth=shape.max_depth, device=_META)
    own = drafter.copy_for(room, _META)
    rule = decoder.acceptance.prepared(shape, _META)
    processing = Processing.none() if processing is None else processing
    timer = _Phases()
    needs_logits = decoder.acceptance.needs_logits or not processing.is_idle
    generation = Generation(target, own, rule, state, None, processing, timer, needs_logits)
    counter = _Launches(timer, on_launch)
    with (
        torch.inference_mode(),
        target.hooked(),
        drafter.session(),
        decoder.scratch.active(),
        counter.instead_of_kernels(),
    ):
        generation.step()  # what only a first step does, such as making tables
        with counter.watching([*tensors_of(target), *tensors_of(own), state.cache.data]):
            generation.step()
    return StepLaunches(tuple(counter.launches))


class _Phases(PhaseTimer):
    """Times nothing, and knows the phase that runs."""

    def __init__(self) -> None:
        super().__init__(_META, enabled=False)
        self.current = "-"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """As `PhaseTimer`."""
        before, self.current = self.current, name
        yield
        self.current = before


class _Launches(TorchDispatchMode):
    """Counts what is dispatched and what Triton is asked to launch while it is active.

    Args:
        phases: knows the phase.
        on_launch: as of `count_step`.
    """

    def __init__(self, phases: _Phases, on_launch: Callable[..., Any] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self._phases = phases
        self._on_launch = on_launch
        self._state: set[int] = set()

    @contextmanager
    def watching(self, state: list[torch.Tensor]) -> Iterator[None]:
        """Count from here on; `state` are the tensors that are there before the step."""
        self.launches.clear()
        self._state = _storages(state)
        with self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        given, results = _tensors((args, kwargs)), _tensors(out)
        is_new = bool(_storages(results) - _storages(given))
        if name in _FREE or not (is_new or func._schema.is_mutable):
            return out
        if name in _ROW_READERS:
            given = [one for one in given[1:] if not one.is_floating_point()] + results
        elif name in _ROW_WRITERS:
            given, results = given[1:], given[1:]
        self._note(name, _num_kernels(name, given), given, results)
        return out

    @contextmanager
    def instead_of_kernels(self) -> Iterator[None]:
        """Note launches of Triton's kernels, compiled or interpreted, and launch none."""
        counter = self

        def note(kernel: Any, *args: Any, **settings: Any) -> None:
            if counter._on_launch is not None:
                counter._on_launch(kernel, *args, **settings)
            name = kernel.__name__.strip("_").removesuffix("_kernel")
            by_rows = _TOUCHED_BY_ROWS | _APPENDED_TO.get(name, frozenset())
            pairs = zip(kernel.arg_names, args, strict=False)
            counter._note(name, 1, _tensors([value for argument, value in pairs if argument not in by_rows]), [])

        before = JITFunction.run, InterpretedFunction.run
        JITFunction.run = InterpretedFunction.run = note
        try:
            yield
        finally:
            JITFunction.run, InterpretedFunction.run = before

    def _note(self, name: str, count: int, given: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        state = [one for one in given if one.untyped_storage()._cdata in self._state]
        total = _num_bytes(given) + _num_bytes(results)
        self.launches.append(Launch(name, self._phases.current, count, total, _num_bytes(state)))


def _num_kernels(name: str, given: list[torch.Tensor]) -> int:
    if name != "topk":
        return 1
    is_short = given[0].shape[-1] <= _TOPK_SHORT
    return _TOPK_SORT if is_short else _TOPK_PER_BYTE * given[0].element_size() + _TOPK_SORT


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _storages(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of all elements, those of an expanded tensor once."""
    return sum(
        prod(size for size, stride in zip(one.shape, one.stride(), strict=True) if stride) * one.element_size()
        for one in tensors
    )
