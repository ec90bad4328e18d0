"""The ops as PyTorch custom ops, `torch.ops.specdec.*`: torch.compile and torch.export see each call as one node.

A launcher cannot be traced: it checks, chooses settings and launches a kernel or walks lists. `@op(fake=...)` on a
launcher registers it with `torch.library` and makes the compilers call the registered op, with its shape function,
instead of looking inside. An eager call takes none of that way: it goes to the launcher with one test on top.

What the schema holds follows from the launcher's signature. Arguments whose names end in `_` are changed in place, as
everywhere in this package. A dataclass of tensors is flattened to a tuple of its fields, and put together again for the
caller.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import torch

from specdec.kernels.common.launch import Backend

__all__ = ["REGISTERED", "as_ops", "op"]

P = ParamSpec("P")
R = TypeVar("R")

_registered: dict[str, Any] = {}

REGISTERED: Mapping[str, Any] = MappingProxyType(_registered)
"""The overload `torch.ops.specdec.<name>.default` of every op whose module was imported, by name."""

_as_ops: ContextVar[bool] = ContextVar("_as_ops", default=False)


@contextmanager
def as_ops() -> Iterator[None]:
    """Make eager calls inside the block go through `torch.ops.specdec` too.

    A `TorchDispatchMode` then sees each call as one op, as a GPU sees one kernel, and not what a launcher or a
    reference does on the host.
    """
    token = _as_ops.set(True)
    try:
        yield
    finally:
        _as_ops.reset(token)


def op(*, fake: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a launcher an op of `torch.library` under its own name.

    Args:
        fake: a shape function, for tensors without data: its parameters are those arguments of the launcher, by name,
            that it needs, and it returns what the launcher returns, in shape, dtype and device. Sizes may be symbolic.

    Returns:
        The decorator. The decorated launcher behaves as before; a compiler that traces it finds the op.
    """

    def register(launcher: Callable[P, R]) -> Callable[P, R]:
        name = launcher.__name__
        signature = _schema_signature(inspect.signature(launcher))
        restore = _restorer(inspect.signature(launcher).return_annotation)
        names = list(signature.parameters)
        run: Callable[..., Any] = launcher
        fake_arguments = list(inspect.signature(fake).parameters)

        def flat_launcher(*args: Any, **kwargs: Any) -> Any:
            # by name: a keyword of the launcher may come by position from the dispatcher
            return _flatten(run(**dict(zip(names, args, strict=False)), **kwargs))

        def flat_fake(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return _flatten(fake(*(bound.arguments[argument] for argument in fake_arguments)))

        flat_launcher.__signature__ = signature  # type: ignore[attr-defined]
        changed = [parameter for parameter in signature.parameters if parameter.endswith("_")]
        registered = torch.library.custom_op(f"specdec::{name}", flat_launcher, mutates_args=changed)
        registered.register_fake(flat_fake)
        overload = getattr(torch.ops.specdec, name).default
        _registered[name] = overload

        @functools.wraps(launcher)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling() or _as_ops.get():
                return restore(overload(*args, **kwargs))
            return launcher(*args, **kwargs)

        return call

    return register


def _schema_signature(signature: inspect.Signature) -> inspect.Signature:
    """The signature in the types that a schema knows, and without keyword-only tensors, which PyTorch refuses."""
    parameters = [
        parameter.replace(
            kind=inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=str | None if parameter.annotation == Backend | None else parameter.annotation,
        )
        for parameter in signature.parameters.values()
    ]
    result = signature.return_annotation
    if dataclasses.is_dataclass(result):
        result = tuple[(torch.Tensor,) * len(dataclasses.fields(result))]  # type: ignore[misc]
    return signature.replace(parameters=parameters, return_annotation=result)


def _flatten(result: Any) -> Any:
    """A dataclass as the tuple of its fields; every tensor contiguous, as the shape function promises."""
    if result is None:
        return None
    if isinstance(result, torch.Tensor):
        return result.contiguous()
    if dataclasses.is_dataclass(result):
        result = [getattr(result, field.name) for field in dataclasses.fields(result)]
    return tuple(field.contiguous() for field in result)


def _restorer(result: Any) -> Callable[[Any], Any]:
    """The inverse of `_flatten`, for a launcher that is annotated to return `result`; compilers trace it."""
    if not dataclasses.is_dataclass(result):
        return lambda flat: flat
    make: Callable[..., Any] = result  # type: ignore[assignment]
    return lambda flat: make(*flat)
