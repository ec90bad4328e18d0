"""Medusa's files: `medusa_lm_head`, which holds the heads alone, and Medusa-2 models, which hold the target as well.

Names are `{k}.{layer}.linear.weight`, `{k}.{layer}.linear.bias` and `{k}.{num_layers}.weight`; in a Medusa-2 model they
stand below `medusa_head.`. Files of the authors' "version 2" have no LM heads: all heads use the target's.
"""

from collections.abc import Mapping
from typing import Any

import torch

from specdec.models.networks.base import check_tensors
from specdec.models.networks.medusa import MedusaConfig, MedusaHeads

__all__ = ["read", "recognises", "tensors_of"]

_PREFIX = "medusa_head."


def recognises(names: set[str], _config: Mapping[str, Any]) -> bool:
    """Whether these are Medusa heads, alone or beside the model that they were trained with."""
    return "0.0.linear.weight" in names or f"{_PREFIX}0.0.linear.weight" in names


def read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> MedusaHeads:
    """Build heads. Sizes are read off the tensors: the published config says two heads where the file has five.

    Raises:
        ValueError: a missing, unexpected or misshapen tensor, by name.
    """
    # of a Medusa-2 model only the heads are read; the target is loaded by its user
    within_model = [name for name in tensors if name.startswith(_PREFIX)]
    if within_model:
        tensors = {name.removeprefix(_PREFIX): tensors[name] for name in within_model}
    odd = sorted(name for name in tensors if not name.split(".")[0].isdigit())
    if odd or not tensors:
        raise ValueError(f"checkpoint: expected tensors named '0.0.linear.weight', ..., got {odd[:3] or 'none'}")
    sizes = _sizes_of(tensors, shares_lm_head=str(config.get("version")) == "2")
    with torch.device("meta"):
        check_tensors(_views(MedusaHeads(sizes)), tensors)
    heads = MedusaHeads(sizes).to(tensors["0.0.linear.weight"].dtype)
    with torch.no_grad():
        for name, part in _views(heads).items():
            part.copy_(tensors[name])
    return heads


def tensors_of(heads: MedusaHeads) -> dict[str, torch.Tensor]:
    """The tensors of heads under the authors' names, for a `medusa_lm_head` file that their code reads."""
    return {name: tensor.detach().contiguous() for name, tensor in _views(heads).items()}


def _views(heads: MedusaHeads) -> dict[str, torch.Tensor]:
    """The parts of the parameters under the authors' names."""
    layers = heads.config.num_layers
    views = {}
    for head in range(heads.config.num_heads):
        for layer in range(layers):
            views[f"{head}.{layer}.linear.weight"] = heads.block_weight[head, layer]
            views[f"{head}.{layer}.linear.bias"] = heads.block_bias[head, layer]
        if heads.config.vocab_size is not None:
            views[f"{head}.{layers}.weight"] = heads.lm_head[head]
    return views


def _sizes_of(tensors: Mapping[str, torch.Tensor], *, shares_lm_head: bool) -> MedusaConfig:
    """The configuration that tensors under the authors' names belong to."""
    block = tensors.get("0.0.linear.weight")
    if block is None or block.ndim != 2:
        raise ValueError("checkpoint: expected the matrix '0.0.linear.weight' of the first head, got none")
    num_heads = len({name.split(".")[0] for name in tensors})
    if shares_lm_head:
        num_layers = len([name for name in tensors if name.startswith("0.") and name.endswith(".linear.weight")])
        return MedusaConfig(block.shape[0], None, num_heads, num_layers)
    lm_heads = [name for name in tensors if name.count(".") == 2 and name.endswith(".weight")]
    if not lm_heads:
        raise ValueError("checkpoint: missing the LM heads ('0.1.weight', ...)")
    first = min(lm_heads)  # '{head}.{num_layers}.weight'
    return MedusaConfig(block.shape[0], tensors[first].shape[0], num_heads, int(first.split(".")[1]))
