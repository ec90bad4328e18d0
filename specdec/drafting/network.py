"""Drafters with a trained network: what they share on the way from a folder to a target."""

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, ClassVar, Literal

import torch

from specdec.drafting.base import Drafter, Room
from specdec.drafting.draft_tree import TreeTemplate
from specdec.drafting.folder import DrafterRecord, TargetRecord, write_folder
from specdec.kernels.common.check import FLOAT_DTYPES
from specdec.models.common.cache import KVCache, RowState
from specdec.models.common.lm_heads import LMHeads
from specdec.models.common.packing import pack_network
from specdec.models.common.placing import in_eval_mode, place
from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.layer import DraftLayerConfig
from specdec.models.networks.prefix import FeaturePrefix
from specdec.models.target.target import Target
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

__all__ = ["NetworkDrafter"]


class NetworkDrafter(Drafter):
    """A drafter whose candidates come from a `DraftNetwork`.

    Args:
        network: the trained network.
        shape: the tree to propose.

    Attributes:
        grows_trees: whether it can propose a `DynamicTree`.
        least_depth: depth of the smallest tree that it can propose.
        target_record: what tells its target from others, once it was loaded for a target or bound to one.

    Raises:
        ValueError: a tree too shallow or too deep for the network, or of more ranks than there are tokens to propose.
    """

    network_class: ClassVar[type[DraftNetwork]]
    grows_trees: ClassVar[bool] = False
    least_depth: ClassVar[int] = 1

    def __init__(self, network: DraftNetwork, shape: TreeShape | DynamicTree) -> None:
        config, limit = network.config, self.depth_limit(network.config)
        if limit is not None and not self.least_depth <= shape.max_depth <= limit[0]:
            allowed = f"{self.least_depth} to {limit[0]}" if self.least_depth else f"at most {limit[0]}"
            raise ValueError(f"tree: expected a depth of {allowed}, {limit[1]}, got {shape.max_depth}")
        if shape.max_depth < self.least_depth:
            raise ValueError("tree: expected at least one draft token, got the root alone")
        num_tokens = getattr(config, "num_draft_tokens", config.vocab_size)
        if num_tokens is not None and shape.max_rank >= num_tokens:
            name = "top_k" if isinstance(shape, DynamicTree) else "tree"
            why = "" if num_tokens == config.vocab_size else " the tokens that the network can propose,"
            raise ValueError(f"{name}: expected ranks below {num_tokens},{why} got {shape.max_rank}")
        self.network = network
        self.shape = shape
        self.target_record: TargetRecord | None = None

    @classmethod
    def depth_limit(cls, config: Any) -> tuple[int, str] | None:
        """The deepest tree that a network of this configuration can fill, and why; None for any depth."""
        return None

    @property
    def can_sample(self) -> bool:
        """Whether the tree is static: one that grows takes the most probable paths and is no sample of the network."""
        return isinstance(self.shape, TreeShape)

    @classmethod
    @abstractmethod
    def default_tree(cls, config: Any) -> TreeShape | DynamicTree:
        """The tree to propose with a network of this configuration when nobody names one."""

    @property
    def settings(self) -> dict[str, Any]:
        """What the drafter was made with beside its network and its tree."""
        return {}

    def with_tree(self, tree: TreeShape) -> "NetworkDrafter":
        """As `Drafter`."""
        changed = type(self)(self.network, tree, **self.settings)
        changed.target_record = self.target_record
        return changed

    def bind(self, target: Target) -> None:
        """Check the sizes, move the network to the target, take what the target shares and lay out a static tree."""
        self.network.check_fits(vocab_size=target.vocab_size, hidden_size=target.hidden_size)
        if target.dtype not in FLOAT_DTYPES:
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
            got = str(target.dtype).removeprefix("torch.")
            raise ValueError(f"target: expected weights in one of {expected} for a {self.kind} drafter, got {got}")
        if self.shape.max_rank >= target.vocab_size:
            raise ValueError(f"tree: expected ranks below {target.vocab_size}, got {self.shape.max_rank}")
        place(self.network, target.device, target.dtype)
        self.network.eval()
        self.network.backend = target.backend
        pack_network(self.network, target.dtype)
        self.embed = target.model.get_input_embeddings()
        self.lm_heads = LMHeads.of(target.model.get_output_embeddings(), backend=target.backend)
        self.target_record = TargetRecord.of(target)
        self._target = target
        self._num_ranks = self.shape.max_rank + 1
        if isinstance(self.shape, TreeShape):
            self._template = TreeTemplate(self.shape, target.device, rows=self.lists, backend=target.backend)

    def session(self) -> AbstractContextManager[None]:
        """As `Drafter`: the network may be trained between generations, or serve another target."""
        self.network.backend = self._target.backend
        return in_eval_mode(self.network)

    @property
    def lists(self) -> Literal["depth", "parent"] | Sequence[int]:
        """The list of candidates that each node is taken from, as `TreeTemplate` has it."""
        return "depth" if self.shares_candidates else "parent"

    def new_prefix(
        self,
        room: Room,
        device: torch.device,
        layer: DraftLayerConfig,
        *,
        num_layers: int = 1,
        feature_size: int | None = None,
        keep: int = 0,
        num_slots: int = 0,
    ) -> FeaturePrefix:
        """Memory for the committed text of a network that reads it with decoder layers.

        Args:
            room: the sizes.
            device: where.
            layer: sizes of the layers.
            num_layers: how many there are.
            feature_size: width of the target's states; by default its hidden size.
            keep: as for `FeaturePrefix`.
            num_slots: places that the drafter writes behind the committed text, if more than what is pending takes.
        """
        target, max_new = self._target, self.max_new
        cache = KVCache(
            num_layers=num_layers,
            batch_size=room.batch_size,
            capacity=room.max_length + max(max_new + keep, num_slots),
            num_kv_heads=layer.num_key_value_heads,
            head_dim=layer.head_dim,
            dtype=target.dtype,
            device=device,
            backend=target.backend,
        )
        width = target.hidden_size if feature_size is None else feature_size
        return FeaturePrefix(cache, layer, max_new=max_new, feature_size=width, keep=keep, may_ask=room.may_ask)

    def row_state(self) -> RowState:
        """As `Drafter`: the memory of `new_prefix`, where the network reads the text with layers of its own."""
        prefix = vars(self).get("_prefix")
        return () if prefix is None else prefix.row_state()

    @property
    def saved_config(self) -> Any:
        """The network's configuration as it is saved; a drafter whose settings belong to it adds them."""
        return self.network.config

    def save_pretrained(self, folder: str | os.PathLike[str], *, texts: Mapping[str, str] | None = None) -> None:
        """Save network and tree to a folder that `specdec.load_drafter` reads.

        Args:
            folder: replaced in one step if it exists; after an error the old one is still there.
            texts: further files by name, such as a report of the training.

        Raises:
            ValueError: the drafter was neither loaded for a target nor bound to one.
        """
        if self.target_record is None:
            raise ValueError("drafter: expected one that knows its target; call drafter.bind(target) first")
        record = DrafterRecord(self.kind, asdict(self.saved_config), self.target_record)
        write_folder(folder, record=record, network=self.network, tree=self.shape, texts=texts)
