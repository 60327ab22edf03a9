"""Q of one item: rounded to integers of 16 bits in two s8 terms, stored as the B operand of Q K^T.

With a power of two ``r`` per head (the largest element lands in (LARGEST / 2, LARGEST]) and the codes' position factor
``f`` (qk.unpack leaves a code multiplied by 1 or 4), ``round(Q r / f) = 256 hi + lo`` with ``hi`` and ``lo`` in
-128 .. 127.  The elements of a bfloat16 query down to 1/32 of the largest are thereby exact; the others are off by at
most 2 parts in 2^14 of it.  What the softmax needs is left in shared memory, two float32 per head, in the units of the
raw product ``s = sum (256 hi + lo) f code``:

- ``factor`` turns a folded ``s`` into a logit in base 2: ``sm_scale log2(e) / r``;
- ``q_sum``, the sum of the rounded Q in the units of ``s``, is what a bias of K multiplies (fold.k_token_score).

A K with several channel groups per token has both per group, ``r`` too, and ``q_sum`` times ``factor``.  A K with
parameters per channel has a query of its own in every unit of tokens (folds.py): here the item's Q is stored as
float32, divided by ``f``, and channel_query.py rounds it for each unit.

Measured against two e4m3 terms of Q, codes as e4m3 subnormals: the same instructions in the loop but for one
conversion per score, and logits 20 times closer (e4m3 sums keep 14 bits and truncate, which biases the LSE).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint16, Uint32

from ..common import device, rows
from . import folds, smem

LARGEST = 32639  # 127 * 256 + 127
MAGIC = 12582912.0  # 1.5 * 2^23: adding it leaves a float's rounded integer, two's complement, in the low bits


def power_of_two(top) -> tuple[Float32, Float32]:
    """The largest power of two ``r`` with ``r top <= LARGEST``, and ``1 / r``; at most 2^126."""
    # r top <= LARGEST where r (top 2^15 / LARGEST) <= 2^15: the exponent of that product, a hair larger, decides.
    bits = (top * Float32(32768.0 / LARGEST * (1 + 2.0**-22))).bitcast(Uint32)
    exponent = cutlass.max(Int32(bits >> 23), Int32(15))
    up = (Uint32(2 * 127 + 14) - Uint32(exponent)) << 23
    down = (Uint32(exponent) - Uint32(14)) << 23
    return up.bitcast(Float32), down.bitcast(Float32)


def position_weight(lane, cfg) -> tuple:
    """K's position p = channel // row_bytes is unpacked times ``f = 4^(p % 2)`` where a byte holds four codes: (odd, f)
    of the lane's channels."""
    odd = Int32(0)
    if cutlass.const_expr(cfg.format.k.bits == 2):
        odd = (lane >> 3) & 1
    return odd, cutlass.select_(odd == 1, Float32(4.0), Float32(1.0))


def store_bytes(address, words: list, per_lane: int) -> None:
    """Words of four channels each; of two channels half a word."""
    if per_lane == 2:
        half = cute.make_ptr(Uint16, address, cute.AddressSpace.smem, assumed_align=2)
        cute.make_tensor(half, cute.make_layout(1))[0] = Uint16(words[0])
    else:
        device.store_shared(address, words)


@cute.jit
def _terms(pairs: cute.Tensor, index: Int32, lane: Int32, args, shared, cfg: cutlass.Constexpr) -> None:
    """Round one head by one warp and store both terms and the two numbers."""
    per_lane, parts = cfg.head_dim // 32, folds.k_side(cfg).parts
    lanes = (1, 2, 4, 8, 16)[: 5 - (parts - 1).bit_length()]  # those that share a channel group
    x = [v for i in range(per_lane // 2) for v in device.unpack_halves(pairs[i], cfg.q_dtype)]
    magnitude = [device.absolute(v) for v in x]
    top = device.butterfly(device.max_nan, device.tree(device.max_nan, magnitude), lanes)
    up, down = power_of_two(top)
    odd, weight = position_weight(lane, cfg)
    scaled = up * cutlass.select_(odd == 1, Float32(0.25), Float32(1.0))
    rounded = [device.fma(v, scaled, Float32(MAGIC)) for v in x]
    total = device.tree(device.add, [v - Float32(MAGIC) for v in rounded])
    q_sum = device.butterfly(device.add, total * weight, lanes)
    low = [v.bitcast(Uint32) for v in rounded]
    high = [(v + Uint32(128)) >> 8 for v in low]
    k = lane * per_lane
    for term, values in enumerate((high, low)):
        column = 2 * index + term
        words = device.pack_bytes(values)
        if cutlass.const_expr(parts > 1):
            for i, word in enumerate(words):
                store_bytes(shared.query + smem.fragment_byte(cfg.head_dim, column, k + 4 * i), [word], per_lane)
        else:
            store_bytes(shared.query + smem.operand_byte(cfg.columns, column, k), words, per_lane)
    # A query with an infinity or a NaN must not become finite: the two differences are then NaN.
    if cutlass.const_expr(parts > 1):
        if lane % (32 // parts) == 0:
            factor = args.sm_scale_log2 * down + (top - top)
            at = shared.factors + 8 * (index * parts + lane // (32 // parts))
            device.store_shared(at, [factor.bitcast(Uint32), (factor * q_sum).bitcast(Uint32)])
    else:
        if lane == 0:
            factor = args.sm_scale_log2 * down + (top - top)
            device.store_shared(shared.factors + 8 * index, [factor.bitcast(Uint32), q_sum.bitcast(Uint32)])


@cute.jit
def _values(pairs: cute.Tensor, index: Int32, lane: Int32, shared, cfg: cutlass.Constexpr) -> None:
    """One head as float32, divided by ``f``."""
    per_lane = cfg.head_dim // 32
    odd, _ = position_weight(lane, cfg)
    scale = cutlass.select_(odd == 1, Float32(0.25), Float32(1.0))
    x = [v * scale for i in range(per_lane // 2) for v in device.unpack_halves(pairs[i], cfg.q_dtype)]
    address = shared.values + 4 * (index * cfg.head_dim + per_lane * lane)
    for i in cutlass.range_constexpr(0, per_lane, 4):
        device.store_shared(address + 4 * i, [v.bitcast(Uint32) for v in x[i : i + 4]])


@cute.jit
def load_query(args, request: Int32, head: Int32, shared, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """By one math warpgroup: warp ``w`` (0..3) takes heads w, w + 4, ...; ends before the warpgroup's barrier."""
    item = rows.of_item(args, request, head, cfg.options)
    pairs = [rows.read_query(args, item, warp + 4 * j, lane, cfg) for j in range(cfg.heads_per_thread)]
    for j in cutlass.range_constexpr(cfg.heads_per_thread):
        if cutlass.const_expr(folds.k_side(cfg).channel):
            _values(pairs[j], warp + 4 * j, lane, shared, cfg)
        else:
            _terms(pairs[j], warp + 4 * j, lane, args, shared, cfg)
    cute.arch.fence_proxy("async.shared", space="cta")
