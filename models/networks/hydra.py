"""Hydra heads: K sequentially dependent heads, each fed with the embeddings of the tokens guessed before it.

Equation:   c_i = [p_t; e(x_{t+1}); ...; e(x_{t+i})]                     side by side, i = 1 .. K
            y_1 = R_i c_i + r_i + SiLU(W_i1 c_i + b_i1);  y_l = y_{l-1} + SiLU(W_il y_{l-1} + b_il),  l = 2 .. L
            logits_i = U_i y_L + u_i, the law of x_{t+1+i}
            p_t = h_t (Hydra), or n(DraftLayer(h_0 .. h_t)) at t (Hydra++: prefix attention)
Source:     Hydra (arXiv:2402.05109) sections 3, 3.1 and A.2; the biases, R and the norm n are the authors' code
Shapes:     h, p, e [.., C]; W_i1, R_i [C, (i + 1) C]; W_il [C, C]; U [V, C]; logits [.., V]

The state h_t enters the target's LM head, so heads see what the target's own guess of x_{t+1} is made from. Files keep
`heads.{i}.blocks.{l}.linear`, `heads.{i}.blocks.0.residual`, `heads.{i}.lm_head` and `prefix.layer`, `prefix.norm`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from specdec.kernels.common.launch import Backend
from specdec.kernels.draft_heads import MAX_PARTS, draft_heads_concat
from specdec.models.networks.base import DraftNetwork, load_strictly
from specdec.models.networks.layer import Attend, DraftLayer, DraftLayerConfig, Rotary

__all__ = ["HydraConfig", "HydraNetwork"]

_PUBLISHED_PREFIX = "prefix_embeding_layer."  # spelled so in the authors' files
_PUBLISHED_EMBEDDING = "input_embed_fn.weight"
_INV_FREQ = _PUBLISHED_PREFIX + "layers.0.self_attn.rotary_emb.inv_freq"
# Copies of the target's embedding and of a constant.
_IGNORED = frozenset({_PUBLISHED_EMBEDDING, _PUBLISHED_PREFIX + "embed_tokens.weight", _INV_FREQ})


@dataclass(frozen=True, slots=True)
class HydraConfig:
    """Sizes of a set of Hydra heads.

    Attributes:
        num_heads: how many tokens beyond the root they guess, one head each.
        num_layers: residual blocks per head; 1 for Hydra, 4 for Hydra++.
        shared_tail: all blocks of a head after its first are one and the same, as in the authors' files.
        dropout: part of the features that training drops in front of every block and every LM head.
        prefix: sizes of the prefix attention layer; None without one.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    shared_tail: bool = False
    dropout: float = 0.0
    prefix: DraftLayerConfig | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_heads >= MAX_PARTS:
            raise ValueError(f"num_heads: expected at most {MAX_PARTS - 1}, got {self.num_heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected 0 up to, not including, 1, got {self.dropout}")
        if self.prefix is not None and self.prefix.hidden_size != self.hidden_size:
            raise ValueError(
                f"prefix: expected a layer of hidden size {self.hidden_size}, got {self.prefix.hidden_size}"
            )

    @property
    def prefix_attention(self) -> bool:
        """Whether the heads read a prefix attention layer's output (Hydra++) instead of the target's state."""
        return self.prefix is not None

    @classmethod
    def for_target(
        cls, target_config: PretrainedConfig, *, prefix_attention: bool = False, **changes: Any
    ) -> "HydraConfig":
        """Hydra for a target; its prefix layer, if any, has the sizes of the target's own layers.

        Args:
            target_config: the target's transformers configuration.
            prefix_attention: add the prefix attention layer.
            changes: fields to set.
        """
        text = target_config.get_text_config(decoder=True)
        prefix = DraftLayerConfig.like(target_config) if prefix_attention else None
        sizes = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size, "prefix": prefix}
        return cls(**{**sizes, **changes})

    @classmethod
    def plus_plus(cls, target_config: PretrainedConfig, **changes: Any) -> "HydraConfig":
        """Hydra++ for a target: four blocks per head, prefix attention, dropout of 0.2; `changes` replace them."""
        return cls.for_target(target_config, **{"num_layers": 4, "prefix_attention": True, "dropout": 0.2, **changes})

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "HydraConfig":
        """The configuration of which `dataclasses.asdict` made `fields`."""
        prefix = fields.get("prefix")
        return cls(**{**fields, "prefix": None if prefix is None else DraftLayerConfig(**prefix)})


class _Block(nn.Module):
    """Residual block on parts side by side; a single part is its own residual."""

    def __init__(self, width: int, num_parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_parts * width, width)
        self.residual = nn.Linear(num_parts * width, width) if num_parts > 1 else None

    def forward(self, parts: Sequence[torch.Tensor], backend: Backend | None) -> torch.Tensor:
        residual = self.residual
        if torch.is_grad_enabled():  # the kernel has no backward pass
            x = torch.cat(list(parts), -1)
            return (x if residual is None else residual(x)) + F.silu(self.linear(x))
        weights = () if residual is None else (residual.weight, residual.bias)
        return draft_heads_concat(parts, self.linear.weight, self.linear.bias, *weights, backend=backend)


class _Head(nn.Module):
    def __init__(self, config: HydraConfig, num_parts: int) -> None:
        super().__init__()
        width = config.hidden_size
        num_tail = min(config.num_layers - 1, 1) if config.shared_tail else config.num_layers - 1
        self.blocks = nn.ModuleList([_Block(width, num_parts), *(_Block(width, 1) for _ in range(num_tail))])
        self.lm_head = nn.Linear(width, config.vocab_size)
        self.num_layers = config.num_layers
        self.dropout = config.dropout

    def forward(self, parts: Sequence[torch.Tensor], backend: Backend | None) -> torch.Tensor:
        x = self.blocks[0]([self._drop(part) for part in parts], backend)
        for layer in range(1, self.num_layers):
            x = self.blocks[min(layer, len(self.blocks) - 1)]([self._drop(x)], backend)
        return self.lm_head(self._drop(x))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


class _Prefix(nn.Module):
    def __init__(self, config: DraftLayerConfig) -> None:
        super().__init__()
        self.layer = DraftLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        return self.norm(self.layer(hidden, self.rotary(hidden, positions), attend))


class HydraNetwork(DraftNetwork):
    """K heads, and the prefix attention layer where the configuration has one."""

    config_class = HydraConfig
    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(_Head(config, num_parts=2 + index) for index in range(config.num_heads))
        self.prefix = None if config.prefix is None else _Prefix(config.prefix)

    def encode(self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """What the heads read: the output of prefix attention, or without it the states themselves.

        Args:
            hidden: [B, T, C] states that enter the target's LM head.
            positions: [B or 1, T] index of each state in its text, from 0.
            attend: what each state sees.

        Returns:
            [B, T, C].
        """
        return hidden if self.prefix is None else self.prefix(hidden, positions, attend)

    def forward(self, head: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits of one head.

        Args:
            head: which one, from 0.
            parts: `head + 2` tensors [.., C] of one shape: `encode`'s state, then the embeddings of the tokens after
                it in their order, the root's first.

        Returns:
            [.., V] logits of the token after the last one.
        """
        rows = [part.reshape(-1, part.shape[-1]) for part in parts]
        return self.heads[head](rows, self.backend).view(*parts[0].shape[:-1], self.config.vocab_size)

    @torch.no_grad()
    def start_from(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Begin training with the target's LM head (weight [V, C], bias [V]) in every head, and blocks without W."""
        for head in cast("list[_Head]", self.heads):
            head.lm_head.weight.copy_(weight)
            head.lm_head.bias.zero_() if bias is None else head.lm_head.bias.copy_(bias)
            for block in cast("list[_Block]", head.blocks):
                block.linear.weight.zero_()

    @classmethod
    def recognises(cls, names: set[str], config: Mapping[str, Any]) -> bool:
        """As `DraftNetwork`."""
        return "hydra_head_arch" in config or any(name.startswith("hydra_mlp.") for name in names)

    @classmethod
    def from_published(cls, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> "HydraNetwork":
        """As `DraftNetwork`, from the tensors of `hydra_lm_head.pt`; numbers of heads and layers are read off them.

        Raises:
            NotImplementedError: one of the authors' experimental variants, named by its setting in `config`.
            ValueError: a missing, unexpected or misshapen tensor, by name.
        """
        layout = _PublishedLayout.of(tensors, config)
        names = layout.names(shared_tail=False)
        used, given = set(names.values()), tensors.keys() - _IGNORED
        if used != given:
            raise ValueError(
                f"checkpoint: missing tensors {sorted(used - given)}, unexpected tensors {sorted(given - used)}"
            )
        shared_tail = layout.num_layers > 2 and layout.has_one_tail(tensors)
        sizes = layout.config(tensors, config, shared_tail=shared_tail)
        with torch.device("meta"):  # a billion parameters, all of which come from the file
            network = cls(sizes)
        names = layout.names(shared_tail=shared_tail)
        for name, tensor in network.state_dict().items():
            if tensors[names[name]].shape != tensor.shape:
                raise ValueError(
                    f"{names[name]}: expected shape {list(tensor.shape)}, got {list(tensors[names[name]].shape)}"
                )
        load_strictly(network, {name: tensors[theirs] for name, theirs in names.items()})
        if network.prefix is not None and sizes.prefix is not None:
            network.prefix.rotary = Rotary(sizes.prefix)  # in no file
        return network


@dataclass(frozen=True, slots=True)
class _PublishedLayout:
    """Names in the authors' files.

    In files with a prefix layer, every block and LM head follows a dropout module, which takes an index of its own.
    """

    num_heads: int
    num_layers: int
    prefix: bool

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> "_PublishedLayout":
        arch = config.get("hydra_head_arch", "mlp")
        for name, supported, got in (
            ("hydra_head_arch", "mlp or prefix-mlp", arch if arch not in ("mlp", "prefix-mlp") else None),
            ("grounded_heads", "true", None if config.get("grounded_heads", True) else False),
            ("hidden_state_offset", "0, the last state", config.get("hidden_state_offset") or None),
        ):
            if got is not None:
                raise NotImplementedError(f"{name}: expected {supported}, got {got!r}")
        prefix = arch == "prefix-mlp" or any(name.startswith(_PUBLISHED_PREFIX) for name in tensors)
        indices = [name.split(".")[1:3] for name in tensors if name.startswith("hydra_mlp.")]
        if not indices or not all(index.isdigit() for pair in indices for index in pair):
            raise ValueError(
                f"checkpoint: expected tensors named 'hydra_mlp.0.{int(prefix)}.linear.weight', ..., "
                f"got {sorted(tensors)[:3] or 'none'}"
            )
        # the config counts when it asks for more than is there, so that what is missing is named
        num_heads = 1 + max(int(head) for head, _ in indices)
        last = max(int(block) for _, block in indices)
        num_layers = 1 + (last // 2 if prefix else last)
        return cls(
            num_heads=max(num_heads, int(config.get("hydra_num_heads", 0))),
            num_layers=max(num_layers, int(config.get("hydra_num_layers", 0))),
            prefix=prefix,
        )

    def _block(self, head: int, layer: int) -> str:
        return f"hydra_mlp.{head}.{2 * layer + 1 if self.prefix else layer}"

    def _lm_head(self, head: int) -> str:
        return f"hydra_lm_head.{head}.1" if self.prefix else f"hydra_lm_head.{head}"

    def names(self, *, shared_tail: bool) -> dict[str, str]:
        """Their name of every tensor of ours; of a shared tail, the last one, which their loader keeps."""
        modules = {}
        for head in range(self.num_heads):
            modules[f"heads.{head}.blocks.0.residual"] = self._block(head, 0) + ".res_connection"
            modules[f"heads.{head}.lm_head"] = self._lm_head(head)
            for layer in range(self.num_layers):
                ours = min(layer, 1) if shared_tail else layer
                modules[f"heads.{head}.blocks.{ours}.linear"] = self._block(head, layer) + ".linear"
        names = {
            f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in ("weight", "bias")
        }
        if self.prefix:
            layer_weights = [f"self_attn.{name}_proj" for name in "qkvo"] + [
                f"mlp.{name}_proj" for name in ("gate", "up", "down")
            ]
            for name in (*layer_weights, "input_layernorm", "post_attention_layernorm"):
                names[f"prefix.layer.{name}.weight"] = f"{_PUBLISHED_PREFIX}layers.0.{name}.weight"
            names["prefix.norm.weight"] = _PUBLISHED_PREFIX + "norm.weight"
        return names

    def has_one_tail(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether all blocks after the first are equal, in every head."""
        return all(
            torch.equal(tensors[f"{self._block(head, 1)}.{kind}"], tensors[f"{self._block(head, layer)}.{kind}"])
            for head in range(self.num_heads)
            for layer in range(2, self.num_layers)
            for kind in ("linear.weight", "linear.bias")
        )

    def config(
        self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, shared_tail: bool
    ) -> HydraConfig:
        """The sizes, from the tensors; what they cannot tell is Vicuna v1.3's."""

        def matrix(name: str) -> tuple[int, int]:
            if tensors[name].ndim != 2:
                raise ValueError(f"{name}: expected a matrix, got shape {list(tensors[name].shape)}")
            rows, columns = tensors[name].shape
            return rows, columns

        vocab_size, hidden_size = matrix(self._lm_head(0) + ".weight")
        prefix = None
        if self.prefix:
            layer = _PUBLISHED_PREFIX + "layers.0."
            query, _ = matrix(layer + "self_attn.q_proj.weight")
            key, _ = matrix(layer + "self_attn.k_proj.weight")
            theta = float(config.get("rope_theta", 10000.0))
            head_dim = _head_dim(tensors, theta)
            for name, rows in (("q_proj", query), ("k_proj", key)):
                if rows % head_dim:
                    raise ValueError(
                        f"{layer}self_attn.{name}.weight: expected rows for heads of {head_dim}, got {rows}"
                    )
            prefix = DraftLayerConfig(
                hidden_size=hidden_size,
                intermediate_size=matrix(layer + "mlp.gate_proj.weight")[0],
                num_attention_heads=query // head_dim,
                num_key_value_heads=key // head_dim,
                head_dim=head_dim,
                max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                rope_parameters={"rope_type": "default", "rope_theta": theta},
            )
        return HydraConfig(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            shared_tail=shared_tail,
            prefix=prefix,
        )


def _head_dim(tensors: Mapping[str, torch.Tensor], theta: float) -> int:
    """Width of the prefix layer's heads, from the rotary frequencies in the file if it has them, else Vicuna's."""
    if _INV_FREQ not in tensors:
        return 128
    given = tensors[_INV_FREQ].double().flatten()
    expected = theta ** -(torch.arange(given.numel(), device=given.device) / max(given.numel(), 1)).double()
    # one percent: the file may hold them in bfloat16
    if given.numel() == 0 or not torch.allclose(given, expected, rtol=1e-2):
        raise ValueError(f"{_INV_FREQ}: expected the frequencies of base {theta:g}, got {given.tolist()[:4]} ...")
    return 2 * given.numel()
