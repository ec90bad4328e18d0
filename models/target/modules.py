"""Whether the modules of a model are still what they were when somebody looked at them closely.

To look closely at some four hundred modules takes ten times as long as to see that nothing has changed, so whoever does
keeps a `Snapshot`.
"""

from operator import is_
from typing import Any

import torch
from torch import nn

from specdec.models.common.packing import own_forward

__all__ = ["Snapshot", "Tap"]


class Tap:
    """A forward hook that keeps a module's output, or the states that it was given.

    Args:
        kept: where it is kept.
        place: under which key.
        of_input: whether what a decoder layer reads is wanted, in place of what it gives.
    """

    def __init__(self, kept: dict[int, torch.Tensor], place: int, *, of_input: bool = False) -> None:
        self.kept = kept
        self.place = place
        self.of_input = of_input

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """As a forward hook with keywords."""
        if self.of_input:
            output = args[0] if args else kwargs["hidden_states"]
        self.kept[self.place] = output if isinstance(output, torch.Tensor) else output[0]


class Snapshot:
    """What the modules of a model were: their classes, children, parameters and hooks, and whose forward they run.

    Values of parameters may change, as training changes them; where they lie may not. Taps do not count: they come and
    go with every block.

    Args:
        model: the model.

    Attributes:
        modules: all its modules, itself included, each once.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self._parts, self._places = self._look()

    def holds(self) -> bool:
        """Whether the modules still are what they were."""
        parts, places = self._look()
        return places == self._places and len(parts) == len(self._parts) and all(map(is_, parts, self._parts))

    def _look(self) -> tuple[list[Any], list[int]]:
        """Objects to compare by identity, and addresses; as the objects are kept, no identity can come again."""
        parts: list[Any] = []
        places: list[int] = []
        for module in self.modules:
            own = module.__dict__
            parts += module, module.__class__, own_forward(module), own.get("_compiled_call_impl")
            parts += own["_modules"].values()
            for parameter in own["_parameters"].values():
                parts.append(parameter)
                if parameter is not None:
                    parts.append(parameter.dtype)
                    places.append(_address(parameter))
            if own["_forward_hooks"]:
                parts += (hook for hook in own["_forward_hooks"].values() if not isinstance(hook, Tap))
            if own["_forward_pre_hooks"]:
                parts += "before", *own["_forward_pre_hooks"].values()
        return parts, places


def _address(parameter: torch.Tensor) -> int:
    try:
        return parameter.data_ptr()
    except RuntimeError:  # of a subclass that has no storage of its own
        return 0
