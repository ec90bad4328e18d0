"""Compile kernels ahead of time, without a GPU: exactly what a launcher would launch, for a chosen architecture.

The launchers run unchanged, on meta tensors, under a Triton driver that knows the architecture but has no device: each
launch is specialised and compiled as at run time, then dropped. What comes back is read from the machine code with the
tools of Triton's own wheel, so the numbers depend on the Triton version alone.

Triton decides at `@triton.jit` whether a kernel is interpreted, so TRITON_INTERPRET must be unset before a kernel
module is imported.
"""

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

__all__ = ["CompiledKernel", "compile_launches", "compile_only"]


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What one launch compiles to.

    Attributes:
        name: name of the jit function.
        registers: per thread.
        stack_bytes: local memory per thread; more than 0 means spilled registers.
        shared_bytes: shared memory of one program.
        num_hmma: mma.sync instructions (fp16 and bf16 tensor cores).
        num_hgmma: wgmma instructions (Hopper's warp-group tensor cores).
        num_async_copies: 16-byte asynchronous copies into shared memory.
    """

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_hmma: int
    num_hgmma: int
    num_async_copies: int


def compile_launches(launch: Callable[[], Any], capability: int) -> list[CompiledKernel]:
    """Run `launch` and compile every kernel that it launches, each once, in the order of first launch.

    Args:
        launch: calls launchers on meta tensors.
        capability: compute capability times ten, such as 80 or 90.

    Raises:
        RuntimeError: the kernels were imported with TRITON_INTERPRET=1, or nothing was launched.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("compile_launches: expected compiled kernels, got TRITON_INTERPRET=1")
    with _recorded_launches(capability) as kernels:
        launch()
    if not kernels:
        raise RuntimeError("compile_launches: expected at least one kernel launch, got none")
    distinct = {kernel.hash: kernel for kernel in kernels}.values()
    return [_inspect(kernel.name, kernel.metadata.shared, kernel.asm["cubin"]) for kernel in distinct]


class _CompileOnlyDriver(DriverBase):
    """Tells Triton which architecture to compile for; there is nothing to run on."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # a jit function caches what it compiled per device

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Callable[..., Any]:
        raise RuntimeError("a compile-only driver measures nothing")


@contextmanager
def compile_only(capability: int) -> Iterator[Callable[..., Any]]:
    """Yield a function that compiles a launch, given its kernel and arguments, and returns the compiled kernel."""
    run = JITFunction.run
    active = driver._active  # reset_active() would look for a GPU
    driver.set_active(_CompileOnlyDriver(capability))
    try:
        yield lambda kernel, *args, **kwargs: run(kernel, *args, **kwargs | {"warmup": True})
    finally:
        driver._active = active


@contextmanager
def _recorded_launches(capability: int) -> Iterator[list[Any]]:
    """Compile launches instead of running them, and collect the compiled kernels."""
    kernels: list[Any] = []
    run = JITFunction.run
    with compile_only(capability) as compile_launch:

        def record(self: Any, *args: Any, **kwargs: Any) -> Any:
            kernels.append(compile_launch(self, *args, **kwargs))
            return kernels[-1]

        JITFunction.run = record
        try:
            yield kernels
        finally:
            JITFunction.run = run


@functools.cache  # many shapes compile to the same kernel, and the tools are not fast
def _inspect(name: str, shared_bytes: int, code: bytes) -> CompiledKernel:
    """Read resources and instructions from a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(code)
        command = [str(tool), "--dump-resource-usage", "--dump-sass", str(cubin)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"\b(REG|STACK):(\d+)", text))
    return CompiledKernel(
        name=name,
        registers=int(usage["REG"]),
        stack_bytes=int(usage["STACK"]),
        shared_bytes=shared_bytes,
        num_hmma=len(re.findall(r"\bHMMA\.", text)),
        num_hgmma=len(re.findall(r"\bHGMMA\.", text)),
        num_async_copies=len(re.findall(r"\bLDGSTS\.E(?:\.\w+)*\.128\b", text)),
    )
