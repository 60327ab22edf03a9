"""Two float32 at once: Blackwell's packed instructions issue once for both.

:class:`Pair` has ``*`` and ``+``, so the functions of common/fold.py take it, with :func:`fma` as their ``fma``.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32


@dataclass(frozen=True)
class Pair:
    """Two float32 of two tokens."""

    low: Float32
    high: Float32

    def __mul__(self, other: Pair) -> Pair:
        return Pair(*cute.arch.mul_packed_f32x2(_both(self), _both(other)))

    def __add__(self, other: Pair) -> Pair:
        return Pair(*cute.arch.add_packed_f32x2(_both(self), _both(other)))


def _both(x: Pair) -> tuple[Float32, Float32]:
    return x.low, x.high


def same(x) -> Pair:
    return Pair(x, x)


def pairs(values) -> list[Pair]:
    """Neighbours of a register tensor or list."""
    count = len(values) if isinstance(values, list) else cute.size(values)
    return [Pair(values[i], values[i + 1]) for i in range(0, count, 2)]


def fma(a: Pair, b: Pair, c: Pair) -> Pair:
    return Pair(*cute.arch.fma_packed_f32x2(_both(a), _both(b), _both(c)))
