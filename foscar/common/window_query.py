"""Q as the operand of a product with keys in 16 bits (window_kernel.py has the order of its registers)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from . import device, rows
from .window_config import ROWS, WARPS


def _pairs(values: list, dtype: str) -> list[Uint32]:
    return [device.pack_halves(a, b, dtype) for a, b in zip(values[::2], values[1::2], strict=True)]


def terms_of(values: list, count: int, dtype: str) -> list[list[Uint32]]:
    """Floats, an even number, as the sum of ``count`` packed lists of 16-bit ones."""
    terms = []
    for i in range(count):
        terms.append(_pairs(values, dtype))
        if i + 1 < count:
            rounded = [x for word in terms[-1] for x in device.unpack_halves(word, dtype)]
            values = [x - y for x, y in zip(values, rounded, strict=True)]
    return terms


@cute.jit
def stage_query(args, item: rows.ItemRows, query: Int32, factors: Int32, warp: Int32, lane: Int32,
                 cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """Q in the order of the operand's registers, and what each row's raw scores are to be multiplied by."""
    per_lane = cfg.head_dim // 32
    for half in cutlass.range_constexpr(ROWS // WARPS):
        index = warp + WARPS * half
        pairs = rows.read_query(args, item, index, lane, cfg)
        terms = [[pairs[i] for i in range(per_lane // 2)]]
        factor = args.sm_scale_log2
        if cutlass.const_expr(cfg.q_dtype != cfg.dtype):
            x = [v for word in terms[0] for v in device.unpack_halves(word, cfg.q_dtype)]
            if cutlass.const_expr(cfg.scales_query):
                largest = device.tree(device.max_nan, [device.absolute(v) for v in x])
                top = device.butterfly(device.max_nan, largest, (1, 2, 4, 8, 16))
                exponent = cutlass.max(Int32(top.bitcast(Uint32) >> 23), Int32(15))
                up = (Uint32(268) - Uint32(exponent) << 23).bitcast(Float32)  # the largest lands in [2^14, 2^15)
                x = [v * up for v in x]
                factor = factor * (Uint32(exponent) - Uint32(14) << 23).bitcast(Float32)
            terms = terms_of(x, cfg.query_terms, cfg.dtype)
        channel = per_lane * lane
        place = channel // 32 * 512 + (index % 8 * 4 + channel % 32 // 8) * 16 + channel % 8 * 2
        for term, words in enumerate(terms):
            device.store_shared(query + (2 * term + half) * (16 * cfg.head_dim) + place, words)
        if lane == 0:
            device.store_shared(factors + 4 * index, [factor.bitcast(Uint32)])
