"""Which logits of a row top-k and top-p keep, found by many programs: bins decide on most, a search on the few others.

A token's bin is a function of its distance d below the row's largest logit: 1/8 wide up to d = 16, then 16 to an
octave. Counts of a row's bins tell the bin of the k-th token. They also bound every mass: up to d = 16 no token of a
bin is more than exp(1/8) times as probable as another. So a bin is kept, dropped or in doubt; few tokens are in doubt,
and the least one that is kept is searched among these.

Masses are exp(-d) in units of 2^-40, whole numbers: a sum is the same whoever adds when. 2^22 tokens fit into 64 bits.

One launch after the other works on a row's part of `found` [rows, FOUND_SIZE] int32: counts of the bins, then how many
tokens are listed, then what `_choose_kernel` found.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specdec.kernels.common.launch import LaunchConfig, batch_stride
from specdec.kernels.common.primitives import TILE, order_key, tiles_config

__all__ = ["FOUND_SIZE", "FilterWork", "clear_found", "filter_rows_"]

_NUM_BINS = tl.constexpr(256)
_LISTED = tl.constexpr(256)
_CHOSEN = tl.constexpr(257)
FOUND_SIZE = 264
_CAPACITY = 16384  # logits in doubt that a list holds

_NUM_FINE = tl.constexpr(128)
_FINE_END = tl.constexpr(16.0)
_FINE_END_BITS = tl.constexpr(0x41800000)  # of 16.0
_COARSE_SHIFT = tl.constexpr(19)  # leaves four bits of the mantissa
_MASS_UNIT = tl.constexpr(2.0**-40)
_SLACK = tl.constexpr(2.0**-10)  # relative; more than fp32 sums over all bins are off


@triton.jit
def _row_largest(largest_ptr, row, NUM_TILES, BLOCK_T: tl.constexpr):
    """Largest logit of a row, of those of its tiles, `largest_ptr` [rows, NUM_TILES]."""
    offs_t = tl.arange(0, BLOCK_T)
    return tl.max(tl.load(largest_ptr + row * NUM_TILES + offs_t, mask=offs_t < NUM_TILES, other=float("-inf")), 0)


@triton.jit
def _bin_of(distance):
    """Bins of distances below the largest logit; never falling with it; an infinite one is in the last."""
    fine = (tl.minimum(distance, _FINE_END) * 8.0).to(tl.int32)
    coarse = ((distance.to(tl.int32, bitcast=True) - _FINE_END_BITS) >> _COARSE_SHIFT) + _NUM_FINE
    # NaN, below an infinite logit, has to stay within the bins too
    return tl.minimum(tl.maximum(tl.where(distance < _FINE_END, fine, coarse), 0), _NUM_BINS - 1)


@triton.jit
def _edge(bins):
    """Least distance of a bin's tokens."""
    coarse = (tl.maximum(bins - _NUM_FINE, 0) << _COARSE_SHIFT) + _FINE_END_BITS
    return tl.where(bins < _NUM_FINE, bins.to(tl.float32) * 0.125, coarse.to(tl.float32, bitcast=True))


@triton.jit
def _whole_mass(share):
    """Masses, relative to the largest logit's, in units of 2^-40, int64."""
    return (share * (1.0 / _MASS_UNIT)).to(tl.int64)


@triton.jit
def clear_found(row_found_ptr):
    """Nothing was counted, nothing is listed."""
    tl.store(row_found_ptr + tl.arange(0, _NUM_BINS), 0)
    tl.store(row_found_ptr + _LISTED, 0)


@triton.jit
def _chosen_bins(row_found_ptr, has_bins):
    """The four numbers of `_choose_kernel`; without a k and without a p all bins are kept."""
    k_bin = tl.load(row_found_ptr + _CHOSEN, mask=has_bins, other=_NUM_BINS)
    k_left = tl.load(row_found_ptr + _CHOSEN + 1, mask=has_bins, other=0)
    first = tl.load(row_found_ptr + _CHOSEN + 2, mask=has_bins, other=_NUM_BINS)
    last = tl.load(row_found_ptr + _CHOSEN + 3, mask=has_bins, other=_NUM_BINS)
    return k_bin, k_left, first, last


@triton.jit
def _in_doubt(bins, k_bin, first, last):
    """Whether tokens of these bins are neither kept nor dropped for their bin; those of the k-th decide on masses."""
    return (bins == k_bin) | ((bins >= first) & (bins <= last) & (bins < k_bin))


@triton.jit
def _load_members(values_ptr, offs, num, largest):
    """Logits at `offs`, their bins (-1 behind the last and for a token that is impossible) and their keys."""
    x = tl.load(values_ptr + offs, mask=offs < num, other=float("-inf"))
    return x, tl.where(x > float("-inf"), _bin_of(largest - x), -1), order_key(x)


@triton.jit
def _least_kept_key(
    values_ptr,  # [num] logits, among which are all members
    num,
    largest,
    first,  # bins of the members
    last,
    floor,  # no member has a lesser key
    before,  # weight of the tokens over all members
    goal,  # in float64
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Least key t such that `before` and the members with a key over t weigh less than the goal; a member's key.

    A token weighs its mass, or 1. Each pass over the logits cuts the interval in which t lies into four. It begins as
    what the members span, which is little. The largest member is kept even if what is before it reaches the goal.
    """
    lanes = tl.arange(0, BLOCK)
    lows, highs = tl.full([BLOCK], 2**31 - 1, tl.int32), tl.full([BLOCK], -(2**31), tl.int32)
    for start in range(0, num, BLOCK):
        _, bins, key = _load_members(values_ptr, start + lanes, num, largest)
        is_member = (bins >= first) & (bins <= last) & (key >= floor)
        lows = tl.where(is_member, tl.minimum(lows, key), lows)
        highs = tl.where(is_member, tl.maximum(highs, key), highs)
    low, high = tl.min(lows, 0).to(tl.int64), tl.max(highs, 0).to(tl.int64)
    while low < high:
        step = (high - low + 4) // 4
        over1 = tl.zeros([BLOCK], tl.int64)
        over2 = tl.zeros([BLOCK], tl.int64)
        over3 = tl.zeros([BLOCK], tl.int64)
        for start in range(0, num, BLOCK):
            x, bins, key = _load_members(values_ptr, start + lanes, num, largest)
            is_member = (bins >= first) & (bins <= last) & (key >= floor)
            weight = _whole_mass(tl.exp(x - largest)) if BY_MASS else tl.full([BLOCK], 1, tl.int64)
            over1 += tl.where(is_member & (key >= low + step), weight, 0)
            over2 += tl.where(is_member & (key >= low + 2 * step), weight, 0)
            over3 += tl.where(is_member & (key >= low + 3 * step), weight, 0)
        quarter = ((before + tl.sum(over1, 0)).to(tl.float64) >= goal).to(tl.int64)
        quarter += ((before + tl.sum(over2, 0)).to(tl.float64) >= goal).to(tl.int64)
        quarter += ((before + tl.sum(over3, 0)).to(tl.float64) >= goal).to(tl.int64)
        low = tl.minimum(low + quarter * step, high)
        high = tl.minimum(high, low + step - 1)
    return low.to(tl.int32)


@triton.jit
def _least_kept(
    values_ptr,  # [num] logits, among which are all that are in doubt
    num,
    largest,
    chosen,  # of `_chosen_bins`
    masses,  # of the tokens that are not in doubt: over the first bin, and between the last and the k-th's
    top_p,
    BLOCK: tl.constexpr,
):
    """Least key that top-k and top-p keep."""
    k_bin, k_left, first, last = chosen
    floor = tl.full((), -(2**31), tl.int32)
    if k_bin < _NUM_BINS:
        floor = _least_kept_key(
            values_ptr, num, largest, k_bin, k_bin, floor, 0, k_left.to(tl.float64), BY_MASS=False, BLOCK=BLOCK
        )
    if top_p < 1.0:
        lanes = tl.zeros([BLOCK], tl.int64)
        for start in range(0, num, BLOCK):
            x, bins, key = _load_members(values_ptr, start + tl.arange(0, BLOCK), num, largest)
            is_kept = (bins >= 0) & _in_doubt(bins, k_bin, first, last) & (key >= floor)
            lanes += tl.where(is_kept, _whole_mass(tl.exp(x - largest)), 0)
        goal = top_p.to(tl.float64) * (masses[0] + masses[1] + tl.sum(lanes, 0)).to(tl.float64)
        floor = _least_kept_key(
            values_ptr, num, largest, first, last, floor, masses[0], goal, BY_MASS=True, BLOCK=BLOCK
        )
    return floor


@triton.jit(do_not_specialize=["stride_sb", "N"])
def _count_kernel(
    processed_ptr,  # [B, N, V]
    settings_ptr,  # [B or 1, 5]
    largest_ptr,  # [B, N, T]
    found_ptr,  # [B, N, FOUND_SIZE]
    stride_sb,
    N,
    V,
    FOUND_SIZE: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program counts one tile into the bins of its row."""
    t = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row = b * N + n
    top_k = tl.load(settings_ptr + b * stride_sb + 1)
    top_p = tl.load(settings_ptr + b * stride_sb + 2)
    largest = _row_largest(largest_ptr, row, NUM_TILES, BLOCK_T)
    if ((top_k > 0.0) | (top_p < 1.0)) & (largest > float("-inf")):
        offs_v = t * BLOCK_V + tl.arange(0, BLOCK_V)
        x = tl.load(processed_ptr + row * V + offs_v, mask=offs_v < V, other=float("-inf"))
        counts = tl.histogram(_bin_of(largest - x), _NUM_BINS, mask=x > float("-inf"))
        count_ptrs = found_ptr + row * FOUND_SIZE + tl.arange(0, _NUM_BINS)
        tl.atomic_add(count_ptrs, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["stride_sb", "N"])
def _choose_kernel(
    settings_ptr,  # [B or 1, 5]
    found_ptr,  # [B, N, FOUND_SIZE]
    stride_sb,
    N,
    FOUND_SIZE: tl.constexpr,
):
    """One program says which bins of one row are in doubt.

    Stored are the bin of the k-th token (over all bins: there is none, or no k); how many tokens of that bin top-k
    keeps; and the first and the last bin of which top-p may keep some and drop others (over all bins: no p).
    """
    n = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    row_found_ptr = found_ptr + (b * N + n) * FOUND_SIZE
    top_k = tl.load(settings_ptr + b * stride_sb + 1)
    top_p = tl.load(settings_ptr + b * stride_sb + 2)
    if (top_k <= 0.0) & (top_p >= 1.0):
        return
    offs = tl.arange(0, _NUM_BINS)
    count = tl.load(row_found_ptr + offs)
    k = top_k.to(tl.int32)
    k_bin = tl.min(tl.where((tl.cumsum(count, 0) >= k) & (k > 0), offs, _NUM_BINS), 0)
    over_k = tl.where(offs < k_bin, count, 0)
    k_left = k - tl.sum(over_k, 0)

    heaviest = tl.exp(-_edge(offs)) * (1.0 + _SLACK) + _MASS_UNIT
    lightest = tl.maximum(tl.exp(-_edge(offs + 1)) * (1.0 - _SLACK) - _MASS_UNIT, 0.0)
    at_k = offs == k_bin
    most = tl.where(at_k, count, over_k).to(tl.float32) * heaviest
    least = tl.where(at_k, k_left, over_k).to(tl.float32) * lightest
    # a token is kept if those over it weigh less than p of all, and so if it and those below weigh more than 1 - p;
    # the bounds of the smaller of the two parts are the closer ones
    all_least, all_most = tl.sum(least, 0), tl.sum(most, 0)
    first = tl.sum((tl.cumsum(most, 0) < top_p * all_least).to(tl.int32), 0)
    below = tl.sum((tl.cumsum(least, 0, reverse=True) > (1.0 - top_p) * all_most).to(tl.int32), 0)
    first = tl.maximum(first, below - 1)
    last = tl.minimum(tl.sum((tl.cumsum(least, 0) < top_p * all_most).to(tl.int32), 0), _NUM_BINS - 1)
    below = tl.sum((tl.cumsum(most, 0, reverse=True) > (1.0 - top_p) * all_least).to(tl.int32), 0)
    last = tl.maximum(tl.minimum(last, below - 1), first)
    tl.store(row_found_ptr + _CHOSEN, k_bin)
    tl.store(row_found_ptr + _CHOSEN + 1, k_left)
    tl.store(row_found_ptr + _CHOSEN + 2, tl.where(top_p < 1.0, first, _NUM_BINS))
    tl.store(row_found_ptr + _CHOSEN + 3, tl.where(top_p < 1.0, last, _NUM_BINS))


@triton.jit(do_not_specialize=["stride_sb", "N"])
def _cut_kernel(
    processed_ptr,  # [B, N, V], in place
    settings_ptr,  # [B or 1, 5]
    largest_ptr,  # [B, N, T]
    found_ptr,  # [B, N, FOUND_SIZE]
    mass_ptr,  # [B, N, 2]
    listed_ptr,  # [B, N, CAPACITY]
    place_ptr,  # [B, N, CAPACITY]
    stride_sb,
    N,
    V,
    FOUND_SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program drops the tokens of one tile, but for those in doubt, which it lists."""
    t = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    row = b * N + n
    top_k = tl.load(settings_ptr + b * stride_sb + 1)
    top_p = tl.load(settings_ptr + b * stride_sb + 2)
    min_p = tl.load(settings_ptr + b * stride_sb + 3)
    has_bins = (top_k > 0.0) | (top_p < 1.0)
    largest = _row_largest(largest_ptr, row, NUM_TILES, BLOCK_T)
    if (has_bins | (min_p > 0.0)) & (largest > float("-inf")):
        row_ptr, row_found_ptr = processed_ptr + row * V, found_ptr + row * FOUND_SIZE
        offs_v = t * BLOCK_V + tl.arange(0, BLOCK_V)
        x = tl.load(row_ptr + offs_v, mask=offs_v < V, other=float("-inf"))
        bins = _bin_of(largest - x)
        k_bin, _, first, last = _chosen_bins(row_found_ptr, has_bins)
        is_listed = (x > float("-inf")) & _in_doubt(bins, k_bin, first, last)
        is_dropped = (bins > k_bin) | (bins > last) | (tl.exp(x - largest) < min_p)
        tl.store(row_ptr + offs_v, float("-inf"), mask=(offs_v < V) & is_dropped & (is_listed == 0))
        if has_bins:
            if top_p < 1.0:
                share = tl.where((bins < k_bin) & (is_listed == 0), tl.exp(x - largest), 0.0)
                share_over = tl.sum(tl.where(bins < first, share, 0.0), 0)
                share_between = tl.sum(tl.where(bins > last, share, 0.0), 0)
                # whole numbers from here on, as tiles arrive in any order
                tl.atomic_add(mass_ptr + row * 2, _whole_mass(share_over), sem="relaxed")
                tl.atomic_add(mass_ptr + row * 2 + 1, _whole_mass(share_between), sem="relaxed")
            count = tl.cumsum(is_listed.to(tl.int32), 0)
            place = count - 1 + tl.atomic_add(row_found_ptr + _LISTED, tl.max(count, 0), sem="relaxed")
            mask = is_listed & (place < CAPACITY)
            tl.store(listed_ptr + row * CAPACITY + place, x, mask=mask)
            tl.store(place_ptr + row * CAPACITY + place, offs_v, mask=mask)


@triton.jit(do_not_specialize=["stride_sb", "N"])
def _trim_kernel(
    processed_ptr,  # [B, N, V], in place
    settings_ptr,  # [B or 1, 5]
    largest_ptr,  # [B, N, T]
    found_ptr,  # [B, N, FOUND_SIZE]
    mass_ptr,  # [B, N, 2]
    listed_ptr,  # [B, N, CAPACITY]
    place_ptr,  # [B, N, CAPACITY]
    stride_sb,
    N,
    V,
    FOUND_SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """One program drops those of one row's tokens in doubt that are not kept.

    If they are too many for the list, it looks for them in the whole row, which takes as much longer.
    """
    n = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    row = b * N + n
    top_k = tl.load(settings_ptr + b * stride_sb + 1)
    top_p = tl.load(settings_ptr + b * stride_sb + 2)
    min_p = tl.load(settings_ptr + b * stride_sb + 3)
    largest = _row_largest(largest_ptr, row, NUM_TILES, BLOCK_T)
    if ((top_k > 0.0) | (top_p < 1.0)) & (largest > float("-inf")):
        chosen = _chosen_bins(found_ptr + row * FOUND_SIZE, True)
        masses = tl.load(mass_ptr + row * 2), tl.load(mass_ptr + row * 2 + 1)
        num = tl.load(found_ptr + row * FOUND_SIZE + _LISTED)
        is_list = num <= CAPACITY
        row_ptr, values_ptr = processed_ptr + row * V, listed_ptr + row * CAPACITY
        if num > CAPACITY:
            num, values_ptr = V, row_ptr
        kept_from = _least_kept(values_ptr, num, largest, chosen, masses, top_p, BLOCK_L)
        for start in range(0, num, BLOCK_L):
            offs = start + tl.arange(0, BLOCK_L)
            x, bins, key = _load_members(values_ptr, offs, num, largest)
            is_dropped = (key < kept_from) | (tl.exp(x - largest) < min_p)
            is_dropped = is_dropped & (bins >= 0) & _in_doubt(bins, chosen[0], chosen[2], chosen[3])
            token = tl.load(place_ptr + row * CAPACITY + offs, mask=(offs < num) & is_list, other=0)
            tl.store(row_ptr + tl.where(is_list, token, offs), float("-inf"), mask=is_dropped)


@dataclass(frozen=True, slots=True)
class FilterWork:
    """What the launches of a filter hand on. The first writes the largest logits and clears what is added to.

    Attributes:
        largest: [rows, T] float32 of every tile.
        found: [rows, FOUND_SIZE] int32 counts of the bins, and what follows from them.
        masses: [rows, 2] int64 of the tokens above those in doubt, and between these and the k-th's bin.
        listed: [rows, CAPACITY] float32 logits in doubt.
        places: [rows, CAPACITY] int32 their tokens.
    """

    largest: torch.Tensor
    found: torch.Tensor
    masses: torch.Tensor
    listed: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> "FilterWork":
        """For rows of `logits [B, N, V]`."""
        rows = logits.shape[0] * logits.shape[1]
        return cls(
            logits.new_empty(rows, triton.cdiv(logits.shape[2], TILE), dtype=torch.float32),
            logits.new_empty(rows, FOUND_SIZE, dtype=torch.int32),
            logits.new_empty(rows, 2, dtype=torch.int64),
            logits.new_empty(rows, _CAPACITY, dtype=torch.float32),
            logits.new_empty(rows, _CAPACITY, dtype=torch.int32),
        )


def filter_rows_(processed_: torch.Tensor, settings: torch.Tensor, work: FilterWork) -> None:
    """Drop in place what top-k, top-p and min-p do not keep.

    Args:
        processed_: [B, N, V] float32, contiguous.
        settings: [B or 1, 5] float32, as `WarpSettings` has them.
        work: with the largest logits of all tiles, and cleared.
    """
    batch, num_nodes, vocab_size = processed_.shape
    tiles = tiles_config(vocab_size)
    tensors = processed_, settings, work.largest, work.found, work.masses, work.listed, work.places
    sizes, rows = (batch_stride(settings), num_nodes, vocab_size, FOUND_SIZE), (num_nodes, batch)
    # a cut keeps more of a tile in registers: smaller tiles leave room for more programs
    block_v = min(tiles.blocks["BLOCK_V"], TILE // 2)
    cut = LaunchConfig({**tiles.blocks, "BLOCK_V": block_v}, num_warps=max(1, min(8, block_v // 256)))
    _count_kernel[(tiles.blocks["NUM_TILES"], *rows)](*tensors[:4], *sizes, **tiles.kwargs())
    _choose_kernel[rows](settings, work.found, *sizes[:2], FOUND_SIZE, num_warps=8)
    _cut_kernel[(triton.cdiv(vocab_size, block_v), *rows)](*tensors, *sizes, CAPACITY=_CAPACITY, **cut.kwargs())
    blocks = {"NUM_TILES": tiles.blocks["NUM_TILES"], "BLOCK_T": tiles.blocks["BLOCK_T"], "BLOCK_L": 2048}
    _trim_kernel[rows](*tensors, *sizes, CAPACITY=_CAPACITY, **blocks, num_warps=8)
