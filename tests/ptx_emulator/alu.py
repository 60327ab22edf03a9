"""Integer arithmetic, and the decoders of opcodes that serve integers and floats (PTX ISA 9.7.1, 9.7.2)."""

from __future__ import annotations

import numpy as np

from .alu_float import F32, PACKED, float_op, fma32, packed_op
from .closures import function, ufunc
from .decode import DTYPE, Builder, Mods, bits_of, opcode

INTS = ("u16", "u32", "u64", "s16", "s32", "s64")


def _max(nan):
    return np.maximum if nan else np.fmax


def _min(nan):
    return np.minimum if nan else np.fmin


FLOAT_FUNCTIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs}


def _arith(b: Builder, m: Mods):
    name = b.ins.root
    t = m.last_type(*INTS, *F32, *PACKED)
    ops = b.operands(2 if name in ("neg", "abs") else 3)
    f = FLOAT_FUNCTIONS[name]
    if t in F32:
        return float_op(b, m, t, f, ops[1:])
    if t == "f32x2":
        return packed_op(b, m, t, f, ops[1:])
    if t in PACKED:
        wide = lambda *x: f(*(v.astype(np.float64) for v in x))  # noqa: E731
        return packed_op(b, m, t, wide, ops[1:])
    if name == "mul":
        return _mul(b, m, t, ops, None)
    if m.flag("sat"):
        b.fail(".sat on integers is not supported")
    m.done()
    b.emit(ufunc(f, b.dst(ops[0], t), *(b.src(x, t) for x in ops[1:])))


opcode("add", "sub", "mul", "neg", "abs")(_arith)


@opcode("min", "max")
def _minmax(b: Builder, m: Mods):
    t = m.last_type(*INTS, *F32, *PACKED)
    ops = b.operands(3, 4)
    largest, nan = b.ins.root == "max", m.flag("NaN")
    f = (_max if largest else _min)(nan)
    if len(ops) == 4:
        if t != "f32":
            b.fail("three-input min/max is for .f32")
        two = f
        f = lambda x, y, z: two(two(x, y), z)  # noqa: E731
        return float_op(b, m, t, f, ops[1:], is_ufunc=False)
    if t in F32:
        return float_op(b, m, t, f, ops[1:])
    if t in PACKED:
        return packed_op(b, m, t, f, ops[1:])
    m.done()
    b.emit(ufunc(np.maximum if largest else np.minimum, b.dst(ops[0], t), b.src(ops[1], t), b.src(ops[2], t)))


# ---- integer multiply and divide ---------------------------------------------------------------------------------
def _mul_high(t: str):
    kind, bits = t[0], int(t[1:])
    if bits == 64:

        def f(x, y):
            out = [(int(p) * int(q)) >> 64 for p, q in zip(x, y, strict=True)]
            return np.array([v & (2**64 - 1) for v in out], np.uint64).view(DTYPE[t])

        return f
    wide = np.dtype(("i" if kind == "s" else "u") + str(bits // 4))
    return lambda x, y: (np.multiply(x, y, dtype=wide) >> wide.type(bits)).astype(DTYPE[t])


def _mul(b: Builder, m: Mods, t: str, ops: list, addend) -> None:
    """mul and mad with .lo, .hi and .wide (9.7.1.3, 9.7.1.4)."""
    part = m.one_of("lo", "hi", "wide", required=True)
    m.done()
    x, y = b.src(ops[1], t), b.src(ops[2], t)
    if part == "wide":
        if bits_of(t) == 64:
            b.fail("mul.wide of 64-bit integers")
        result = t[0] + str(2 * bits_of(t))
        wide = DTYPE[result]
        product = lambda p, q: np.multiply(p, q, dtype=wide)  # noqa: E731
    else:
        result = t
        product = _mul_high(t) if part == "hi" else np.multiply
    d = b.dst(ops[0], result)
    if addend is None:
        b.emit(ufunc(np.multiply, d, x, y) if part == "lo" else function(product, d, x, y))
    else:
        b.emit(function(lambda p, q, r: product(p, q) + r, d, x, y, b.src(addend, result)))


@opcode("mad")
def _mad(b: Builder, m: Mods):
    t = m.last_type(*INTS, "f32")
    ops = b.operands(4)
    if t == "f32":
        m.expect("rn")
        return float_op(b, m, t, fma32, ops[1:], is_ufunc=False)
    _mul(b, m, t, ops, ops[3])


def _divide(x, y):
    """Quotient truncated towards zero; division by zero gives all ones (machine specific by 9.7.1.7)."""
    zero = y == 0
    y = np.where(zero, y.dtype.type(1), y)
    if x.dtype.kind == "u":
        q = x // y
    else:
        q = x // y
        q = q + ((q * y != x) & ((x < 0) != (y < 0))).astype(x.dtype)
    return np.where(zero, np.array(-1).astype(x.dtype), q)


@opcode("div", "rem")
def _div(b: Builder, m: Mods):
    t = m.last_type(*INTS, *F32)
    ops = b.operands(3)
    if t in F32:
        if b.ins.root == "rem":
            b.fail("rem of floats")
        m.one_of("full", "approx", "rn")
        return float_op(b, m, t, np.divide, ops[1:])
    m.done()
    f = _divide if b.ins.root == "div" else (lambda x, y: x - _divide(x, y) * y)
    b.emit(function(f, b.dst(ops[0], t), b.src(ops[1], t), b.src(ops[2], t)))


@opcode("bfe")
def _bfe(b: Builder, m: Mods):
    """Bit field extract (9.7.1.19)."""
    t = m.last_type("u32", "s32", "u64", "s64")
    m.done()
    ops = b.operands(4)
    bits = bits_of(t)

    def f(x, position, length):
        out = []
        for v, p, n in zip(x.tolist(), (position & 255).tolist(), (length & 255).tolist(), strict=True):
            raw = v & ((1 << bits) - 1)
            sign = 0 if t[0] == "u" or n == 0 else raw >> min(p + n - 1, bits - 1) & 1
            field_ = (raw | (sign * -1 << bits)) >> p & ((1 << n) - 1)
            out.append((field_ | (sign * -1 << n)) & ((1 << bits) - 1))
        return np.array(out, f"u{bits // 8}").view(DTYPE[t])

    b.emit(function(f, b.dst(ops[0], t), b.src(ops[1], t), b.src(ops[2], "u32"), b.src(ops[3], "u32")))


@opcode("bfi")
def _bfi(b: Builder, m: Mods):
    """Bit field insert: the low bits of a into b (9.7.1.20)."""
    t = m.last_type("b32", "b64")
    m.done()
    ops = b.operands(5)
    bits = bits_of(t)
    d, a, base, p, n = b.dst(ops[0], t), b.src(ops[1], t), b.src(ops[2], t), b.src(ops[3], "u32"), b.src(ops[4], "u32")

    def run(w, R, mask):
        out = []
        lanes = (R[a].tolist(), R[base].tolist(), (R[p] & 255).tolist(), (R[n] & 255).tolist())
        for v, x, q, k in zip(*lanes, strict=True):
            ones = (((1 << k) - 1) << q) & ((1 << bits) - 1)
            out.append(((v << q) & ones) | (x & ~ones))
        np.copyto(R[d], np.array(out, DTYPE[t]), where=True if mask is None else mask)

    b.emit(run)


def _bit_count(x):
    return np.array([int(v).bit_count() for v in x.tolist()], np.uint32)


@opcode("popc", "clz", "brev")
def _bits(b: Builder, m: Mods):
    t = m.last_type("b32", "b64")
    m.done()
    ops = b.operands(2)
    n = bits_of(t)
    f = {
        "popc": _bit_count,
        "clz": lambda x: np.array([n - int(v).bit_length() for v in x.tolist()], np.uint32),
        "brev": lambda x: np.array([int(format(int(v), f"0{n}b")[::-1], 2) for v in x.tolist()], DTYPE[t]),
    }[b.ins.root]
    b.emit(function(f, b.dst(ops[0], t if b.ins.root == "brev" else "u32"), b.src(ops[1], t)))


@opcode("bfind")
def _bfind(b: Builder, m: Mods):
    """Position of the most significant non-sign bit (9.7.1.17)."""
    t = m.last_type("u32", "s32")
    shift = m.flag("shiftamt")
    m.done()
    ops = b.operands(2)

    def f(x):
        out = [(v if v >= 0 else ~v).bit_length() - 1 for v in x.tolist()]
        return np.array([(31 - v if shift and v >= 0 else v) & 0xFFFFFFFF for v in out], np.uint32)

    b.emit(function(f, b.dst(ops[0], "u32"), b.src(ops[1], t)))
