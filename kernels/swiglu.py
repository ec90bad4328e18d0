"""The gate of a LLaMA MLP, on the output of its fused gate and up projection.

Equation:   swiglu(x)_f = silu(x_f) * x_{F + f},  silu(g) = g / (1 + exp(-g))
Source:     Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202) equation 5, with beta = 1
Reference:  kernels/reference/swiglu.py

Shapes:     F width of the MLP; all leading dimensions are rows
            gate_up  [..., 2 * F]  fp16, bf16 or fp32, gate then up
            out      [..., F]      as gate_up
Cost:       reads 2 * F and writes F elements per row; bandwidth-bound, and bound by the launch for the rows of one
            decoding step
Edges:      gate -inf gives NaN, as in eager PyTorch; a large negative finite gate gives zero
Numerics:   all arithmetic in fp32. Rounded as in transformers' LLaMA: the SiLU to the dtype of gate_up, then its
            product with the second half
"""

import torch
import triton
import triton.language as tl

from specdec.kernels.common import library
from specdec.kernels.common.check import FLOAT_DTYPES, check_tensor
from specdec.kernels.common.launch import (
    Backend,
    LaunchConfig,
    early_start,
    on_device,
    resolve_backend,
    wait_for_launch,
)
from specdec.kernels.reference.swiglu import swiglu as swiglu_reference

__all__ = ["swiglu"]


@triton.jit
def _swiglu_kernel(
    gate_up_ptr,  # [M, 2 * F]
    out_ptr,  # [M, F]
    stride_gm,
    F,
    EARLY: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """One program does BLOCK_F elements of one row."""
    wait_for_launch(EARLY)
    m = tl.program_id(0).to(tl.int64)
    offs_f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_f = offs_f < F
    gate_ptr = gate_up_ptr + m * stride_gm
    gate = tl.load(gate_ptr + offs_f, mask=mask_f, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + F + offs_f, mask=mask_f, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + m * F + offs_f, (silu * up).to(out_ptr.dtype.element_ty), mask=mask_f)


def _launch_config(width: int) -> LaunchConfig:
    """Eight elements per lane: 16 bytes at a time of 16-bit elements; small blocks, so that few rows fill the GPU."""
    block_f = min(triton.next_power_of_2(width), 1024)
    return LaunchConfig(blocks={"BLOCK_F": block_f}, num_warps=max(1, block_f // 256))


@library.op(fake=lambda gate_up: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2))
def swiglu(gate_up: torch.Tensor, *, backend: Backend | None = None) -> torch.Tensor:
    """SiLU of the first half of every row, times the second half.

    Args:
        gate_up: [..., 2 * F] float32, float16 or bfloat16, contiguous in the last dimension; gate then up.
        backend: "triton" or "reference"; None decides by device.

    Returns:
        [..., F], dtype of `gate_up`, contiguous.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a last dimension that is not even or empty.
    """
    check_tensor("gate_up", gate_up, dtype=FLOAT_DTYPES)
    if gate_up.ndim == 0 or gate_up.shape[-1] == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: expected an even last dimension, got shape {list(gate_up.shape)}")
    if resolve_backend(gate_up, backend) == "reference":
        return swiglu_reference(gate_up, upcast=False)

    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    rows = gate_up.reshape(-1, 2 * width)
    config = _launch_config(width)
    with on_device(gate_up):
        _swiglu_kernel[(rows.shape[0], triton.cdiv(width, config.blocks["BLOCK_F"]))](
            rows, out, stride_gm=rows.stride(0), F=width, **early_start(), **config.kwargs()
        )
    return out
