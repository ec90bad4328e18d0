"""The end of a step: emitted tokens appended, rows ended, and everything the loop counts, in one launch.

Equation:   with n = num_accepted[b] + 1, o = num_output[b] and s = step, everything read before anything is stored:
            output[b, o + j] = emitted[b, j]  for j < n;   root[b] = emitted[b, n - 1]  if n > 0
            num_output[b] += n;   lengths[b] += n
            budget[b] = 0  if root[b] is a stop token,  else budget[b] - n
            first_nan = s  if it is negative and some row with budget has a NaN;   nan_rows[b] |= this row is one
            steps[s, 0, b] = n;  steps[s, 1, b] = deepest[b];   step = s + is_running;   is_running = any(budget)
Source:     none; it is what the decoding loop keeps from step to step
Reference:  kernels/reference/emit_step.py (int-exact)

Shapes:     B requests, P nodes of the longest path, M places that logits were computed at, E stop tokens, S tokens of
            the longest text, T steps
            num_accepted  [B]        int32, accepted draft tokens; -1 for a finished request, which emits nothing
            emitted       [B, P]     int32, of which the first num_accepted + 1 are real
            deepest       [B or 1]   int32, depth of the deepest node that was proposed
            has_nan       [B, M]     bool, whether there was a NaN among the logits of a place
            stop_tokens   [E]        int32
            output_       [B, S]     int32
            num_output_   [B]        int32, tokens that were emitted before
            root_         [B]        int32, last emitted token
            budget_       [B]        int32, tokens that may still be emitted; 0 for a finished request
            lengths_      [B]        int32, tokens in the cache
            progress_     [2]        int32: is_running, first_nan (-1: none)
            step_         []         int64, the number of the step; it stands still when all requests have finished
            steps_        [T, 2, B]  int32
            nan_rows_     [B]        int32, 1 from the first NaN of a running request on
Cost:       reads and writes some 12 * B * (P + 4) + B * M bytes; bound by latency: one launch, one program
Edges:      a finished request changes nothing but its place in steps_; after the last place of steps_ nothing is noted
Numerics:   integers only, exact
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import check_tensor
from specdec.kernels.common.launch import Backend, LaunchConfig, batch_stride, on_device, resolve_backend
from specdec.kernels.reference.emit_step import emit_step as emit_step_reference

__all__ = ["emit_step"]


@triton.jit
def _emitted_tokens(
    emitted_ptr,  # [B, P]
    output_ptr,  # [B, S]
    root,  # [BLOCK_B]
    count,  # [BLOCK_B]
    num_output,  # [BLOCK_B]
    b,
    stride_eb,
    stride_ob,
    P,
    BLOCK_P: tl.constexpr,
):
    """Append the tokens of BLOCK_B requests; gives the last token of each, the root where nothing was emitted."""
    for begin in range(0, P, BLOCK_P):
        j = (begin + tl.arange(0, BLOCK_P))[None, :]
        is_real = (j < count[:, None]) & (j < P)
        token = tl.load(emitted_ptr + b[:, None] * stride_eb + j, mask=is_real, other=0)  # [BLOCK_B, BLOCK_P]
        tl.store(output_ptr + b[:, None] * stride_ob + num_output[:, None] + j, token, mask=is_real)
        is_last = is_real & (j == count[:, None] - 1)
        root = tl.where(tl.max(is_last.to(tl.int32), 1) > 0, tl.sum(tl.where(is_last, token, 0), 1), root)
    return root


@triton.jit
def _any_nan(has_nan_ptr, b, mask_b, stride_nb, M, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr):
    """Whether a place of each of BLOCK_B requests has a NaN, as 0 or 1."""
    found = tl.zeros([BLOCK_B], tl.int32)
    for begin in range(0, M, BLOCK_M):
        m = (begin + tl.arange(0, BLOCK_M))[None, :]
        is_nan = tl.load(has_nan_ptr + b[:, None] * stride_nb + m, mask=mask_b[:, None] & (m < M), other=0)
        found = tl.maximum(found, tl.max(is_nan.to(tl.int32), 1))
    return found


@triton.jit(do_not_specialize=["stride_eb", "stride_db", "stride_nb", "stride_ob", "stride_st", "B", "P", "M", "T"])
def _emit_step_kernel(
    num_accepted_ptr,  # [B]
    emitted_ptr,  # [B, P]
    deepest_ptr,  # [B or 1]
    has_nan_ptr,  # [B, M]
    stop_tokens_ptr,  # [NUM_STOPS] or None
    output_ptr,  # [B, S]
    num_output_ptr,  # [B]
    root_ptr,  # [B]
    budget_ptr,  # [B]
    lengths_ptr,  # [B] or None
    progress_ptr,  # [2]
    step_ptr,  # []
    steps_ptr,  # [T, 2, B]
    nan_rows_ptr,  # [B] or None
    stride_eb,
    stride_db,
    stride_nb,
    stride_ob,
    stride_st,
    stride_sk,
    B,
    P,
    M,
    T,
    NUM_STOPS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program does all requests, BLOCK_B at a time, as whether any is running is one number."""
    was_running = tl.load(progress_ptr)
    first_nan = tl.load(progress_ptr + 1)
    step = tl.load(step_ptr)
    is_running, is_nan = 0, 0
    for begin in range(0, B, BLOCK_B):
        offs_b = begin + tl.arange(0, BLOCK_B)
        mask_b = offs_b < B
        b = offs_b.to(tl.int64)
        count = tl.load(num_accepted_ptr + b, mask=mask_b, other=-1) + 1  # [BLOCK_B]
        num_output = tl.load(num_output_ptr + b, mask=mask_b, other=0)
        root = tl.load(root_ptr + b, mask=mask_b, other=0)
        budget = tl.load(budget_ptr + b, mask=mask_b, other=0)
        nan = _any_nan(has_nan_ptr, b, mask_b, stride_nb, M, BLOCK_B, BLOCK_M)
        nan = tl.where(budget > 0, nan, 0)
        is_nan = tl.maximum(is_nan, tl.max(nan, 0))
        root = _emitted_tokens(emitted_ptr, output_ptr, root, count, num_output, b, stride_eb, stride_ob, P, BLOCK_P)
        budget -= count
        if stop_tokens_ptr is not None:
            for e in range(0, NUM_STOPS):
                budget = tl.where(root == tl.load(stop_tokens_ptr + e), 0, budget)
        is_running = tl.maximum(is_running, tl.max((budget != 0).to(tl.int32), 0))

        tl.debug_barrier()  # no thread stores before all have loaded
        tl.store(num_output_ptr + b, num_output + count, mask=mask_b)
        tl.store(root_ptr + b, root, mask=mask_b)
        tl.store(budget_ptr + b, budget, mask=mask_b)
        if lengths_ptr is not None:
            length = tl.load(lengths_ptr + b, mask=mask_b, other=0)
            tl.debug_barrier()
            tl.store(lengths_ptr + b, length + count, mask=mask_b)
        if nan_rows_ptr is not None:
            tl.store(nan_rows_ptr + b, tl.full(b.shape, 1, tl.int32), mask=mask_b & (nan > 0))
        noted_ptr = steps_ptr + step * stride_st + b
        tl.store(noted_ptr, count, mask=mask_b & (step < T))
        deepest = tl.load(deepest_ptr + b * stride_db, mask=mask_b, other=0)
        tl.store(noted_ptr + stride_sk, deepest, mask=mask_b & (step < T))

    tl.debug_barrier()
    tl.store(progress_ptr, is_running)
    tl.store(progress_ptr + 1, tl.where((is_nan > 0) & (first_nan < 0), step.to(tl.int32), first_nan))
    tl.store(step_ptr, step + was_running)


def _launch_config(batch: int, path_length: int, num_places: int) -> LaunchConfig:
    """Tiles of at most 512 elements, as one warp does it all: its reductions need no barrier."""
    block_p = min(triton.next_power_of_2(max(path_length, 1)), 128)
    block_m = min(triton.next_power_of_2(max(num_places, 1)), 128)
    block_b = min(triton.next_power_of_2(batch), 512 // max(block_p, block_m))
    return LaunchConfig(blocks={"BLOCK_B": block_b, "BLOCK_P": block_p, "BLOCK_M": block_m}, num_warps=1)


@library.op(fake=lambda: None)
def emit_step(
    num_accepted: torch.Tensor,
    emitted: torch.Tensor,
    deepest: torch.Tensor,
    has_nan: torch.Tensor,
    stop_tokens: torch.Tensor | None,
    output_: torch.Tensor,
    num_output_: torch.Tensor,
    root_: torch.Tensor,
    budget_: torch.Tensor,
    lengths_: torch.Tensor | None,
    progress_: torch.Tensor,
    step_: torch.Tensor,
    steps_: torch.Tensor,
    nan_rows_: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> None:
    """Append what a step emitted, end the rows that have finished, and note what the step did; all in place.

    Args:
        num_accepted: [B] int32, accepted draft tokens; -1 for a finished row, which emits nothing.
        emitted: [B, P] int32, emitted tokens, of which the first `num_accepted + 1` are real.
        deepest: [B] or [1] int32, depth of the deepest node that was proposed.
        has_nan: [B, M] bool, whether there was a NaN among the logits of a place; those of a finished row do not count.
        stop_tokens: [E] int32, tokens that end a row with their emission; None: none.
        output_: [B, S] int32, emitted tokens. That they have room is not checked because the counts live on the device.
        num_output_: [B] int32, how many they are.
        root_: [B] int32, the last of them.
        budget_: [B] int32, tokens that each row may still emit; 0 for a finished row.
        lengths_: [B] int32, tokens in the cache, grown by what was emitted; None: not grown.
        progress_: [2] int32: 1 while any row may emit, else 0; the first step with a NaN, -1 if there is none.
        step_: [] int64, the number of this step, counted on if any row was running.
        steps_: [T, 2, B] int32: of each step, tokens emitted and `deepest` of every row.
        nan_rows_: [B] int32, set to 1 for rows with a NaN that had not finished; None: not noted.
        backend: "triton" or "reference"; None decides by device.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, tensors on several devices.
    """
    given = num_accepted, emitted, deepest, has_nan, stop_tokens
    changed = output_, num_output_, root_, budget_, lengths_, progress_, step_, steps_, nan_rows_
    tensors: tuple[Any, ...] = (*given, *changed)
    _check(*tensors)
    batch = num_accepted.shape[0]
    if batch == 0:
        return
    if resolve_backend(num_accepted, backend) == "reference":
        emit_step_reference(*tensors)
        return

    strides = emitted.stride(0), batch_stride(deepest), has_nan.stride(0), output_.stride(0)
    sizes = batch, emitted.shape[1], has_nan.shape[1], steps_.shape[0]
    num_stops = 0 if stop_tokens is None else stop_tokens.shape[0]
    config = _launch_config(batch, emitted.shape[1], has_nan.shape[1])
    with on_device(num_accepted):
        _emit_step_kernel[(1,)](*given, *changed, *strides, *steps_.stride()[:2], *sizes, num_stops, **config.kwargs())


def _check(
    num_accepted: torch.Tensor,
    emitted: torch.Tensor,
    deepest: torch.Tensor,
    has_nan: torch.Tensor,
    stop_tokens: torch.Tensor | None,
    output: torch.Tensor,
    num_output: torch.Tensor,
    root: torch.Tensor,
    budget: torch.Tensor,
    lengths: torch.Tensor | None,
    progress: torch.Tensor,
    step: torch.Tensor,
    steps: torch.Tensor,
    nan_rows: torch.Tensor | None,
) -> None:
    """Check the arguments of `emit_step`."""
    check_tensor("num_accepted", num_accepted, shape=(None,), dtype=torch.int32)
    batch, device = num_accepted.shape[0], num_accepted.device
    check_tensor("deepest", deepest, shape=(None,), dtype=torch.int32, device=device)
    if deepest.shape[0] not in (1, batch):
        raise ValueError(f"deepest: expected {batch} rows or 1, got shape {list(deepest.shape)}")
    check_tensor("has_nan", has_nan, shape=(batch, None), dtype=torch.bool, device=device)
    check_tensor("step_", step, shape=(), dtype=torch.int64, device=device)
    integers: dict[str, tuple[torch.Tensor | None, tuple[int | None, ...]]] = {
        "emitted": (emitted, (batch, None)),
        "stop_tokens": (stop_tokens, (None,)),
        "output_": (output, (batch, None)),
        "num_output_": (num_output, (batch,)),
        "root_": (root, (batch,)),
        "budget_": (budget, (batch,)),
        "lengths_": (lengths, (batch,)),
        "progress_": (progress, (2,)),
        "steps_": (steps, (None, 2, batch)),
        "nan_rows_": (nan_rows, (batch,)),
    }
    for name, (tensor, shape) in integers.items():
        if tensor is not None:
            check_tensor(name, tensor, shape=shape, dtype=torch.int32, device=device)
