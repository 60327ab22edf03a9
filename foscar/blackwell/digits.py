"""Q as signed digits of base 8 in e2m1, for K's 2-bit codes as dense 4-bit operands (kind::mxf4).

A code 0..3 read as e2m1 is half of it, so a word of 16 codes is two operand words by two masks and one shift
(unpack.py), and no position leaves a factor.  e2m1 holds 0, 1/2, 1, 3/2 and 2, half of every digit -4 .. 4: Q is
rounded to an integer of six such digits per element, ``q r ~ n = sum d_i 8^i``, ``|n| <= 2^17`` with a power of two
``r`` per head.  The upper three digits are the first term, the lower three the second, a column of the B operand each;
the three digits of a term are three operands, whose products the tensor core adds with the scale ``8^-step`` of their
block::

    first + second / 512 = 2^-17 sum n code        first = sum_step 8^-step sum (d_(5 - step) / 2) (code / 2)

Every sum is exact where the accumulator keeps 20 bits.  All scales of one operand are the same byte, so where in their
columns the tensor core looks for them does not matter.
"""

from __future__ import annotations

import operator

import cutlass
from cutlass import Float32, Int32, Uint32

from ..common import device
from .config import DIGIT_STEPS, DecodeConfig

TOP_EXPONENT = 16  # of the largest scaled element: |n| <= 2^17
UNIT = 17  # log2 of n's unit over that of the products
SECOND = 2.0**-9  # the unit of the second term in that of the first
OFFSET = 4 * (8 ** (2 * DIGIT_STEPS) - 1) // 7  # makes all digits 0 .. 7, the first 0 .. 8
MAGIC = 1.5 * 2.0**23  # float32 from here to 2^24 are the integers


def scale_word(step: int) -> Uint32:
    """The ue8m0 scales 8^-step of four blocks; those of K are ``scale_word(0)``."""
    return Uint32(0x01010101 * (127 - 3 * step))


def integers(x: list) -> list[Int32]:
    """Float32 of less than 2^22 rounded to the nearest integer."""
    bits = Float32(MAGIC).bitcast(Int32)
    return [(v + Float32(MAGIC)).bitcast(Int32) - bits for v in x]


def terms(n: list) -> list[list[Uint32]]:
    """``[term][step]``: digits of up to four integers as e2m1 codes, one in the lower half of each byte."""
    biased = [Uint32(v + OFFSET) for v in n]
    words = []
    for place in range(2 * DIGIT_STEPS - 1, -1, -1):
        keep = Uint32(15 if place == 2 * DIGIT_STEPS - 1 else 7)
        word = device.tree(operator.or_, [((v >> (3 * place)) & keep) << (8 * i) for i, v in enumerate(biased)])
        # 4 .. 8 are the codes 0 .. 4; 0 .. 3 are minus 4 .. 1: the sign bit and 4 - digit = (digit ^ 3) + 1.
        negative = ((word >> 2) | (word >> 3)) & Uint32(0x01010101) ^ Uint32(0x01010101)
        low, four = word & Uint32(0x03030303), (word & Uint32(0x08080808)) >> 1
        words.append((low ^ (negative * 3)) + negative * 9 + four)
    return [words[:DIGIT_STEPS], words[DIGIT_STEPS:]]


def operand_bytes(cfg: DecodeConfig) -> int:
    """Of the B operand of one step: a row of head_dim / 2 bytes per column."""
    return cfg.columns * cfg.head_dim // 2


def halves(own: Uint32, other: Uint32, upper) -> Uint32:
    """Own codes and those of the lane 16 away in one word; ``upper``: own are the upper halves of the bytes."""
    return cutlass.select_(upper, own << 4 | other, own | other << 4)
