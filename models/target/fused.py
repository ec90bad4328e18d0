"""The fused path: the layers of LLaMA-shaped models over the nodes of a draft tree, with fewer and wider operations.

Equation:   the layer's own:  a = x + O attend(rope(Q n(x)), rope(K n(x)), V n(x));  y = a + Down swiglu(GU m(a))
            with Q, K and V as one matrix product, gate and up (GU) as another, each norm with the sum before it as one
            kernel, rope with the write to the cache as one, and the gate as one
Source:     the decoder layers of transformers' families of that shape (`families.py`), rounding by rounding

While `FusedPath.attached()` is active, eligible layers carry a `forward` of ours in their own `__dict__`; it takes over
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from specdec.kernels.common.launch import Backend
from specdec.kernels.common.limits import MAX_NODES
from specdec.kernels.rms_norm import MAX_WIDTH, add_rms_norm, rms_norm
from specdec.kernels.rope_kv_write import rope_kv_write
from specdec.kernels.swiglu import swiglu
from specdec.models.common.cache import KVCache
from specdec.models.common.packing import Packer, is_bare, is_free
from specdec.models.common.passes import TreePass
from specdec.models.target.families import FAMILIES
from specdec.models.target.modules import Snapshot, Tap
from specdec.models.target.rotary import RotaryTable

__all__ = ["FusedPath"]

_FUSED = [family for family in FAMILIES.values() if family.layer is not None]
_ATTENTIONS = {family.attention: family for family in _FUSED}
_DECODERS, _LAYERS, _MLPS, _NORMS = (
    {getattr(family, part) for family in _FUSED} for part in ("decoder", "layer", "mlp", "norm")
)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256

_logger = logging.getLogger(__name__)


class FusedPath:
    """The fused path of one model: planned once, and attached while decoding runs.

    Where all layers are fused and nobody looks in between, they find the places of a tree's nodes themselves: slots by
    counting from the row's length, cosines and sines in a table of all positions. Such a pass is announced by `begin`.

    Args:
        model: the model; weights of it are packed.
        known: an earlier path of it, whose table is taken over if it is still right.

    Attributes:
        modules: all modules of the model.
        num_layers: layers that have the path. Those that have one from an outer block keep that.
    """

    def __init__(self, model: PreTrainedModel, known: "FusedPath | None" = None) -> None:
        self._state = _State()
        self._attached = _plan(model, self._state)
        self._is_attached = False
        self.num_layers = sum(isinstance(forward, _Layer) for _, forward in self._attached)
        self._rotary: nn.Module | None = None
        self._table: RotaryTable | None = None if known is None else known._table
        self._dtype = model.dtype
        self._num_positions: int = model.config.get_text_config(decoder=True).max_position_embeddings
        if _is_whole(model.get_decoder(), self._attached, self._dtype):
            self._rotary = cast(nn.Module, model.get_decoder().rotary_emb)
            self._attached.append((self._rotary, _Lookup(self._rotary, self._state)))
        self._snapshot = Snapshot(model)  # with the weights where they lie now
        self.modules = self._snapshot.modules

    def holds(self) -> bool:
        """Whether a new path would be this one."""
        return self._is_attached or self._snapshot.holds()

    @property
    def tables(self) -> tuple[torch.Tensor, ...]:
        """What passes read beside the model's own tensors."""
        rows, nodes = self._state.rows, self._state.nodes
        return () if rows is None or nodes is None else (rows, nodes)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach it for the duration of the block and take it off again, whatever ends the block."""
        if self._is_attached:
            yield
            return
        self._find_tables()
        before = [vars(module).get("forward") for module, _ in self._attached]
        self._is_attached = True
        try:
            for module, forward in self._attached:
                vars(module)["forward"] = forward
            yield
        finally:
            self._is_attached = False
            for (module, _), forward in zip(self._attached, before, strict=True):
                del vars(module)["forward"]
                if forward is not None:
                    vars(module)["forward"] = forward

    def begin(self, tree_pass: TreePass) -> torch.Tensor | None:
        """Announce a pass whose layers are to find the places of its nodes themselves.

        Returns:
            What the model is given for positions; None if it needs the pass's own.
        """
        state, end = self._state, tree_pass.first_node + tree_pass.num_nodes
        if not (self._is_attached and tree_pass.fused) or state.rows is None or end > MAX_NODES:
            return None
        state.announced = tree_pass.depth
        return tree_pass.depth

    def _find_tables(self) -> None:
        """The table of the rotary embedding, as that is now."""
        state = self._state
        if self._rotary is not None:
            sizes = {"num_positions": self._num_positions, "dtype": self._dtype}
            self._table = RotaryTable.of(self._rotary, **sizes, known=self._table)
            state.rows = None if self._table is None else self._table.rows
        if state.rows is not None and (state.nodes is None or state.nodes.device != state.rows.device):
            state.nodes = torch.arange(MAX_NODES, dtype=torch.int32, device=state.rows.device)[None]


def _plan(model: PreTrainedModel, state: "_State") -> list[tuple[nn.Module, Any]]:
    """The modules that get a forward of ours, and which; packs their weights."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    dtype = model.dtype
    if not isinstance(layers, nn.ModuleList) or dtype not in _DTYPES:
        return []
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    packer = Packer(dtype, {identity for identity, count in uses.items() if count > 1})
    chosen = [type(layer) in _LAYERS and is_free(layer) for layer in layers]
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


def _is_whole(decoder: Any, attached: Sequence[tuple[nn.Module, Any]], dtype: torch.dtype) -> bool:
    """Whether all layers of a decoder compute nothing but what is fused, so that none asks for positions or slots."""
    layers = [forward for _, forward in attached if isinstance(forward, _Layer)]
    return (
        type(decoder) in _DECODERS
        and len(layers) == len(decoder.layers)
        and all(is_bare(module, ignored=Tap) for module in (decoder, *decoder.layers))
        and type(decoder.embed_tokens) is nn.Embedding
        and is_bare(decoder.embed_tokens)
        and decoder.embed_tokens.weight.dtype == dtype
        and all(layer.is_whole for layer in layers)
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the nodes of a pass are, as `rope_kv_write` takes it.

    Attributes:
        positions: [B or 1, N] int32, rows of the table.
        table: [P, D], half cosines, half sines.
        slots: [B or 1, N] int32, cache slot of each node.
        lengths: [B] int32, from where positions and slots count; None for 0.
    """

    positions: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor | None


class _State:
    """What the layers of one pass hand on: places of the nodes, and a residual stream with its norm for the next layer.

    Attributes:
        rows: [P, D] cosines and sines of all positions, if layers look them up.
        nodes: [1, MAX_NODES] int32 0, 1, 2, ..., with them.
        announced: the depths of a pass whose layers look up positions.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.nodes: torch.Tensor | None = None
        self.announced: torch.Tensor | None = None
        self._places: _Places | None = None
        self._of: tuple[TreePass, torch.Tensor] | None = None
        self._summed: torch.Tensor | None = None
        self._normed: torch.Tensor | None = None

    def places(self, cos_sin: tuple[torch.Tensor, torch.Tensor], tree_pass: TreePass) -> _Places:
        """Where the nodes are, found once per pass.

        The cosines and sines are the model's own, whatever scaling they have in them; rounded to the model's dtype by
        it, so that the kernel's rounding changes nothing.
        """
        cos, sin = cos_sin
        if self._places is None or self._of is None or self._of[0] is not tree_pass or self._of[1] is not cos:
            self._of = tree_pass, cos
            if cos is self.rows:
                assert self.nodes is not None
                slots = self.nodes[:, tree_pass.first_node : tree_pass.first_node + tree_pass.num_nodes]
                self._places = _Places(tree_pass.depth, cos, slots, tree_pass.lengths)
            else:
                self._places = _places_of_one_pass(cos, sin, tree_pass.slots)
        return self._places

    def hand_on(self, summed: torch.Tensor, normed: torch.Tensor) -> None:
        """Keep the output of a layer and what the next norm makes of it."""
        self._summed, self._normed = summed, normed

    def take_normed(self, summed: torch.Tensor) -> torch.Tensor | None:
        """The norm of `summed` if the layer before made it; it is given out once."""
        normed = self._normed if self._summed is summed else None
        self._summed = self._normed = None
        return normed

    def clear(self) -> None:
        """Forget the pass."""
        self.announced = self._places = self._of = self._summed = self._normed = None


def _places_of_one_pass(cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor) -> _Places:
    """Places by the cosines and sines [B or 1, N, D] that the model made, one row of the table per node."""
    batch_size, num_nodes = slots.shape
    half = cos.shape[-1] // 2
    table = torch.cat((cos[..., :half], sin[..., :half]), -1)
    table = table.expand(batch_size, -1, -1).reshape(batch_size * num_nodes, -1)
    rows = torch.arange(batch_size * num_nodes, dtype=torch.int32, device=cos.device)
    return _Places(rows.view(batch_size, num_nodes), table, slots.int(), None)


class _Lookup:
    """Forward of the rotary embedding: for an announced pass all rows, of which layers take their own."""

    def __init__(self, module: nn.Module, state: _State) -> None:
        self.module = module
        self.state = state

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.state
        if state.rows is not None and position_ids is state.announced:
            return state.rows, state.rows
        return cast(tuple[torch.Tensor, torch.Tensor], type(self.module).forward(self.module, x, position_ids))


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

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the layer is left as it is, and nothing changes the dtype of its states."""
        if self.attention is None or self.mlp is None:
            return False
        norms = self.input_norm, self.middle_norm, *self.attention.norms
        outputs = self.attention.module.o_proj, self.mlp.module.down_proj
        return all(norm.is_fused for norm in norms) and all(
            type(linear) is nn.Linear and is_bare(linear) and linear.weight.dtype == self.dtype for linear in outputs
        )

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
            places = self.state.places(kwargs["position_embeddings"], tree_pass)
            x = self.attention(x, places, tree_pass, kwargs["past_key_values"])
        x, hidden_states = self.middle_norm.after(x, hidden_states, backend)
        x = self.layer.mlp(x) if self.mlp is None else self.mlp(x, backend)
        if self.following is None:
            return hidden_states + x
        normed, hidden_states = self.following.after(x, hidden_states, backend)
        self.state.hand_on(hidden_states, normed)
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
        self.window_of = module.config if _ATTENTIONS[type(module)].has_one_window else module

    @classmethod
    def of(cls, module: Any, packer: Packer) -> "_Attention | None":
        """For a module of a known class; None where it must stay as it is."""
        head_dim = getattr(module, "head_dim", 1)
        if type(module) not in _ATTENTIONS or not is_bare(module) or head_dim % 2 or head_dim > _MAX_HEAD_DIM:
            return None
        packed = packer.pack(_qkv(module))
        return None if packed is None else cls(module, *packed, packer.dtype)

    def __call__(self, x: torch.Tensor, places: _Places, tree_pass: TreePass, cache: KVCache) -> torch.Tensor:
        qkv = F.linear(x, self.weight, self.bias).view(*x.shape[:2], -1, self.head_dim)
        query, key, value = qkv.split(self.heads, 2)
        if self.norms:
            query, key = (norm(part, tree_pass.backend) for norm, part in zip(self.norms, (query, key), strict=True))
        layer: Any = cache.layers[self.module.layer_idx]
        keys, values = layer.keys.transpose(1, 2), layer.values.transpose(1, 2)
        found = places.positions, places.table, places.slots
        query = rope_kv_write(
            query, key, value, *found, keys, values, lengths=places.lengths, backend=tree_pass.backend
        )
        window: int | None = getattr(self.window_of, "sliding_window", None)
        attended = tree_pass.attend(
            query.transpose(1, 2), layer.keys, layer.values, scale=float(self.module.scaling), window=window
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
