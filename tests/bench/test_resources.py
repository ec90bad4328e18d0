"""Kernels compiled ahead of time, for GPUs that are not here: no spills, shared memory in limits, no regression."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.bench.compiled.cases import cases
from specdec.bench.compiled.compile_only import CompiledKernel, compile_launches
from specdec.bench.resources import ARCHITECTURES, compare, read_table, table_text

ROOT = Path(__file__).resolve().parents[2]
SM_90A = ARCHITECTURES["sm_90a"]
KERNEL = CompiledKernel(
    name="k", registers=100, stack_bytes=0, shared_bytes=1000, num_hmma=0, num_hgmma=8, num_async_copies=48
)


def run_compiled(*arguments):
    """In a process of its own: in this one @triton.jit may have made interpreted kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.compile
@pytest.mark.slow
def test_every_kernel_compiles_without_spills_or_regressions():
    result = run_compiled("-m", "specdec.bench.resources")
    assert result.returncode == 0, result.stderr


ROPE_PTX = """
from specdec.bench.compiled.compile_only import _recorded_launches
from specdec.bench.compiled.cases import cases
for name, launch in cases().items():
    if name.startswith("rope_kv_write/"):
        with _recorded_launches(90) as kernels:
            launch()
        print(*(kernel.asm["ptx"] for kernel in kernels))
"""


@pytest.mark.compile
def test_rotary_products_are_rounded_before_they_are_added():
    """As in transformers: fused, a quarter of half precision's results would differ. The interpreter fuses none."""
    result = run_compiled("-c", ROPE_PTX)
    assert "mul.rn.bf16" in result.stdout or "mul.bf16" in result.stdout
    assert "fma" not in result.stdout


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_op_is_in_the_tables(architecture):
    kernels = {path.stem for path in (ROOT / "kernels").glob("*.py") if "@triton.jit" in path.read_text()}
    references = {path.stem for path in (ROOT / "kernels" / "reference").glob("*.py")}
    assert kernels & references <= {name.split("/")[0] for name in cases()}
    _, table = read_table(architecture)
    assert {name.split(" ")[0] for name in table} == set(cases())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tables_are_as_the_writer_writes_them(architecture):
    text = (ROOT / "bench" / "compiled" / "tables" / f"{architecture}.json").read_text()
    version, table = read_table(architecture)
    assert text == table_text(version, table)
    assert len(text.splitlines()) == len(table) + 5


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")
def test_interpreted_kernels_are_refused():
    with pytest.raises(RuntimeError, match="expected compiled kernels, got TRITON_INTERPRET=1"):
        compile_launches(lambda: None, 90)


# what changes, what is wrong with it, and whether that shows without a table of the same Triton
CHANGES = {
    "nothing": ({}, [], True),
    "spills": ({"stack_bytes": 8}, ["case k: spills registers, 8 bytes of stack per thread"], True),
    "shared": ({"shared_bytes": 232449}, ["case k: 232449 bytes of shared memory, limit 232448"], True),
    "registers": ({"registers": 117}, ["case k: 117 registers, 100 in the table"], False),
    "tensor cores": (
        {"num_hmma": 64, "num_hgmma": 0},
        ["case k: 64 mma and 0 wgmma instructions, 0 and 8 in the table"],
        False,
    ),
    "copies": ({"num_async_copies": 0}, ["case k: 0 async copies, 48 in the table"], False),
    "other tiles": ({"registers": 116, "shared_bytes": 2000, "num_hgmma": 16, "num_async_copies": 96}, [], False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_limits_fail_anywhere_and_regressions_against_the_table_of_the_same_triton(change):
    fields, problems, anywhere = CHANGES[change]
    changed = {"case k": replace(KERNEL, **fields)}
    assert compare(changed, SM_90A, {"case k": KERNEL}) == problems
    assert compare(changed, SM_90A, None) == (problems if anywhere else [])


def test_a_case_that_is_missing_on_either_side_fails():
    assert compare({"new k": KERNEL}, SM_90A, {"old k": KERNEL}) == [
        "new k: not in the table; run with --update",
        "old k: in the table only; run with --update",
    ]
