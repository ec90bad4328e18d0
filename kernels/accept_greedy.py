"""Greedy acceptance: how far a draft tree agrees with the target's own choice of tokens.

Equation:   path_0 = 0 (the root), emitted_d = target_tokens[path_d]
            path_{d+1} = the lowest node j with parent[j] = path_d and tokens[j] = emitted_d
            the walk ends at the first d where emitted_d is a stop token, d + 1 = budget, d = max_depth or there is
            no such j; num_accepted = d and next_root = emitted_d
Source:     the lossless greedy rule of Leviathan et al. (arXiv:2211.17192, temperature 0), on a tree as in SpecInfer
            (arXiv:2305.09781) algorithm 2, VerifyGreedy
Reference:  kernels/reference/accept_greedy.py (int-exact)

Shapes:     B requests, N nodes, node 0 the root, E stop tokens
            tokens         [B, N]              int32
            parent         [B or 1, N]         int32, parent[j] < j; -1 for the root and for padding
            target_tokens  [B, N]              int32, what the target would emit after each node
            budget         [B]                 int32, tokens the request may still emit; 0 marks a finished request
            stop_tokens    [E]                 int32
            path, emitted  [B, max_depth + 1]  int32, -1 padded
            num_accepted, next_root  [B]       int32
Cost:       reads about 12*B*N bytes, writes 8*B*(max_depth + 2) bytes; bound by latency: one launch, two dependent
            loads and max_depth reductions over the nodes
Padding:    a padded node has parent -1 and is nobody's child, whatever its token; a finished request keeps its root,
            tokens[b, 0], as next_root, with num_accepted -1
Numerics:   integers only, exact
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_tensor
from specdec.kernels.common.launch import Backend, LaunchConfig, batch_stride, on_device, resolve_backend
from specdec.kernels.common.primitives import load_parents, store_verdict, tree_blocks
from specdec.kernels.common.verdict import Verdict
from specdec.kernels.common.walk import check_walk, empty_verdict, verdict_fields
from specdec.kernels.reference.accept_greedy import accept_greedy as accept_greedy_reference

__all__ = ["accept_greedy"]


@triton.jit(do_not_specialize=["stride_tb", "stride_pb", "stride_gb", "N"])
def _accept_greedy_kernel(
    tokens_ptr,  # [B, N]
    parent_ptr,  # [B or 1, N]
    target_ptr,  # [B, N]
    budget_ptr,  # [B] or None
    stop_tokens_ptr,  # [NUM_STOPS] or None
    verdict_ptrs,  # the fields of a `Verdict`
    stride_tb,
    stride_pb,
    stride_gb,
    N,
    MAX_DEPTH: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program walks one tree; all tests of a node against its parent are made before the walk."""
    b = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    tokens_ptr += b * stride_tb
    parent = load_parents(parent_ptr + b * stride_pb, offs_n, mask_n)  # [BLOCK_N]
    token = tl.load(tokens_ptr + offs_n, mask=mask_n, other=-1)

    has_parent = parent >= 0
    # the target's choice at the parent
    wanted = tl.load(target_ptr + b * stride_gb + parent, mask=has_parent, other=-1)
    follows = has_parent & (token == wanted)

    # -1 ends the walk: no node that follows has parent -1, so it stays -1
    offs_d = tl.arange(0, BLOCK_D)
    node = 0
    path = tl.where(offs_d == 0, 0, -1)  # [BLOCK_D]
    for d in range(1, MAX_DEPTH + 1):
        child = tl.min(tl.where(follows & (parent == node), offs_n, BLOCK_N), 0)
        node = tl.where(child < BLOCK_N, child, -1)
        path = tl.where(offs_d == d, node, path)

    emitted = tl.load(target_ptr + b * stride_gb + path, mask=path >= 0, other=-1)
    store_verdict(
        path, emitted, b, tokens_ptr, budget_ptr, stop_tokens_ptr, verdict_ptrs, MAX_DEPTH, NUM_STOPS, BLOCK_D
    )


def _launch_config(num_nodes: int, max_depth: int) -> LaunchConfig:
    """The whole tree sits in the registers of one program; one warp needs no barrier in its reductions."""
    return LaunchConfig(tree_blocks(num_nodes, max_depth), num_warps=1 if num_nodes <= 256 else 4)


@library.op(fake=empty_verdict)
def accept_greedy(
    tokens: torch.Tensor,
    parent: torch.Tensor,
    target_tokens: torch.Tensor,
    *,
    max_depth: int,
    budget: torch.Tensor | None = None,
    stop_tokens: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> Verdict:
    """Accept the longest path from the root that the target itself would have produced.

    Every unfinished request emits the accepted tokens and one more, the target's choice after them; a stop token and
    the last token of the budget end the emission exactly there. Among siblings with the same token the lowest-numbered
    one is taken.

    Args:
        tokens: [B, N] int32, tokens of the tree's nodes, contiguous in N.
        parent: [B, N] or [1, N] int32, topological (parent < child); -1 for the root and for padding. Checked on the
            CPU only; on a GPU a node with another parent counts as padding.
        target_tokens: [B, N] int32, the target's choice after every node.
        max_depth: largest depth of any node (the root has depth 0); the walk goes no deeper.
        budget: [B] int32, how many tokens each request may still emit; 0 or less marks a finished one. None: no limit.
        stop_tokens: [E] int32, tokens that end the emission. None: none.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        The verdict, with B rows.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, no or more than 512 nodes, parents that are not topological (CPU only), a
            negative depth, tensors on several devices.
    """
    check_walk(tokens, parent, max_depth=max_depth, budget=budget, stop_tokens=stop_tokens)
    batch, num_nodes = tokens.shape
    check_tensor("target_tokens", target_tokens, shape=(batch, num_nodes), dtype=torch.int32, device=tokens.device)
    if resolve_backend(tokens, backend) == "reference":
        return accept_greedy_reference(
            tokens, parent, target_tokens, max_depth=max_depth, budget=budget, stop_tokens=stop_tokens
        )

    verdict = empty_verdict(tokens, max_depth)
    num_stops = 0 if stop_tokens is None else stop_tokens.shape[0]
    config = _launch_config(num_nodes, max_depth)
    tensors = tokens, parent, target_tokens, budget, stop_tokens, verdict_fields(verdict)
    strides = tokens.stride(0), batch_stride(parent), target_tokens.stride(0)
    with on_device(tokens):
        _accept_greedy_kernel[(batch,)](*tensors, *strides, num_nodes, max_depth, num_stops, **config.kwargs())
    return verdict
