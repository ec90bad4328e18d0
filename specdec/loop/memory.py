"""How much memory decoding takes, known before it is taken: the code that lays it out also runs on the meta device."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from specdec.drafting.base import Drafter, Room
from specdec.loop.state import DecodeState
from specdec.models.common.cache import KVCache
from specdec.models.target.target import Target

__all__ = ["Description", "MemoryPlan", "num_bytes", "tensors_of", "weights_of"]


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


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors that an object of this package, or any drafter, holds, one per storage."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found.setdefault(_key(one), one)
        else:
            waiting += _parts(one)
    return list(found.values())


def weights_of(drafter: Drafter) -> list[torch.Tensor]:
    """The parameters of the networks that a drafter holds."""
    networks = [one.model if isinstance(one, Target) else one for one in vars(drafter).values()]
    return [weight for one in networks if isinstance(one, nn.Module) for weight in one.parameters()]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of their storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Target):
        yield from (value.model, value.tables)
    elif isinstance(value, KVCache):  # not the slots of the pass that is running, which are no state
        yield from (value.data, value.lengths, value.row_starts)
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, Drafter) or type(value).__module__.startswith("specdec."):
        if is_dataclass(value):
            yield from (getattr(value, one.name) for one in fields(value))
        yield from getattr(value, "__dict__", {}).values()


def _key(tensor: torch.Tensor) -> int:
    """Of its storage; on the meta device data has no address."""
    return tensor.untyped_storage()._cdata
