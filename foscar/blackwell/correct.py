"""The correct warps: O in float32 registers, rescaled to the running maximum step by step, and the output.

They keep their own running maximum from the tile maxima that the softmax left in shared memory: the same arithmetic on
the same numbers, so both sides agree on the unit 2^m.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common import device, schedule
from ..hopper.softmax import LOWEST
from . import packed, pipeline, smem, store, tcgen05, walk
from .config import STEP_TILES
from .tmem import TensorLedger, lane_address


@cute.jit
def add_step(m: cute.Tensor, o: cute.Tensor, top: list, d: list, cfg: cutlass.Constexpr) -> None:
    """O += the tiles' products with the weights 2^(tile maximum - new maximum); ``top[tile][head]``,
    ``d[tile][half][4 j + 2 term + rh]``.

    ``o[j * blocks + r]``: head ``lane % 4 + 4 j``, row block ``r``.
    """
    for j in cutlass.range_constexpr(cfg.heads_per_thread):
        new_m = device.tree(cute.arch.fmax, [m[j], *(x[j] for x in top)])
        old = packed.same(device.exp2(m[j] - new_m))
        new = [packed.same(device.exp2(x[j] - new_m)) for x in top]
        m[j] = new_m
        for half in cutlass.range_constexpr(cfg.head_dim // 64):
            at = (j * cfg.head_dim // 64 + half) * 2
            here = packed.Pair(o[at], o[at + 1]) * old
            for i in cutlass.range_constexpr(STEP_TILES):
                terms = [x.bitcast(Float32) for x in d[i][half][4 * j : 4 * j + 4]]
                first, second = packed.pairs(terms)
                here = packed.fma(first + second, new[i], here)
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
    step, item = (Int32(0), Int32(0)), (Int32(0), Int32(0))  # (buffer, phase)
    while left > 0:
        tiles = schedule.tiles_of(lengths[request])
        n = cutlass.min(left, tiles - tile)
        m.fill(LOWEST)
        o.fill(0.0)
        for _ in cutlass.range(walk.steps_of(n), unroll=1):
            pipeline.wait_full(barriers, "p_full", role, step)
            maxima = smem.reduction(cfg, shared, step[0]).maxima
            top = [
                [smem.joined(maxima + 16 * (lane % 4 + 4 * j + cfg.heads * i), cute.arch.fmax) for j in range(nh)]
                for i in range(STEP_TILES)
            ]
            pipeline.wait_full(barriers, "o_full", role, step)
            tcgen05.fence_after()
            halves = cfg.head_dim // 64
            columns = [tensor + ledger.tile("o", step[0], i) for i in range(STEP_TILES)]
            d = tcgen05.load_rows([lane_address(c, warp, i) for c in columns for i in range(halves)], cfg.load_columns)
            tcgen05.fence_before()
            pipeline.arrive(barriers, "o_empty", role, step[0], lane)
            add_step(m, o, top, [d[i * halves : (i + 1) * halves] for i in range(STEP_TILES)], cfg)
            step = pipeline.after(step)
        pipeline.wait_full(barriers, "sums_full", role, item)
        room = smem.reduction(cfg, shared, item[0])
        at = [16 * (lane % 4 + 4 * j) for j in range(nh)]
        l = [smem.joined(room.sums + x, device.add) for x in at]  # noqa: E741
        b = [smem.joined(room.offsets + x, device.add) for x in at]
        pipeline.arrive(barriers, "sums_empty", role, item[0], lane)
        store.finish(args, (m, l, b, o), work.at(request, head, tile, position, left), n == tiles, warp, lane, cfg)
        item = pipeline.after(item)
        left = left - n
        position = position + n
        tile = Int32(0)
        request, head = walk.next_item(args, request, head)
