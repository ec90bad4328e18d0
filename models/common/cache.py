"""The KV cache of one model: one allocation, a length per row, and room for the nodes of a draft tree.

Layout: `data [L, 2, B, S, HK, D]` (layer, K or V, row, slot, KV head, head dim). Slots `0 .. lengths[b] - 1` of row b
hold its committed tokens; tree node n of a pass is written to slot `lengths[b] + n`, so that prefix and tree share one
tensor and committing an accepted path is a pure move (`specdec.kernels.kv_compact`). The memory is zeroed once: slots
beyond the length may be read by masked lanes and must hold finite numbers.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from specdec.kernels.common.launch import Backend
from specdec.kernels.kv_compact import kv_compact

__all__ = ["KVCache", "RowState", "clear_row", "copy_row"]


class _Pass(Protocol):
    """What a cache has to know of a forward pass."""

    def flat_slots(self, row_starts: torch.Tensor) -> torch.Tensor:
        """[M] int64 slots of all tokens of the pass, a cache seen as [B * S, HK, D]; `row_starts` as of `KVCache`."""
        ...


class _Slots:
    """Where the current pass writes; one object that all layers of a cache share.

    Args:
        row_starts: [B, 1] int64, as of `KVCache`.
    """

    def __init__(self, row_starts: torch.Tensor) -> None:
        self._row_starts = row_starts
        self._flat: torch.Tensor | None = None
        self._pass: _Pass | None = None

    def of(self, one: _Pass) -> None:
        """Take those of a pass, when a layer asks for them."""
        if one is not self._pass:
            self._flat, self._pass = None, one

    @property
    def flat(self) -> torch.Tensor:
        """[M] int64 slots of the pass, the cache of a layer seen as [B * S, HK, D]."""
        if self._flat is None:
            assert self._pass is not None, "no pass has begun"
            self._flat = self._pass.flat_slots(self._row_starts)
        return self._flat


class _Layer(CacheLayerMixin):
    """What one attention layer of a transformers model sees as its cache."""

    def __init__(self, memory: torch.Tensor, slots: _Slots) -> None:
        super().__init__()
        # made once: on a CPU, eight views per layer and pass cost as much as the copies they serve
        self.keys, self.values = memory.transpose(2, 3).unbind()  # [B, HK, S, D]
        self._flat_keys, self._flat_values = memory.flatten(1, 2).unbind()  # [B * S, HK, D]
        self._slots = slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Nothing to do: the memory exists."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this pass's [B, HK, T, D] keys and values; returns the whole layer as [B, HK, S, D]."""
        self._flat_keys.index_copy_(0, self._slots.flat, key_states.transpose(1, 2).flatten(0, 1))
        self._flat_values.index_copy_(0, self._slots.flat, value_states.transpose(1, 2).flatten(0, 1))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Sizes of a mask that our attention function never asks for."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        """Zero: rows have lengths of their own, and positions are always passed explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Slots per row."""
        return int(self.keys.shape[2])

    # transformers 5.0 - 5.15 call it by this name
    get_max_cache_shape = get_max_length


class KVCache(Cache):
    """Keys and values of all layers, with per-row lengths on the device; a transformers model writes to it directly.

    Attributes:
        data: [L, 2, B, S, HK, D] in the model's dtype.
        lengths: [B] int32, committed tokens per row.
        row_starts: [B, 1] int64, the first slot of each row in a layer seen as [B * S, HK, D].
    """

    def __init__(
        self,
        *,
        num_layers: int,
        batch_size: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend | None = None,
    ) -> None:
        shape = (num_layers, 2, batch_size, capacity, num_kv_heads, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.backend = backend
        self.row_starts = torch.arange(batch_size, device=device)[:, None] * capacity
        self._slots = _Slots(self.row_starts)
        super().__init__(layers=[_Layer(memory, self._slots) for memory in self.data])

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self.data.shape[3]

    def begin_pass(self, one: _Pass) -> None:
        """Say which pass writes next; its slots are asked for only if a layer writes by `update`."""
        self._slots.of(one)

    def compact(self, path: torch.Tensor, num_accepted: torch.Tensor) -> None:
        """Move the accepted path of the tree behind the prefix; the caller adds `num_accepted + 1` to the lengths.

        Args:
            path: [B, P] int32 accepted nodes from the root (node 0), -1 padded.
            num_accepted: [B] int32 accepted draft tokens; the root is kept too. -1 keeps nothing (a finished row).
        """
        kv_compact(self.data, self.lengths, path, num_accepted, backend=self.backend)

    def commit(self, path: torch.Tensor, num_accepted: torch.Tensor) -> None:
        """Keep the accepted path of the tree and drop the rest; arguments as of `compact`."""
        self.compact(path, num_accepted)
        self.lengths += num_accepted + 1

    def take_row(self, row: int, other: "KVCache", other_row: int, num_tokens: int | None = None) -> None:
        """Copy a row of another cache with as many slots: `num_tokens` slots, which hold all of it, or every slot."""
        slots = slice(num_tokens)
        self.data[:, :, row, slots].copy_(other.data[:, :, other_row, slots])
        self.lengths[row].copy_(other.lengths[other_row])

    def copy_of(self, num_rows: int) -> "KVCache":
        """The first rows in memory of their own, with a slot to spare."""
        num_layers, _, _, _, num_kv_heads, head_dim = self.data.shape
        copy = KVCache(
            num_layers=num_layers,
            batch_size=num_rows,
            capacity=int(self.lengths[:num_rows].max()) + 1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=self.data.dtype,
            device=self.data.device,
            backend=self.backend,
        )
        copy.data.copy_(self.data[:, :, :num_rows, : copy.data.shape[3]])
        copy.lengths.copy_(self.lengths[:num_rows])
        return copy


RowState: TypeAlias = Sequence["torch.Tensor | KVCache"]
"""What belongs to the rows of a batch: tensors with the rows along their first axis, and caches."""


def copy_row(target: RowState, row: int, source: RowState, source_row: int, num_tokens: int | None = None) -> None:
    """Make a row what a row of another batch is; nothing waits for the device.

    Args:
        target: changed in place.
        row: of `target`.
        source: of the same parts in the same order, for any number of rows.
        source_row: of `source`.
        num_tokens: slots of the caches that hold all there is of the row; None for every slot.
    """
    for to, of in zip(target, source, strict=True):
        if isinstance(to, KVCache):
            assert isinstance(of, KVCache)
            to.take_row(row, of, source_row, num_tokens)
        else:
            assert isinstance(of, torch.Tensor)
            to[row].copy_(of[source_row])


def clear_row(target: RowState, row: int) -> None:
    """Make a row what it was when memory was laid out: zeros everywhere, so that nothing not finite is left."""
    for to in target:
        if isinstance(to, KVCache):
            to.data[:, :, row].zero_()
            to.lengths[row].zero_()
        else:
            to[row].zero_()
