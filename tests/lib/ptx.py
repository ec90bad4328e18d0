"""Executes the PTX of compiled kernels on a CPU: what Triton made of a kernel, with the memory of ordinary tensors.

Between the interpreter, which runs a kernel's Python, and a GPU lies the compiler. Here its output runs, one program
after the other, all threads of a program together, an instruction at a time. An access outside of every tensor that
the kernel was given is an error, shared memory holds NaN before it is written, and asynchronous copies arrive only
when they are waited for, so that a wait too few is seen. What lock step hides is a missing barrier: racecheck's part.

    with executed(capability=80) as programs:   # jit functions compile for sm_80 and run here
        launcher(...)                           # on CPU tensors

Instructions are those that our kernels compile to; any other raises `NotImplementedError` with its name. `approx`
instructions are as exact as numpy's, and tensor cores sum in fp64.
"""

import ctypes
import re
from contextlib import contextmanager

import numpy as np
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lib.ptx_instructions import SHARED, WARP, Instructions, PtxError
from specdec.bench.compiled.compile_only import _CompileOnlyDriver


class Memory:
    """The tensors of a launch, by address."""

    def __init__(self, tensors):
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self.blocks = []
        for base, storage in storages.items():
            if storage.nbytes():
                data = (ctypes.c_uint8 * storage.nbytes()).from_address(base)
                self.blocks.append((base, np.frombuffer(data, dtype=np.uint8)))
        self.shared = np.zeros(0, np.uint8)

    def bytes_at(self, addresses, width, where):
        """The block of all accesses of `width` bytes, and [n, width] places in it."""
        addresses = addresses.astype(np.int64)
        for base, data in self.blocks:
            if base <= addresses[0] < base + len(data):
                places = addresses - base
                if places.min() < 0 or places.max() + width > len(data):
                    raise PtxError(f"{where}: access outside of its tensor")
                return data, places[:, None] + np.arange(width)
        raise PtxError(f"{where}: access outside of every tensor")

    def shared_at(self, addresses, width, where):
        places = addresses.astype(np.int64) - SHARED
        if places.min() < 0 or places.max() + width > len(self.shared):
            raise PtxError(f"{where}: access outside of shared memory")
        return self.shared, places[:, None] + np.arange(width)

    def read(self, space, addresses, width, where):
        """[n, width] bytes."""
        if not len(addresses):
            return np.zeros((0, width), np.uint8)
        data, places = (self.shared_at if space == "shared" else self.bytes_at)(addresses, width, where)
        return data[places]

    def write(self, space, addresses, content, where):
        """Write [n, width] bytes."""
        if len(addresses):
            data, places = (self.shared_at if space == "shared" else self.bytes_at)(addresses, content.shape[1], where)
            data[places] = content


class Kernel:
    """A parsed kernel."""

    def __init__(self, name, text, num_threads, shared_bytes):
        self.name, self.num_threads, self.shared_bytes = name, num_threads, shared_bytes
        self.labels, self.code = {}, []
        body = text[text.index(f".entry {name}") :]
        for line in body[body.index("\n{") + 2 :].splitlines():
            self._parse(line.split("//")[0].strip())

    def _parse(self, line):
        if re.fullmatch(r"[$\w]+:", line):
            self.labels[line[:-1]] = len(self.code)
        elif line and line[0] not in ".}" and line != "{":
            if line[0] == "{":  # a scope of its own, with a register that nobody reads
                line = line.strip("{} ")
            statements = (part.strip() for part in line.split(";"))
            for statement in (one for one in statements if one and one[0] != "."):
                guard, _, rest = statement.partition(" ") if statement[0] == "@" else ("", "", statement)
                opcode, *operands = re.split(r"\s+", rest.strip(), maxsplit=1)
                listed = _operands(operands[0]) if operands else []
                self.code.append((guard, opcode.split("."), listed, statement))


def _operands(text):
    """Operands; those in braces as a list."""
    found = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)
    return [
        [one.strip() for one in operand[1:-1].split(",")] if operand[0] == "{" else operand.strip() for operand in found
    ]


class Program(Instructions):
    """One program (thread block) of a launch."""

    def __init__(self, kernel, memory, parameters, place, grid):
        self.kernel, self.memory, self.parameters = kernel, memory, parameters
        count = kernel.num_threads
        self.registers = {}
        thread = np.arange(count, dtype=np.uint32)
        self.special = {"%tid.x": thread, "%laneid": thread % WARP}
        for axis, index, size in zip("xyz", place, grid, strict=True):
            self.special |= {f"%ctaid.{axis}": np.full(count, index, np.uint32)}
            self.special |= {f"%nctaid.{axis}": np.full(count, size, np.uint32)}
        self.count, self.copies, self.groups = count, [], []
        memory.shared = np.full(kernel.shared_bytes, 0xFF, np.uint8)

    def run(self):
        """Until all threads have returned. Of threads that went apart the hindmost go on first."""
        places = np.zeros(self.count, np.int64)
        end = len(self.kernel.code)
        while (place := places.min()) < end:
            active = places == place
            guard, opcode, operands, statement = self.kernel.code[place]
            self.where = f"{self.kernel.name}, `{statement}`"
            taken = active
            if guard:
                taken = active & (self.get(guard.lstrip("@!"), "pred") ^ guard.startswith("@!"))
            places[active] += 1
            if opcode[0] == "bra":
                places[taken] = self.kernel.labels[operands[0]]
            elif opcode[0] in ("ret", "exit"):
                places[taken] = end
            elif opcode[:2] == ["bar", "sync"]:
                if not active.all() and (places[~active] < end).any():
                    raise PtxError(f"{self.where}: not all threads come to the barrier")
            else:
                with np.errstate(all="ignore"):
                    self.execute(opcode, operands, taken)


def _flat(value):
    return [one for item in value for one in _flat(item)] if isinstance(value, (tuple, list)) else [value]


def _parameter(value, kind):
    """The bits of an argument."""
    if kind.startswith("*"):
        return 0 if value is None else value.data_ptr()
    if kind.startswith("fp"):
        return int(np.array(value, f"f{int(kind[2:]) // 8}").view(f"u{int(kind[2:]) // 8}"))
    return int(value) & 0xFFFFFFFFFFFFFFFF


class Executed:
    """What a block of `executed` ran: `changes` are functions from the PTX of a kernel to what is run in its place."""

    def __init__(self):
        self.kernels, self.changes, self.num_changed = {}, [], 0

    def launch(self, compiled, names, arguments, grid):
        """Run all programs of a launch, one after the other."""
        signature = compiled.src.signature
        pairs = [pair for name in names for pair in zip(_flat(signature[name]), _flat(arguments[name]), strict=True)]
        pairs = [(kind, value) for kind, value in pairs if kind != "constexpr"]
        tensors = [value for kind, value in pairs if kind.startswith("*") and value is not None]
        kernel = self.kernels.get(compiled.hash)
        if kernel is None:
            text = compiled.asm["ptx"]
            for change in self.changes:
                changed = change(compiled.name, text)
                self.num_changed += changed != text
                text = changed
            threads = compiled.metadata.num_warps * WARP
            kernel = Kernel(compiled.name, text, threads, compiled.metadata.shared)
            self.kernels[compiled.hash] = kernel
        memory = Memory(tensors)
        parameters = [_parameter(value, kind) for kind, value in pairs]
        grid = (*grid, 1, 1)[:3]
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    Program(kernel, memory, [*parameters, 0, 0], (x, y, z), grid).run()


@contextmanager
def executed(capability):
    """Compile launches inside the block for an architecture and execute their PTX on CPU tensors."""
    run, active, ran = JITFunction.run, driver._active, Executed()

    def launch(self, *args, grid, warmup, **kwargs):
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        names = [name for name in self.arg_names if name in compiled.src.signature]
        arguments = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        for parameter in self.params:  # arguments with defaults
            arguments.setdefault(parameter.name, parameter.default if parameter.has_default else None)
        ran.launch(compiled, names, arguments, grid(arguments) if callable(grid) else grid)
        return compiled

    driver.set_active(_CompileOnlyDriver(capability))
    JITFunction.run = launch
    try:
        yield ran
    finally:
        JITFunction.run = run
        driver._active = active
