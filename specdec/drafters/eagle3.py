"""EAGLE-3: as EAGLE, with a network that reads several layers of the target and proposes from a vocabulary of its own.

Paper: Li et al. 2025, "EAGLE-3" (arXiv:2503.01840).
Proposes: what EAGLE proposes; by default a dynamic tree, as its authors do.
Needs from the target: per token the outputs of three decoder layers, and its embedding, unless the network has its own.
Cost of one draft: as EAGLE's; the LM head is one of fewer tokens.
Deviations: as EAGLE's.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from specdec.drafters.eagle import Eagle
from specdec.drafting.candidates import Candidates, Choose
from specdec.models.common.lm_heads import LMHeads
from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.eagle3 import Eagle3Config, Eagle3Network, default_tap_layers
from specdec.models.target.target import PrefillOutput, Target, TargetOutput
from specdec.trees.dynamic import DynamicTree
from specdec.trees.shape import TreeShape

__all__ = ["Eagle3", "check_windows"]


def check_windows(config: Eagle3Config, reach: int) -> None:
    """Raise ValueError where a layer's window does not hold the `reach` positions of a pass behind the cache.

    Windows end in the text: what a pass writes behind it is seen as a whole.
    """
    least = config.least_window
    if least is not None and least < reach:
        raise ValueError(f"tree: expected one so shallow that windows of {reach} positions hold it, got one of {least}")


class Eagle3(Eagle):
    """Drafting with an EAGLE-3 network and a static or dynamic tree.

    Args:
        network: the trained network.
        shape: the tree to propose.
        tap_layers: decoder layers (0-based) of the target whose outputs are read, whatever the network's configuration
            says; where neither does, those of the published rule.

    Raises:
        ValueError: as `Eagle`, tap layers that the network cannot read, or a tree deeper than a layer's window.
    """

    kind: ClassVar[str] = "eagle3"
    network_class: ClassVar[type[DraftNetwork]] = Eagle3Network
    network: Eagle3Network

    def __init__(
        self, network: Eagle3Network, shape: TreeShape | DynamicTree, *, tap_layers: Sequence[int] | None = None
    ) -> None:
        super().__init__(network, shape)
        config = network.config
        check_windows(config, shape.max_depth + 1)
        if tap_layers is not None and len(tap_layers) != config.num_taps:
            raise ValueError(f"tap_layers: expected {config.num_taps} layers for this network, got {tuple(tap_layers)}")
        self.tap_layers = config.tap_layers if tap_layers is None else tuple(tap_layers)

    @property
    def most_new(self) -> int | None:
        """As `Drafter`: the smallest window, which ends in the text, must hold all that is read behind it."""
        return self.network.config.least_window

    @property
    def saved_config(self) -> Eagle3Config:
        """With the tap layers, which published files need not name."""
        return replace(self.network.config, tap_layers=self.tap_layers)

    @property
    def settings(self) -> dict[str, Any]:
        """As `NetworkDrafter`."""
        return {"tap_layers": self.tap_layers}

    @property
    def proposes(self) -> torch.Tensor | None:
        """As `Drafter`."""
        return self.network.target_ids if self.network.has_own_vocabulary else None

    @classmethod
    def default_tree(cls, config: Any) -> DynamicTree:
        """A dynamic tree, as the authors use it."""
        return DynamicTree()

    def bind(self, target: Target) -> None:
        """As `Eagle`, with what the network has of its own in the place of what the target shares."""
        check_windows(self.network.config, self.max_new)
        super().bind(target)
        network = self.network
        if network.lm_head is not None:
            self._heads = LMHeads.of(network.lm_head, backend=target.backend)
        if network.embed_tokens is not None:
            self.embed = network.embed_tokens
        self._taps = target.tap(default_tap_layers(target.num_layers) if self.tap_layers is None else self.tap_layers)
        self._target_ids = network.target_ids

    def _choose(self, states: torch.Tensor, choose: Choose) -> Candidates:
        chosen = super()._choose(states, choose)
        return chosen.among(self._target_ids, self._target.vocab_size) if self.network.has_own_vocabulary else chosen

    def _as_target(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._target_ids[tokens]

    def _features(self, output: PrefillOutput | TargetOutput) -> torch.Tensor:
        return torch.cat([output.taps[place] for place in self._taps], -1)
