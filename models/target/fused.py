"""The fused path: the layers of LLaMA-shaped models over the nodes of a draft tree, with fewer and wider operations.

Equation:   the layer's own:  a = x + O attend(rope(Q n(x)), rope(K n(x)), V n(x));  y = a + Down swiglu(GU m(a))
            with Q, K and V as one matrix product, gate and up (GU) as another, each norm with the sum before it as one
            kernel, rope with the write to the cache as one, and the gate as one
Source:     the decoder layers of transformers' families of that shape (`families.py`), rounding by rounding

While `fused_layers(model)` is active, eligible layers carry a `forward` of ours in their own `__dict__`; it takes over
for a `TreePass` with `fused` set and hands every other call to the layer's class. So prefill, training and other code
run what they always ran. A layer normalises its sum for the layer after it, which is one kernel instead of two: the
pair travels beside the ordinary output and is used only where that very tensor comes in again.

Packed weights: q_proj, k_proj and v_proj (and gate_proj and up_proj) live in one tensor from then on, also when
decoding is over (`specdec.models.common.packing`).

Left as it is, part by part: whatever is no plain `nn.Linear`, norm, attention or MLP of those classes (quantized, LoRA,
sharded), shares its weights with another module or its memory with other tensors, carries hooks, or has a `forward` of
someone else (offloading, compiled or replaced layers).
"""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from specdec.kernels.common.launch import Backend
from specdec.kernels.rms_norm import MAX_WIDTH, add_rms_norm, rms_norm
from specdec.kernels.rope_kv_write import rope_kv_write
from specdec.kernels.swiglu import swiglu
from specdec.models.common.cache import KVCache
from specdec.models.common.packing import Packer, is_bare, is_free
from specdec.models.common.passes import TreePass
from specdec.models.target.families import FAMILIES

__all__ = ["fused_layers"]

_FUSED = [family for family in FAMILIES.values() if family.layer is not None]
_ATTENTIONS = {family.attention: family for family in _FUSED}
_LAYERS, _MLPS, _NORMS = ({getattr(family, part) for family in _FUSED} for part in ("layer", "mlp", "norm"))
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256

_logger = logging.getLogger(__name__)


@contextmanager
def fused_layers(model: PreTrainedModel) -> Iterator[int]:
    """Attach the fused path to a model for the duration of the block and take it off again, whatever ends the block.

    Gives the number of layers that have it. Layers that have it from an outer block keep that.
    """
    attached = _plan(model)
    before = [dict(vars(module)) for module, _ in attached]
    try:
        for module, forward in attached:
            module.forward = forward
        yield sum(isinstance(forward, _Layer) for _, forward in attached)
    finally:
        for (module, _), attributes in zip(attached, before, strict=True):
            vars(module).pop("forward", None)
            if "forward" in attributes:
                module.forward = attributes["forward"]


def _plan(model: PreTrainedModel) -> list[tuple[nn.Module, Any]]:
    """The modules that get a forward of ours, and which; packs their weights."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    dtype = model.dtype
    if not isinstance(layers, nn.ModuleList) or dtype not in _DTYPES:
        return []
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    packer = Packer(dtype, {identity for identity, count in uses.items() if count > 1})
    chosen = [type(layer) in _LAYERS and is_free(layer) for layer in layers]
    state = _State()
    final = _Norm(getattr(decoder, "norm", None), dtype)
    following: _Norm | None = final if final.is_fused else None
    plan: list[tuple[nn.Module, Any]] = []
    for layer, is_chosen in zip(reversed(layers), reversed(chosen), strict=True):
        forward = _Layer(layer, following, state, packer) if is_chosen else None
        if forward is not None:
            plan.append((layer, forward))
        following = forward.input_norm if forward is not None and forward.input_norm.is_fused else None
    if plan and final.is_fused:
        plan.append((final.module, _FinalNorm(final.module, state)))
    if packer.num_packed:
        _logger.info("fused path: packed %d groups of weights of %s", packer.num_packed, type(model).__name__)
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # the old weights were blocks of their own, too small for anything packed
    return plan


@dataclass(slots=True)
class _State:
    """What the layers of one pass hand on: rotary tables, and a residual stream with its norm for the next layer.

    Attributes:
        cos: the tensor that the model made for this pass; tells whether the tables are this pass's.
        table: [B * N, D] fp32, half cosines, half sines, of every node.
        nodes: [B, N] int32, row of each node in the table.
        slots: [B, N] int32, cache slot of each node.
        summed: output of the layer before.
        normed: what the next norm makes of it.
    """

    cos: torch.Tensor | None = None
    table: torch.Tensor | None = None
    nodes: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    summed: torch.Tensor | None = None
    normed: torch.Tensor | None = None

    def tables(
        self, cos_sin: tuple[torch.Tensor, torch.Tensor], tree_pass: TreePass
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions, rotary table and slots as `rope_kv_write` takes them, made once per pass.

        The cosines and sines are the model's own, whatever scaling they have in them; rounded to the model's dtype by
        it, so that the kernel's rounding changes nothing.
        """
        cos, sin = cos_sin
        if self.cos is not cos:
            batch_size, num_nodes = tree_pass.slots.shape
            half = cos.shape[-1] // 2
            table = torch.cat((cos[..., :half], sin[..., :half]), -1).float()
            self.table = table.expand(batch_size, -1, -1).reshape(batch_size * num_nodes, -1)
            nodes = torch.arange(batch_size * num_nodes, dtype=torch.int32, device=cos.device)
            self.nodes = nodes.view(batch_size, num_nodes)
            self.slots = tree_pass.slots.int()
            self.cos = cos
        assert self.nodes is not None
        assert self.table is not None
        assert self.slots is not None
        return self.nodes, self.table, self.slots

    def take_normed(self, summed: torch.Tensor) -> torch.Tensor | None:
        """The norm of `summed` if the layer before made it; it is given out once."""
        normed = self.normed if self.summed is summed else None
        self.summed = self.normed = None
        return normed

    def clear(self) -> None:
        """Forget the pass."""
        self.cos = self.table = self.nodes = self.slots = self.summed = self.normed = None


class _Norm:
    """An RMS norm by the kernel, or by the module itself where that is something else."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.module = module
        self.is_fused: bool = (
            type(module) in _NORMS
            and is_bare(module)
            and module.weight.dtype == dtype
            and module.weight.shape[0] <= MAX_WIDTH
        )

    def __call__(self, x: torch.Tensor, backend: Backend) -> torch.Tensor:
        module = self.module
        if not self.is_fused:
            return cast(torch.Tensor, module(x))
        return rms_norm(x, module.weight, eps=module.variance_epsilon, backend=backend)

    def after(self, x: torch.Tensor, residual: torch.Tensor, backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised sum and the sum."""
        module = self.module
        if not self.is_fused:
            summed = residual + x
            return module(summed), summed
        return add_rms_norm(x, residual, module.weight, eps=module.variance_epsilon, backend=backend)


class _FinalNorm:
    """The norm behind the last layer, which has been computed with that layer's sum."""

    def __init__(self, norm: nn.Module, state: _State) -> None:
        self.norm = norm
        self.state = state

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = self.state.take_normed(hidden_states)
        self.state.clear()
        return type(self.norm).forward(self.norm, hidden_states) if normed is None else normed


class _Layer:
    """Forward of one decoder layer.

    Args:
        layer: the layer.
        following: the norm that reads its output, if that is ours to compute.
        state: shared by all layers of the model.
        packer: packs weights.
    """

    def __init__(self, layer: Any, following: _Norm | None, state: _State, packer: Packer) -> None:
        self.layer = layer
        self.following = following
        self.state = state
        self.dtype = packer.dtype
        self.input_norm = _Norm(layer.input_layernorm, packer.dtype)
        self.middle_norm = _Norm(layer.post_attention_layernorm, packer.dtype)
        self.attention = _Attention.of(layer.self_attn, packer)
        self.mlp = _MLP.of(layer.mlp, packer)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tree_pass = kwargs.get("specdec_pass")
        is_ours = isinstance(tree_pass, TreePass) and tree_pass.fused
        if not is_ours or args or hidden_states.dtype != self.dtype:
            return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)
        assert isinstance(tree_pass, TreePass)
        backend = tree_pass.backend
        x = self.state.take_normed(hidden_states)
        if x is None:
            x = self.input_norm(hidden_states, backend)
        if self.attention is None:
            x, _ = self.layer.self_attn(hidden_states=x, **kwargs)
        else:
            tables = self.state.tables(kwargs["position_embeddings"], tree_pass)
            x = self.attention(x, tables, tree_pass, kwargs["past_key_values"])
        x, hidden_states = self.middle_norm.after(x, hidden_states, backend)
        x = self.layer.mlp(x) if self.mlp is None else self.mlp(x, backend)
        if self.following is None:
            return hidden_states + x
        normed, hidden_states = self.following.after(x, hidden_states, backend)
        self.state.summed, self.state.normed = hidden_states, normed
        return hidden_states


class _Attention:
    """Self-attention with one projection for queries, keys and values."""

    def __init__(self, module: Any, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.module = module
        self.weight = weight
        self.bias = bias
        self.head_dim: int = module.head_dim
        self.heads = [linear.out_features // self.head_dim for linear in _qkv(module)]
        norms = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
        self.norms = [_Norm(norm, dtype) for norm in norms if isinstance(norm, nn.Module)]
        window_of = module.config if _ATTENTIONS[type(module)].has_one_window else module
        self.window: int | None = getattr(window_of, "sliding_window", None)

    @classmethod
    def of(cls, module: Any, packer: Packer) -> "_Attention | None":
        """For a module of a known class; None where it must stay as it is."""
        head_dim = getattr(module, "head_dim", 1)
        if type(module) not in _ATTENTIONS or not is_bare(module) or head_dim % 2 or head_dim > _MAX_HEAD_DIM:
            return None
        packed = packer.pack(_qkv(module))
        return None if packed is None else cls(module, *packed, packer.dtype)

    def __call__(
        self,
        x: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tree_pass: TreePass,
        cache: KVCache,
    ) -> torch.Tensor:
        nodes, table, slots = tables
        qkv = F.linear(x, self.weight, self.bias).view(*x.shape[:2], -1, self.head_dim)
        query, key, value = qkv.split(self.heads, 2)
        if self.norms:
            query, key = (norm(part, tree_pass.backend) for norm, part in zip(self.norms, (query, key), strict=True))
        layer: Any = cache.layers[self.module.layer_idx]
        keys, values = layer.keys.transpose(1, 2), layer.values.transpose(1, 2)
        query = rope_kv_write(query, key, value, nodes, table, slots, keys, values, backend=tree_pass.backend)
        attended = tree_pass.attend(
            query.transpose(1, 2), layer.keys, layer.values, scale=float(self.module.scaling), window=self.window
        )
        return cast(torch.Tensor, self.module.o_proj(attended.flatten(2)))


class _MLP:
    """A gated MLP with one projection for gate and up."""

    def __init__(self, module: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.module = module
        self.weight = weight
        self.bias = bias

    @classmethod
    def of(cls, module: Any, packer: Packer) -> "_MLP | None":
        """For a module of a known class; None where it must stay as it is."""
        if type(module) not in _MLPS or not is_bare(module) or type(module.act_fn) not in (SiLUActivation, nn.SiLU):
            return None
        packed = packer.pack([module.gate_proj, module.up_proj])
        return None if packed is None else cls(module, *packed)

    def __call__(self, x: torch.Tensor, backend: Backend) -> torch.Tensor:
        gated = swiglu(F.linear(x, self.weight, self.bias), backend=backend)
        return cast(torch.Tensor, self.module.down_proj(gated))


def _qkv(attention: Any) -> list[Any]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]
