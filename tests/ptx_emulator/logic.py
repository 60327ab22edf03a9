"""Logic, shifts and byte permutation (PTX ISA 9.7.8)."""

from __future__ import annotations

import numpy as np

from .closures import function, ufunc
from .decode import DTYPE, Builder, Mods, bits_of, opcode
from .syntax import Imm

INTS = ("u16", "u32", "u64", "s16", "s32", "s64")


@opcode("and", "or", "xor", "not", "cnot")
def _logic(b: Builder, m: Mods):
    t = m.last_type("b16", "b32", "b64", "pred")
    m.done()
    unary = b.ins.root in ("not", "cnot")
    ops = b.operands(2 if unary else 3)
    d, s = b.dst(ops[0], t), [b.src(x, t) for x in ops[1:]]
    if b.ins.root == "cnot":
        return b.emit(function(lambda x: (x == 0).astype(x.dtype), d, *s))
    f = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}[b.ins.root]
    b.emit(ufunc(f, d, *s))


@opcode("shl", "shr")
def _shift(b: Builder, m: Mods):
    t = m.last_type("b16", "b32", "b64", *(INTS if b.ins.root == "shr" else ()))
    m.done()
    ops = b.operands(3)
    d, x, n = b.dst(ops[0], t), b.src(ops[1], t), b.src(ops[2], "u32")
    bits, dtype, left = bits_of(t), DTYPE[t].type, b.ins.root == "shl"
    if isinstance(ops[2], Imm):
        count = int(ops[2].value) & 0xFFFFFFFF
        if count < bits or t[0] == "s":
            k = b.program.const(min(count, bits - 1), DTYPE[t])
            return b.emit(ufunc(np.left_shift if left else np.right_shift, d, x, k))
    shift = np.left_shift if left else np.right_shift

    def f(v, count):
        small = np.minimum(count, bits - 1).astype(dtype)
        out = shift(v, small)
        return out if t[0] == "s" else np.where(count < bits, out, dtype(0))

    b.emit(function(f, d, x, n))


@opcode("shf")
def _funnel(b: Builder, m: Mods):
    """Funnel shift of {b,a} (9.7.8.7)."""
    t = m.last_type("b32")
    side, mode = m.one_of("l", "r", required=True), m.one_of("wrap", "clamp", required=True)
    m.done()
    ops = b.operands(4)

    def f(lo, hi, n):
        n = ((n & np.uint32(31)) if mode == "wrap" else np.minimum(n, np.uint32(32))).astype(np.uint64)
        both = (hi.astype(np.uint64) << np.uint64(32)) | lo
        return ((both << n) >> np.uint64(32) if side == "l" else both >> n).astype(np.uint32)

    def clamped(lo, hi, n):
        return np.where(n >= 32, lo if side == "l" else hi, f(lo, hi, np.minimum(n, np.uint32(31))))

    b.emit(function(f if mode == "wrap" else clamped, b.dst(ops[0], t), *(b.src(x, t) for x in ops[1:])))


@opcode("lop3")
def _lop3(b: Builder, m: Mods):
    """Any function of three bits, from its truth table (9.7.8.6): ta = 0xF0, tb = 0xCC, tc = 0xAA."""
    t = m.last_type("b32")
    m.done()
    ops = b.operands(5)
    table = b.integer(ops[4]) & 255

    def f(x, y, z):
        out = np.zeros(32, np.uint32)
        for i in range(8):
            if table >> i & 1:
                out |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        return out

    short = {
        0xC0: lambda x, y, z: x & y,
        0xEA: lambda x, y, z: (x & y) | z,
        0xF8: lambda x, y, z: x | (y & z),
        0x96: lambda x, y, z: x ^ y ^ z,
        0x6A: lambda x, y, z: (x & y) ^ z,
        0x80: lambda x, y, z: x & y & z,
        0xFE: lambda x, y, z: x | y | z,
    }
    b.emit(function(short.get(table, f), b.dst(ops[0], t), *(b.src(x, t) for x in ops[1:4])))


@opcode("prmt")
def _prmt(b: Builder, m: Mods):
    """Byte permute, default mode (9.7.8.8): nibble bits 0..2 pick a byte of {b,a}, bit 3 replicates its sign."""
    t = m.last_type("b32")
    m.done()
    ops = b.operands(4)
    d, x, y, c = b.dst(ops[0], t), *(b.src(v, t) for v in ops[1:])
    rows = np.arange(32)[:, None]

    def f(lo, hi, selector):
        data = np.empty((32, 2), np.uint32)
        data[:, 0], data[:, 1] = lo, hi
        nibbles = (selector[:, None] >> np.array([0, 4, 8, 12], np.uint32)) & np.uint32(15)
        out = data.view(np.uint8)[rows, nibbles & 7]
        if (nibbles & 8).any():
            out = np.where(nibbles & 8, np.where(out & 0x80, 255, 0).astype(np.uint8), out)
        return np.ascontiguousarray(out).view(np.uint32)[:, 0]

    b.emit(function(f, d, x, y, c))
