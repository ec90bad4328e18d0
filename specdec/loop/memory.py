"""How much memory decoding takes, known before it is taken: the code that lays it out also runs on the meta device."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specdec.drafting.base import Drafter, Room
from specdec.drafting.planning import Planner
from specdec.loop.state import DecodeState
from specdec.models.common.cache import KVCache
from specdec.models.target.target import Target

_NOT_PLAIN = frozenset({"_modules", "_parameters", "_buffers", "forward"})
"""Attributes of a module that are looked at by themselves, and the forward that is ours while a model is hooked."""

__all__ = ["Description", "MemoryPlan", "Places", "num_bytes", "tensors_of"]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the target's device.

    Attributes:
        room: the sizes they are for.
        weights_bytes: the target's parameters and buffers.
        drafter_bytes: the drafter's own, and its tables.
        cache_bytes: the target's keys and values.
        state_bytes: what else changes from step to step.
        drafter_state_bytes: the same of the drafter, its keys and values included.
    """

    room: Room
    weights_bytes: int
    drafter_bytes: int
    cache_bytes: int
    state_bytes: int
    drafter_state_bytes: int

    @classmethod
    def of(cls, target: Target, drafter: Drafter, state: DecodeState) -> "MemoryPlan":
        """Count.

        Args:
            target: the target.
            drafter: with memory allocated, as a rule on "meta".
            state: the loop's, on the same device.
        """
        shared = tensors_of(target)
        device = state.root.device
        own = [tensor for tensor in tensors_of(drafter) if _key(tensor) not in {_key(other) for other in shared}]
        changing = [tensor for tensor in own if tensor.device == device] if device.type == "meta" else []
        cache = tensors_of(state.cache)
        return cls(
            room=state.room,
            weights_bytes=num_bytes(shared),
            drafter_bytes=num_bytes(own) - num_bytes(changing),
            cache_bytes=num_bytes(cache),
            state_bytes=num_bytes(tensors_of(state)) - num_bytes(cache),
            drafter_state_bytes=num_bytes(changing),
        )

    @property
    def static_bytes(self) -> int:
        """What a captured step keeps beside the weights, without the intermediate results of its passes."""
        return self.cache_bytes + self.state_bytes + self.drafter_state_bytes

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.drafter_bytes + self.static_bytes

    def __str__(self) -> str:
        rows = [
            ("target, weights", self.weights_bytes),
            ("drafter, weights and tables", self.drafter_bytes),
            ("target, keys and values", self.cache_bytes),
            ("state of the loop", self.state_bytes),
            ("state of the drafter", self.drafter_state_bytes),
            ("total", self.total_bytes),
        ]
        head = f"{self.room.batch_size} x {self.room.max_length} tokens"
        return "\n".join([head, *(f"  {name:<28}{count / 2**20:>12.2f} MiB" for name, count in rows)])


@dataclass(frozen=True, slots=True)
class Description:
    """What a decoder needs and holds; prints as text.

    Attributes:
        plan: memory of a call of the sizes that were asked for, without the intermediate results of passes.
        captured: per memory that exists, its sizes and the number of steps that were captured on it.
        captures: whether this decoder captures steps at all.
    """

    plan: MemoryPlan
    captured: tuple[tuple[Room, int], ...]
    captures: bool

    def __str__(self) -> str:
        if not self.captures:
            return f"{self.plan}\nsteps run eagerly"
        lines = [f"captured: {count} for {room.batch_size} x {room.max_length} tokens" for room, count in self.captured]
        return "\n".join([str(self.plan), *(lines or ["captured: none yet"])])


class Places:
    """Where the tensors lie that some objects hold, and whether that is still so.

    A captured step reads its target and its drafter where their parameters, buffers and tables lay when it was
    captured. Looking again takes some 100 us for a model of 32 layers, if everything is what it was.

    Args:
        holders: a target, a drafter, or anything else that `tensors_of` can look into.
    """

    def __init__(self, *holders: Any) -> None:
        self._holders = holders
        self._look()

    def _look(self) -> None:
        links = list(_links(self._holders))
        self._wholes = list({id(holder): holder for holder, key, _ in links if key is None}.values())
        self._children = self._now_held()
        self._entries = [(holder, key, child) for holder, key, child in links if key is not None and holder is not None]
        self._targets = [child for _, _, child in links if isinstance(child, Target)]
        tensors = {id(child): child for _, _, child in links if isinstance(child, torch.Tensor)}.values()
        self._tensors = [one for one in tensors if not (one.is_meta or is_traceable_wrapper_subclass(one))]
        self._addresses, self._dtypes = self._now()
        self._shapes = [(one.shape, one.stride()) for one in self._tensors]

    def _now_held(self) -> list[Any]:
        return [child for whole in self._wholes for child in (whole.values() if isinstance(whole, dict) else whole)]

    def _now(self) -> tuple[list[int], list[torch.dtype]]:
        tables = [table for target in self._targets for table in target.tables]  # made anew where they are outgrown
        tensors = [*self._tensors, *tables]
        return [one.data_ptr() for one in tensors], [one.dtype for one in tensors]

    def stay(self) -> bool:
        """Whether all of them lie where they lay; values may have changed."""
        before = (self._addresses, self._dtypes)
        held = self._now_held()
        is_same = len(held) == len(self._children) and all(map(is_, held, self._children))
        is_same = is_same and all(holder.get(key) is child for holder, key, child in self._entries)
        if is_same and before == self._now():
            return True
        shapes = self._shapes
        self._look()  # other objects may hold the same memory
        return (*before, shapes) == (self._addresses, self._dtypes, self._shapes)


def tensors_of(*holders: Any) -> list[torch.Tensor]:
    """All tensors that objects of this package, or any drafter, hold, one per storage.

    Of modules these are parameters, buffers and tensors in plain attributes.
    """
    found: dict[int, torch.Tensor] = {}
    for _, _, child in _links(holders):
        if isinstance(child, torch.Tensor):
            found.setdefault(_key(child), child)
    return list(found.values())


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of their storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _links(holders: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """What leads from `holders` to their tensors: the container, a name in it or None for all it holds, what is there.

    Containers are dictionaries, those of attributes too, lists and tuples.
    """
    seen: set[int] = set()
    waiting: list[tuple[Any, Any, Any]] = [(holders, None, holder) for holder in reversed(holders)]
    while waiting:
        holder, key, child = waiting.pop()
        yield holder, key, child
        if id(child) not in seen:
            seen.add(id(child))
            waiting += reversed(list(_parts(child)))


def _parts(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What an object holds, as links."""
    if isinstance(value, nn.Module):
        for whole in (value._modules, value._parameters, value._buffers):
            yield from ((whole, None, one) for one in whole.values())
        plain = [(name, one) for name, one in vars(value).items() if name not in _NOT_PLAIN]
        yield from ((vars(value), name, one) for name, one in plain if _is_ours(one) or _holds_tensors(one))
    elif isinstance(value, torch.Tensor):
        # of quantized weights: what a wrapper wraps, and an object with scales beside the codes
        wrapped = value.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(value) else ()
        beside = [(name, one) for name, one in vars(value).items() if name in wrapped or _has_tensors(one)]
        yield from ((vars(value), name, one) for name, one in beside)
    elif isinstance(value, Target):
        yield vars(value), "model", value.model
        yield from ((None, "tables", one) for one in value.tables)
    elif isinstance(value, KVCache):  # not the slots of the pass that is running, which are no state
        yield from ((vars(value), name, getattr(value, name)) for name in ("data", "lengths", "row_starts"))
    elif isinstance(value, dict):
        yield from ((value, None, one) for one in value.values())
    elif isinstance(value, (list, tuple)):
        yield from ((value, None, one) for one in value)
    elif is_dataclass(value) and _is_ours(value):
        held = tuple(getattr(value, one.name) for one in fields(value))
        yield from ((held, None, one) for one in held)
    elif _is_ours(value) or _has_tensors(value):
        own = getattr(value, "__dict__", {})
        yield from ((own, None, one) for one in own.values())


def _is_ours(value: Any) -> bool:
    """Whether it may hold tensors anywhere; what plans on the host has none, and changes with every step."""
    is_own = isinstance(value, Drafter) or type(value).__module__.startswith("specdec.")
    return is_own and not isinstance(value, Planner)


def _has_tensors(value: Any) -> bool:
    """Whether some of an object's attributes are tensors."""
    return any(isinstance(one, torch.Tensor) for one in getattr(value, "__dict__", {}).values())


def _holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor or a container with one in it."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


def _key(tensor: torch.Tensor) -> int:
    """Of its storage; on the meta device data has no address."""
    return tensor.untyped_storage()._cdata
