"""Q of one unit of tokens for a K with parameters per channel (fold.py's row 2): ``Q' = Q scale`` in two s8 terms.

``Q'`` is rounded like Q (query.py) with a power of two per head *and unit*, from the largest product of that unit: one
for the whole item would have to know the scales to come, and a bound from the largest scale is loose by as much as
the scales of channels differ.  Per (unit, head), in float32:

- ``factor``, which turns the integer product into a logit in base 2;
- ``offset``, the fold's constant as a logit: ``sm_scale log2(e) sum_c Q[h,c] bias[c]``, and with it the middle code
  times what the rounding of Q' left out, so that the rounding error is multiplied by codes around 0.

The four warps share out units and heads so that one of four units or more prepares its own tokens' queries.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..common import device, fold
from . import folds, query, smem


def _pairs(address, per_lane: int, dtype: str) -> tuple[list, list]:
    """(scales, biases) of the lane's channels."""
    step = min(4, per_lane)
    words = [w for i in range(0, per_lane, step) for w in _words(address + 4 * i, step)]
    pairs = [device.unpack_halves(w, dtype) for w in words]
    return [p[0] for p in pairs], [p[1] for p in pairs]


def _words(address, count: int) -> list:
    loaded = device.load_shared(address, count)
    return [loaded[i] for i in range(count)]


def _power_of_two(top) -> tuple[Float32, Float32]:
    """A power of two ``r`` with ``r top`` in [2^13, 2^14), and ``1 / r``: from the exponent alone (query.power_of_two
    takes up to one bit more); at most 2^126."""
    exponent = cutlass.max(top.bitcast(Int32) & 0x7F800000, Int32(14 << 23))
    return (Int32(2 * 127 + 13 << 23) - exponent).bitcast(Float32), (exponent - (13 << 23)).bitcast(Float32)


@cute.jit
def _head(scale: list, values: Int32, room: Int32, sm_scale: Float32, cfg: cutlass.Constexpr) -> tuple:
    """Store Q' of one head of one unit by one warp.

    Returns (the lane's channels of Q / f, the factor, what the rounding left out of the lane's channels of Q' in all).

    Args:
        values: shared address of the lane's float32 channels; ``room``: of the lane's first word of the operand.
    """
    per_lane = cfg.head_dim // 32
    step = min(4, per_lane)
    q = [w.bitcast(Float32) for i in range(0, per_lane, step) for w in _words(values + 4 * i, step)]
    x = [fold.k_channel_query(a, b) for a, b in zip(q, scale, strict=True)]
    top = device.tree(device.max_nan, [device.absolute(v) for v in x])
    top = device.warp_max(top.bitcast(Uint32)).bitcast(Float32)  # not negative: ordered like its bits, NaN on top
    up, down = _power_of_two(top)
    # 128 more: byte 1 is then the rounded high term, byte 0 the low one with its sign bit flipped.
    magic = Float32(query.MAGIC + 128.0)
    rounded = [device.fma(v, up, magic) for v in x]
    bits = [v.bitcast(Uint32) for v in rounded]
    left = device.tree(device.add, [device.fma(v, up, magic - r) for v, r in zip(x, rounded, strict=True)])
    for i in cutlass.range_constexpr(0, per_lane, step):
        four = (bits[i : i + step] * 2)[:4]
        first, second = device.byte_permute(four[0], four[1], 0x5410), device.byte_permute(four[2], four[3], 0x5410)
        high = device.byte_permute(first, second, 0x7531)
        low = device.byte_permute(first, second, 0x6420) ^ Uint32(0x80808080)
        query.store_bytes(room + 4 * i, [high], per_lane)
        query.store_bytes(room + (4 * i + 64), [low], per_lane)
    return q, device.fma(sm_scale, down, top - top), left * down  # NaN where Q' has one


@cute.jit
def prepare(args, shared, slot: Int32, seen: tuple, warp: Int32, lane: Int32, first: cutlass.Constexpr,
            cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """The queries of all units of the tile in ``slot``; ``seen``: which tokens count (:func:`smem.live_unit`).

    A barrier must follow.  By one math warpgroup, after the barrier that follows :func:`query.load_query`.
    ``first``: the tile may be empty.  A unit of no token that counts may have anything for parameters: its pairs are 0.
    """
    k = folds.k_side(cfg)
    per_lane, d = cfg.head_dim // 32, cfg.head_dim
    sharing = max(1, 4 // k.units)  # warps that prepare one unit
    mine = max(1, k.units // 4)  # units of one warp
    _, weight = query.position_weight(lane, cfg)
    weight = weight * args.sm_scale_log2
    stage = shared.ring + slot * cfg.stage_bytes
    lane_room = shared.query + smem.fragment_byte(d, 0, per_lane * lane)
    for n in cutlass.range_constexpr(mine):
        unit = Int32(0) if cutlass.const_expr(k.units == 1) else warp // sharing * mine + n
        pairs_at = smem.unit_pairs(cfg, k.unit, unit, cfg.layout.k_params_offset, seen)
        address = stage + pairs_at + 4 * per_lane * lane
        scale, bias = _pairs(address, per_lane, cfg.format.params)
        factors, offsets = [], []
        for j in cutlass.range_constexpr(cfg.heads // sharing):
            head = warp % sharing + sharing * j
            values = shared.values + 4 * (head * d + per_lane * lane)
            room = lane_room + unit * (cfg.columns * d) + head // 4 * (8 * d) + head % 4 * 128
            q, factor, left_out = _head(scale, values, room, args.sm_scale_log2, cfg)
            offset = left_out * Float32(cfg.format.k.max_code / 2)
            for a, b in zip(q, bias, strict=True):
                offset = fold.k_channel_offset(offset, a, b, fma=device.fma)
            factors.append(factor)
            offsets.append(offset * weight)
        base, offsets, shared_bits = device.spread(device.add, offsets, lane, (16, 8, 4, 2, 1))
        if cutlass.const_expr(first or k.units > 1):
            live = smem.live_unit(unit, k.unit, seen)
            factors, offsets = (
                [Float32(cutlass.select_(live, x, Float32(0.0))) for x in y] for y in (factors, offsets)
            )
        pairs = shared.factors + 8 * (unit * cfg.heads + warp % sharing)
        if cutlass.const_expr(len(factors) == 1):
            device.store_pair_where(lane == 0, pairs, factors[0].bitcast(Uint32), offsets[0].bitcast(Uint32))
        else:
            for i, offset in enumerate(offsets):
                at = pairs + 8 * sharing * (base + i) + 4
                device.store_shared_where((lane & shared_bits) == 0, at, offset.bitcast(Uint32))
            for j, factor in enumerate(factors):
                device.store_shared_where(lane == 0, pairs + 8 * sharing * j, factor.bitcast(Uint32))
