"""MTP heads: what ships inside a target to guess a second token drafts trees, as EAGLE does.

Papers: DeepSeek-V3 (arXiv:2412.19437) section 2.2; FastMTP (arXiv:2509.18362), for one layer that is fed with its own
states.
Proposes: what EAGLE proposes; any depth. A node at depth d is drafted by layer d - 1, and below by the last layer.
Needs from the target: its embedding, its LM head, and per token the state that enters that head. The head's tensors are
in the target's own files, of which transformers leaves them out.
Cost of one draft: as EAGLE's. With K layers, each of them reads every newly committed token, and nodes above depth K
run through more than one.
Several layers: layer k reads at pair t what layer k - 1 made of pair t - 1, so that the first k pairs of a text have no
place in it. Of a node at depth d the layers from d on are run, those that its descendants need. All of that is made
anew from true states once a node is committed. Along a chain this is what transformers computes. A first draft behind a
prompt of fewer than K - 1 tokens reads zeros where a layer has no place yet.
Deviations: as EAGLE's. Deeper drafts than there are layers are not DeepSeek's or GLM's; they feed the last layer with
what the LM head read, behind its norm.
"""

from dataclasses import replace
from typing import ClassVar

import torch

from specdec.drafters.eagle import Eagle
from specdec.drafting.base import Room
from specdec.models.common.cache import RowState
from specdec.models.common.passes import PromptPass, TreePass
from specdec.models.networks.base import DraftNetwork
from specdec.models.networks.layer import CachedAttention
from specdec.models.networks.mtp import MtpNetwork
from specdec.models.networks.prefix import Pairs

__all__ = ["Mtp"]


class Mtp(Eagle):
    """Drafting with an MTP head and a static or dynamic tree.

    Between passes, a node's states are those that its children's layers read, side by side; that of the LM head first.

    Args:
        network: the head.
        shape: the tree to propose.

    Raises:
        ValueError: as `Eagle`.
    """

    kind: ClassVar[str] = "mtp"
    network_class: ClassVar[type[DraftNetwork]] = MtpNetwork
    network: MtpNetwork

    def allocate(self, room: Room, device: torch.device) -> None:
        """Keys and values of the layers, and of all but the last one the state at the newest token.

        What a generation before left there is never read: a layer's first pair comes after one of the layer before.
        """
        super().allocate(room, device)
        config = self.network.config
        shape = config.num_layers - 1, room.batch_size, config.hidden_size
        self._newest = torch.zeros(shape, dtype=self._target.dtype, device=device)

    def row_state(self) -> RowState:
        """As `Drafter`."""
        return *super().row_state(), self._newest.movedim(1, 0)

    def _follow(self, pairs: Pairs) -> torch.Tensor:
        """As `Eagle`; a layer reads at each pair what the layer before made of the pair before."""
        states = self.network.read(pairs.features)
        embedded = self.embed(pairs.tokens)
        made = [self._run_layer(0, states, embedded, pairs.attend)]
        for layer, newest in enumerate(self._newest, start=1):
            before = torch.cat((newest[:, None], made[-1][:, :-1]), 1)
            made.append(self._run_pairs(layer, before, embedded, pairs.attend))
        for newest, states in zip(self._newest, made, strict=False):
            newest.copy_(torch.where(pairs.counts[:, None] > 0, pairs.last(states), newest))
        return torch.cat(made[:-1] or made, -1)

    def _run(self, states: torch.Tensor, tokens: torch.Tensor, attend: CachedAttention) -> torch.Tensor:
        """Run nodes of the tree through the layers that they have states for, which are the last ones."""
        parts = states.split(self.network.config.hidden_size, -1)
        embedded = self.embed(tokens)
        first = self.network.config.num_layers - len(parts)
        made = [self._run_layer(layer, part, embedded, attend) for layer, part in enumerate(parts, first)]
        return torch.cat(made[:-1] or made, -1)

    def _run_pairs(
        self, layer: int, states: torch.Tensor, embedded: torch.Tensor, attend: CachedAttention
    ) -> torch.Tensor:
        """Run committed pairs `[B, T, C]` through a layer that has none of the first `layer` pairs of a text."""
        visible, num_pairs = attend.visible, states.shape[1]
        if isinstance(visible, PromptPass):
            absent = min(max(layer - visible.start, 0), num_pairs)
            made = states.new_zeros(states.shape)
            if absent < num_pairs:
                made[:, absent:] = self._run_layer(layer, states[:, absent:], embedded[:, absent:], attend)
            return made
        # a text may begin in the middle of what is pending: the pairs that are there move to the front, and back
        places = torch.arange(num_pairs, device=states.device)
        missing = (layer - visible.lengths.long()).clamp(min=0)[:, None]
        present = (places + missing).clamp(max=num_pairs - 1)[:, :, None].expand_as(states)
        made = self._run_layer(layer, states.gather(1, present), embedded.gather(1, present), attend)
        made = made.gather(1, (places - missing).clamp(min=0)[:, :, None].expand_as(made))
        return made.masked_fill((places < missing)[:, :, None], 0)

    def _run_layer(
        self, layer: int, states: torch.Tensor, embedded: torch.Tensor, attend: CachedAttention
    ) -> torch.Tensor:
        """Run one layer over [B, T, C], at the slots that its keys have: `layer` less than those of the first one."""
        visible = attend.visible
        if layer and isinstance(visible, PromptPass):
            start = max(visible.start - layer, 0)
            moved = PromptPass(start, states.shape[1], visible.batch_size, visible.device)
            attend = replace(attend, visible=moved)
        elif layer and isinstance(visible, TreePass):
            attend = replace(attend, visible=replace(visible, lengths=(visible.lengths - layer).clamp(min=0)))
        return self.network(states, embedded, attend.positions, attend, layer)
