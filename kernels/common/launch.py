"""How a launcher decides: which backend runs an op, and with which launch settings.

A launch setting is a pure function of shapes (never `triton.autotune`, which needs a device, fails in the interpreter
and breaks graph capture); sweeps live in `bench/`, their winners are committed here as data.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

__all__ = ["Backend", "LaunchConfig", "batch_stride", "early_start", "needs_upcast", "on_device", "resolve_backend"]
__all__ += ["wait_for_launch"]

Backend = Literal["triton", "reference"]


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Settings of one kernel launch.

    Attributes:
        blocks: tile sizes and other constexpr arguments, by parameter name.
        num_warps: warps of one program.
        num_stages: depth of the software pipeline of the main loop.
        fuses_products: the compiler may fuse a product with a sum, which saves the product's rounding. False where that
            rounding is part of the definition.
    """

    blocks: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    fuses_products: bool = True

    def kwargs(self) -> dict[str, Any]:
        """Keywords of the launch."""
        settings = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {**self.blocks, **settings, **({} if self.fuses_products else {"enable_fp_fusion": False})}


def resolve_backend(tensor: torch.Tensor, backend: Backend | None = None) -> Backend:
    """Decide what runs an op on `tensor`: the Triton kernel or the eager reference.

    The order is: the argument, the environment variable `SPECDEC_BACKEND`, then the device (CUDA tensors run Triton,
    CPU tensors the reference). Triton on CPU tensors works in its interpreter only (`TRITON_INTERPRET=1`); nothing
    falls back silently.

    Raises:
        ValueError: an unknown backend.
        RuntimeError: Triton was asked for on CPU tensors outside the interpreter.
    """
    chosen = backend or os.environ.get("SPECDEC_BACKEND") or ("reference" if tensor.device.type == "cpu" else "triton")
    if chosen not in get_args(Backend):
        raise ValueError(f"backend: expected one of {', '.join(get_args(Backend))}, got {chosen!r}")
    if chosen == "triton" and tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("backend: 'triton' on CPU tensors needs TRITON_INTERPRET=1 set before specdec is imported")
    return chosen  # type: ignore[return-value]  # membership was checked above


def early_start() -> dict[str, bool]:
    """Keywords of the launch of a kernel that may start before the one in front of it has ended, and then waits for it.

    Off unless the environment variable `SPECDEC_PDL` is 1: whether it gains anything has not been measured. It takes
    compute capability 9.0 (programmatic dependent launch); older GPUs and the interpreter launch as always. Such a
    kernel has a parameter `EARLY: tl.constexpr` and begins with `wait_for_launch(EARLY)`.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    wanted = os.environ.get("SPECDEC_PDL", "0")
    if wanted not in ("0", "1"):
        raise ValueError(f"SPECDEC_PDL: expected 0 or 1, got {wanted!r}")
    if wanted == "0" or knobs.runtime.interpret:
        return {"EARLY": False}
    target = driver.active.get_current_target()
    if target.backend != "cuda" or target.arch < 90:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def wait_for_launch(EARLY: tl.constexpr):
    """Wait for the launch in front, if this one was started early, and let the one behind start (`early_start`).

    First thing in a kernel: whatever it reads may come from the launch in front of it, and whatever it writes may still
    be read there. The one behind waits in its turn until this one has ended, and with it all before.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def batch_stride(tensor: torch.Tensor | None) -> int:
    """Stride of the first dimension; 0 without a tensor, or if all rows of the batch share the only one."""
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def needs_upcast(tensor: torch.Tensor) -> bool:
    """Whether a product has to be taken in fp32: Triton's interpreter multiplies the bits of bf16."""
    return tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"


def on_device(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Make the tensor's GPU the current one for a launch; does nothing for other tensors."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
