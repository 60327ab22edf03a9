"""Small float formats as numpy functions: f16, bf16, e4m3, e5m2, e2m1 (PTX ISA 5.2.2, 5.2.3).

Encoders round once, to nearest even, from float64 or float32.
"""

from __future__ import annotations

import numpy as np


def _table(exponent_bits: int, mantissa_bits: int, bias: int, special: str) -> np.ndarray:
    """Values of every code. special: 'nan' (e4m3: only S.1111.111), 'ieee' (e5m2) or 'none' (e2m1)."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    sign = np.where(codes >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    e = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    f = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = np.where(e == 0, f * 2.0 ** (1 - bias), (1 + f) * 2.0 ** (e - float(bias)))
    top = e == (1 << exponent_bits) - 1
    if special == "nan":
        value[top & (f == 1 - 2.0**-mantissa_bits)] = np.nan
    elif special == "ieee":
        value[top] = np.where(f[top] == 0, np.inf, np.nan)
    return sign * value


E4M3 = _table(4, 3, 7, "nan")
E5M2 = _table(5, 2, 15, "ieee")
E2M1 = _table(2, 1, 1, "none")
E3M2 = _table(3, 2, 3, "none")
E2M3 = _table(2, 3, 1, "none")
DECODE = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1, "e3m2": E3M2, "e2m3": E2M3}


def _encode(x, table: np.ndarray, mantissa_bits: int, min_exponent: int, nan_code: int, largest: float) -> np.ndarray:
    """Nearest-even code of each value, saturating at the largest finite one (.satfinite)."""
    x = np.asarray(x, np.float64)
    a = np.abs(np.nan_to_num(x, nan=0.0, posinf=1e300, neginf=-1e300))
    e = np.maximum(np.frexp(np.where(a == 0, 1, a))[1] - 1, min_exponent)
    unit = np.exp2(np.minimum(e, 1000) - float(mantissa_bits))
    rounded = np.minimum(np.rint(a / unit) * unit, largest)
    half = len(table) // 2
    positive = table[:half]
    finite = positive[np.isfinite(positive)]
    code = np.searchsorted(finite, rounded).astype(np.uint8)
    code |= np.where(np.signbit(x), half, 0).astype(np.uint8)
    return np.where(np.isnan(x), np.uint8(nan_code), code)


def encode_e4m3(x):
    return _encode(x, E4M3, 3, -6, 0x7F, 448.0)


def encode_e5m2(x):
    return _encode(x, E5M2, 2, -14, 0x7F, 57344.0)


def encode_e2m1(x):
    return _encode(x, E2M1, 1, 0, 0x7, 6.0)


ENCODE = {"e4m3": encode_e4m3, "e5m2": encode_e5m2, "e2m1": encode_e2m1}


def bf16_to_f32(x):
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _odd_f32(x):
    """float64 -> float32 rounded to odd, so that a second rounding is correct."""
    x = np.asarray(x, np.float64)
    y = x.astype(np.float32)
    back = y.astype(np.float64)
    bits = y.view(np.uint32).copy()
    inexact = np.isfinite(y) & (back != x)
    bits = np.where(inexact & (np.abs(back) > np.abs(x)), bits - np.uint32(1), bits)
    return np.where(inexact, bits | np.uint32(1), bits).view(np.float32)


def f32_to_bf16(x, rounding: str = "rn"):
    """Codes (uint16) of float64 or float32 values; NaN becomes 0x7fff (9.7.9.21 cvt)."""
    x = np.asarray(x)
    x = np.ascontiguousarray(_odd_f32(x) if x.dtype == np.float64 else x)
    bits = x.view(np.uint32)
    if rounding == "rn":
        with np.errstate(over="ignore"):
            rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    elif rounding == "rz":
        rounded = bits
    else:
        raise ValueError(rounding)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded >> np.uint32(16)).astype(np.uint16)


def pair(low, high):
    """Two 16-bit vectors -> one 32-bit vector (or two 8-bit ones -> 16)."""
    wide = {1: np.uint16, 2: np.uint32}[low.dtype.itemsize]
    return low.astype(wide) | (high.astype(wide) << wide(8 * low.dtype.itemsize))


def _lanes(x, dtype):
    return np.ascontiguousarray(x).view(dtype).reshape(len(x), -1)


def _join(x, dtype):
    return np.ascontiguousarray(x).view(dtype).reshape(-1)


# type -> (register lanes -> float32 values, values -> register lanes); values keep a trailing axis for packed types
PACKED = {
    "f16": (lambda x: x.astype(np.float32), lambda v: v.astype(np.float16)),
    "bf16": (bf16_to_f32, f32_to_bf16),
    "f16x2": (lambda x: _lanes(x, np.float16).astype(np.float32), lambda v: _join(v.astype(np.float16), np.uint32)),
    "bf16x2": (lambda x: bf16_to_f32(_lanes(x, np.uint16)), lambda v: _join(f32_to_bf16(v), np.uint32)),
    "f32x2": (lambda x: _lanes(x, np.float32), lambda v: _join(v.astype(np.float32).reshape(-1, 2), np.uint64)),
}
