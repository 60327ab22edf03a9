"""Q of one item: rounded to two terms per element, stored as the B operands of Q K^T.

Against codes in bytes the terms are e4m3, with a power of two ``r`` per head that takes the largest element to
[2^7, 2^8): ``q r ~ hi + lo``, ``lo`` the rounded remainder.  The 8 significant bits of a bfloat16 query are exact down
to 2^-9 of the largest element; otherwise the error is at most 2^-9 of the element and 2^-17 of the largest.  Against
codes in e2m1 they are the digits of an integer (digits.py): the error is at most 2^-17 of the largest element.
A float16 and a product with scales (channel_query.py) have more bits than a bfloat16: in e4m3 a second operand has two
terms of what the first leaves, and the error is at most 2^-16 of the largest element.

What the softmax needs is left in shared memory, two float32 per head, in the units of the raw product
``s = 2^-UNIT sum (q r) code``, UNIT 9 (a code's byte is the e4m3 number 2^-9 code) or digits.UNIT:

- ``factor`` turns a folded ``s`` into a logit in base 2: ``sm_scale log2(e) 2^UNIT / r``;
- ``q_sum``, the sum of the rounded Q in the units of ``s``, is what a bias of K multiplies (fold.k_token_score).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, Uint32

from ..common import device, rows, schedule
from . import digits, lowfloat, pipeline, smem, tcgen05
from .config import ROLES, DecodeConfig
from .tcgen05 import operand_byte
from .walk import next_item

TOP_EXPONENT = 7  # of the largest scaled element in e4m3, which ends at 448
WARPS = ROLES["query"]
LANES = (1, 2, 4, 8, 16)


def _power_of_two(top, cfg: DecodeConfig) -> tuple[Float32, Float32]:
    """``r``, which gives the largest element its exponent, and ``2^UNIT / r``, by the exponent bits in a safe range."""
    largest, unit = (digits.TOP_EXPONENT, digits.UNIT) if cfg.digit_steps else (TOP_EXPONENT, lowfloat.CODE_SHIFT)
    exponent = Uint32(cutlass.min(cutlass.max(Int32(top.bitcast(Uint32) >> 23), Int32(largest)), Int32(251)))
    up = (Uint32(2 * 127 + largest) - exponent) << 23
    down = (exponent + Uint32(unit - largest)) << 23
    return up.bitcast(Float32), down.bitcast(Float32)


def _store_terms(values: list, index, lane, room, cfg: DecodeConfig) -> Float32:
    """A head's e4m3 terms to their rows; returns the sum of this lane's rounded values."""
    high, low = lowfloat.split(values)
    for term, word in enumerate((high, low)):
        row = tcgen05.operand_row(index, term)
        _store_bytes(room + operand_byte(cfg.head_dim, row, lane * len(values)), word, len(values))
    rounded = [*lowfloat.values(high)[: len(values)], *lowfloat.values(low)[: len(values)]]
    return device.tree(device.add, rounded)


def _store_digits(values: list, index, lane, room, cfg: DecodeConfig) -> Float32:
    """A head's digits to their rows of every step; returns the sum of this lane's integers.

    The upper half of the lanes has the codes of the upper halves of the bytes: it takes the second term, the lower
    half the first.
    """
    n = digits.integers(values)
    first, second = digits.terms(n)
    upper = lane >= 16
    row = tcgen05.operand_row(index, cutlass.select_(upper, Int32(1), Int32(0)))
    at = room + operand_byte(cfg.head_dim // 2, row, lane % 16 * len(values))
    for step in range(cfg.digit_steps):
        own = cutlass.select_(upper, second[step], first[step])
        other = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, first[step], second[step]), offset=16)
        _store_bytes(at + step * digits.operand_bytes(cfg), digits.halves(own, other, upper), len(values))
    return Float32(device.tree(device.add, n))


def _store_bytes(address, word, count: int) -> None:
    """The lowest ``count`` (2 or 4) bytes of a word."""
    if count == 2:
        half = cute.make_ptr(Uint16, address, cute.AddressSpace.smem, assumed_align=2)
        cute.make_tensor(half, cute.make_layout(1))[0] = Uint16(word)
    else:
        device.store_shared(address, [word])


def store_rounded(x: list, index, lane, room, cfg: DecodeConfig) -> tuple[Float32, Float32, Float32]:
    """A head, ``x`` its channels of this lane, by one warp to the operand at ``room``.

    Returns:
        (its largest element, 2^UNIT / r, the sum of the lane's rounded elements in units of the operand).
    """
    top = device.butterfly(device.max_nan, device.tree(device.max_nan, [device.absolute(v) for v in x]), LANES)
    up, down = _power_of_two(top, cfg)
    scaled = [v * up for v in x]
    if cfg.digit_steps:
        return top, down, _store_digits(scaled, index, lane, room, cfg)
    if cfg.byte_steps == 1:
        return top, down, _store_terms(scaled, index, lane, room, cfg)
    most = [((v.bitcast(Uint32) + Uint32(0x8000)) & Uint32(0xFFFF0000)).bitcast(Float32) for v in scaled]  # 8 bits
    total = _store_terms(most, index, lane, room, cfg)
    rest = [a - b for a, b in zip(scaled, most, strict=True)]
    return top, down, total + _store_terms(rest, index, lane, room + cfg.columns * cfg.head_dim, cfg)


@cute.jit
def _terms(pairs: cute.Tensor, index: Int32, lane: Int32, args, room: Int32, factors: Int32,
           cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """Round one head by one warp and store its terms and the two numbers."""
    per_lane = cfg.head_dim // 32
    x = [v for i in range(per_lane // 2) for v in device.unpack_halves(pairs[i], cfg.q_dtype)]
    top, down, total = store_rounded(x, index, lane, room, cfg)
    unit = digits.UNIT if cfg.digit_steps else lowfloat.CODE_SHIFT
    q_sum = device.butterfly(device.add, total * Float32(2.0**-unit), LANES)
    if lane == 0:
        # A query with an infinity or a NaN must not become finite: the difference is then NaN.
        factor = args.sm_scale_log2 * down + (top - top)
        device.store_shared(factors + 8 * index, [factor.bitcast(Uint32), q_sum.bitcast(Uint32)])


@cute.jit
def query_warp(args, shared, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """Walk the items of the CTA's range, up to two ahead; warp ``w`` takes heads w, w + WARPS, ..."""
    role, barriers = "query", shared.barriers
    work = schedule.start(args, Int32(0), 1, lane, cfg.options)
    request, head, tile, left = work.request, work.head, work.tile, work.left
    buffer, phase = Int32(0), Int32(0)  # of the item
    while left > 0:
        cut = schedule.cut_of(args, request, cfg.options)
        n = cutlass.min(left, cut.tiles - tile)
        item_rows = rows.of_item(args, request, head, cfg.options)
        pairs = [rows.read_query(args, item_rows, warp + WARPS * j, lane, cfg) for j in range(cfg.heads // WARPS)]
        pipeline.wait_empty(barriers, "q_empty", role, (buffer, phase))
        room = shared.query + smem.query_operand(cfg, buffer)
        numbers = smem.reduction(cfg, shared, buffer)
        device.store_shared_where((warp == 0) & (lane == 0), numbers.tiles, n)
        for j in cutlass.range_constexpr(cfg.heads // WARPS):
            _terms(pairs[j], warp + WARPS * j, lane, args, room, numbers.factors, cfg)
        cute.arch.fence_proxy("async.shared", space="cta")
        pipeline.arrive(barriers, "q_full", role, buffer, lane)
        buffer, phase = pipeline.after((buffer, phase))
        left = left - n
        tile = Int32(0)
        request, head = next_item(cut.heads, request, head)
