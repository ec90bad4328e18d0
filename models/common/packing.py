"""Weights of several linear layers as one tensor, so that one matrix product does the work of all of them.

The parameters become views of one tensor that holds them one after the other. They stay the same `Parameter` objects
with the same values; only `data_ptr` has changed. It costs a copy of one group of weights at a time, once, and no
memory afterwards. What moves them apart again (`model.to`, `model.half`) is noticed and mended at the next packing.

Left alone: whatever is no plain `nn.Linear`, shares its weights with another module or its memory with other tensors,
carries hooks, or has a `forward` of someone else (offloading, compiled or replaced layers).
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["Packer", "SameForward", "is_bare", "is_free", "own_forward", "pack_network", "packed"]

_RECORDERS = "transformers.utils.output_capturing"


class Packer:
    """Turns the weights of several linear layers into views of one tensor.

    Args:
        dtype: of the model.
        tied: ids of parameters that several modules use.
    """

    def __init__(self, dtype: torch.dtype, tied: set[int]) -> None:
        self.dtype = dtype
        self.num_packed = 0
        self._tied = tied

    def pack(self, linears: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Weight and bias of the layers as one; None if one of them must be left alone."""
        if any(type(linear) is not nn.Linear or not is_bare(linear) for linear in linears):
            return None
        weights: list[nn.Parameter] = [linear.weight for linear in linears]
        biases: list[nn.Parameter | None] = [linear.bias for linear in linears]
        given = [bias for bias in biases if bias is not None]
        if len(given) not in (0, len(biases)) or not all(map(self._may_move, (*weights, *given))):
            return None
        is_packed = _joined(weights) is not None and (not given or _joined(given) is not None)
        if not is_packed:
            # a parameter that is part of some other storage would leave its memory behind and break who shares it
            if any(part.untyped_storage().nbytes() != part.nbytes for part in (*weights, *given)):
                return None
            for group in (weights, given):
                _move_together(group)
            self.num_packed += 1
        weight = _joined(weights)
        assert weight is not None
        return weight, _joined(given) if given else None

    def _may_move(self, parameter: nn.Parameter) -> bool:
        return (
            type(parameter) is nn.Parameter
            and type(parameter.data) is torch.Tensor
            and parameter.dtype == self.dtype
            and parameter.is_contiguous()
            and not parameter.is_inference()
            and id(parameter) not in self._tied
            and not (parameter.device.type == "cpu" and parameter.is_shared())
        )


def pack_network(network: nn.Module, dtype: torch.dtype) -> None:
    """Pack the linear layers that the modules of a network name in `side_by_side`, as far as that may be.

    Args:
        network: its modules may have an attribute `side_by_side`, names of children that read the same input.
        dtype: of its parameters.
    """
    uses = Counter(id(parameter) for _, parameter in network.named_parameters(remove_duplicate=False))
    packer = Packer(dtype, {identity for identity, count in uses.items() if count > 1})
    for module in network.modules():
        names = getattr(module, "side_by_side", None)
        if names is not None:
            packer.pack([getattr(module, name) for name in names])


def packed(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight and bias of the layers as one, without gradients, if they lie together; None if they do not."""
    weight = _joined([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if weight is None or len(biases) not in (0, len(linears)):
        return None
    bias = _joined(biases) if biases else None
    return None if biases and bias is None else (weight, bias)


def _joined(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The parameters as one tensor, if they lie one after the other in one storage."""
    first = parameters[0].detach()
    # by storage and place in it, not by address: weights without data, on "meta", have none
    storage, place, num_rows = first.untyped_storage()._cdata, first.storage_offset(), 0
    for parameter in parameters:
        if parameter.untyped_storage()._cdata != storage or parameter.storage_offset() != place:
            return None
        if parameter.shape[1:] != first.shape[1:]:
            return None
        place += parameter.numel()
        num_rows += parameter.shape[0]
    return first.as_strided((num_rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _move_together(parameters: Sequence[nn.Parameter]) -> None:
    """Copy the parameters into one storage and let them live there."""
    if not parameters:
        return
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor could never be trained again
        packed = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, packed.split([len(one) for one in parameters]), strict=True):
            parameter.data = part


class SameForward(partial[Any]):
    """What a module runs in place of its class's forward, for the duration of a block and with the same result."""


def own_forward(module: nn.Module) -> Any:
    """What a module runs in place of its class's forward, as far as the result may be another; None if nothing."""
    own = vars(module).get("forward")
    return None if isinstance(own, SameForward) else own


def is_free(module: nn.Module) -> bool:
    """Whether its forward is that of its class; hooks around it go on working."""
    own = own_forward(module)
    # transformers 5.0 leaves the class's own method behind where it has recorded outputs
    is_own = own is None or getattr(own, "__func__", None) is type(module).forward
    return is_own and module._compiled_call_impl is None


def is_bare(module: nn.Module, ignored: type | tuple[type, ...] = ()) -> bool:
    """Whether nothing but its forward happens when it is called, so that it need not be called.

    Args:
        module: the module.
        ignored: classes of hooks that do not count.
    """
    # the hooks that transformers leaves behind do nothing unless it records outputs at that moment
    hooks = (hook for hook in module._forward_hooks.values() if getattr(hook, "__module__", None) != _RECORDERS)
    return is_free(module) and not module._forward_pre_hooks and all(isinstance(hook, ignored) for hook in hooks)
