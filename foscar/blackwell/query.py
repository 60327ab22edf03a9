"""Q of one item: rounded to two e4m3 terms per element, stored as the B operand of Q K^T.

With a power of two ``r`` per head (the largest element lands in [2^7, 2^8)) and the codes' position factor ``f``
(unpack.py leaves a code multiplied by 1 or 4): ``q r / f ~ hi + lo``, ``lo`` the rounded remainder.  The 8 significant
bits of a bfloat16 query are exact down to 2^-9 of the largest element; otherwise the error is at most 2^-9 of the
element and 2^-17 of the largest.  What the softmax needs is left in shared memory, two float32 per head, in the units
of the raw product ``s = sum (hi + lo) f 2^-9 code`` (a code's byte is the e4m3 number 2^-9 code):

- ``factor`` turns a folded ``s`` into a logit in base 2: ``sm_scale log2(e) 2^9 / r``;
- ``q_sum``, the sum of the rounded Q in the units of ``s``, is what a bias of K multiplies (fold.k_token_score).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, Uint32

from ..common import device, rows, schedule
from ..hopper import query as hopper_query
from . import lowfloat, pipeline, smem
from .config import ROLES
from .tcgen05 import operand_byte
from .walk import next_item

TOP_EXPONENT = 7  # of the largest scaled element; e4m3 ends at 448
WARPS = ROLES["query"]


def _power_of_two(top) -> tuple[Float32, Float32]:
    """``r = 2^(TOP_EXPONENT - floor(log2 top))`` and ``2^9 / r``, by the exponent bits, kept in a safe range."""
    exponent = Uint32(cutlass.min(cutlass.max(Int32(top.bitcast(Uint32) >> 23), Int32(7)), Int32(251)))
    up = (Uint32(2 * 127 + TOP_EXPONENT) - exponent) << 23
    down = (exponent + Uint32(lowfloat.CODE_SHIFT - TOP_EXPONENT)) << 23
    return up.bitcast(Float32), down.bitcast(Float32)


@cute.jit
def _terms(pairs: cute.Tensor, index: Int32, lane: Int32, args, room: Int32, factors: Int32,
           cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """Round one head by one warp and store both terms and the two numbers."""
    per_lane = cfg.head_dim // 32
    lanes = (1, 2, 4, 8, 16)
    x = [v for i in range(per_lane // 2) for v in device.unpack_halves(pairs[i], cfg.q_dtype)]
    top = device.butterfly(device.max_nan, device.tree(device.max_nan, [device.absolute(v) for v in x]), lanes)
    up, down = _power_of_two(top)
    # K's position p = channel // row_bytes is unpacked times 4^(p % 2) where a byte holds four codes.
    odd = Int32(0)
    if cutlass.const_expr(cfg.format.k.bits == 2):
        odd = (lane >> 3) & 1
    weight = cutlass.select_(odd == 1, Float32(4.0), Float32(1.0))
    scaled = up * cutlass.select_(odd == 1, Float32(0.25), Float32(1.0))
    values = [v * scaled for v in x]
    high, low = lowfloat.split(values)
    rounded = [*lowfloat.values(high)[:per_lane], *lowfloat.values(low)[:per_lane]]
    total = device.tree(device.add, rounded)
    q_sum = device.butterfly(device.add, total * (weight * Float32(2.0**-lowfloat.CODE_SHIFT)), lanes)
    k = lane * per_lane
    for term, word in enumerate((high, low)):
        address = room + operand_byte(cfg.head_dim, 2 * index + term, k)
        if cutlass.const_expr(per_lane == 2):
            half = cute.make_ptr(Uint16, address, cute.AddressSpace.smem, assumed_align=2)
            cute.make_tensor(half, cute.make_layout(1))[0] = Uint16(word)
        else:
            device.store_shared(address, [word])
    if lane == 0:
        # A query with an infinity or a NaN must not become finite: the difference is then NaN.
        factor = args.sm_scale_log2 * down + (top - top)
        device.store_shared(factors + 8 * index, [factor.bitcast(Uint32), q_sum.bitcast(Uint32)])


@cute.jit
def query_warp(args, shared, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """Walk the items of the CTA's range, up to two ahead; warp ``w`` takes heads w, w + WARPS, ..."""
    role, barriers = "query", shared.barriers
    work = schedule.start(args, Int32(0), 1, lane)
    lengths = schedule.lengths_of(args)
    request, head, tile, left = work.request, work.head, work.tile, work.left
    item = Int32(0)
    while left > 0:
        n = cutlass.min(left, schedule.tiles_of(lengths[request]) - tile)
        buffer = item & 1
        item_rows = rows.of_item(args, request, head, cfg.options)
        pairs = [hopper_query._read(args, item_rows, warp + WARPS * j, lane, cfg) for j in range(cfg.heads // WARPS)]
        pipeline.wait_empty(barriers, "q_empty", role, item)
        room = shared.query + buffer * cfg.query_bytes
        numbers = smem.reduction(cfg, shared, buffer)
        device.store_shared_where((warp == 0) & (lane == 0), numbers.tiles, n)
        for j in cutlass.range_constexpr(cfg.heads // WARPS):
            _terms(pairs[j], warp + WARPS * j, lane, args, room, numbers.factors, cfg)
        cute.arch.fence_proxy("async.shared", space="cta")
        pipeline.arrive(barriers, "q_full", role, buffer, lane)
        item = item + 1
        left = left - n
        tile = Int32(0)
        request, head = next_item(args, request, head)
