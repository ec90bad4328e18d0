"""What single PTX instructions do to the registers of all threads of a program; see `lib.ptx`."""

import re

import numpy as np

WARP = 32
SHARED = 1 << 20  # addresses of shared memory begin here, so that a null pointer is none of them
_DTYPES = {
    **{f"{kind}{size}": np.dtype(f"u{size // 8}") for kind in ("b", "u") for size in (8, 16, 32, 64)},
    **{f"s{size}": np.dtype(f"i{size // 8}") for size in (8, 16, 32, 64)},
    **{"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "bf16": np.dtype("u2")},
    **{"bf16x2": np.dtype("u4"), "f16x2": np.dtype("u4"), "pred": np.dtype("?")},
}
_REGISTERS = {"%p": np.dtype("?"), "%rs": np.dtype("u2"), "%r": np.dtype("u4"), "%rd": np.dtype("u8")}
_FLOATS = frozenset({"f16", "f32", "f64", "bf16"})


class PtxError(RuntimeError):
    """The kernel did what it must not do."""


def bf16_to_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float_to_bf16(value):
    """Rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), rounded)


class Instructions:
    """Registers, and an instruction at a time. A subclass sets `count`, `registers`, `special`, `memory` and so on."""

    def get(self, operand, kind):
        """[threads] an operand as numbers of a type; half precision as its bits if it is bf16."""
        dtype = _DTYPES[kind]
        if operand in self.special:
            bits = self.special[operand]
        elif operand.startswith("%"):
            bits = self.registers.get(operand)
            if bits is None:
                raise PtxError(f"{self.where}: {operand} is read before it is written")
        elif operand.startswith("global_smem"):
            offset = operand.partition("+")[2]
            bits = np.full(self.count, SHARED + int(offset or 0), np.uint64)
        elif operand[:2] in ("0f", "0d"):
            raw = int(operand[2:], 16)
            bits = np.full(self.count, raw, np.uint32 if operand[1] == "f" else np.uint64)
        else:
            bits = np.full(self.count, int(operand.rstrip("U"), 0) & 0xFFFFFFFFFFFFFFFF, np.uint64)
        if kind == "pred":
            return bits.astype(bool)
        size = dtype.itemsize
        return np.ascontiguousarray(bits).astype(np.dtype(f"u{size}")).view(dtype)

    def number(self, operand, kind):
        """As `get`, with bf16 as fp32."""
        value = self.get(operand, kind)
        return bf16_to_float(value) if kind == "bf16" else value

    def put(self, register, value, taken, kind):
        """Write numbers of a type to a register, extended by sign or with zeros; as bits if it is no number's type."""
        if register[0] != "%":  # nobody reads it
            return
        dtype = _REGISTERS[re.match(r"%[a-z]+", register)[0]]
        if kind == "bf16" and value.dtype.kind == "f":
            value = float_to_bf16(value)
        if kind == "pred" or dtype.kind == "b":
            value = value.astype(bool)
        elif value.dtype.kind == "f":
            value = value.astype(_DTYPES[kind]).view(f"u{_DTYPES[kind].itemsize}")
        else:
            value = value.astype(_DTYPES[kind]).astype(np.int64 if kind[0] == "s" else np.uint64)
        old = self.registers.get(register)
        new = np.asarray(value).astype(dtype)
        self.registers[register] = new if old is None or taken.all() else np.where(taken, new, old)

    def execute(self, opcode, operands, taken):
        """One instruction, for the threads in `taken`."""
        name, kind = opcode[0], opcode[-1]
        handler = getattr(self, f"_{name}", None)
        if handler is not None:
            handler(opcode, operands, taken)
            return
        if name not in _ARITHMETIC or kind not in _DTYPES:
            raise NotImplementedError(f"{self.where}: this instruction is not known")
        if kind.endswith("x2"):
            self._pairwise(opcode, operands, taken)
            return
        sources = [self.number(operand, kind) for operand in operands[1:]]
        if "ftz" in opcode:
            sources = [_flushed(source) for source in sources]
        result = _ARITHMETIC[name](*sources)
        self.put(operands[0], _flushed(result) if "ftz" in opcode else result, taken, kind)

    def _pairwise(self, opcode, operands, taken):
        """Both halves of packed half precision."""
        kind, halves = opcode[-1][:-2], []
        for shift in (0, 16):
            sources = [((self.get(one, "b32") >> shift) & 0xFFFF).astype(np.uint16) for one in operands[1:]]
            sources = [bf16_to_float(one) if kind == "bf16" else one.view(np.float16) for one in sources]
            halves.append(self._half_bits(_ARITHMETIC[opcode[0]](*sources), kind))
        self.put(operands[0], halves[0] | halves[1] << 16, taken, "b32")

    @staticmethod
    def _half_bits(value, kind):
        bits = float_to_bf16(value) if kind == "bf16" else value.astype(np.float16).view(np.uint16)
        return bits.astype(np.uint32)

    # moves and choices

    def _mov(self, opcode, operands, taken):
        target, source = operands
        if isinstance(source, list) or isinstance(target, list):
            self._repack(target, source, int(opcode[-1][1:]), taken)
        else:
            kind = opcode[-1]
            self.put(target, self.get(source, "u64" if kind == "f64" else kind.replace("f32", "b32")), taken, kind)

    def _repack(self, target, source, size, taken):
        parts = source if isinstance(source, list) else target
        part = size // len(parts)
        if isinstance(source, list):
            words = [self.get(one, f"b{part}").astype(np.uint64) << (part * place) for place, one in enumerate(source)]
            self.put(target, np.bitwise_or.reduce(words), taken, f"b{size}")
            return
        word = self.get(source, f"b{size}").astype(np.uint64)
        for place, one in enumerate(target):
            self.put(one, word >> (part * place), taken, f"b{part}")

    def _selp(self, opcode, operands, taken):
        kind = f"b{_DTYPES[opcode[-1]].itemsize * 8}"
        chosen = np.where(self.get(operands[3], "pred"), self.get(operands[1], kind), self.get(operands[2], kind))
        self.put(operands[0], chosen, taken, kind)

    def _setp(self, opcode, operands, taken):
        first, second = (self.number(operand, opcode[-1]) for operand in operands[1:3])
        comparison = opcode[1]
        if opcode[-1] in _FLOATS:
            unordered = np.isnan(first) | np.isnan(second)
            if comparison in ("nan", "num"):
                result = unordered == (comparison == "nan")
            elif comparison in _COMPARISONS:
                result = _COMPARISONS[comparison](first, second) & ~unordered
            else:  # ltu, leu, neu ...: true of NaN as well
                result = _COMPARISONS[comparison[:-1]](first, second) | unordered
        else:
            result = _COMPARISONS[comparison](first, second)
        self.put(operands[0], result, taken, "pred")

    def _cvt(self, opcode, operands, taken):
        target, source = opcode[-2:]
        if target.endswith("x2"):
            high, low = (self._half_bits(self.number(one, source), target[:-2]) for one in operands[1:])
            self.put(operands[0], high << 16 | low, taken, "b32")
            return
        value = self.number(operands[1], source)
        if source in _FLOATS and target not in _FLOATS:
            rounding = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[opcode[1]]
            limits = np.iinfo(_DTYPES[target])
            value = np.clip(np.nan_to_num(rounding(value.astype(np.float64))), limits.min, limits.max)
        elif target in _FLOATS and source not in _FLOATS:
            value = value.astype(np.float64).astype(np.float32 if target == "bf16" else _DTYPES[target])
        elif target in ("f16", "f64", "f32"):
            value = value.astype(_DTYPES[target])
        self.put(operands[0], value, taken, target)

    # memory

    def _address(self, operand):
        base, _, offset = operand.strip("[] ").partition("+")
        return self.get(base.strip(), "u64") + np.uint64(int(offset or 0) & 0xFFFFFFFFFFFFFFFF)

    @staticmethod
    def _vector(operand):
        return operand if isinstance(operand, list) else [operand]

    def _ld(self, opcode, operands, taken):
        kind, targets = opcode[-1], self._vector(operands[0])
        if opcode[1] == "param":
            value = self.parameters[int(operands[1].strip("[]").rpartition("_")[2])]
            self.put(targets[0], np.full(self.count, value, np.uint64).astype(_DTYPES[kind]), taken, kind)
            return
        size = _DTYPES[kind].itemsize
        content = self.memory.read(opcode[1], self._address(operands[1])[taken], size * len(targets), self.where)
        for place, target in enumerate(targets):
            value = np.zeros(self.count, _DTYPES[kind])
            value[taken] = np.ascontiguousarray(content[:, place * size : (place + 1) * size]).view(value.dtype)[:, 0]
            self.put(target, value, taken, kind)

    def _st(self, opcode, operands, taken):
        kind = f"b{_DTYPES[opcode[-1]].itemsize * 8}"
        values = [np.ascontiguousarray(self.get(one, kind)[taken])[:, None] for one in self._vector(operands[1])]
        content = np.concatenate([value.view(np.uint8) for value in values], 1)
        self.memory.write(opcode[1], self._address(operands[0])[taken], content, self.where)

    def _cp(self, opcode, operands, taken):
        if opcode[2] == "commit_group":
            self.groups.append(self.copies)
            self.copies = []
        elif opcode[2] in ("wait_group", "wait_all"):
            left = int(operands[0]) if operands else 0
            while len(self.groups) > left:
                for copy in self.groups.pop(0):
                    copy()
        else:
            to, source = self._address(operands[0])[taken], self._address(operands[1])[taken]
            size, where = int(operands[2], 0), self.where
            wanted = self.get(operands[3], "u32")[taken] if len(operands) > 3 else np.full(len(to), size)

            def arrive():
                content = np.zeros((len(to), size), np.uint8)
                for count in np.unique(wanted[wanted > 0]):
                    rows = wanted == count
                    content[rows, :count] = self.memory.read("global", source[rows], int(count), where)
                self.memory.write("shared", to, content, where)

            self.copies.append(arrive)

    def _atom(self, opcode, operands, taken):
        if opcode[-2] not in _ATOMICS:
            raise NotImplementedError(f"{self.where}: this instruction is not known")
        kind, change = opcode[-1], _ATOMICS[opcode[-2]]
        addresses = self._address(operands[1])
        values = [self.get(operand, kind) for operand in operands[2:]]
        before = np.zeros(self.count, _DTYPES[kind])
        for thread in np.flatnonzero(taken):
            at = addresses[thread : thread + 1]
            before[thread] = self.memory.read(opcode[1], at, before.itemsize, self.where).view(before.dtype)[0, 0]
            after = np.array([change(before[thread], *(value[thread] for value in values))]).astype(before.dtype)
            self.memory.write(opcode[1], at, after.view(np.uint8)[None], self.where)
        self.put(operands[0], before, taken, kind)

    _red = None  # no kernel of ours has one

    def _ldmatrix(self, opcode, operands, taken):
        addresses = self._address(operands[1]).reshape(-1, WARP)
        lane = np.arange(WARP)
        for place, target in enumerate(operands[0]):
            rows = addresses[:, 8 * place : 8 * place + 8].reshape(-1)
            content = self.memory.read("shared", rows, 16, self.where).view(np.uint16).reshape(-1, 8, 8)
            if "trans" in opcode:
                content = content.transpose(0, 2, 1)
            pairs = np.ascontiguousarray(content).view(np.uint32)  # [warps, 8, 4]
            self.put(target, pairs[:, lane // 4, lane % 4].reshape(-1), taken, "b32")

    # across lanes

    def _shfl(self, opcode, operands, taken):
        value = self.get(operands[1], "b32")
        distance, clamp = self.get(operands[2], "u32").astype(np.int64), int(operands[3], 0)
        lane, warp = np.arange(self.count) % WARP, np.arange(self.count) // WARP * WARP
        segment = (clamp >> 8) & 31
        lowest, highest = lane & segment, (lane & segment) | (clamp & 31 & ~segment)
        source = {
            "bfly": lane ^ distance,
            "up": lane - distance,
            "down": lane + distance,
            "idx": lowest | (distance & 31 & ~segment),
        }[opcode[2]]
        inside = source >= (clamp & 31 if opcode[2] == "up" else lowest) if opcode[2] == "up" else source <= highest
        target, _, flag = operands[0].partition("|")
        self.put(target, value[warp + np.where(inside, source, lane)], taken, "b32")
        if flag:
            self.put(flag, inside, taken, "pred")

    def _redux(self, opcode, operands, taken):
        kind = opcode[-1]
        value = self.get(operands[1], kind).reshape(-1, WARP)
        ufunc = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "and": np.bitwise_and}
        reduced = ufunc[opcode[2]].reduce(value, axis=1, dtype=value.dtype)
        self.put(operands[0], np.repeat(reduced, WARP), taken, kind)

    def _vote(self, opcode, operands, taken):
        asked = (self.get(operands[1], "pred") & taken).reshape(-1, WARP)
        if opcode[2] == "ballot":
            bits = (asked.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1)
            self.put(operands[0], np.repeat(bits, WARP), taken, "b32")
        else:
            self.put(operands[0], np.repeat(getattr(asked, opcode[2])(1), WARP), taken, "pred")

    def _bar(self, opcode, operands, taken):
        """Of a warp: threads of a program run together in any case."""

    _fence = _membar = _bar

    # bits and products that are no arithmetic of one type

    def _bfe(self, opcode, operands, taken):
        value = self.get(operands[1], opcode[-1]).astype(np.int64)
        start, length = (self.get(operand, "u32").astype(np.int64) & 0xFF for operand in operands[2:])
        field = (value >> start) & ((1 << length) - 1)
        if opcode[-1][0] == "s":
            sign = (field >> np.maximum(length - 1, 0)) & 1
            field = np.where(length > 0, field - (sign << length), 0)
        self.put(operands[0], field, taken, opcode[-1])

    def _prmt(self, opcode, operands, taken):
        low, high = (self.get(operand, "b32").astype(np.uint64) for operand in operands[1:3])
        both, selector = low | high << 32, self.get(operands[3], "b32").astype(np.uint64)
        result = np.zeros(self.count, np.uint64)
        for place in range(4):
            nibble = selector >> (4 * place) & 0xF
            byte = both >> ((nibble & 7) * 8) & 0xFF
            byte = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint64)
            result |= byte << np.uint64(8 * place)
        self.put(operands[0], result, taken, "b32")

    def _mul(self, opcode, operands, taken):
        kind = opcode[-1]
        first, second = (self.number(operand, kind) for operand in operands[1:3])
        if kind in _FLOATS:
            self.put(operands[0], first * second, taken, kind)
        elif opcode[1] == "wide":
            wide = _DTYPES[kind[0] + str(2 * int(kind[1:]))]
            self.put(operands[0], first.astype(wide) * second.astype(wide), taken, kind[0] + str(2 * int(kind[1:])))
        elif opcode[1] == "hi":
            product = [int(a) * int(b) >> int(kind[1:]) for a, b in zip(first, second, strict=True)]
            self.put(operands[0], np.array(product), taken, kind)
        else:
            self.put(operands[0], first * second, taken, kind)

    def _mad(self, opcode, operands, taken):
        kind = opcode[-1]
        result = kind[0] + str(2 * int(kind[1:])) if opcode[1] == "wide" else kind
        first, second = (self.get(operand, kind).astype(_DTYPES[result]) for operand in operands[1:3])
        self.put(operands[0], first * second + self.get(operands[3], result), taken, result)

    def _mma(self, opcode, operands, taken):
        """D = A B + C of m16n8k16, a warp at a time."""
        if opcode[3] != "m16n8k16" or opcode[-4] != "f32" or opcode[-3] not in ("bf16", "f16"):
            raise NotImplementedError(f"{self.where}: this instruction is not known")
        lane = np.arange(WARP)
        row, column = lane // 4, lane % 4 * 2

        def halves(register):  # [warps, 32, 2]
            bits = np.ascontiguousarray(self.get(register, "b32")).view(np.uint16).reshape(-1, WARP, 2)
            number = bf16_to_float(bits) if opcode[-3] == "bf16" else bits.view(np.float16)
            return number.astype(np.float64)

        num_warps = self.count // WARP
        a, b, c = np.zeros((num_warps, 16, 16)), np.zeros((num_warps, 16, 8)), np.zeros((num_warps, 16, 8))
        for place, register in enumerate(operands[1]):
            for half in (0, 1):
                a[:, row + place % 2 * 8, column + place // 2 * 8 + half] = halves(register)[:, :, half]
        for place, register in enumerate(operands[2]):
            for half in (0, 1):
                b[:, column + place * 8 + half, row] = halves(register)[:, :, half]
        for place, register in enumerate(operands[3]):
            c[:, row + place // 2 * 8, column + place % 2] = self.get(register, "f32").reshape(-1, WARP)
        d = (a @ b + c).astype(np.float32)
        for place, register in enumerate(operands[0]):
            self.put(register, d[:, row + place // 2 * 8, column + place % 2].reshape(-1), taken, "f32")


def _flushed(value):
    """Numbers too small for a full mantissa become 0."""
    tiny = np.finfo(value.dtype).tiny
    return np.where(np.abs(value) < tiny, np.copysign(np.zeros_like(value), value), value)


def _fused(first, second, third):
    """A product and a sum with one rounding; of fp64, whose product numpy would round, two."""
    wide = np.float64 if first.dtype != np.float64 else np.longdouble
    return (first.astype(wide) * second.astype(wide) + third.astype(wide)).astype(first.dtype)


def _divide(first, second):
    if first.dtype.kind == "f":
        return first / second
    safe = np.where(second == 0, 1, second)
    quotient = np.abs(first.astype(object)) // np.abs(safe.astype(object))
    return (quotient * np.sign(first.astype(object)) * np.sign(safe.astype(object))).astype(first.dtype)


def _shift(operation):
    def shift(value, distance):
        bits = value.dtype.itemsize * 8
        fill = value >> (bits - 1) if operation is np.right_shift and value.dtype.kind == "i" else np.zeros_like(value)
        distance = distance.view(f"u{value.dtype.itemsize}").astype(np.uint64)
        inside = np.minimum(distance, bits - 1).astype(value.dtype)
        return np.where(distance < bits, operation(value, inside), fill)

    return shift


_COMPARISONS = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater},
    **{"ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}
_ATOMICS = {
    **{"add": lambda old, value: old + value, "exch": lambda old, value: value, "or": lambda old, value: old | value},
    **{"max": max, "min": min, "cas": lambda old, expected, value: value if old == expected else old},
    "inc": lambda old, value: 0 if old >= value else old + 1,
}
_ARITHMETIC = {
    **{"add": np.add, "sub": np.subtract, "div": _divide, "fma": _fused, "max": np.fmax, "min": np.fmin},
    **{"rem": np.fmod, "abs": np.abs, "neg": np.negative, "and": np.bitwise_and, "or": np.bitwise_or},
    **{"xor": np.bitwise_xor, "not": np.invert, "shl": _shift(np.left_shift), "shr": _shift(np.right_shift)},
    **{"ex2": np.exp2, "lg2": np.log2, "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt},
    **{"tanh": np.tanh, "popc": lambda x: np.array([int(one).bit_count() for one in x], dtype=x.dtype)},
}
