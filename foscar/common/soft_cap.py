"""The logits' soft-cap, of every kernel that has one (common/options.py has the formula)."""

from __future__ import annotations

import math

import cutlass
from cutlass import Float32

from . import device

# Under a wide soft-cap tanh(u) is the start of its series where |2 u log2(e)| is below this: the next term is 6e-8 of
# it there, and 1 - 2 / (1 + e^2u), off by 2^-22, is 2e-6 of it.
SERIES_BELOW = 0.288


def cap_logit(y, cap, v_log, wide: bool) -> Float32:
    """``cap tanh(u) + v_log`` from ``y = 2 u log2(e)``; ``u`` is the logit over the soft-cap, ``cap`` in base 2.

    tanh.approx is off by up to 2^-11 of a logit, eight times what an LSE may be off by.
    """
    result = device.fma(Float32(-2.0), device.reciprocal(device.exp2(y) + Float32(1.0)), Float32(1.0))
    if wide:
        half = 0.5 * math.log(2.0)  # u / y
        square = y * y
        series = device.fma(square, Float32(half**5 * 2 / 15), Float32(-(half**3) / 3))
        series = device.fma(series, square, Float32(half)) * y
        near = device.absolute(y) < Float32(SERIES_BELOW)
        result = Float32(cutlass.select_(near, series, result))
    return device.fma(result, cap, v_log)
