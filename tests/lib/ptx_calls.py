"""Run the compiled PTX of every op on the small calls of `op_calls`, and of some with faults planted; prints JSON.

    TRITON_INTERPRET= python -m lib.ptx_calls

Triton decides at import whether kernels are interpreted, so this is a process of its own. What is printed is, by case,
"" or what was wrong.
"""

import importlib
import json
import pkgutil
import re
import sys
from dataclasses import replace

import torch

import specdec.kernels
import specdec.kernels.common
from lib.op_calls import CALLS, LAUNCHERS, arguments_of, tensors_of
from lib.ptx import PtxError, executed
from lib.tolerances import FLOOR
from specdec.kernels.common.launch import LaunchConfig

CAPABILITY = 80
# ops that take half precision, which tensor cores multiply and registers hold in pairs
IN_HALF_PRECISION = [
    *("accept_naive", "accept_rejection", "accept_traversal", "accept_typical", "add_rms_norm", "draft_heads"),
    *("commit_pairs", "draft_heads_concat", "kv_compact", "lm_head_topk", "lstm_recurrence", "rms_norm"),
    *("rope_kv_write", "skinny_linear", "swiglu", "tree_attention", "warp_logits"),
]
FP32_ARGUMENTS = ("uniform", "uniform_final", "cos_sin_table", "settings")


def always_compiled():
    """Let launchers launch on CPU tensors what they would launch on a GPU's."""
    for package in (specdec.kernels, specdec.kernels.common):
        for found in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{found.name}")
            if hasattr(module, "resolve_backend"):
                module.resolve_backend = lambda tensor, backend=None: backend
            if hasattr(module, "needs_upcast"):
                module.needs_upcast = lambda tensor: False


def converted(arguments, dtype):
    def one(name, value):
        if isinstance(value, list):
            return [one(name, item) for item in value]
        is_number = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(dtype) if is_number and name not in FP32_ARGUMENTS else value

    return {name: one(name, value) for name, value in arguments.items()}


def results(name, dtype, backend):
    arguments = converted(arguments_of(name), dtype)
    returned = tensors_of(LAUNCHERS[name](**arguments, backend=backend))
    changed = [value for argument, value in arguments.items() if argument.endswith("_")]
    return [result for result in returned if result is not None] + changed


def difference(name, dtype):
    """What is wrong with an op's compiled kernels, "" if nothing is."""
    try:
        got = results(name, dtype, "triton")
    except PtxError as error:
        return str(error)
    for place, (ours, expected) in enumerate(zip(got, results(name, dtype, "reference"), strict=True)):
        if not expected.is_floating_point():
            if not torch.equal(ours, expected):
                return f"result {place}: {int((ours != expected).sum())} of {expected.numel()} integers differ"
            continue
        finite = torch.isfinite(expected)
        if not torch.equal(ours[~finite].nan_to_num(), expected[~finite].nan_to_num()):
            return f"result {place}: infinities differ"
        ours, expected = ours[finite].double(), expected[finite].double()
        error = (ours - expected).abs().max().item() if finite.any() else 0.0
        # every rounding of the rotary embedding is defined
        scale = 0.0 if name == "rope_kv_write" else max(1.0, expected.abs().max().item() if finite.any() else 0.0)
        bound = FLOOR[dtype] * scale
        if not error <= bound:
            return f"result {place}: an error of {error:.3g}, more than {bound:.3g}"
    return ""


def without_guards(statement):
    return lambda _, text: re.sub(rf"@!?%p\d+ ({statement})", r"\1", text)


def with_other(pattern, replacement, count=0):
    return lambda _, text: re.sub(pattern, replacement, text, count=count)


FAULTS = {
    "a store without its guard": ("kv_compact", torch.float32, without_guards(r"st\.global")),
    "a load without its guard": ("draft_heads", torch.float32, without_guards(r"ld\.global")),
    "a reduction that leaves lanes out": ("lm_head_topk", torch.float32, with_other(r"(bfly[^;]*, )16,", r"\g<1>8,")),
    "a mask one too far": ("tree_attention", torch.float32, with_other(r"setp\.lt\.s32", "setp.le.s32")),
    "a minimum for a maximum": ("accept_naive", torch.float32, with_other(r"\bmax\.f32", "min.f32")),
    "a product that keeps its lower half": ("philox_uniform", torch.float32, with_other(r"mul\.hi\.u32", "mul.lo.s32")),
    "tensor cores with operands exchanged": (
        "lm_head_topk",
        torch.bfloat16,
        with_other(r"(mma\S+\s*\{[^}]*\}, \{) (%r\d+), (%r\d+)", r"\1 \3, \2"),
    ),
    "a wait that lets copies go": ("skinny_linear", torch.bfloat16, with_other(r"wait_group\s+\d+", "wait_group 9")),
    "transposed loads that are not": ("tree_attention", torch.bfloat16, with_other(r"\.trans\.", ".")),
}


def fused_rounding():
    """Products that are rounded by definition, fused with their sums: a setting of the compiler's."""
    kwargs = LaunchConfig.kwargs
    LaunchConfig.kwargs = lambda self: kwargs(replace(self, fuses_products=True))
    try:
        with executed(CAPABILITY):
            return difference("rope_kv_write", torch.bfloat16)
    finally:
        LaunchConfig.kwargs = kwargs


def main():
    always_compiled()
    cases = [(name, torch.float32) for name in sorted(CALLS)]
    cases += [(name, dtype) for name in IN_HALF_PRECISION for dtype in (torch.bfloat16, torch.float16)]
    found = {"ops": {}, "faults": {}}
    for name, dtype in cases:
        with executed(CAPABILITY):
            found["ops"][f"{name} {dtype}".replace("torch.", "")] = difference(name, dtype)
    for fault, (name, dtype, change) in FAULTS.items():
        with executed(CAPABILITY) as ran:
            ran.changes.append(change)
            seen = difference(name, dtype)
            found["faults"][fault] = seen if ran.num_changed else ""
    found["faults"]["a product fused with its sum"] = fused_rounding()
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
