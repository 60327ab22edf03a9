"""Q of every step for a K with parameters per channel (fold.py's row 2): ``Q' = Q scale`` of each unit of tokens.

The query warps walk steps, not items: they read the scales of a step from the ring and round Q' as query.py rounds Q,
with a power of two per head *and unit* from the largest product of that unit.  Instead of query.py's two numbers they
leave, ``[tile][unit][head]``:

- ``factor``, which turns the raw product into a logit in base 2;
- ``offset``, the fold's constant as a logit: ``sm_scale log2(e) sum_c Q[h,c] bias[c]``.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..common import device, fold, rows, schedule
from ..hopper import folds
from . import pipeline, query, smem
from .config import STEP_TILES, STEP_TOKENS, TILE_TOKENS, DecodeConfig
from .walk import next_item, steps_of, tokens_of


def unit_number(cfg: DecodeConfig, tile: int, unit):
    """Of a unit of a step; where its operand and its numbers lie goes by it."""
    return tile * folds.k_side(cfg).units + unit


def load_pairs(stage, tokens, lane, cfg: DecodeConfig) -> list[list[Uint32]]:
    """(scale, bias) words of the lane's channels of every unit of a step; zeros for a unit of no token that counts.

    Args:
        stage: shared address of the step.
        tokens: of the segment from this step on: beyond them the bytes may be anything.
    """
    k, per_lane = folds.k_side(cfg), cfg.head_dim // 32
    found = []
    for tile in range(STEP_TILES):
        for unit in range(k.units):
            at = stage + tile * cfg.tile_bytes + folds.unit_offset(cfg, k.unit, unit, cfg.layout.k_params_offset)
            words = device.load_shared(at + 4 * per_lane * lane, per_lane)
            live = tile * TILE_TOKENS + unit * k.unit < tokens
            found.append([Uint32(cutlass.select_(live, words[i], Uint32(0))) for i in range(per_lane)])
    return found


@cute.jit
def _unit(q: list, words: list, args, room: Int32, factors: Int32, warp: Int32, lane: Int32,
          cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """Q' of one unit for the warp's heads, ``q[j]`` their channels of this lane, as packed pairs."""
    params = [device.unpack_halves(w, cfg.format.params) for w in words]
    for j in cutlass.range_constexpr(len(q)):
        x = [v for i in range(cute.size(q[j])) for v in device.unpack_halves(q[j][i], cfg.q_dtype)]
        index = warp + query.WARPS * j
        scaled = [fold.k_channel_query(a, scale) for a, (scale, _) in zip(x, params, strict=True)]
        top, down, _ = query.store_rounded(scaled, index, lane, room, cfg)
        offset = Float32(0.0)
        for a, (_, bias) in zip(x, params, strict=True):
            offset = fold.k_channel_offset(offset, a, bias, fma=device.fma)
        offset = device.butterfly(device.add, offset, query.LANES) * args.sm_scale_log2
        factor = args.sm_scale_log2 * down + (top - top)  # NaN where Q' has one
        device.store_pair_where(lane == 0, factors + 8 * index, factor.bitcast(Uint32), offset.bitcast(Uint32))


@cute.jit
def _step(q: list, args, shared, slot: Int32, phase: Int32, use: tuple, n: Int32, tokens: Int32, warp: Int32,
          lane: Int32, cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """``n``: tiles of the segment; ``tokens``: of :func:`load_pairs`."""
    role, barriers, numbers = "query", shared.barriers, smem.reduction(cfg, shared, use[0])
    pipeline.wait(barriers, "full", role, slot, phase)
    words = load_pairs(shared.ring + slot * cfg.stage_bytes, tokens, lane, cfg)
    pipeline.arrive(barriers, "empty", role, slot, lane)
    pipeline.wait_empty(barriers, "q_empty", role, use)
    device.store_shared_where((warp == 0) & (lane == 0), numbers.tiles, n)
    for number in cutlass.range_constexpr(len(words)):
        room = shared.query + smem.query_operand(cfg, use[0], number)
        _unit(q, words[number], args, room, numbers.factors + 8 * cfg.heads * number, warp, lane, cfg)
    cute.arch.fence_proxy("async.shared", space="cta")
    pipeline.arrive(barriers, "q_full", role, use[0], lane)


@cute.jit
def query_warp(args, shared, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """Every step of the CTA's range; warp ``w`` takes heads w, w + WARPS, ..."""
    work = schedule.start(args, Int32(0), 1, lane, cfg.options)
    request, head, tile, left = work.request, work.head, work.tile, work.left
    slot, phase, step = Int32(0), Int32(0), (Int32(0), Int32(0))
    while left > 0:
        cut = schedule.cut_of(args, request, cfg.options)
        n = cutlass.min(left, cut.tiles - tile)
        tokens = tokens_of(cut, tile, n)
        item_rows = rows.of_item(args, request, head, cfg.options)
        count = cfg.heads // query.WARPS
        q = [rows.read_query(args, item_rows, warp + query.WARPS * j, lane, cfg) for j in range(count)]
        for _ in cutlass.range(steps_of(n), unroll=1):
            _step(q, args, shared, slot, phase, step, n, tokens, warp, lane, cfg)
            tokens = tokens - STEP_TOKENS
            step = pipeline.after(step)
            slot, phase = pipeline.next_slot(slot, phase, cfg.stages)
        left = left - n
        tile = Int32(0)
        request, head = next_item(cut.heads, request, head)
