"""Bytes that a decoding step must read: weights, and keys and values of the text. The floor that a step is held to.

    target   every weight once, but of the embedding only some rows; keys and values of the text, in all layers
    drafter  every weight as often as its passes need it: heads once, the layer of an autoregressive drafter once per
             depth, the shared LM head once per pass; keys and values of its own cache once per pass

Activations, logits and tree nodes are not counted: together they are below a hundredth of the weights. How often a
drafter needs a weight is counted, not derived: `count_reads` watches one draft on a CPU, where every operation is
PyTorch's own. It depends on the kind of the drafter and on its tree, not on the sizes, so that a small twin tells it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec.bench.common.cost import Machine
from specdec.drafting.base import Drafter, Prompt, Room
from specdec.drafting.candidates import Best
from specdec.models.target.target import Target

__all__ = ["StepBytes", "count_reads", "step_bytes"]

_TARGET_HEAD = "target.lm_head.weight"
_KEYS = "self_attn.k_proj.weight"
# these read the rows that they are asked for, not the whole tensor
_ROW_READERS = frozenset({"aten::embedding", "aten::index_select", "aten::gather", "aten::index"})


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one step of a batch must read.

    Attributes:
        target_weights: of the scoring pass.
        target_cache: keys and values of the text, all rows.
        drafter_weights: of all passes of one draft.
        drafter_cache: keys and values of the drafter's own cache, all passes, all rows.
    """

    target_weights: int
    target_cache: int
    drafter_weights: int
    drafter_cache: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.target_weights + self.target_cache + self.drafter_weights + self.drafter_cache

    def floor_ms(self, machine: Machine) -> float:
        """Time below which no implementation of this step can come on `machine`, in ms."""
        return 1e3 * self.total / machine.bytes_per_s


class _Reads(TorchDispatchMode):
    """Counts how often each of some tensors is read, in units of the whole tensor."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = dict.fromkeys(tensors, 0.0)
        # by place: of weights that are packed side by side any part may be read on its own
        self._places = [(tensor.data_ptr(), tensor.nbytes, name) for name, tensor in tensors.items()]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view and func.name().split(".")[0] not in _ROW_READERS:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                    for place, size, name in self._places:
                        self.reads[name] += max(0, min(end, place + size) - max(begin, place)) / size
        return func(*args, **kwargs)


@torch.no_grad()
def count_reads(target: Target, drafter: Drafter) -> dict[str, float]:
    """How often one draft reads each weight, by name; the target's LM head, if shared, is `target.lm_head.weight`.

    Args:
        target: on a CPU.
        drafter: bound to it here; its next generation starts anew.

    Raises:
        ValueError: the target is not on a CPU.
    """
    if target.device.type != "cpu":
        raise ValueError(f"target: expected one on a CPU, got {target.device}")
    drafter.bind(target)
    tensors = _weights(drafter)
    tensors[_TARGET_HEAD] = target.model.get_output_embeddings().weight
    tokens = torch.arange(16)[None] % target.vocab_size
    prompt = Prompt(tokens, torch.full((1,), 16, dtype=torch.int32), max_length=32 + drafter.shape.num_nodes)
    with target.hooked(), drafter.session():
        cache = target.new_cache(1, 16)
        drafter.allocate(Room(1, prompt.max_length, 16, prompt.max_length - 16), target.device)
        drafter.start(prompt, target.prefill(prompt.tokens, prompt.lengths, cache))
        with _Reads(tensors) as counter:
            drafter.draft(torch.zeros(1, dtype=torch.int32), Best())
    return {name: count for name, count in counter.reads.items() if count}


def step_bytes(
    target: Target, drafter: Drafter, reads: Mapping[str, float], *, lengths: Sequence[int], expected_new: float = 0.0
) -> StepBytes:
    """Bytes of one step.

    Args:
        target: the target.
        drafter: the drafter, on any device.
        reads: what `count_reads` says of it, or of its twin.
        lengths: tokens of the text of every row when decoding begins.
        expected_new: tokens that a row has gained in the middle of decoding, where the average step is.
    """
    text = sum(lengths) + expected_new * len(lengths)
    embedding = target.model.get_input_embeddings().weight
    head = target.model.get_output_embeddings().weight
    weights = sum(parameter.nbytes for parameter in target.model.parameters())
    if embedding is not head:
        weights -= embedding.nbytes
    per_token = 2 * target.num_layers * target.num_kv_heads * target.head_dim * target.dtype.itemsize
    tensors = {**_weights(drafter), _TARGET_HEAD: head}
    keys = [(count, tensors[name]) for name, count in reads.items() if name.endswith(_KEYS)]
    return StepBytes(
        target_weights=weights,
        target_cache=round(text * per_token),
        drafter_weights=round(sum(count * tensors[name].nbytes for name, count in reads.items())),
        # a cached token has a key and a value of as many numbers as the key projection has rows
        drafter_cache=round(sum(2 * count * text * weight.shape[0] * weight.element_size() for count, weight in keys)),
    )


def _weights(drafter: Drafter) -> dict[str, torch.Tensor]:
    """The drafter's own weights by name."""
    network = getattr(drafter, "model", None) or getattr(drafter, "network", None)
    return dict(network.named_parameters()) if isinstance(network, nn.Module) else {}
