"""Naive acceptance: the target draws its own token at every node, and the walk follows it while the tree has it.

Equation:   y_n ~ softmax(logits[n]):  y_n = the first v with sum_{w <= v} p_n(w) > uniform[n], at every node n
            then the walk of accept_greedy with target_tokens = y
Source:     multi-candidate naive sampling (MCNS) of "Multi-Candidate Speculative Decoding" (arXiv:2401.06706)
Reference:  kernels/reference/accept_naive.py

Shapes:     B requests, N nodes, node 0 the root, V vocabulary, E stop tokens, T = ceil(V / 4096) tiles
            tokens         [B, N]              int32
            parent         [B or 1, N]         int32, parent[j] < j; -1 for the root and for padding
            logits         [B, N, V]           fp32, fp16 or bf16, what the target samples from: already processed
            uniform        [B, N]              fp32 in [0, 1), one per node
            budget         [B]                 int32, tokens the request may still emit; 0 marks a finished request
            stop_tokens    [E]                 int32
            path, emitted  [B, max_depth + 1]  int32, -1 padded
            num_accepted, next_root  [B]       int32
Cost:       reads the logits once, B*N*V elements; the rest is small. Bandwidth-bound; three launches
Padding:    as in accept_greedy; a finished request reads no logits
Numerics:   sums in fp32, so a draw can differ from the exact one where uniform lies within about 1e-6 of a step of the
            distribution function. A token of probability 0 is never drawn. NaN logits count as -inf
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.kernels.accept_greedy import accept_greedy
from specdec.kernels.common import library
from specdec.kernels.common.check import check_tensor
from specdec.kernels.common.launch import Backend, on_device, resolve_backend
from specdec.kernels.common.primitives import load_logits, pick, pick_tile, softmax_tiles, tile_masses, tiles_config
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.walk import check_logits, check_walk, empty_verdict
from specdec.kernels.reference.accept_naive import accept_naive as accept_naive_reference

__all__ = ["accept_naive"]


@triton.jit(do_not_specialize=["stride_ub", "N"])
def _draw_tokens_kernel(
    logits_ptr,  # [B, N, V]
    uniform_ptr,  # [B, N]
    tiles,  # maxima and sums, [B, N, NUM_TILES] each
    drawn_ptr,  # [B, N]
    stride_lb,
    stride_ln,
    stride_ub,
    N,
    V,
    NUM_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program draws one node's token: first the tile, then the token in it."""
    n = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    row = b * N + n
    row_max, masses = tile_masses(tiles, row, NUM_TILES, BLOCK_T)
    tile, goal = pick_tile(masses, tl.load(uniform_ptr + b * stride_ub + n), BLOCK_T)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    end = tl.where(tl.sum(masses, 0) > 0.0, V, 0)  # a finished request has no mass and is not read
    x = load_logits(logits_ptr + b * stride_lb + n * stride_ln, offs_v, offs_v < end)
    tl.store(drawn_ptr + row, tile * BLOCK_V + pick(tl.exp(x - row_max), goal, BLOCK_V))


@library.op(fake=empty_verdict)
def accept_naive(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    logits: torch.Tensor,
    uniform: torch.Tensor,
    *,
    max_depth: int,
    budget: torch.Tensor | None = None,
    stop_tokens: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> Verdict:
    """Accept what the target itself would have sampled.

    The emitted tokens have exactly the target's law, whatever the tree proposes and however it was made: every one of
    them is a draw from the target's own distribution at its place.

    Args:
        tokens: [B, N] int32, tokens of the tree's nodes, contiguous in N.
        parent: [B, N] or [1, N] int32, topological, as in `accept_greedy`.
        logits: [B, N, V] float32, float16 or bfloat16, contiguous in V; the target samples from their softmax.
        uniform: [B, N] float32 in [0, 1), contiguous in N; independent along every path of the tree.
        max_depth: largest depth of any node (the root has depth 0); the walk goes no deeper.
        budget: [B] int32, how many tokens each request may still emit; 0 or less marks a finished one. None: no limit.
        stop_tokens: [E] int32, tokens that end the emission. None: none.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        The verdict, with B rows.

    Raises:
        TypeError: a wrong dtype.
        ValueError: as in `accept_greedy`, and an empty vocabulary.
    """
    limits: dict[str, Any] = {"max_depth": max_depth, "budget": budget, "stop_tokens": stop_tokens}
    check_walk(tokens, parent, **limits)
    (batch, num_nodes), device = tokens.shape, tokens.device
    check_logits("logits", logits, (batch, num_nodes, None), device)
    check_tensor("uniform", uniform, shape=(batch, num_nodes), dtype=torch.float32, device=device)
    if resolve_backend(tokens, backend) == "reference":
        return accept_naive_reference(tokens, parent, logits, uniform, **limits, upcast=False)

    config = tiles_config(logits.shape[-1])
    tiles = softmax_tiles(logits, config, budget=budget)[:2]
    drawn = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    strides = *logits.stride()[:2], uniform.stride(0)
    with on_device(tokens):
        _draw_tokens_kernel[(num_nodes, batch)](
            logits, uniform, tiles, drawn, *strides, num_nodes, logits.shape[-1], **config.kwargs()
        )
    return accept_greedy(tokens, parent, drawn, **limits, backend="triton")
