"""Hydra's files: `hydra_lm_head.pt` with the heads and, for Hydra++, the prefix layer.

Numbers of heads and layers are read off the tensors. In files with a prefix layer, every block and LM head follows a
dropout module, which takes an index of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specdec.models.networks.base import check_tensors, load_strictly
from specdec.models.networks.hydra import HydraConfig, HydraNetwork
from specdec.models.networks.layer import DraftLayerConfig, Rotary

__all__ = ["read", "recognises"]

_PREFIX = "prefix_embeding_layer."  # spelled so in the authors' files
_EMBEDDING = "input_embed_fn.weight"
_INV_FREQ = _PREFIX + "layers.0.self_attn.rotary_emb.inv_freq"
# Copies of the target's embedding and of a constant.
_IGNORED = frozenset({_EMBEDDING, _PREFIX + "embed_tokens.weight", _INV_FREQ})


def recognises(names: set[str], config: Mapping[str, Any]) -> bool:
    """Whether the configuration names a Hydra architecture, or there are blocks of Hydra heads."""
    return "hydra_head_arch" in config or any(name.startswith("hydra_mlp.") for name in names)


def read(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> HydraNetwork:
    """Build a network.

    Raises:
        NotImplementedError: one of the authors' experimental variants, named by its setting in `config`.
        ValueError: a missing, unexpected or misshapen tensor, by name.
    """
    layout = _Layout.of(tensors, config)
    names = layout.names(shared_tail=False)
    used, given = set(names.values()), tensors.keys() - _IGNORED
    if used != given:
        raise ValueError(
            f"checkpoint: missing tensors {sorted(used - given)}, unexpected tensors {sorted(given - used)}"
        )
    shared_tail = layout.num_layers > 2 and layout.has_one_tail(tensors)
    sizes = layout.config(tensors, config, shared_tail=shared_tail)
    with torch.device("meta"):  # a billion parameters, all of which come from the file
        network = HydraNetwork(sizes)
    names = layout.names(shared_tail=shared_tail)
    expected = {names[name]: tensor for name, tensor in network.state_dict().items()}
    check_tensors(expected, {name: tensors[name] for name in expected})
    load_strictly(network, {name: tensors[theirs] for name, theirs in names.items()})
    if network.prefix is not None and sizes.prefix is not None:
        network.prefix.rotary = Rotary(sizes.prefix)  # in no file
    return network


@dataclass(frozen=True, slots=True)
class _Layout:
    """Names in the authors' files."""

    num_heads: int
    num_layers: int
    prefix: bool

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> "_Layout":
        arch = config.get("hydra_head_arch", "mlp")
        for name, supported, got in (
            ("hydra_head_arch", "mlp or prefix-mlp", arch if arch not in ("mlp", "prefix-mlp") else None),
            ("grounded_heads", "true", None if config.get("grounded_heads", True) else False),
            ("hidden_state_offset", "0, the last state", config.get("hidden_state_offset") or None),
        ):
            if got is not None:
                raise NotImplementedError(f"{name}: expected {supported}, got {got!r}")
        prefix = arch == "prefix-mlp" or any(name.startswith(_PREFIX) for name in tensors)
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
                names[f"prefix.layer.{name}.weight"] = f"{_PREFIX}layers.0.{name}.weight"
            names["prefix.norm.weight"] = _PREFIX + "norm.weight"
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
            layer = _PREFIX + "layers.0."
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
