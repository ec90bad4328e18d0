"""One LSTM layer along short sequences: what is left to do in turn once all inputs were multiplied at once.

Equation:   (i, f, g, o) = given[b, p, t] + W h_{t-1} + bias;  c_t = s(f) c_{t-1} + s(i) tanh(g);  h_t = s(o) tanh(c_t)
            (h_{-1}, c_{-1}) = state[b, source[p]], or zeros
            of the steps first[b] <= t < counts[b]; the others leave h and c as they are
            outputs[b, p, t] = h_t for t < counts[b], else 0;  last[b, p] = (h, c) after all steps
Source:     Hochreiter and Schmidhuber, 1997, with the forget gate of Gers et al., 2000; gates in PyTorch's order
Reference:  kernels/reference/lstm_recurrence.py

Shapes:     B rows, P sequences in each, T steps, C width, P0 states to begin from
            given    [B, P, T, 4 C]  fp16, bf16 or fp32  products of the inputs, with their bias
            weight   [4 C, C]        as given
            bias     [4 C]           as given, or None
            state    [B, P0, 2, C]   as given, hidden and cell state, or None for zeros
            source   [P]             int32 or int64, or None for 0 .. P - 1, with P0 = P
            first    [B]             int32 or int64, the first step that a row takes; None for 0
            counts   [B]             int32 or int64, one past its last step; None for T
            outputs  [B, P, T, C]    as given
            last     [B, P, 2, C]    as given
Cost:       one launch a step. A step that some row takes reads 4 C^2 weights, once for up to 128 sequences; one that
            no row takes reads none, and neither does the first from zeros
Edges:      a row of no steps keeps its state; outputs before the first step are the hidden state begun with
Numerics:   products, gates and both states of a step in fp32, which between steps are rounded to the dtype of given, as
            by PyTorch's cell on a GPU; fp32 inputs are multiplied in full precision, never TF32
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import FLOAT_DTYPES, check_tensor
from specdec.kernels.common.launch import Backend, LaunchConfig, needs_upcast, on_device, resolve_backend
from specdec.kernels.common.weight_first import weight_first_dot, weight_first_tiles
from specdec.kernels.reference.lstm_recurrence import lstm_recurrence as lstm_recurrence_reference

__all__ = ["lstm_recurrence"]

_INTEGERS = (torch.int32, torch.int64)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    """Hyperbolic tangent; near 0, where the difference below cancels, its series."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = size * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    found = tl.where(size < 0.25, near, far)
    return tl.where(x < 0.0, -found, found)


@triton.jit
def _gate(acc, given_ptrs, bias_ptr, cols, mask_u, mask):
    """One gate [BLOCK_U, BLOCK_M] before its nonlinearity: product, input and bias."""
    acc += tl.load(given_ptrs, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=mask_u, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit(do_not_specialize=["t", "num_rows", "P", "T"])
def _lstm_step_kernel(
    given_ptr,  # [B, P, T, 4 C]
    weight_ptr,  # [4 C, C]
    bias_ptr,  # [4 C] or None
    state_ptr,  # [B, P0, 2, C] or None
    source_ptr,  # [P] or None
    first_ptr,  # [B] or None
    counts_ptr,  # [B] or None
    outputs_ptr,  # [B, P, T, C]
    last_ptr,  # [B, P, 2, C]
    stride_gb,
    stride_gp,
    stride_gt,
    stride_wn,
    stride_sb,
    stride_sp,
    stride_sh,
    t,
    num_rows,
    P,
    T,
    C,
    FIRST: tl.constexpr,  # t = 0
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program takes BLOCK_U units of BLOCK_M sequences one step on: all four gates, so that no other is asked."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M] sequences of all rows
    units = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    mask_m, mask_u = rows < num_rows, units < C
    mask = mask_u[:, None] & mask_m[None, :]
    b, p = rows // P, rows % P
    count = T
    if counts_ptr is not None:
        count = tl.load(counts_ptr + b, mask=mask_m, other=0)
    is_there = mask_m & (t < count)  # [BLOCK_M]
    is_taken = is_there
    if first_ptr is not None:
        is_taken = is_there & (t >= tl.load(first_ptr + b, mask=mask_m, other=0))

    outputs = outputs_ptr + (rows * T + t) * C
    last = last_ptr + rows * (2 * C)
    before = outputs - C  # hidden state of the step before
    if FIRST:
        if state_ptr is not None:
            begin = p
            if source_ptr is not None:
                begin = tl.load(source_ptr + p, mask=mask_m, other=0).to(tl.int64)
            before = state_ptr + b * stride_sb + begin * stride_sp

    # the rows of the four gates of these units, gate by gate
    place = tl.arange(0, 4 * BLOCK_U)
    unit = tl.program_id(1) * BLOCK_U + place % BLOCK_U
    weight_rows = weight_ptr + ((place // BLOCK_U).to(tl.int64) * C + unit) * stride_wn
    acc = tl.zeros([4 * BLOCK_U, BLOCK_M], tl.float32)
    if not FIRST or state_ptr is not None:
        # of a step that nobody takes no weight is read
        end = tl.max(tl.where(is_taken, C, 0), 0)
        acc = weight_first_dot(before, weight_rows, is_taken, unit < C, 0, end, C, UPCAST, BLOCK_K)
    acc = tl.permute(tl.reshape(acc, [2, 2, BLOCK_U, BLOCK_M]), [2, 3, 0, 1])
    from_even, from_odd = tl.split(acc)
    entry, update = tl.split(from_even)
    forget, leave = tl.split(from_odd)

    given = given_ptr + b * stride_gb + p * stride_gp + t.to(tl.int64) * stride_gt
    taken = mask_u[:, None] & is_taken[None, :]
    given_ptrs = given[None, :] + units[:, None]
    entry = _gate(entry, given_ptrs, bias_ptr, units, mask_u, taken)
    forget = _gate(forget, given_ptrs + C, bias_ptr, C + units, mask_u, taken)
    update = _gate(update, given_ptrs + 2 * C, bias_ptr, 2 * C + units, mask_u, taken)
    leave = _gate(leave, given_ptrs + 3 * C, bias_ptr, 3 * C + units, mask_u, taken)

    last_ptrs = last[None, :] + units[:, None]
    old_hidden = tl.zeros([BLOCK_U, BLOCK_M], tl.float32)
    old_cell = old_hidden
    if not FIRST:
        old_hidden = tl.load(last_ptrs, mask=mask, other=0.0).to(tl.float32)
        old_cell = tl.load(last_ptrs + C, mask=mask, other=0.0).to(tl.float32)
    elif state_ptr is not None:
        start_ptrs = before[None, :] + units[:, None]
        old_hidden = tl.load(start_ptrs, mask=mask, other=0.0).to(tl.float32)
        old_cell = tl.load(start_ptrs + stride_sh, mask=mask, other=0.0).to(tl.float32)
    cell = _sigmoid(forget) * old_cell + _sigmoid(entry) * _tanh(update)
    hidden = _sigmoid(leave) * _tanh(cell)
    dtype: tl.constexpr = outputs_ptr.dtype.element_ty
    hidden = tl.where(taken, hidden, old_hidden).to(dtype)
    cell = tl.where(taken, cell, old_cell).to(dtype)
    tl.store(outputs[None, :] + units[:, None], tl.where(is_there[None, :], hidden, 0.0).to(dtype), mask=mask)
    changed = mask if FIRST else taken  # what a row begins with is handed on, whether it takes the step or not
    tl.store(last_ptrs, hidden, mask=changed)
    tl.store(last_ptrs + C, cell, mask=changed)


def _launch_config(num_rows: int, itemsize: int) -> LaunchConfig:
    """Tiles as those of `weight_first_tiles`, whose 64 rows of the weight are four gates of 16 units."""
    config = weight_first_tiles(num_rows, itemsize)
    blocks = dict(config.blocks)
    blocks["BLOCK_U"] = blocks.pop("BLOCK_N") // 4
    return LaunchConfig(blocks, num_warps=config.num_warps, num_stages=config.num_stages)


@library.op(
    fake=lambda given: (
        given.new_empty(*given.shape[:3], given.shape[3] // 4),
        given.new_empty(*given.shape[:2], 2, given.shape[3] // 4),
    )
)
def lstm_recurrence(
    given: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    source: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    *,
    backend: Backend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one LSTM layer along sequences whose inputs were multiplied already.

    Args:
        given: [B, P, T, 4 C], T at least 1: W_ih x + b_ih of every step, the gates in the order i, f, g, o; float32,
            float16 or bfloat16, contiguous in its last dimension.
        weight: [4 C, C] recurrent weights, dtype of `given`, contiguous in C.
        bias: [4 C], dtype of `given`, or None.
        state: [B, P0, 2, C] hidden and cell state that sequences begin with, dtype of `given`, contiguous in C; None
            for zeros.
        source: [P] int32 or int64, which of the states each sequence begins with, 0 to P0 - 1; None for its own, with
            P0 = P.
        first: [B] int32 or int64, first step that the sequences of a row take; None for 0.
        counts: [B] int32 or int64, one past the last step that they take; None for T.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        [B, P, T, C] hidden states: after each step that was taken, before these the one begun with, behind them 0; and
        [B, P, 2, C] hidden and cell state at the end. Dtype of `given`, contiguous.

    Raises:
        TypeError: a wrong dtype.
        ValueError: shapes that do not fit, no step, tensors on several devices.
    """
    _check_arguments(given, weight, bias, state, source)
    for name, steps in (("first", first), ("counts", counts)):
        if steps is not None:
            check_tensor(name, steps, shape=given.shape[:1], dtype=_INTEGERS, device=given.device)
    if resolve_backend(given, backend) == "reference":
        return lstm_recurrence_reference(given, weight, bias, state, source, first, counts, upcast=False)
    batch, num_sequences, length, num_gates = given.shape
    num_rows, width = batch * num_sequences, num_gates // 4
    outputs = given.new_empty(batch, num_sequences, length, width)
    last = given.new_empty(batch, num_sequences, 2, width)
    if outputs.numel() == 0:
        return outputs, last
    config = _launch_config(num_rows, given.element_size())
    grid = triton.cdiv(num_rows, config.blocks["BLOCK_M"]), triton.cdiv(width, config.blocks["BLOCK_U"])
    tensors = given, weight, bias, state, source, first, counts, outputs, last
    strides = *given.stride()[:3], weight.stride(0), *((0, 0, 0) if state is None else state.stride()[:3])
    with on_device(given):
        for t in range(length):
            sizes = t, num_rows, num_sequences, length, width
            _lstm_step_kernel[grid](
                *tensors, *strides, *sizes, FIRST=t == 0, UPCAST=needs_upcast(given), **config.kwargs()
            )
    return outputs, last


def _check_arguments(
    given: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    source: torch.Tensor | None,
) -> None:
    """Check the floating-point arguments of `lstm_recurrence`, and where its sequences begin."""
    check_tensor("weight", weight, shape=(None, None), dtype=FLOAT_DTYPES)
    width = weight.shape[1]
    check_tensor("weight", weight, shape=(4 * width, width))
    check_tensor("given", given, shape=(None, None, None, 4 * width), dtype=weight.dtype, device=weight.device)
    batch, num_sequences, length = given.shape[:3]
    if length == 0:
        raise ValueError("given: expected at least one step, got none")
    if bias is not None:
        check_tensor("bias", bias, shape=(4 * width,), dtype=given.dtype, device=given.device)
    if state is not None:
        num_states = num_sequences if source is None else None
        shape = batch, num_states, 2, width
        check_tensor("state", state, shape=shape, dtype=given.dtype, device=given.device)
    if source is not None:
        check_tensor("source", source, shape=(num_sequences,), dtype=_INTEGERS, device=given.device)
        if state is None:
            raise ValueError("source: expected None without state, got a tensor")
