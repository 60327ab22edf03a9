"""What the matrix units share: shared-memory descriptors, operand decoding and the arithmetic.

Layouts are the canonical ones of the PTX ISA (9.7.15.5.1 wgmma, 9.7.16.5 tcgen05, "Shared Memory Matrix Layout" and
"Strides"): core matrices of 8 rows of 16 bytes, without swizzle, or rows of 32, 64 or 128 bytes whose 16-byte chunks
are XORed with address bits 7 and up.

Arithmetic as measured on an H200, where it agreed in every bit: with E the largest exponent among the products (the sum
of the operands' exponents, subnormals at the lowest normal one) and the accumulator, every addend is cut off towards
zero below 2^(E - 13) for 8-bit floats and 2^(E - 25) for f16 and bf16; the exact sum is cut off towards zero to 14
significant bits and to float32, respectively (:class:`Adder`).  Integers are exact.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from . import lowfloat as lf
from .errors import PtxError

SWIZZLE_BITS = {128: 3, 64: 2, 32: 1, 0: 0}
ELEMENT_BYTES = {
    "f16": 2,
    "bf16": 2,
    "tf32": 4,
    "e4m3": 1,
    "e5m2": 1,
    "u8": 1,
    "s8": 1,
    "e2m1": 1,
    "e2m3": 1,
    "e3m2": 1,
}
# The exponent of the lowest normal number, which subnormals share.
LOWEST_EXPONENT = {
    "f16": -14,
    "bf16": -126,
    "tf32": -126,
    "e4m3": -6,
    "e5m2": -14,
    "e2m1": 0,
    "e2m3": 0,
    "e3m2": -2,
}


@dataclass(frozen=True)
class Adder:
    """How a matrix unit adds: bits kept below the largest exponent, significant bits of the result."""

    below: int
    significant: int


WIDE = Adder(25, 24)
NARROW = Adder(13, 14)


def hopper_adder(kind: str) -> Adder:
    return NARROW if ELEMENT_BYTES[kind] == 1 else WIDE


@dataclass(frozen=True)
class Descriptor:
    """A decoded 64-bit matrix descriptor: byte address and offsets, swizzle width in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int


def wgmma_descriptor(value: int) -> Descriptor:
    """9.7.15.5.1.2.2 Matrix Descriptor Format."""
    if value >> 49 & 7:
        raise PtxError(f"matrix descriptor {value:#018x}: a base offset is not modelled")
    if value >> 52 & 0x3FF or value >> 46 & 7 or value >> 30 & 3 or value >> 14 & 3:
        raise PtxError(f"matrix descriptor {value:#018x}: reserved bits are set")
    swizzle = {0: 0, 1: 128, 2: 64, 3: 32}[value >> 62]
    return Descriptor((value & 0x3FFF) << 4, (value >> 16 & 0x3FFF) << 4, (value >> 32 & 0x3FFF) << 4, swizzle)


@functools.lru_cache(maxsize=4096)
def element_addresses(d: Descriptor, k_major: bool, rows: int, k: int, size: int) -> np.ndarray:
    """Byte address of every element, [rows, k]; `rows` runs over M or N."""
    r, c = np.arange(rows)[:, None], np.arange(k)[None, :]
    chunk = 16 // size
    if k_major:
        if d.swizzle == 0:
            offset = r % 8 * 16 + r // 8 * d.stride + c % chunk * size + c // chunk * d.leading
        else:
            offset = r % 8 * d.swizzle + r // 8 * d.stride + c * size
    elif d.swizzle == 0:
        offset = r % chunk * size + r // chunk * d.stride + c % 8 * 16 + c // 8 * d.leading
    else:
        wide = d.swizzle // size
        offset = r % wide * size + r // wide * d.leading + c % 8 * d.swizzle + c // 8 * d.stride
    address = d.start + offset
    bits = SWIZZLE_BITS[d.swizzle]
    if bits:
        address = address ^ ((address >> 7 & ((1 << bits) - 1)) << 4)
    address.flags.writeable = False
    return address


@functools.lru_cache(maxsize=4096)
def touched_granules(d: Descriptor, k_major: bool, rows: int, k: int, size: int, shift: int) -> np.ndarray:
    """The distinct shared-memory granules an operand occupies, for the race detector."""
    first = element_addresses(d, k_major, rows, k, size).ravel()
    every = (first[:, None] + np.arange(size)).ravel()
    return np.unique(every >> shift)


def values(raw: np.ndarray, kind: str) -> np.ndarray:
    """Operand bit patterns -> exact numbers: float64, or int64 for the integer types."""
    if kind == "f16":
        return raw.view(np.float16).astype(np.float64)
    if kind == "bf16":
        return lf.bf16_to_f32(raw).astype(np.float64)
    if kind == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if kind in lf.DECODE:
        return lf.DECODE[kind][raw & (len(lf.DECODE[kind]) - 1)]
    if kind == "u8":
        return raw.astype(np.int64)
    if kind == "s8":
        return raw.view(np.int8).astype(np.int64)
    raise PtxError(f"matrix element type {kind}")


def gather(shared, d: Descriptor, k_major: bool, rows: int, k: int, kind: str) -> np.ndarray:
    """An operand matrix [rows, k] from shared memory."""
    size = ELEMENT_BYTES[kind]
    address = element_addresses(d, k_major, rows, k, size)
    shared.check(address, size)
    return values(shared.views[size][address >> (size - 1 if size < 4 else 2)], kind)


def multiply_integer(a, b, c, saturate: bool) -> np.ndarray:
    """a [M, K] times b [N, K] transposed plus c, exact; wraps or saturates to int32."""
    total = a @ b.T + (0 if c is None else c.astype(np.int64))
    if saturate:
        return np.clip(total, -(2**31), 2**31 - 1).astype(np.int32)
    return total.astype(np.uint64).astype(np.uint32).view(np.int32)


def _exponents(x: np.ndarray, lowest: int) -> np.ndarray:
    """floor(log2 |x|), at least `lowest`; far below everything for a zero."""
    return np.where(x == 0, -(1 << 20), np.maximum(np.frexp(x)[1] - 1, lowest))


def multiply_float(a, b, c, kinds: tuple[str, str], adder: Adder) -> np.ndarray:
    """a [M, K] times b [N, K] transposed plus c (float64 values), as the tensor cores add: float32 result."""
    return multiply_lowest(a, b, c, tuple(LOWEST_EXPONENT[kind] for kind in kinds), adder)


def multiply_lowest(a, b, c, lowest: tuple, adder: Adder) -> np.ndarray:
    """:func:`multiply_float` with the exponents of the operands' lowest normal numbers (a number or an array each)."""
    products = a[:, None, :] * b[None, :, :]
    if not np.isfinite(products).all() or (c is not None and not np.isfinite(c).all()):
        total = products.sum(-1) + (0 if c is None else c)
        return total.astype(np.float32)
    exponents = _exponents(a, lowest[0])[:, None] + _exponents(b, lowest[1])[None]
    largest = exponents.max(-1)
    if c is not None:
        largest = np.maximum(largest, _exponents(c, -126))
    up = np.ldexp(1.0, np.clip(adder.below - largest, -1000, 1000))
    products *= up[..., None]
    total = np.trunc(products, out=products).sum(-1)
    if c is not None:
        total += np.trunc(c * up)
    return _truncated(total / up, adder.significant)


def _truncated(x: np.ndarray, significant: int) -> np.ndarray:
    """float32 towards zero, with that many significant bits (fewer where it is subnormal)."""
    fraction, exponent = np.frexp(x)
    kept = np.minimum(significant, np.maximum(exponent + 149, 0))
    return np.ldexp(np.trunc(np.ldexp(fraction, kept)), exponent - kept).astype(np.float32)
