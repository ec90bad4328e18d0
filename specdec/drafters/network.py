"""Drafters with a trained network: what they share on the way from a folder to a target."""

from abc import abstractmethod
from typing import Any, ClassVar

from specdec.drafters.base import Drafter
from specdec.models.draft_network import DraftNetwork
from specdec.models.target import Target
from specdec.trees import TreeShape

__all__ = ["NetworkDrafter"]


class NetworkDrafter(Drafter):
    """A drafter whose candidates come from a `DraftNetwork`.

    Args:
        network: the trained network.
        shape: the tree to propose.
    """

    network_class: ClassVar[type[DraftNetwork]]

    def __init__(self, network: DraftNetwork, shape: TreeShape) -> None:
        self.network = network
        self.shape = shape

    @classmethod
    @abstractmethod
    def default_tree(cls, config: Any) -> TreeShape:
        """The tree to propose with a network of this configuration when nobody names one."""

    def bind(self, target: Target) -> None:
        """Check the sizes, move the network to the target's device and dtype, and take what the target shares."""
        self.network.check_fits(vocab_size=target.vocab_size, hidden_size=target.hidden_size)
        if self.shape.max_rank >= target.vocab_size:
            raise ValueError(f"tree: expected ranks below {target.vocab_size}, got {self.shape.max_rank}")
        self.network.to(device=target.device, dtype=target.dtype).eval()
        self.embed = target.model.get_input_embeddings()
        self.lm_head = target.model.get_output_embeddings()
