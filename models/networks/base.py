"""What the trained networks of all drafters have in common: a configuration, names of tensors, and strict loading.

A network's `state_dict` holds what the method trains and nothing else. What it shares with the target (embedding, LM
head) is handed in when a drafter is bound to its target, and is never saved with it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from specdec.kernels.common.launch import Backend

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DraftNetwork", "load_strictly"]


class DraftNetwork(nn.Module):
    """Base of the draft networks.

    Attributes:
        config_class: frozen dataclass of the network's sizes and switches; JSON-serialisable with `asdict`.
        config: an instance of it.
        backend: what runs its kernels; by default decided by the device. Set when a drafter is bound to its target.
        file_embedding: name under which published files hold an input embedding, which tells their base model.
    """

    config_class: ClassVar[type]
    file_embedding: ClassVar[str | None] = None
    config: Any
    backend: Backend | None = None

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def recognises(cls, names: set[str], config: Mapping[str, Any]) -> bool:  # noqa: ARG003 - interface
        """Whether tensors of these names, beside a `config.json` of this content, are the authors' file of this kind.

        False unless a network says otherwise: not every method has published files.
        """
        return False

    @classmethod
    def from_published(cls, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> "Self":
        """Build a network from the authors' published file. A kind's further keywords are settings of loading.

        Args:
            tensors: the file's tensors by name.
            config: content of the `config.json` beside it; empty if there is none.

        Raises:
            ValueError: a missing, unexpected or misshapen tensor, by name.
        """
        raise NotImplementedError(f"{cls.__name__}: no published layout is known")

    def share_embedding(self) -> None:
        """Give up an embedding of its own, if it has one: it was found to equal the target's."""

    def check_fits(self, *, vocab_size: int, hidden_size: int) -> None:
        """Raise ValueError unless the network belongs to a target of these sizes (those that its config sets)."""
        for name, expected in (("vocab_size", vocab_size), ("hidden_size", hidden_size)):
            got = getattr(self.config, name, None)
            if got not in (None, expected):
                raise ValueError(f"drafter: expected {name} {expected} as the target's, got {got}")


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
    missing = sorted(expected.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - expected.keys() - ignored)
    if missing or unexpected:
        raise ValueError(f"checkpoint: missing tensors {missing}, unexpected tensors {unexpected}")
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise ValueError(f"{name}: expected shape {list(tensor.shape)}, got {list(tensors[name].shape)}")
    module.load_state_dict({name: tensors[name] for name in expected}, assign=True)
