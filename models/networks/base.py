"""What the trained networks of all drafters have in common: a configuration, names of tensors, and strict loading.

A network's `state_dict` holds what the method trains and nothing else. What it shares with the target (embedding, LM
head) is handed in when a drafter is bound to its target, and is never saved with it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from specdec.kernels.common.launch import Backend

__all__ = ["DraftNetwork", "check_tensors", "load_strictly"]


class DraftNetwork(nn.Module):
    """Base of the draft networks.

    Attributes:
        config_class: frozen dataclass of the network's sizes and switches; JSON-serialisable with `asdict`.
        config: an instance of it.
        backend: what runs its kernels; by default decided by the device. Set when a drafter is bound to its target.
    """

    config_class: ClassVar[type]
    config: Any
    backend: Backend | None = None

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def share_embedding(self) -> None:
        """Give up an embedding of its own, if it has one: it was found to equal the target's."""

    def check_fits(self, *, vocab_size: int, hidden_size: int) -> None:
        """Raise ValueError unless the network belongs to a target of these sizes (those that its config sets)."""
        for name, expected in (("vocab_size", vocab_size), ("hidden_size", hidden_size)):
            got = getattr(self.config, name, None)
            if got not in (None, expected):
                raise ValueError(f"drafter: expected {name} {expected} as the target's, got {got}")


def check_tensors(
    expected: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], *, ignored: frozenset[str] = frozenset()
) -> None:
    """Raise ValueError for missing, unexpected or misshapen tensors, by name; `ignored` ones may be there."""
    missing = sorted(expected.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - expected.keys() - ignored)
    if missing or unexpected:
        raise ValueError(f"checkpoint: missing tensors {missing}, unexpected tensors {unexpected}")
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise ValueError(f"{name}: expected shape {list(tensor.shape)}, got {list(tensors[name].shape)}")


def load_strictly(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], *, ignored: frozenset[str] = frozenset()
) -> None:
    """Copy `tensors` into `module`, all of them and no others.

    Args:
        module: receives them; its parameters take the tensors' dtype.
        tensors: by name.
        ignored: names that may be there and are not used.

    Raises:
        ValueError: missing, unexpected or misshapen tensors, by name.
    """
    expected = module.state_dict()
    check_tensors(expected, tensors, ignored=ignored)
    module.load_state_dict({name: tensors[name] for name in expected}, assign=True)
