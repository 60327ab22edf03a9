"""The correct warps: O in float32 registers, rescaled to the running maximum step by step, and the output.

They keep their own running maximum from the tile maxima that the softmax left in shared memory: the same arithmetic on
the same numbers, so both sides agree on the unit 2^m.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common import device, fold, schedule
from ..hopper import folds, pv_channel
from ..hopper.softmax import LOWEST
from . import lowfloat, packed, pipeline, smem, store, tcgen05, unpack, walk
from .config import STEP_TILES, STEP_TOKENS, TILE_TOKENS, DecodeConfig
from .tmem import TensorLedger, lane_address


def load_pairs(base, tokens, warp, cfg: DecodeConfig) -> list:
    """``[tile][unit][half]`` (scale, bias), packed pairs of row blocks, of a V with parameters per channel.

    The scale takes codes from the units of the product: V's position factors and 2^-9 are in it.

    Args:
        base: shared address of channel ``8 w + g`` of unit 0 in the slot.
        tokens: of the segment from this step on: a unit of none gets zeros, its bytes may be anything.
    """
    factors = [x * Float32(2.0**lowfloat.CODE_SHIFT) for x in unpack.position_factors(cfg, warp)]
    result = []
    for i in range(STEP_TILES):
        seen = (None, tokens - i * TILE_TOKENS)
        words = pv_channel.load_pairs(base + i * cfg.tile_bytes, range(folds.v_side(cfg).units), seen, cfg)
        tile = []
        for unit in words:
            found = [device.unpack_halves(w, cfg.format.params) for w in unit]
            scales = packed.pairs([s * f for (s, _), f in zip(found, factors, strict=True)])
            tile.append(list(zip(scales, packed.pairs([b for _, b in found]), strict=True)))
        result.append(tile)
    return result


@cute.jit
def add_step(m: cute.Tensor, o: cute.Tensor, top: list, d: list, cfg: cutlass.Constexpr, channel=None) -> None:
    """O += the tiles' products with the weights 2^(tile maximum - new maximum); ``top[tile][head]``,
    ``d[tile][unit * halves + half][4 j + 2 term + rh]``.

    ``o[j * blocks + r]``: head ``lane % 4 + 4 j``, row block ``r``.  ``channel``: of a V with parameters per channel,
    :func:`load_pairs` and the sums of P over its units, ``[tile][head][unit]``.
    """
    halves = cfg.head_dim // 64
    for j in cutlass.range_constexpr(cfg.heads_per_thread):
        new_m = device.tree(cute.arch.fmax, [m[j], *(x[j] for x in top)])
        old = packed.same(device.exp2(m[j] - new_m))
        new = [packed.same(device.exp2(x[j] - new_m)) for x in top]
        m[j] = new_m
        for half in cutlass.range_constexpr(halves):
            at = (j * cfg.head_dim // 64 + half) * 2
            here = packed.Pair(o[at], o[at + 1]) * old
            for i in cutlass.range_constexpr(STEP_TILES):
                for unit in cutlass.range_constexpr(folds.v_side(cfg).units):
                    terms = [x.bitcast(Float32) for x in d[i][unit * halves + half][4 * j : 4 * j + 4]]
                    first, second = packed.pairs(terms)
                    part = first + second
                    if cutlass.const_expr(channel is not None):
                        p_sum = packed.same(channel[1][i][j][unit])
                        part = fold.v_channel_output(part, p_sum, *channel[0][i][unit][half], fma=packed.fma)
                    here = packed.fma(part, new[i], here)
            o[at], o[at + 1] = here.low, here.high


def _unit_sums(address, cfg: DecodeConfig) -> list:
    """The sums of P over a tile's units from those of the four warps, of 32 tokens each."""
    four = device.load_shared(address, 4)
    parts, each = [four[i].bitcast(Float32) for i in range(4)], folds.v_side(cfg).unit // 32
    return [device.tree(device.add, parts[i : i + each]) for i in range(0, 4, each)]


@cute.jit
def correct_warp(args, shared, tensor: Int32, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """Every tile of the CTA's range: warp ``w`` of 4."""
    role, barriers, ledger, nh = "correct", shared.barriers, TensorLedger(cfg), cfg.heads_per_thread
    m = cute.make_rmem_tensor((nh,), Float32)
    o = cute.make_rmem_tensor((nh * cfg.head_dim // 32,), Float32)
    work = schedule.start(args, Int32(0), 1, lane, cfg.options)
    request, head, tile, position, left = work.request, work.head, work.tile, work.position, work.left
    step, item = (Int32(0), Int32(0)), (Int32(0), Int32(0))  # (buffer, phase)
    slot, phase, tokens, channel = Int32(0), Int32(0), Int32(0), folds.v_side(cfg).channel
    v_pairs = shared.ring + 4 * (8 * warp + lane // 4)
    while left > 0:
        cut = schedule.cut_of(args, request, cfg.options)
        n = cutlass.min(left, cut.tiles - tile)
        m.fill(LOWEST)
        o.fill(0.0)
        tokens = walk.tokens_of(cut, tile, n)
        for _ in cutlass.range(walk.steps_of(n), unroll=1):
            v_params = None
            if cutlass.const_expr(channel):
                pipeline.wait(barriers, "full", role, slot, phase)
                v_params = load_pairs(v_pairs + slot * cfg.stage_bytes, tokens, warp, cfg)
                pipeline.arrive(barriers, "empty", role, slot, lane)
                tokens = tokens - STEP_TOKENS
                slot, phase = pipeline.next_slot(slot, phase, cfg.stages)
            pipeline.wait_full(barriers, "p_full", role, step)
            numbers = smem.reduction(cfg, shared, step[0])
            at = [[16 * (lane % 4 + 4 * j + cfg.heads * i) for j in range(nh)] for i in range(STEP_TILES)]
            top = [[smem.joined(numbers.maxima + x, cute.arch.fmax) for x in row] for row in at]
            if cutlass.const_expr(channel):
                v_params = v_params, [[_unit_sums(numbers.tile_sums + x, cfg) for x in row] for row in at]
            pipeline.wait_full(barriers, "o_full", role, step)
            tcgen05.fence_after()
            halves = cfg.head_dim // 64
            units = folds.v_side(cfg).units
            columns = [
                tensor + ledger.tile("o", step[0], i) + cfg.columns * u for i in range(STEP_TILES) for u in range(units)
            ]
            d = tcgen05.load_rows([lane_address(c, warp, i) for c in columns for i in range(halves)], cfg.load_columns)
            tcgen05.fence_before()
            pipeline.arrive(barriers, "o_empty", role, step[0], lane)
            each = units * halves
            add_step(m, o, top, [d[i * each : (i + 1) * each] for i in range(STEP_TILES)], cfg, v_params)
            step = pipeline.after(step)
        pipeline.wait_full(barriers, "sums_full", role, item)
        room = smem.reduction(cfg, shared, item[0])
        at = [16 * (lane % 4 + 4 * j) for j in range(nh)]
        l = [smem.joined(room.sums + x, device.add) for x in at]  # noqa: E741
        b = [smem.joined(room.offsets + x, device.add) for x in at]
        pipeline.arrive(barriers, "sums_empty", role, item[0], lane)
        store.finish(args, (m, l, b, o), work.at(request, head, tile, position, left), n == cut.tiles, warp, lane, cfg)
        item = pipeline.after(item)
        left = left - n
        position = position + n
        tile = Int32(0)
        request, head = walk.next_item(cut.heads, request, head)
