"""Floating-point arithmetic: f32, f64 and the packed 16-bit types (PTX ISA 9.7.3 to 9.7.5)."""

from __future__ import annotations

import numpy as np

from . import lowfloat as lf
from .closures import function, ufunc
from .decode import Builder, Mods, opcode

F32 = ("f32", "f64")
PACKED = ("f16", "bf16", "f16x2", "bf16x2", "f32x2")
_TINY = np.float32(1.1754944e-38)


def ftz(x):
    """Subnormals flushed to sign-preserving zero (9.7.3, .ftz)."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def _flushing(f):
    return lambda *x: ftz(f(*(ftz(v) for v in x)))


def fma32(a, b, c):
    """float32 a*b+c with one rounding. The product is exact in float64; the sum is redone where float64 rounding
    landed on a float32 tie. (Results that are float32 subnormals may be one unit off.)"""
    p = np.multiply(a, b, dtype=np.float64)
    s = p + c
    tie = (s.view(np.uint64) & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    if tie.any():
        back = s - p
        error = (p - (s - back)) + (c - back)
        up = (error > 0) == (s > 0)
        step = np.where(up, 1, -1) * (tie & (error != 0) & np.isfinite(s))
        s = (s.view(np.int64) + step).view(np.float64)
    return s.astype(np.float32)


def _saturate(f):
    return lambda *x: np.clip(np.nan_to_num(f(*x), nan=0.0), 0, 1)


def float_op(b: Builder, m: Mods, t: str, f, sources: list, is_ufunc=True) -> None:
    """Emits an arithmetic operation on f32/f64, with .rn (or none), .ftz and .sat."""
    m.one_of("rn")
    flush, sat = m.flag("ftz"), m.flag("sat")
    m.done()
    d = b.dst(b.ins.operands[0], t)
    s = [b.src(x, t) for x in sources]
    if flush or sat:
        f, is_ufunc = (_flushing(f) if flush else f), False
        f = _saturate(f) if sat else f
    b.emit(ufunc(f, d, *s) if is_ufunc else function(f, d, *s))


def packed_op(b: Builder, m: Mods, t: str, f, sources: list) -> None:
    """add, sub, mul, fma, min, max, neg, abs on f16, bf16, f16x2, bf16x2 and f32x2: exact in float64, rounded once.
    (float64 holds products and sums of f16/bf16 exactly enough for one rounding; 9.7.4.)"""
    m.one_of("rn")
    flush = m.flag("ftz")
    m.done()
    d = b.dst(b.ins.operands[0], t)
    s = [b.src(x, t) for x in sources]
    unpack, pack = lf.PACKED[t]

    def run(*x):
        x = [unpack(v) for v in x]
        return pack(f(*([ftz(v) for v in x] if flush else x)))

    b.emit(function(run, d, *s))


@opcode("fma")
def _fma(b: Builder, m: Mods):
    t = m.last_type("f32", "f64", *PACKED)
    m.expect("rn")
    ops = b.operands(4)
    if t == "f32":
        return float_op(b, m, t, fma32, ops[1:], is_ufunc=False)
    if t == "f64":
        b.fail("fma.f64 is not modelled with a single rounding")
    if t == "f32x2":
        return packed_op(b, m, t, lambda x, y, z: fma32(*(np.ascontiguousarray(v).ravel() for v in (x, y, z))), ops[1:])
    relu = m.flag("relu")
    wide = lambda x, y, z: x.astype(np.float64) * y + z  # noqa: E731
    packed_op(b, m, t, (lambda *v: np.maximum(wide(*v), 0)) if relu else wide, ops[1:])


# ---- special functions (9.7.3): computed in float64 and rounded, the hardware is within a few units in the last place
_APPROX = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@opcode(*_APPROX)
def _special_function(b: Builder, m: Mods):
    t = m.last_type("f32", "f16", "f16x2", "bf16", "bf16x2")
    exact = b.ins.root in ("rcp", "sqrt") and m.flag("rn")
    if not exact:
        m.expect("approx")
    ops = b.operands(2)
    f = _APPROX[b.ins.root]
    wide = lambda x: f(x.astype(np.float64))  # noqa: E731
    if t == "f32":
        float_op(b, m, t, lambda x: wide(x).astype(np.float32), ops[1:], is_ufunc=False)
    else:
        packed_op(b, m, t, wide, ops[1:])
