"""The two kinds of forward pass of a hooked model: where its tokens go in the cache and what each of them may see."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from specdec.kernels.common.launch import Backend
from specdec.kernels.tree_attention import tree_attention
from specdec.models.common.runs import Run, attend_in_runs, visible_runs

__all__ = ["PackedPass", "PromptPass", "TreePass"]


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

    def flat_slots(self, row_starts: torch.Tensor) -> torch.Tensor:
        """As a cache asks."""
        return (row_starts + self.slots).flatten()

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


class PackedPass:
    """A chunk of the prompts of several rows one behind the other, as if they were one row: no padding is computed.

    Where rows can be attended to one by one at no cost, which is on a CPU.

    Args:
        start: the chunk's place in the prompts.
        counts: tokens of each row in the chunk, 0 or more.
        device: where.

    Attributes:
        rows: [M] int64 the row of each token.
        positions: [1, M] int64 its position, counted from 0.
        ends: [B] int64 places behind each row's last token.
    """

    def __init__(self, start: int, counts: Sequence[int], device: torch.device) -> None:
        sizes = torch.tensor(counts, device=device)
        self.ends = sizes.cumsum(0)
        self.rows = torch.arange(len(counts), device=device).repeat_interleave(sizes)
        columns = torch.arange(len(self.rows), device=device) - (self.ends - sizes)[self.rows]
        self.columns = columns
        self.positions = (columns + start)[None]
        self._parts = [(row, PromptPass(start, count, 1, device)) for row, count in enumerate(counts) if count > 0]

    def flat_slots(self, row_starts: torch.Tensor) -> torch.Tensor:
        """As a cache asks."""
        return row_starts[self.rows, 0] + self.positions[0]

    def packed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[1, M]: of `tokens [B, T]` of the chunk, right-padded, the real ones."""
        return tokens[self.rows, self.columns][None]

    def padded(self, states: torch.Tensor, width: int) -> torch.Tensor:
        """[B, width, C]: `states [1, M, C]` of the tokens in their rows again, zeros behind them."""
        rows = states.new_zeros(len(self.ends), width, states.shape[2])
        rows[self.rows, self.columns] = states[0]
        return rows

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """Causal attention of `query [1, HQ, M, D]`, each row's to its own slots of `[B, HK, S, D]`; [1, M, HQ, D]."""
        attended, begin = [], 0
        for row, part in self._parts:
            own = query.narrow(2, begin, part.num_tokens)
            begin += part.num_tokens
            held = keys.narrow(0, row, 1), values.narrow(0, row, 1)
            attended.append(part.attend(own, *held, scale=scale, window=window))
        return torch.cat(attended, 1)


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

    def flat_slots(self, row_starts: torch.Tensor) -> torch.Tensor:
        """As a cache asks."""
        return (row_starts + self.slots).flatten()

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
