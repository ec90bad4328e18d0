"""Random weights of true shapes: targets and drafters at the sizes that were published, for speed alone.

The target's text is a walk: after token v comes v + 1. Its LM head holds the embedding's rows, moved by one, and the
layers, which do all of a real model's work, add little to the residual stream. So the margin between the first and the
second token is wide, and rounding in bfloat16, which differs between one row and 64 rows, cannot move the text. Weights
are random numbers, not zeros: a GPU's clock depends on the data.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.bench.common.shapes import ModelShape
from specdec.drafters.draft_model import DraftModel
from specdec.drafters.kinds import KINDS_WITHOUT_WEIGHTS, drafter_class, network_class
from specdec.drafting.base import Drafter
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

__all__ = ["DRAFTERS", "random_drafter", "random_target"]

_SPREAD = 0.02
_LAYERS_SHARE = 0.035  # of _SPREAD: all layers together stay well below the embedding in the residual stream
_LOW_RANK = 128


def _without_weights(kind: str) -> Callable[[Target], Drafter]:
    return lambda _target: drafter_class(kind).from_settings(None)


def random_target(
    shape: ModelShape, *, max_positions: int, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> LlamaForCausalLM:
    """A LLaMA of a true shape whose greedy text counts upwards, from any prompt.

    Args:
        shape: its sizes.
        max_positions: tokens of its context.
        device: where it is built.
        dtype: of all weights.
        seed: of the weights.
    """
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: LlamaForCausalLM = _build(lambda: LlamaForCausalLM(config), device, dtype, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(_LAYERS_SHARE)
        embedding = model.model.embed_tokens.weight
        embedding.normal_()
        model.lm_head.weight.copy_(embedding.roll(1, 0)).mul_(shape.hidden_size**-0.5)
    return model


def random_drafter(name: str, target: Target) -> Drafter:
    """The drafter of a name in `DRAFTERS` for a target, with random weights of the published sizes.

    Raises:
        ValueError: no such name.
    """
    if name not in DRAFTERS:
        raise ValueError(f"drafter: expected one of {', '.join(DRAFTERS)}, got {name!r}")
    return DRAFTERS[name](target)


def _build(make: Callable[[], Any], device: torch.device | str, dtype: torch.dtype, seed: int) -> Any:
    """Build a module where it belongs and fill all its matrices with random numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = make()
    finally:
        torch.set_default_dtype(before)
    if torch.device(device).type != "meta":
        generator = torch.Generator(device=device).manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, _SPREAD, generator=generator)
    return module.to(device=device, dtype=dtype).eval()


def _network(
    kind: str, *, tree: TreeShape | DynamicTree | None = None, sizes: str = "for_target", **settings: Any
) -> Callable[[Target], Drafter]:
    """A maker of a drafter with a network, whose config is that method's of its class with these settings."""

    def make(target: Target) -> Drafter:
        drafter: Any = network_class(kind)
        network = drafter.network_class
        config = getattr(network.config_class, sizes)(target.model.config, **settings)
        built = _build(lambda: network(config), target.device, target.dtype, seed=1)
        found: Drafter = drafter(built, drafter.default_tree(config) if tree is None else tree)
        return found

    return make


def _small_model(target: Target) -> Drafter:
    """A draft model of the sizes of vicuna-68m, in MCSD's tree."""
    wide = target.hidden_size >= 4096
    hidden, heads, inner = (768, 12, 3072) if wide else (max(64, target.hidden_size // 4), 4, target.hidden_size)
    shape = ModelShape("68m", 2, hidden, inner, heads, heads, hidden // heads, target.vocab_size)
    model = random_target(shape, max_positions=target.max_positions, device=target.device, dtype=target.dtype, seed=2)
    return DraftModel(model, TreeShape.from_k_config((4, 2, 2)))


def _eagle3(target: Target) -> Drafter:
    size, last = min(32000, target.vocab_size), target.num_layers - 1
    taps: dict[str, Any] = {} if target.num_layers >= 7 else {"tap_layers": (0, last // 2, last)}
    return _network("eagle3", draft_vocab_size=size, **taps)(target)


def _low_rank_amphista(target: Target) -> Drafter:
    rank = min(_LOW_RANK, math.ceil(target.hidden_size / 2))
    return _network("amphista", head_rank=rank)(target)


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "medusa": _network("medusa", num_heads=5),
    "eagle": _network("eagle"),
    "hydra++": _network("hydra++", sizes="plus_plus"),
    "parallelspec": _network("parallelspec"),
    "amphista_low_rank": _low_rank_amphista,
    "falcon": _network("falcon"),
    "eagle2": _network("eagle", tree=DynamicTree()),
    "eagle3": _eagle3,
    "amphista": _network("amphista"),
    "hydra": _network("hydra"),
    "parallelspec_medusa": _network("parallelspec", variant="medusa"),
    "draft_model": _small_model,
    **{kind: _without_weights(kind) for kind in KINDS_WITHOUT_WEIGHTS if kind != "none"},
}
"""Makers of drafters by name, the most telling first."""
