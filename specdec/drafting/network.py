"""Drafters with a trained network: what they share on the way from a folder to a target."""

import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from specdec.drafting.base import Drafter
from specdec.drafting.folder import DrafterRecord, TargetRecord, write_folder
from specdec.models.common.lm_heads import LMHeads
from specdec.models.networks.base import DraftNetwork
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
        target_record: what tells its target from others, once it was loaded for a target or bound to one.
    """

    network_class: ClassVar[type[DraftNetwork]]
    grows_trees: ClassVar[bool] = False

    def __init__(self, network: DraftNetwork, shape: TreeShape | DynamicTree) -> None:
        self.network = network
        self.shape = shape
        self.target_record: TargetRecord | None = None

    @property
    def can_sample(self) -> bool:
        """Yes: candidates come from the network's logits."""
        return True

    @classmethod
    @abstractmethod
    def default_tree(cls, config: Any) -> TreeShape | DynamicTree:
        """The tree to propose with a network of this configuration when nobody names one."""

    def bind(self, target: Target) -> None:
        """Check the sizes, move the network to the target's device and dtype, and take what the target shares."""
        self.network.check_fits(vocab_size=target.vocab_size, hidden_size=target.hidden_size)
        if self.shape.max_rank >= target.vocab_size:
            raise ValueError(f"tree: expected ranks below {target.vocab_size}, got {self.shape.max_rank}")
        self.network.to(device=target.device, dtype=target.dtype).eval()
        self.network.backend = target.backend
        self.embed = target.model.get_input_embeddings()
        self.lm_head = target.model.get_output_embeddings()
        self.lm_heads = LMHeads.of(self.lm_head, backend=target.backend)
        self.target_record = TargetRecord.of(target)

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
