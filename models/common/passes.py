"""The two kinds of forward pass of a hooked model: where its tokens go in the cache and what each of them may see."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from specdec.kernels.common.launch import Backend
from specdec.kernels.reference.tree_attention import VisibleSlots, attend_to, visible_slots
from specdec.kernels.tree_attention import tree_attention

__all__ = ["PromptPass", "TreePass"]


@dataclass(slots=True)
class PromptPass:
    """A chunk of the prompt: every row's tokens `start .. start + num_tokens - 1`, causal.

    Rows are right-padded, so what a real token may see is never padding.
    """

    start: int
    num_tokens: int
    batch_size: int
    device: torch.device
    slots: torch.Tensor = field(init=False)
    """[B, T] int64, cache slot of each token."""

    def __post_init__(self) -> None:
        columns = torch.arange(self.start, self.start + self.num_tokens, device=self.device)
        self.slots = columns.expand(self.batch_size, -1)

    @property
    def positions(self) -> torch.Tensor:
        """[B, T] int64, position of each token, counted from 0."""
        return self.slots

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """Causal attention of `query [B, HQ, T, D]` to the first of `[B, HK, S, D]` slots; returns [B, T, HQ, D]."""
        end = self.start + self.num_tokens
        mask = None
        if self.start > 0 or (window is not None and window < end):
            distance = self.slots[0][:, None] - torch.arange(end, device=self.device)
            mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        attended = F.scaled_dot_product_attention(
            query,
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=keys.shape[1] != query.shape[1],
        )
        return attended.transpose(1, 2)


@dataclass(slots=True)
class TreePass:
    """Nodes of a draft tree: node n of row b has slot `lengths[b] + first_node + n`, position `lengths[b] + depth`."""

    lengths: torch.Tensor  # [B] int32
    depth: torch.Tensor  # [B or 1, N] int32
    ancestors: torch.Tensor  # [B or 1, N, W] int32 words
    first_node: int
    num_nodes: int
    backend: Backend
    fused: bool = False
    """Whether layers may run on the fused path (`specdec.models.target.fused`)."""
    slots: torch.Tensor = field(init=False)
    """[B, N] int64, cache slot of each node."""
    positions: torch.Tensor = field(init=False)
    """[B, N] int64, position of each node, counted from 0."""
    _visible: dict[int | None, list[VisibleSlots]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        base = self.lengths.long()[:, None]
        nodes = torch.arange(self.first_node, self.first_node + self.num_nodes, device=self.lengths.device)
        self.slots = base + nodes
        self.positions = base + self.depth

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """Attention of the nodes, `[B, HQ, N, D]`, to the prefix and to their ancestors; returns [B, N, HQ, D]."""
        num_tree_nodes = self.first_node + self.num_nodes
        if self.backend == "reference":
            # who sees whom is the same in all layers of one window: found once per pass, not once per layer
            if window not in self._visible:
                self._visible[window] = visible_slots(self.lengths, self.ancestors, num_tree_nodes, self.depth, window)
            return attend_to(query, keys, values, self._visible[window], scale=scale, upcast=False)
        return tree_attention(
            query.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            self.lengths,
            self.ancestors,
            scale=scale,
            num_tree_nodes=num_tree_nodes,
            depth=None if window is None else self.depth,
            window=window,
            backend=self.backend,
        )
