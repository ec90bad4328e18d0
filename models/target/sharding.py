"""A target whose weights are spread over processes (tensor parallel), and how the processes stay of one mind.

transformers shards by a plan (`from_pretrained(..., tp_plan="auto")` under torchrun): query, key, value, gate and up
projections by outputs, so that every process has some of the heads; output and down projections by inputs, followed by
a sum over processes; the LM head by outputs, gathered. So states and logits are whole on every process, keys and values
are not: a process caches its own heads alone. Embedding and LM head, called as modules, take and give whole tensors.

For training there is another way, with plans for no family: FSDP (`shard_layers_`) gives each process a part of every
weight of the layers, and the whole of a layer while it runs. Heads, states and logits are then whole everywhere.

Every process runs the same program: same prompts, same seeds, its own copy of the drafter. They must take the same
decisions, or one would wait for ever for a sum that the others do not compute. Sums and gathers hand the same bits to
all, and equal machines make equal choices from equal bits; but nothing promises that of a drafter on a GPU of another
kind, or of a choice of algorithm by the clock. So nothing rests on it: random seeds, the drafted tree and the verdict
are those of the first process, broadcast as a few hundred integers in one message each. Everything else that differs in
the last bit, the drafter's state and its laws, stays local and does no harm.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Sharding", "shard_layers_"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sharding:
    """The processes that share a model.

    Attributes:
        group: their process group.
        num_ranks: how many they are.
        num_kv_heads: KV heads of this process, in every layer.
        is_gathered: every layer is whole while it runs (FSDP), and what is no layer always is.
    """

    group: Any
    num_ranks: int
    num_kv_heads: int
    is_gathered: bool = False

    @classmethod
    def of(cls, model: Any, layers: nn.ModuleList, head_dim: int) -> "Sharding | None":
        """How a model is sharded; None if all of it is here.

        Args:
            model: the model.
            layers: its decoder layers.
            head_dim: D.

        Raises:
            NotImplementedError: sharded over a mesh of several dimensions, or keys in a module of an unknown name.
        """
        if not dist.is_available():
            return None
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        if any(isinstance(layer, FSDPModule) for layer in layers):
            config = model.config.get_text_config(decoder=True)
            num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            return cls(dist.group.WORLD, dist.get_world_size(), num_heads, is_gathered=True)

        sharded = next((parameter for parameter in model.parameters() if isinstance(parameter, DTensor)), None)
        if sharded is None:
            return None
        mesh = sharded.device_mesh
        if mesh.ndim != 1:
            raise NotImplementedError(f"model: expected weights sharded over one dimension of processes, got {mesh}")
        heads = set()
        for layer in layers:
            keys = getattr(getattr(layer, "self_attn", None), "k_proj", None)
            if keys is None:
                raise NotImplementedError(
                    "model: it is sharded over processes, and its layers have no self_attn.k_proj to tell the heads by"
                )
            weight = keys.weight.to_local() if isinstance(keys.weight, DTensor) else keys.weight
            heads.add(weight.shape[0] / head_dim)
        if len(heads) != 1 or not min(heads).is_integer():
            raise NotImplementedError(
                f"model: expected whole KV heads on every process, as many in every layer, got {sorted(heads)}; "
                f"num_key_value_heads must be a multiple of the number of processes, {mesh.size()}"
            )
        return cls(mesh.get_group(), mesh.size(), int(heads.pop()))

    def broadcast_from_first(self, value: T) -> T:
        """What the first process has, on all of them.

        Args:
            value: a tensor of integers, or a dataclass: its fields of integers are the first process's, tensors of
                floats and everything else stay as they are.
        """
        if isinstance(value, torch.Tensor):
            return self._broadcast([value])[0]  # type: ignore[return-value]
        assert is_dataclass(value)
        assert not isinstance(value, type)
        tensors = {field.name: getattr(value, field.name) for field in fields(value)}
        names = [
            name
            for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
        ]
        first = self._broadcast([tensors[name] for name in names])
        return replace(value, **dict(zip(names, first, strict=True)))

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One message for all of them."""
        message = torch.cat([tensor.long().flatten() for tensor in tensors])
        dist.broadcast(message, src=dist.get_global_rank(self.group, 0), group=self.group)
        parts = message.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def shard_layers_(model: nn.Module, layers: nn.ModuleList, device: torch.device) -> None:
    """Give each process that torchrun started a part of every layer's weights, and put a model on its device.

    Embedding, final norm and LM head, which drafters share, stay whole. All processes must call the model as often.

    Args:
        model: a frozen model, on the CPU, the same in all processes.
        layers: its decoder layers.
        device: this process's.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (int(os.environ.get("WORLD_SIZE", "1")),))
    model.requires_grad_(False)
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    model.to(device)
