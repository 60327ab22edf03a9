"""Steps of a tile whose order depends on the folds (folds.py): scores of the tile ahead, and P V; see kernel.py.

``me``: kernel.Thread; ``item``: kernel.Item.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from ..common import device
from . import channel_query, folds, pv, pv_channel, qk, qk_folded, softmax


def _release(barrier: cute.Pointer, lane) -> None:
    """The warp has read all it needs of a slot."""
    cute.arch.sync_warp()
    device.arrive_where(lane == 0, barrier.toint())


def seen_of(item, left, cfg) -> tuple:
    """Which tokens of a tile count (smem.live_unit), those that a row sees: with a sliding window from some token on (0
    or less: all are)."""
    return (left - item.span if cfg.options.window else None), left


@cute.jit
def prepare(me, item, slot: Int32, left: Int32, cfg: cutlass.Constexpr) -> None:
    """The parameters of the tile in ``slot``, from which on ``left`` tokens count (more than TILE_TOKENS: all)."""
    at = slot * cfg.stage_bytes
    valid = me.token < left
    if cutlass.const_expr(cfg.options.window):
        valid = valid & (me.token >= seen_of(item, left, cfg)[0])
    softmax.prepare_params(me.k_pair + at, me.v_pair + at, me.prepared, Int32(valid), cfg)


@cute.jit
def scores_ahead(me, args, shared, s: list, operands: tuple, item, slot: Int32, left: Int32,
                 before: cutlass.Constexpr, first: cutlass.Constexpr, cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """What is done for the scores of the tile in ``slot``, from which on ``left`` tokens count: ``before`` the first
    barrier, or after it.

    ``first``: of an item, so that the tile may have no token.
    """
    k = folds.k_side(cfg)
    if cutlass.const_expr(before):
        if cutlass.const_expr(k.plain):
            qk.scores(s, me.k + slot * cfg.stage_bytes, operands[0], cfg)
        if cutlass.const_expr(k.channel):
            channel_query.prepare(args, shared, slot, seen_of(item, left, cfg), me.warp, me.lane, first, cfg)
    else:
        prepare(me, item, slot, left, cfg)  # between the barriers: all lanes have loaded, none loads before the next
        if cutlass.const_expr(not k.plain):
            qk_folded.scores(s, shared, slot, me.k, seen_of(item, left, cfg), me.warp, me.lane, cfg)


@cute.jit
def values(me, shared, state, sums: list, words: list, operands: list, slot: Int32,
           cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """P V of a tile and its promotion, V with parameters per token."""
    blocks = range(pv.row_blocks(cfg))
    if cutlass.const_expr(folds.k_side(cfg).plain):
        warpgroup.wait_group(0)  # Q K^T is long done; its A registers are free for V's (16 heads spill without)
    if cutlass.const_expr(pv.in_turn(cfg)):
        _release(shared.empty + slot, me.lane)
        cute.arch.barrier(barrier_id=me.barrier, number_of_threads=128)
        weights = [softmax.advance(state, sums, j, cfg) for j in range(cfg.heads_per_thread)]
        for i in cutlass.range_constexpr(len(blocks)):
            codes = pv.unpack(words, me.masks, i, 0, cfg)
            (d,) = pv.accumulate([codes], [pv.operand_of(operands, i, cfg)], 0, cfg)
            warpgroup.wait_group(0)
            softmax.promote_block(state, weights, d, i, cfg)
    else:
        codes = [pv.unpack(words, me.masks, i, 0, cfg) for i in blocks]
        _release(shared.empty + slot, me.lane)
        cute.arch.barrier(barrier_id=me.barrier, number_of_threads=128)
        d = pv.accumulate(codes, [pv.operand_of(operands, i, cfg) for i in blocks], 0, cfg)
        warpgroup.wait_group(0)
        softmax.promote(state, sums, d, cfg)


@cute.jit
def channel_values(me, shared, state, sums: list, words: list, operand: cute.Tensor, slot: Int32, seen,
                   cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """P V of a tile and its promotion, V with parameters per channel; ``seen``: of pv_channel.load_pairs."""
    units = folds.v_side(cfg).units
    base = me.v_channel + slot * cfg.stage_bytes
    early = pv_channel.load_pairs(base, range(units if units <= pv_channel.EARLY else 0), seen, cfg)
    pv_channel.store_sums(sums, shared, me.warp, me.lane, cfg)
    if cutlass.const_expr(folds.k_side(cfg).plain):
        warpgroup.wait_group(0)
    if cutlass.const_expr(len(early) > 0):
        _release(shared.empty + slot, me.lane)
    cute.arch.barrier(barrier_id=me.barrier, number_of_threads=128)
    pv_channel.add_tile(state, sums, words, early, base, seen, me, shared, operand, cfg)
    if cutlass.const_expr(len(early) == 0):
        _release(shared.empty + slot, me.lane)
