"""The correct warps: O in float32 registers, rescaled to the running maximum tile by tile, and the output.

They keep their own running maximum from the tile maxima that the softmax left in shared memory: the same arithmetic on
the same numbers, so both sides agree on the unit 2^m.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common import device, schedule
from ..hopper.softmax import LOWEST
from . import packed, pipeline, smem, store, tcgen05
from .tmem import TensorLedger, lane_address
from .walk import next_item


def joined(address, op) -> Float32:
    """One number from the four warps' parts."""
    four = device.load_shared(address, 4)
    return device.tree(op, [four[i].bitcast(Float32) for i in range(4)])


@cute.jit
def add_tile(m: cute.Tensor, o: cute.Tensor, top: list, d: list, cfg: cutlass.Constexpr) -> None:
    """O += the tile's product with the weight 2^(tile maximum - new maximum); ``d[half][4 j + 2 term + rh]``.

    ``o[j * blocks + r]``: head ``lane % 4 + 4 j``, row block ``r``.
    """
    nh = cfg.heads_per_thread
    for j in cutlass.range_constexpr(nh):
        new_m = cute.arch.fmax(m[j], top[j])
        old, new = device.exp2(m[j] - new_m), device.exp2(top[j] - new_m)
        m[j] = new_m
        for half in cutlass.range_constexpr(cfg.head_dim // 64):
            terms = [x.bitcast(Float32) for x in d[half][4 * j : 4 * j + 4]]
            first, second = packed.pairs(terms)
            product = first + second
            at = (j * cfg.head_dim // 64 + half) * 2
            here = packed.Pair(o[at], o[at + 1]) * packed.same(old)
            here = packed.fma(product, packed.same(new), here)
            o[at], o[at + 1] = here.low, here.high


@cute.jit
def correct_warp(args, shared, tensor: Int32, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """Every tile of the CTA's range: warp ``w`` of 4."""
    role, barriers, ledger, nh = "correct", shared.barriers, TensorLedger(cfg), cfg.heads_per_thread
    m = cute.make_rmem_tensor((nh,), Float32)
    o = cute.make_rmem_tensor((nh * cfg.head_dim // 32,), Float32)
    work = schedule.start(args, Int32(0), 1, lane)
    lengths = schedule.lengths_of(args)
    request, head, tile, position, left = work.request, work.head, work.tile, work.position, work.left
    count, item = Int32(0), Int32(0)
    while left > 0:
        tiles = schedule.tiles_of(lengths[request])
        n = cutlass.min(left, tiles - tile)
        m.fill(LOWEST)
        o.fill(0.0)
        for _ in cutlass.range(n, unroll=1):
            pipeline.wait_full(barriers, "p_full", role, count)
            maxima = smem.reduction(cfg, shared, count & 1).maxima
            top = [joined(maxima + 16 * (lane % 4 + 4 * j), cute.arch.fmax) for j in range(nh)]
            pipeline.wait_full(barriers, "o_full", role, count)
            tcgen05.fence_after()
            column = tensor + ledger.column("o", count & 1)
            halves = [lane_address(column, warp, i) for i in range(cfg.head_dim // 64)]
            d = tcgen05.load_rows(halves, cfg.load_columns)
            tcgen05.fence_before()
            pipeline.arrive(barriers, "o_empty", role, count & 1, lane)
            add_tile(m, o, top, d, cfg)
            count = count + 1
        pipeline.wait_full(barriers, "sums_full", role, item)
        room = smem.reduction(cfg, shared, item & 1)
        at = [16 * (lane % 4 + 4 * j) for j in range(nh)]
        l = [joined(room.sums + x, device.add) for x in at]  # noqa: E741
        b = [joined(room.offsets + x, device.add) for x in at]
        pipeline.arrive(barriers, "sums_empty", role, item & 1, lane)
        store.finish(args, (m, l, b, o), work.at(request, head, tile, position, left), n == tiles, warp, lane, cfg)
        item = item + 1
        left = left - n
        position = position + n
        tile = Int32(0)
        request, head = next_item(args, request, head)
