"""quantize.py on the device, for one row (a token of a head) per token: device code of the append kernel.

``quantize.py`` is the specification: its float32 arithmetic is done operation by operation, so that scales, biases and
codes are the same bits.  A row is shared by ``row bytes / 4`` threads; thread ``j`` has the channels of word ``j`` of
the packed row: four consecutive ones at each bit position.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from . import device
from .append_config import CHANNELS, AppendConfig

INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}  # bits
NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0}
SMALL = {"float16": 0x0001, "bfloat16": 0x3380}  # quantize.CONSTANT_SCALE
TWO_23 = 0x4B000000  # float32
assert struct.unpack("<ef", struct.pack("<HI", SMALL["float16"], SMALL["bfloat16"] << 16)) == (2.0**-24, 2.0**-24)


@dataclass(frozen=True)
class Side:
    """What differs between K and V at compile time."""

    bits: int
    group: int
    row_bytes: int
    lanes: int  # threads of a row
    head_dim: int
    params: str
    byte: object  # the record's byte of (token, row byte)
    param: object  # the record's pair of (token, channel)
    together: bool  # whether the bytes of a word of a row are a word of the record

    @classmethod
    def of(cls, cfg: AppendConfig, name: str) -> Side:
        layout = cfg.layout
        f = getattr(cfg.format, name)
        group, row_bytes, byte, param = (
            getattr(layout, f"{name}_{what}") for what in ("group", "row_bytes", "byte", "param")
        )
        lanes, together = cfg.lanes(row_bytes), name == "k"
        return cls(f.bits, group, row_bytes, lanes, cfg.head_dim, cfg.format.params, byte, param, together)

    @property
    def positions(self) -> int:
        return 8 // self.bits

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def padded(self) -> bool:
        """Whether the record has more channels than k and v."""
        return self.head_dim < self.row_bytes * self.positions


def _wide(bits, dtype: str) -> Float32:
    return device.unpack_halves(bits, dtype)[0]


def _endless(bits, dtype: str):
    """Whether a 16-bit float is infinite or NaN."""
    return (bits & Uint32(0x7FFF)) >= Uint32(INFINITY[dtype])


def select(condition, a, b) -> Uint32:
    return Uint32(cutlass.select_(condition, a, b))


def _below(bits) -> Uint32:
    """The next smaller value of a finite 16-bit float (quantize._below)."""
    smaller = select(bits == Uint32(0), Uint32(0x8001), bits - Uint32(1))
    return select(bits < Uint32(0x8000), smaller, bits + Uint32(1))


def fit(lo, hi, max_code: int, dtype: str):
    """quantize.fit_parameters: the bits of scale and bias, and whether all codes are 0."""
    steps = Float32(max_code)
    near = device.to_half(lo, dtype)
    wide = _wide(near, dtype)
    step = _wide(device.to_half(device.arith("div.rn", device.arith("sub.rn", hi, wide), steps), dtype), dtype)
    above = device.arith("sub.rn", wide, lo) > device.arith("mul.rn", step, Float32(0.5))
    bias = select(above, _below(near), near)
    span = device.arith("sub.rn", hi, _wide(bias, dtype))
    scale = device.to_half(device.arith("div.rn", span, steps), dtype)
    short = device.arith("mul.rn", _wide(scale, dtype), Float32(max_code + 0.5)) < span
    scale = select(short, (scale & Uint32(0x7FFF)) + Uint32(1), scale)
    constant = lo == hi
    bias = select(constant, near, bias)
    bad = _endless(near, dtype) | (_endless(scale, dtype) & (lo != hi))
    empty = constant | bad
    scale = select(empty, Uint32(SMALL[dtype]), scale)
    return scale, select(bad, Uint32(NAN[dtype]), bias), empty


@dataclass
class Divisor:
    """A group's scale, ready to divide by: ``unit * scale`` and its reciprocal, ``unit`` a power of two."""

    unit: Float32 | None
    negative: Float32
    reciprocal: Float32

    @classmethod
    def of(cls, scale, dtype: str) -> Divisor:
        unit = None
        if dtype == "bfloat16":  # brought between 2^-60 and 2^60; float16 has nothing outside
            large = cutlass.select_(scale > Float32(2.0**60), Float32(2.0**-80), Float32(1.0))
            unit = Float32(cutlass.select_(scale < Float32(2.0**-60), Float32(2.0**80), large))
            scale = device.arith("mul.rn", scale, unit)
        negative, guess = -scale, device.reciprocal(scale)
        return cls(unit, negative, device.fma(guess, device.fma(negative, guess, Float32(1.0)), guess))


def _code(x, bias, divisor: Divisor, max_code: int) -> Uint32:
    """quantize.nearest_codes, as the bits of ``2^23 + code`` in float32.

    The quotient, corrected twice by its remainder, is div.rn's wherever it is not far below a half, which is code 0.
    """
    d = device.arith("sub.rn", x, bias)
    if divisor.unit is not None:
        d = device.arith("mul.rn", d, divisor.unit)
    q = device.arith("mul.rn", d, divisor.reciprocal)
    for _ in range(2):
        q = device.fma(device.fma(divisor.negative, q, d), divisor.reciprocal, q)
    q = cute.arch.fmin(cute.arch.fmax(q, Float32(0.0)), Float32(max_code))
    return device.arith("add.rn", q, Float32(2.0**23)).bitcast(Uint32)


def add_code(word, x, bias, divisor: Divisor, max_code: int, shift: int) -> Uint32:
    """``word`` with the code of ``x`` at bit ``shift``."""
    word = word + (_code(x, bias, divisor, max_code) << shift)
    return word - Uint32(TWO_23 << shift & 0xFFFFFFFF)


def quantize(x, j, side: Side):
    """Thread ``j``'s word of the packed row, and (first channel, pair as a word) of every group that it has part in."""
    per = max(1, side.group // side.row_bytes)  # positions of a group
    offsets = [1 << i for i in range((min(side.lanes, side.group // CHANNELS) - 1).bit_length())]
    word, pairs = Uint32(0), []
    for first in range(0, side.positions, per):
        values = [value for p in range(first, first + per) for value in x[p]]
        lo = device.butterfly(device.min_nan, device.tree(device.min_nan, values), offsets)
        hi = device.butterfly(device.max_nan, device.tree(device.max_nan, values), offsets)
        lo = device.arith("add.rn", lo, Float32(0.0))  # -0 is 0
        scale, bias, empty = fit(lo, hi, side.max_code, side.params)
        divisor, wide_bias = Divisor.of(_wide(scale, side.params), side.params), _wide(bias, side.params)
        for p in range(first, first + per):
            part = Uint32(0)
            for c in range(CHANNELS):
                shift = 8 * c + side.bits * p
                part = add_code(part, x[p][c], wide_bias, divisor, side.max_code, shift)
            channel = p * side.row_bytes + CHANNELS * j
            unused = empty | (channel >= side.head_dim) if side.padded else empty
            word = word | select(unused, Uint32(0), part)
        channel = first * side.row_bytes + (CHANNELS * j if side.group < side.row_bytes else 0 * j)
        start = channel // side.group * side.group
        pair = scale | (bias << 16)
        if side.padded:  # a group of padding alone
            pair = select(start >= side.head_dim, Uint32(SMALL[side.params]), pair)
        pairs.append((start, pair))
    return word, pairs
