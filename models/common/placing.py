"""Where a module lies and in which mode it is, changed only where something has to change.

`Module.to` may give a module other memory even if it is where it should be: recurrent layers are packed anew, for one.
Captured steps read parameters where they lie.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["in_eval_mode", "place"]


def place(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Move a module, unless it is there.

    Args:
        module: parameters and buffers go to the device, parameters take the dtype.
        device: with its index, as tensors name it.
        dtype: of floating point parameters; None leaves each its own.
    """
    parameters = list(module.parameters())
    is_there = all(tensor.device == device for tensor in (*parameters, *module.buffers()))
    if not is_there or any(dtype not in (None, one.dtype) for one in parameters if one.is_floating_point()):
        module.to(device=device, dtype=dtype)


@contextmanager
def in_eval_mode(module: nn.Module, parts: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Put a module into eval mode for the duration of the block, and each part back into its own.

    Args:
        module: the module.
        parts: all modules in it, itself included, if they are known.
    """
    training = [one for one in (module.modules() if parts is None else parts) if one.training]
    try:
        if training:
            module.eval()
        yield
    finally:
        for one in training:
            one.training = True
