"""Code shared by kernels: parents of a tree, softmax statistics by tiles, a draw from them, the end of a verdict.

A row of V logits is cut into tiles of BLOCK_V tokens, the same for every batch and tree, so that no result depends on
who else is in the batch. Per tile the largest logit m_t and s_t = sum exp(x - m_t) are kept; with M = max_t m_t the
mass of a tile is s_t exp(m_t - M), and a draw needs to look into one tile only. NaN logits count as -inf here and in
every kernel that uses this; a row without a finite logit yields token 0.
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common.launch import LaunchConfig, on_device

__all__ = [
    "INFINITE_COST",
    "TILE",
    "cost_bits",
    "draw_residual",
    "key_token",
    "load_logits",
    "load_parents",
    "mass_outside",
    "order_key",
    "pick",
]
__all__ += ["pick_tile", "residual", "row_law", "softmax_tiles", "store_verdict", "tile_masses", "tiles_config"]
__all__ += ["token_key", "tree_blocks"]

TILE = 4096
"""Tokens of one vocabulary tile: 32 for each thread of four warps."""

INFINITE_COST = tl.constexpr(0x7F800000)
"""`cost_bits` of -inf; a NaN has more."""


@triton.jit
def load_parents(parent_ptr, offs, mask):
    """Parents of nodes; -1 outside the mask and for a parent that is no earlier node.

    A walk along such parents stays within the tree and ends, whatever the device holds, where no launcher can look.
    """
    parent = tl.load(parent_ptr + offs, mask=mask, other=-1)
    return tl.where((parent >= 0) & (parent < offs), parent, -1)


@triton.jit
def store_ancestors(
    parent_ptr,  # [B, N]
    ancestors_ptr,  # [B, N, NUM_WORDS]
    b,
    N: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Store the ancestor words of a request's nodes, whose parents this program has just stored."""
    tl.debug_barrier()  # what one thread stored another reads
    offs_n = tl.arange(0, BLOCK_N)
    node = tl.where(offs_n < N, offs_n, -1)
    offs_w = tl.arange(0, BLOCK_W)
    words = tl.zeros([BLOCK_N, BLOCK_W], tl.int32)
    for _ in range(MAX_DEPTH + 1):  # climb to the root, one bit for every node on the way
        bit = tl.where(node >= 0, 1 << (node & 31), 0)
        words |= tl.where((node >> 5)[:, None] == offs_w[None, :], bit[:, None], 0)
        node = tl.load(parent_ptr + b * N + node, mask=node >= 0, other=-1)
    mask = (offs_n < N)[:, None] & (offs_w < NUM_WORDS)[None, :]
    tl.store(ancestors_ptr + (b * N + offs_n)[:, None] * NUM_WORDS + offs_w[None, :], words, mask=mask)


@triton.jit
def cost_bits(logps):
    """Bits of max(-logps, 0): they order like the numbers, so a higher probability has fewer; NaN has the most."""
    return tl.where(logps > 0, 0.0, logps).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def load_logits(row_ptr, offs, mask):
    """Logits in fp32; -inf outside the mask and for NaN."""
    x = tl.load(row_ptr + offs, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def order_key(x):
    """int32 in the order of the floats; 0.0 and -0.0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def token_key(x, token):
    """int64 that sorts by value, and at equal values by token from the highest to the lowest."""
    return (order_key(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def key_token(key):
    """The token of a `token_key`."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def pick(mass, goal, BLOCK: tl.constexpr):
    """First index whose running sum of `mass` exceeds `goal`; an index without mass is never picked.

    A goal that rounding has put at or beyond the total picks the last index with mass; no mass at all picks 0.
    """
    offs = tl.arange(0, BLOCK)
    reached = (tl.cumsum(mass, 0) > goal) & (mass > 0.0)
    first = tl.min(tl.where(reached, offs, BLOCK), 0)
    last = tl.max(tl.where(mass > 0.0, offs, 0), 0)
    return tl.where(first < BLOCK, first, last)


@triton.jit
def pick_tile(masses, uniform, BLOCK_T: tl.constexpr):
    """The tile in which a draw falls, and the mass to pass within it."""
    goal = uniform * tl.sum(masses, 0)
    tile = pick(masses, goal, BLOCK_T)
    return tile, goal - tl.sum(tl.where(tl.arange(0, BLOCK_T) < tile, masses, 0.0), 0)


@triton.jit
def tile_masses(tiles, row, NUM_TILES: tl.constexpr, BLOCK_T: tl.constexpr):
    """Largest logit M of a row (0 if it has none) and the masses of its tiles, relative to exp(M).

    `tiles` are the pointers to what `softmax_tiles` returns, `row` is the number of the row, int64.
    """
    offs_t = tl.arange(0, BLOCK_T)
    mask_t = offs_t < NUM_TILES
    m = tl.load(tiles[0] + row * NUM_TILES + offs_t, mask=mask_t, other=float("-inf"))  # [BLOCK_T]
    s = tl.load(tiles[1] + row * NUM_TILES + offs_t, mask=mask_t, other=0.0)
    row_max = tl.max(m, 0)
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    return row_max, s * tl.exp(m - row_max)


@triton.jit
def row_law(tiles, row, NUM_TILES: tl.constexpr, BLOCK_T: tl.constexpr):
    """Log-sum-exp of a row and the probabilities of its tiles."""
    row_max, masses = tile_masses(tiles, row, NUM_TILES, BLOCK_T)
    total = tl.sum(masses, 0)
    total = tl.where(total > 0.0, total, 1.0)
    return row_max + tl.log(total), masses / total


@triton.jit
def residual(laws, scale, offs_v, mask_v):
    """Mass of p - scale q above 0, and q; `laws` are the rows of their logits and their log-sum-exps."""
    target_row_ptr, draft_row_ptr, target_lse, draft_lse = laws
    p = tl.exp(load_logits(target_row_ptr, offs_v, mask_v) - target_lse)
    q = tl.exp(load_logits(draft_row_ptr, offs_v, mask_v) - draft_lse)
    return tl.maximum(p - scale * q, 0.0), q


@triton.jit
def draw_residual(masses, uniform, laws, scale, V, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr):
    """Draw a token from the law max(0, p - scale q), whose tiles have these masses."""
    tile, goal = pick_tile(masses, uniform, BLOCK_T)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    left, _ = residual(laws, scale, offs_v, offs_v < V)
    return tile * BLOCK_V + pick(left, goal, BLOCK_V)


@triton.jit
def mass_outside(q, offs_v, tokens_row_ptr, is_child, BLOCK_N: tl.constexpr):
    """Mass of one tile of q [BLOCK_V] outside the tokens of a node's children, which `is_child` [BLOCK_N] marks."""
    offs_n = tl.arange(0, BLOCK_N)
    child = tl.min(tl.where(is_child, offs_n, BLOCK_N), 0)
    while child < BLOCK_N:
        q = tl.where(offs_v == tl.load(tokens_row_ptr + child), 0.0, q)
        child = tl.min(tl.where(is_child & (offs_n > child), offs_n, BLOCK_N), 0)
    return tl.sum(q, 0)


@triton.jit
def store_verdict(
    path,  # [BLOCK_D] nodes from the root down, -1 padded
    emitted,  # [BLOCK_D] token after each node of the path
    b,
    tokens_row_ptr,  # [N]
    budget_ptr,  # [B] or None
    stop_tokens_ptr,  # [NUM_STOPS] or None
    verdict_ptrs,  # the fields of a `Verdict`
    MAX_DEPTH: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Cut a row's emission behind the first stop token and at the budget, and store the row of the verdict."""
    offs_d = tl.arange(0, BLOCK_D)
    num_emitted = tl.sum((path >= 0).to(tl.int32), 0)
    if budget_ptr is not None:
        num_emitted = tl.minimum(num_emitted, tl.maximum(tl.load(budget_ptr + b), 0))
    if stop_tokens_ptr is not None:
        is_stop = offs_d < 0
        for e in range(0, NUM_STOPS):
            is_stop = is_stop | (emitted == tl.load(stop_tokens_ptr + e))
        num_emitted = tl.minimum(num_emitted, tl.min(tl.where(is_stop, offs_d, BLOCK_D), 0) + 1)

    path_ptr, num_accepted_ptr, next_root_ptr, emitted_ptr = verdict_ptrs
    mask_d = offs_d <= MAX_DEPTH
    kept = offs_d < num_emitted
    tl.store(path_ptr + b * (MAX_DEPTH + 1) + offs_d, tl.where(kept, path, -1), mask=mask_d)
    tl.store(emitted_ptr + b * (MAX_DEPTH + 1) + offs_d, tl.where(kept, emitted, -1), mask=mask_d)
    tl.store(num_accepted_ptr + b, num_emitted - 1)
    last = tl.sum(tl.where(offs_d == num_emitted - 1, emitted, 0), 0)
    tl.store(next_root_ptr + b, tl.where(num_emitted > 0, last, tl.load(tokens_row_ptr)))


@triton.jit(do_not_specialize=["N"])
def _softmax_tiles_kernel(
    logits_ptr,  # [B, N, V]
    budget_ptr,  # [B] or None
    max_ptr,  # [B, N, T]
    sum_ptr,  # [B, N, T]
    moment_ptr,  # [B, N, T] or None
    stride_lb,
    stride_ln,
    N,
    V,
    BLOCK_V: tl.constexpr,
):
    """One program reads one tile of one row."""
    t = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    offs_v = t * BLOCK_V + tl.arange(0, BLOCK_V)
    end = V
    if budget_ptr is not None:
        end = tl.where(tl.load(budget_ptr + b) > 0, V, 0)
    x = load_logits(logits_ptr + b * stride_lb + n * stride_ln, offs_v, offs_v < end)  # [BLOCK_V]
    m = tl.max(x, 0)
    shifted = x - tl.where(m == float("-inf"), 0.0, m)
    e = tl.exp(shifted)
    out = (b * N + n) * tl.num_programs(0) + t
    tl.store(max_ptr + out, m)
    tl.store(sum_ptr + out, tl.sum(e, 0))
    if moment_ptr is not None:
        # 0 * -inf is NaN, its limit is 0
        tl.store(moment_ptr + out, tl.sum(tl.where(e > 0.0, shifted, 0.0) * e, 0))


def tree_blocks(num_nodes: int, max_depth: int) -> dict[str, int]:
    """Blocks that hold all nodes and a whole path of a tree."""
    return {"BLOCK_N": triton.next_power_of_2(num_nodes), "BLOCK_D": triton.next_power_of_2(max_depth + 1)}


def tiles_config(vocab_size: int) -> LaunchConfig:
    """Tiles of a row: a function of the vocabulary alone, so that the rounding of a sum is too."""
    num_tiles = triton.cdiv(vocab_size, TILE)
    block_v = min(TILE, triton.next_power_of_2(vocab_size))
    blocks = {"NUM_TILES": num_tiles, "BLOCK_T": triton.next_power_of_2(num_tiles), "BLOCK_V": block_v}
    return LaunchConfig(blocks=blocks, num_warps=max(1, min(4, block_v // 256)))


def softmax_tiles(
    logits: torch.Tensor,
    config: LaunchConfig,
    *,
    budget: torch.Tensor | None = None,
    moment: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Statistics of every tile of every row; the rows of a finished request are not read and have no mass.

    Args:
        logits: [B, N, V] float32, float16 or bfloat16, contiguous in V.
        config: `tiles_config(V)`.
        budget: [B] int32; 0 or less marks a finished request. None: none is finished.
        moment: also sum (x - m_t) exp(x - m_t), for the entropy.

    Returns:
        m_t, s_t and the moment (or None), each [B, N, T] fp32.
    """
    batch, num_nodes, vocab_size = logits.shape
    num_tiles = config.blocks["NUM_TILES"]
    shape = (3 if moment else 2, batch, num_nodes, num_tiles)
    tiles = torch.empty(shape, dtype=torch.float32, device=logits.device)
    statistics = tiles[0], tiles[1], tiles[2] if moment else None
    tensors, sizes = (logits, budget, *statistics), (*logits.stride()[:2], num_nodes, vocab_size)
    with on_device(logits):
        _softmax_tiles_kernel[(num_tiles, num_nodes, batch)](
            *tensors, *sizes, BLOCK_V=config.blocks["BLOCK_V"], num_warps=config.num_warps
        )
    return statistics
