"""cvt: conversions between integers, floats and packed small floats (PTX ISA 9.7.9.21)."""

from __future__ import annotations

import numpy as np

from . import lowfloat as lf
from .alu_float import ftz
from .closures import function
from .decode import DTYPE, Builder, Mods, bits_of, opcode
from .syntax import Reg

INTS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
SMALL_PAIRS = ("e4m3x2", "e5m2x2", "e2m1x2")
PAIRS = ("f16x2", "bf16x2", *SMALL_PAIRS)
_ROUND_INT = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@opcode("cvt")
def _cvt(b: Builder, m: Mods):
    source = m.last_type(*INTS, *FLOATS, *PAIRS)
    target = m.last_type(*INTS, *FLOATS, *PAIRS, "tf32")
    if target in PAIRS:
        return _to_pair(b, m, target, source)
    if source in PAIRS:
        b.fail("pair source with scalar destination")
    flush = m.flag("ftz")
    saturate = m.flag("sat")
    d, s = b.operands(2)
    x = b.src(s, source, wider=True)
    read = _reader(source, flush)
    if target in INTS:
        f = _to_int(b, m, target, source, saturate)
    else:
        f = _to_float(b, m, target, source, saturate, flush)
    m.done()
    if not isinstance(d, Reg):
        b.fail("destination is not a register")
    own = bits_of(target) if target != "tf32" else 32
    if d.bits < own:
        b.fail(f"destination of {d.bits} bits")
    if target in FLOATS and d.bits == own:
        slot = b.dst(d, target)
        return b.emit(function(lambda v: f(read(v)), slot, x))
    slot, dtype = b.dst_natural(d, signed=target[0] == "s")
    kind = np.dtype(f"{'i' if target[0] == 's' else 'u'}{own // 8}")
    b.emit(function(lambda v: f(read(v)).view(kind).astype(dtype), slot, x))


def _reader(source: str, flush: bool):
    if source == "bf16":
        return lf.bf16_to_f32
    return ftz if flush and source == "f32" else (lambda v: v)


def _to_int(b: Builder, m: Mods, target: str, source: str, saturate: bool):
    dtype = DTYPE[target]
    info = np.iinfo(dtype)
    if source in FLOATS:
        rounding = _ROUND_INT[m.one_of(*_ROUND_INT, required=True)]

        def from_float(v):
            """Out-of-range values clamp; NaN gives 0 (for 64 bits, 2^63)."""
            v = v.astype(np.float64)
            r = rounding(v)
            out = np.where(r >= float(info.max), info.max, np.where(r <= float(info.min), info.min, 0))
            inside = (r < float(info.max)) & (r > float(info.min))
            out = out.astype(dtype)
            out[inside] = r[inside].astype(dtype)
            if dtype.itemsize == 8:
                out[np.isnan(v)] = np.array([1 << 63], np.uint64).view(dtype)[0]
            return out

        return from_float
    if saturate:
        low, high = DTYPE[source], np.iinfo(DTYPE[source])
        top, bottom = min(info.max, high.max), max(info.min, high.min)
        return lambda v: np.clip(v, low.type(bottom), low.type(top)).astype(dtype)
    return lambda v: v.astype(dtype)


def _to_float(b: Builder, m: Mods, target: str, source: str, saturate: bool, flush: bool):
    rounding = m.one_of("rn", "rz", "rna", *_ROUND_INT)
    relu, satfinite = m.flag("relu"), m.flag("satfinite")
    if satfinite and target != "tf32":
        b.fail(".satfinite needs a small float destination")
    if source in FLOATS and target in FLOATS and bits_of(source) < bits_of(target) and rounding:
        b.fail("a widening conversion takes no rounding modifier")
    if source in FLOATS and target == source and rounding in _ROUND_INT:
        return lambda v: _ROUND_INT[rounding](v)
    if rounding in _ROUND_INT:
        b.fail(f"rounding .{rounding}")

    def finish(v):
        if relu:
            v = np.where(np.isnan(v), v, np.maximum(v, 0))
        return np.clip(np.nan_to_num(v, nan=0.0), 0, 1) if saturate else v

    if target == "tf32":
        if rounding not in ("rna", "rn", "rz"):
            b.fail("tf32 needs .rn, .rna or .rz")
        return lambda v: _tf32(finish(v), rounding)
    if target == "bf16":
        if rounding not in ("rn", "rz"):
            b.fail("bf16 needs .rn or .rz")
        return lambda v: lf.f32_to_bf16(finish(v), rounding)
    if rounding == "rz":
        if not (source == "f32" and target == "f16"):
            b.fail("rounding .rz to this type")
        return lambda v: _f16_towards_zero(finish(v))
    if rounding == "rna":
        b.fail("rounding .rna to this type")
    if flush and target == "f32":
        return lambda v: ftz(finish(v.astype(np.float32)))
    return lambda v: finish(v).astype(DTYPE[target])


def _tf32(v, rounding: str):
    bits = np.ascontiguousarray(v, np.float32).view(np.uint32)
    even = np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    add = {"rna": np.uint32(0x1000), "rz": np.uint32(0), "rn": even}
    return (bits + add[rounding]) & np.uint32(0xFFFFE000)


def _f16_towards_zero(v):
    h = v.astype(np.float16)
    too_far = np.abs(h.astype(np.float32)) > np.abs(v)
    return np.where(too_far, h.view(np.uint16) - np.uint16(1), h.view(np.uint16)).astype(np.uint16).view(np.float16)


def _to_pair(b: Builder, m: Mods, target: str, source: str) -> None:
    """Two f32 into a packed pair (the first operand goes to the high half), or one packed pair into another."""
    m.expect("rn")
    relu, satfinite = m.flag("relu"), m.flag("satfinite")
    m.done()
    small = target in SMALL_PAIRS
    if small and not satfinite:
        b.fail("small floats need .satfinite")
    finish = (lambda v: np.where(np.isnan(v), v, np.maximum(v, 0))) if relu else (lambda v: v)
    encode = _pair_encoder(target, satfinite)
    d_type = "b8" if target == "e2m1x2" else "b16" if small else "b32"
    if source == "f32":
        d, high, low = b.operands(3)
        f = lambda hi, lo: encode(finish(lo), finish(hi))  # noqa: E731
        return b.emit(function(f, b.dst(d, d_type), b.src(high, "f32"), b.src(low, "f32")))
    d, s = b.operands(2)
    if source in SMALL_PAIRS and target in ("f16x2", "bf16x2"):
        name = source[:-2]
        if name == "e2m1":
            x, codes = b.src(s, "b8"), lambda v: (v & 15, v >> 4)
        else:
            x, codes = b.src(s, "b16"), lambda v: ((v & 255).astype(np.uint8), (v >> 8).astype(np.uint8))
        table = lf.DECODE[name]
        read = lambda v: [finish(table[c]) for c in codes(v)]  # noqa: E731
    elif source in ("f16x2", "bf16x2") and small:
        x = b.src(s, "b32")
        unpack = lf.PACKED[source][0]
        read = lambda v: [finish(h) for h in unpack(v).T]  # noqa: E731
    else:
        b.fail(f"conversion from .{source} to .{target}")
    b.emit(function(lambda v: encode(*read(v)), b.dst(d, d_type), x))


def _pair_encoder(target: str, satfinite: bool):
    """(low values, high values) -> register lanes."""
    if target == "f16x2":

        def half(v):
            v = np.clip(v, -65504, 65504) if satfinite else v
            return v.astype(np.float16).view(np.uint16)

        return lambda lo, hi: lf.pair(half(lo), half(hi))
    if target == "bf16x2":
        return lambda lo, hi: lf.pair(lf.f32_to_bf16(lo), lf.f32_to_bf16(hi))
    encode = lf.ENCODE[target[:-2]]
    if target == "e2m1x2":
        return lambda lo, hi: (encode(lo) | (encode(hi) << 4)).astype(np.uint8)
    return lambda lo, hi: lf.pair(encode(lo), encode(hi))
