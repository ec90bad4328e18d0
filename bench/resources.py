"""What every kernel compiles to at the shapes that matter, compared with a committed table; needs no GPU.

    python -m specdec.bench.resources            # compile for all architectures and compare
    python -m specdec.bench.resources --update   # write the tables, bench/compiled/tables/<architecture>.json

A kernel fails if it spills registers or exceeds the shared memory of an architecture. Against the table it fails if it
takes many more registers, uses other tensor-core instructions or loses asynchronous copies. The numbers depend on
Triton, which brings its own assembler: with another version than the table's only spills and limits are checked.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import triton

from specdec.bench.compiled.cases import Launch, cases
from specdec.bench.compiled.compile_only import CompiledKernel, compile_launches

__all__ = ["ARCHITECTURES", "Architecture", "compare", "compile_cases", "main", "read_table", "table_text"]

REGISTER_TOLERANCE = 16
"""Registers per thread that a kernel may gain before it counts as a regression."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A GPU to compile for.

    Attributes:
        capability: compute capability times ten.
        shared_bytes: shared memory that one program may use.
    """

    capability: int
    shared_bytes: int


ARCHITECTURES = {"sm_80": Architecture(80, 163 * 1024), "sm_90a": Architecture(90, 227 * 1024)}


def compile_cases(architecture: Architecture, launches: Mapping[str, Launch]) -> dict[str, CompiledKernel]:
    """Compile every kernel of every launch, by the names of the launch and the kernel."""
    return {
        f"{name} {kernel.name}": kernel
        for name, launch in launches.items()
        for kernel in compile_launches(launch, architecture.capability)
    }


def read_table(name: str) -> tuple[str, dict[str, CompiledKernel]]:
    """Read the committed table of an architecture.

    Returns:
        The Triton version it was made with, and the kernels by the names of the launch and the kernel.
    """
    table = json.loads(_table_path(name).read_text(encoding="utf-8"))
    return table["triton"], {case: CompiledKernel(case.split()[-1], **row) for case, row in table["kernels"].items()}


def _table_path(name: str) -> Path:
    return Path(__file__).parent / "compiled" / "tables" / f"{name}.json"


def table_text(version: str, kernels: Mapping[str, CompiledKernel]) -> str:
    """A table as it is committed: JSON with a kernel per line, whose name is the last word of its key."""
    rows = {case: {key: value for key, value in asdict(row).items() if key != "name"} for case, row in kernels.items()}
    lines = ",\n".join(f"  {json.dumps(case)}: {json.dumps(row)}" for case, row in rows.items())
    return f'{{\n "triton": {json.dumps(version)},\n "kernels": {{\n{lines}\n }}\n}}\n'


def compare(
    kernels: Mapping[str, CompiledKernel], architecture: Architecture, committed: Mapping[str, CompiledKernel] | None
) -> list[str]:
    """Find what is wrong with compiled kernels.

    Args:
        kernels: what was compiled.
        architecture: what it was compiled for.
        committed: the table to compare with, or None to check spills and limits only.

    Returns:
        One line per problem.
    """
    problems = []
    for case, kernel in kernels.items():
        if kernel.stack_bytes:
            problems.append(f"{case}: spills registers, {kernel.stack_bytes} bytes of stack per thread")
        if kernel.shared_bytes > architecture.shared_bytes:
            problems.append(f"{case}: {kernel.shared_bytes} bytes of shared memory, limit {architecture.shared_bytes}")
    if committed is None:
        return problems
    for case in sorted(kernels.keys() ^ committed.keys()):
        problems.append(f"{case}: {'not in the table' if case in kernels else 'in the table only'}; run with --update")
    for case in kernels.keys() & committed.keys():
        now, before = kernels[case], committed[case]
        if now.registers > before.registers + REGISTER_TOLERANCE:
            problems.append(f"{case}: {now.registers} registers, {before.registers} in the table")
        if (now.num_hmma > 0, now.num_hgmma > 0) != (before.num_hmma > 0, before.num_hgmma > 0):
            found, known = f"{now.num_hmma} mma and {now.num_hgmma} wgmma", f"{before.num_hmma} and {before.num_hgmma}"
            problems.append(f"{case}: {found} instructions, {known} in the table")
        if now.num_async_copies < before.num_async_copies:
            problems.append(f"{case}: {now.num_async_copies} async copies, {before.num_async_copies} in the table")
    return problems


def main(argv: list[str] | None = None) -> int:
    """Compile, then compare or write the tables; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.resources", description=__doc__.split("\n")[0])
    parser.add_argument("--update", action="store_true", help="write the tables instead of comparing with them")
    update = parser.parse_args(argv).update

    problems = []
    launches = cases()
    for name, architecture in ARCHITECTURES.items():
        kernels = compile_cases(architecture, launches)
        for case, kernel in kernels.items():
            print(
                f"{name}  {case}: {kernel.registers} registers, {kernel.shared_bytes} bytes shared, "
                f"{kernel.num_hmma} mma, {kernel.num_hgmma} wgmma, {kernel.num_async_copies} async copies"
            )
        committed = None
        if update:
            _table_path(name).write_text(table_text(triton.__version__, kernels), encoding="utf-8")
        else:
            version, committed = read_table(name)
            if version != triton.__version__:
                print(f"{name}: spills and limits only, the table is of Triton {version}, not {triton.__version__}")
                committed = None
        problems += [f"{name}  {problem}" for problem in compare(kernels, architecture, committed)]
    for problem in problems:
        print(f"FAILED  {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
