"""mma.sync: one warp's matrix multiply, all operands in registers (PTX ISA 9.7.14.5)."""

from __future__ import annotations

import re

import numpy as np

from . import matrix as mx
from .decode import Builder, Mods, opcode
from .syntax import Vec
from .warpops import LANES

_OPERANDS = {
    ("f16", "f16"),
    ("bf16", "bf16"),
    *((x, y) for x in ("u8", "s8") for y in ("u8", "s8")),
    *((x, y) for x in ("e4m3", "e5m2") for y in ("e4m3", "e5m2")),
}


@opcode("mma")
def _mma(b: Builder, m: Mods):
    """m16n8kK with K of 16 or 32 bytes' worth of elements (the .row.col forms)."""
    m.expect("sync", "aligned")
    shape = m.left.pop(0)
    m.expect("row", "col")
    saturate = m.flag("satfinite")
    match = re.fullmatch(r"m16n8k(\d+)", shape)
    if not match or len(m.left) != 4:
        b.fail("shape or types of mma.sync")
    d_type, kind_a, kind_b, c_type = m.left
    m.left.clear()
    size = mx.ELEMENT_BYTES.get(kind_a, 0)
    k_bytes = int(match.group(1)) * size
    integer = kind_a in ("u8", "s8")
    if (kind_a, kind_b) not in _OPERANDS or k_bytes not in (16, 32) or d_type != c_type:
        b.fail("types of mma.sync")
    if d_type != ("s32" if integer else "f32") or (saturate and not integer):
        b.fail("accumulator type of mma.sync")
    ops = b.operands(4)
    if not all(isinstance(x, Vec) for x in ops):
        b.fail("operands of mma.sync")
    halves = k_bytes // 16
    if [len(x.items) for x in ops] != [4, 2 * halves, halves, 4]:
        b.fail("number of registers of mma.sync")
    b.converge(b.program.const(0xFFFFFFFF, "u4"))
    d, a, bb, c = [
        [(b.dst if i == 0 else b.src)(r, d_type if i in (0, 3) else "b32") for r in x.items] for i, x in enumerate(ops)
    ]
    per, raw = 4 // size, f"u{size}"
    row, column = LANES // 4, 2 * (LANES % 4)

    def run(w, R, mask):
        fa = np.empty((2, 8, halves, 4, per), raw)
        for i, s in enumerate(a):
            fa[i % 2, :, i // 2] = R[s].view(raw).reshape(8, 4, per)
        fb = np.empty((8, halves, 4, per), raw)
        for i, s in enumerate(bb):
            fb[:, i] = R[s].view(raw).reshape(8, 4, per)
        matrix_a, matrix_b = mx.values(fa.reshape(16, -1), kind_a), mx.values(fb.reshape(8, -1), kind_b)
        acc = np.empty((16, 8), R[c[0]].dtype)
        for i, s in enumerate(c):
            acc[row + 8 * (i // 2), column + i % 2] = R[s]
        if integer:
            out = mx.multiply_integer(matrix_a, matrix_b, acc, saturate)
        else:
            out = mx.multiply_float(
                matrix_a, matrix_b, acc.astype(np.float64), (kind_a, kind_b), mx.hopper_adder(kind_a)
            )
        for i, s in enumerate(d):
            R[s][...] = out[row + 8 * (i // 2), column + i % 2]
        w.launch.counters.matrix("mma", 16 * 8 * k_bytes // size)

    b.emit(run)
