"""The two kinds of forward pass of a hooked model: where its tokens go in the cache and what each of them may see."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from specdec.kernels.common.launch import Backend
from specdec.kernels.tree_attention import tree_attention
from specdec.models.common.runs import Run, attend_in_runs, visible_runs

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
    _masks: dict[int | None, torch.Tensor | None] = field(init=False, default_factory=dict)

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
        """Causal attention of `query [B, HQ, T, D]` to the first of `[B, HK, S, D]` slots; returns [B, T, HQ, D].

        Prompts come in all lengths and some are long, so on a GPU nothing may be planned for a length, and nothing of
        T x S numbers per head be written: a causal prompt needs no mask, and a window one of its own width.
        """
        end, num_groups = self.start + self.num_tokens, query.shape[1] // keys.shape[1]
        window = None if window is None or window >= end else window
        begin = 0 if window is None else max(0, self.start + 1 - window)
        if window not in self._masks:  # the same in all layers of one window
            self._masks[window] = self._mask(begin, end, window)
        mask = self._masks[window]
        keys, values = keys[:, :, begin:end], values[:, :, begin:end]
        # of the kernels without such matrices one shares the heads of keys, but takes no mask and no fp32 on a GPU
        if num_groups > 1 and (window is not None or (query.dtype == torch.float32 and query.device.type != "cpu")):
            keys, values = keys.repeat_interleave(num_groups, 1), values.repeat_interleave(num_groups, 1)
        with _without_plans():
            attended = F.scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=keys.shape[1] != query.shape[1],
            )
        return attended.transpose(1, 2)

    def _mask(self, begin: int, end: int, window: int | None) -> torch.Tensor | None:
        """What the chunk's tokens see of the slots `begin .. end - 1`; None for causal from the first token on."""
        if window is not None:
            distance = self.slots[0][:, None] - torch.arange(begin, end, device=self.device)
            return (distance >= 0) & (distance < window)
        if self.start == 0:
            return None
        with _disable_current_modes():  # in a mode that watches operators a tensor's subclass cannot be made
            return causal_lower_right(self.num_tokens, end)  # a word for a mask that is not written


@contextmanager
def _without_plans() -> Iterator[None]:
    """Leave cuDNN's attention out: it builds a plan for every new shape, which takes longer than a short prompt."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


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
    window_depth: torch.Tensor | None = None
    """[B or 1, N] int32, where the window of each node ends, if that is not its own position."""
    _slots: torch.Tensor | None = field(init=False, default=None)
    _positions: torch.Tensor | None = field(init=False, default=None)
    _visible: dict[int | None, list[Run]] = field(init=False, default_factory=dict)

    @property
    def slots(self) -> torch.Tensor:
        """[B, N] int64, cache slot of each node; made when first asked for, as the fused path counts itself."""
        if self._slots is None:
            nodes = torch.arange(self.first_node, self.first_node + self.num_nodes, device=self.lengths.device)
            self._slots = self.lengths.long()[:, None] + nodes
        return self._slots

    @property
    def positions(self) -> torch.Tensor:
        """[B, N] int64, position of each node, counted from 0; made when first asked for."""
        if self._positions is None:
            self._positions = self.lengths.long()[:, None] + self.depth
        return self._positions

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """Attention of the nodes, `[B, HQ, N, D]`, to the prefix and to their ancestors; returns [B, N, HQ, D]."""
        num_tree_nodes = self.first_node + self.num_nodes
        depth = self.depth if self.window_depth is None else self.window_depth
        if self.backend == "reference":
            # who sees whom is the same in all layers of one window: found once per pass, not once per layer
            if window not in self._visible:
                num_groups = query.shape[1] // keys.shape[1]
                self._visible[window] = visible_runs(
                    self.lengths,
                    self.ancestors,
                    num_tree_nodes,
                    depth,
                    window,
                    num_groups=num_groups,
                    dtype=query.dtype,
                )
            return attend_in_runs(query, keys, values, self._visible[window], scale=scale)
        return tree_attention(
            query.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            self.lengths,
            self.ancestors,
            scale=scale,
            num_tree_nodes=num_tree_nodes,
            depth=None if window is None else depth,
            window=window,
            backend=self.backend,
        )
