"""The softmax of every tile: scores from tensor memory to P^T in shared memory, and the denominators.

The domains are those of hopper/softmax.py, whose parameters, fold and exact tile maxima these are, too; a thread holds
the same four tokens.  Two things differ: ``s`` is ``(hi + lo) . code 2^-9`` in float32, and ``p' = 2^(w - M) <= 1`` is
stored times ``PROB_TOP`` in two e4m3 terms (9 bits down to 2^-8 of the tile's heaviest token, 2^-17 of it below).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..common import device, fold, rows, schedule
from ..common.soft_cap import cap_logit
from ..hopper import folds
from ..hopper import softmax as parts
from . import channel_query, digits, lowfloat, packed, pipeline, smem, tcgen05, walk
from .config import STEP_TILES, STEP_TOKENS, TILE_TOKENS, DecodeConfig
from .tmem import TensorLedger, lane_address

PROB_LOG = 8.0
PROB_TOP = 2.0**PROB_LOG  # P = 1 in the units of its two terms; e4m3 ends at 448
HALVES = 2  # of a warp's lanes of tensor memory: two of a thread's four tokens each
BARRIER = 1  # of the four softmax warps


def _capped(y: packed.Pair, cap, v_log: packed.Pair, cfg: DecodeConfig) -> packed.Pair:
    both = ((y.low, v_log.low), (y.high, v_log.high))
    return packed.Pair(*(cap_logit(a, cap, b, cfg.options.wide_cap) for a, b in both))


@cute.jit
def fold_scores(s: list, params, factor: list, q_sum: list, cfg: cutlass.Constexpr, left=None, cap=None) -> list:
    """``w[head][pair of tokens]`` from the scores of both halves of the lanes (register ``4 j + 2 term + rh``).

    ``left``: tokens that count, from the thread's first on; needed where V has parameters per channel.  With K per
    channel ``factor`` and ``q_sum`` are those of channel_query.py.  ``cap``: as in hopper/softmax.py.
    """
    v_log = params.v_log
    if cutlass.const_expr(v_log is None):
        v_log = [Float32(cutlass.select_(i < left, Float32(0.0), Float32(float("-inf")))) for i in range(2 * HALVES)]
    v_log, channel = packed.pairs(v_log), folds.k_side(cfg).channel
    k_scale, k_bias = ([], []) if channel else (packed.pairs(x) for x in (params.k_scale, params.k_bias))
    w = []
    for j in cutlass.range_constexpr(cfg.heads_per_thread):
        row = []
        for i in cutlass.range_constexpr(HALVES):
            terms = [x.bitcast(Float32) for x in s[i][4 * j : 4 * j + 4]]
            first, second = packed.pairs(terms)
            raw = packed.fma(second, packed.same(Float32(digits.SECOND)), first) if cfg.digit_steps else first + second
            scale = packed.same(factor[j])
            if cutlass.const_expr(channel):
                x = packed.fma(raw, scale, packed.same(q_sum[j]))
                row.append(_capped(x, cap, v_log[i], cfg) if cfg.options.soft_cap else x + v_log[i])
            else:
                z = fold.k_token_score(raw, packed.same(q_sum[j]), k_scale[i], k_bias[i], fma=packed.fma)
                row.append(
                    _capped(z * scale, cap, v_log[i], cfg) if cfg.options.soft_cap else packed.fma(z, scale, v_log[i])
                )
        w.append(row)
    return w


def probs_offsets(warp, lane) -> list:
    """Where the thread's four tokens of its first head lie in P^T, per term; the next head is 8 rows on."""
    k = 32 * warp + 4 * (lane // 4)
    return [tcgen05.operand_byte(TILE_TOKENS, tcgen05.operand_row(lane % 4, term), k) for term in range(2)]


@cute.jit
def probabilities(w: list, top: list, params, rooms: list, cfg: cutlass.Constexpr) -> list:
    """Folded scores to P^T; per head (tile maximum, sum of the numerators, their sum times V's bias) of the thread.

    Both sums are in units of ``PROB_TOP``; with V per channel P is what the first adds up, and the second is 0.
    ``rooms``: shared addresses of the thread's first words, per term; a proxy fence must follow before the tensor cores
    read them.
    """
    bare = folds.v_side(cfg).channel
    if cutlass.const_expr(not bare):
        reciprocal, ratio = packed.pairs(params.v_reciprocal), packed.pairs(params.v_ratio)
    zero = packed.same(Float32(0.0))
    sums = []
    for j in cutlass.range_constexpr(cfg.heads_per_thread):
        # A tile with no token at all has the maximum -inf; any finite number serves instead.
        shift = Float32(PROB_LOG) - cute.arch.fmax(top[j], Float32(parts.LOWEST))
        total, offset, scaled = zero, zero, []
        for i in cutlass.range_constexpr(HALVES):
            x = w[j][i] + packed.same(shift)
            p = packed.Pair(device.exp2(x.low), device.exp2(x.high))
            total = total + p if cutlass.const_expr(bare) else packed.fma(p, reciprocal[i], total)
            if cutlass.const_expr(not bare):
                offset = fold.v_token_offset(offset, p, ratio[i], fma=packed.fma)
            scaled += [p.low, p.high]
        for room, word in zip(rooms, lowfloat.split(scaled), strict=True):
            device.store_shared(room + 8 * TILE_TOKENS * j, [word])
        sums.append((top[j], total.low + total.high, offset.low + offset.high))
    return sums


@cute.jit
def step_maxima(w: list, room, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> list:
    """``[tile][head]`` maxima of the thread's heads from ``w[tile][head][pair]``: over lanes by shuffles, over warps
    through shared memory.

    Holds one barrier of the softmax warps.
    """
    nh = cfg.heads_per_thread
    mine = [device.tree(cute.arch.fmax, [x for p in row for x in (p.low, p.high)]) for tile in w for row in tile]
    base, values, shared_bits = device.spread(cute.arch.fmax, mine, lane, (16, 8, 4))
    here = (lane & shared_bits) == 0
    for i in cutlass.range_constexpr(len(values)):
        at = room.maxima + 16 * (lane % 4 + 4 * (base + i)) + 4 * warp
        device.store_shared_where(here, at, values[i].bitcast(Uint32))
    cute.arch.barrier(barrier_id=BARRIER, number_of_threads=128)
    top = [smem.joined(room.maxima + 16 * (lane % 4 + 4 * i), cute.arch.fmax) for i in range(STEP_TILES * nh)]
    return [top[i * nh : (i + 1) * nh] for i in range(STEP_TILES)]


@cute.jit
def write_tile_sums(sums: list, room, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """Each warp's sums of P of every tile, ``sums[tile][head]``, for the correct warps: V's units are whole warps'."""
    mine = [row[1] for tile in sums for row in tile]
    base, values, shared_bits = device.spread(device.add, mine, lane, (16, 8, 4))
    for i in cutlass.range_constexpr(len(values)):
        at = room.tile_sums + 16 * (lane % 4 + 4 * (base + i)) + 4 * warp
        device.store_shared_where((lane & shared_bits) == 0, at, values[i].bitcast(Uint32))


def add_step(m: cute.Tensor, l: cute.Tensor, b: cute.Tensor, sums: list) -> None:  # noqa: E741
    """The thread's denominators and bias sums, in units of 2^m, take in ``sums[tile][head]``."""
    for j in range(len(sums[0])):
        new_m = device.tree(cute.arch.fmax, [m[j], *(tile[j][0] for tile in sums)])
        old = device.exp2(m[j] - new_m)
        m[j] = new_m
        denominator, offset = l[j] * old, b[j] * old
        for tile in sums:
            top, total, biases = tile[j]
            new = device.exp2(top - new_m)
            denominator, offset = device.fma(total, new, denominator), device.fma(biases, new, offset)
        l[j], b[j] = denominator, offset


@cute.jit
def write_sums(l: cute.Tensor, b: cute.Tensor, room, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:  # noqa: E741
    """Each warp's sums of an item, for the correct warps."""
    for j in cutlass.range_constexpr(cfg.heads_per_thread):
        total = device.butterfly(device.add, l[j], (4, 8, 16))
        offset = device.butterfly(device.add, b[j], (4, 8, 16))
        at = 16 * (lane % 4 + 4 * j) + 4 * warp
        device.store_shared_where(lane < 4, room.sums + at, total.bitcast(Uint32))
        device.store_shared_where(lane < 4, room.offsets + at, offset.bitcast(Uint32))


def load_factors(room, lane, cfg: DecodeConfig, number=0) -> tuple[list, list]:
    """(factor, q_sum) of the thread's heads; ``number``: channel_query.unit_number."""
    factor, q_sum = [], []
    for j in range(cfg.heads_per_thread):
        pair = device.load_shared(room.factors + 8 * (cfg.heads * number + lane % 4 + 4 * j), 2)
        factor.append(pair[0].bitcast(Float32))
        q_sum.append(pair[1].bitcast(Float32))
    return factor, q_sum


@dataclass
class Item:
    """What the steps of one segment share, of options."""

    soft_cap: Float32 | None  # in base 2
    beyond: Int32  # tokens of the request after the segment
    span: Int32 | None  # as in hopper/kernel.py's Item, and the rest
    q_len: Int32 | None
    limit: list
    window: Int32 | None


@cute.jit
def _item(args, request: Int32, head: Int32, cut: schedule.Cut, beyond: Int32, lane: Int32,
          cfg: cutlass.Constexpr) -> Item:  # fmt: skip
    limit = []
    if cutlass.const_expr(cfg.options.rows):
        item = rows.of_item(args, request, head, cfg.options)
        for j in cutlass.range_constexpr(cfg.heads_per_thread):
            limit.append(item.place(lane % 4 + 4 * j).token - cut.q_len)
    return Item(args.soft_cap_log2, beyond, cut.span, cut.q_len, limit, args.window)


def _mask(w: list, item: Item, left: Int32, first: Int32, cfg: DecodeConfig) -> list:
    """hopper/softmax.mask of pairs of tokens."""
    each = [[x for pair in row for x in (pair.low, pair.high)] for row in w]
    return [packed.pairs(row) for row in parts.mask(each, item, left, first, cfg)]


@cute.jit
def _step(state: tuple, query: tuple, shared, places: tuple, tensor: Int32, stage: tuple, use: tuple,
          tokens: Int32, item: Item, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """The tiles of one step.

    Args:
        state: (m, l, b).
        query: (factor, q_sum) of the thread's heads; with K per channel they are the step's.
        places: shared addresses of the lane's pairs of K and V, of the warp's parameters and of P^T per term.
        stage: slot and phase of the ring.
        use: buffer and phase of all else.
        tokens: of the segment from this step on.
        item: of :func:`_item`.
    """
    role, barriers, ledger = "softmax", shared.barriers, TensorLedger(cfg)
    k_pair, v_pair, room, probs = places
    slot, phase = stage
    tiles, part = range(STEP_TILES), cfg.param_bytes // (4 * STEP_TILES)
    pipeline.wait(barriers, "full", role, slot, phase)
    for i in cutlass.range_constexpr(STEP_TILES):
        at = slot * cfg.stage_bytes + i * cfg.tile_bytes
        token = i * TILE_TOKENS + 32 * warp + lane
        valid = token < tokens
        if cutlass.const_expr(cfg.options.window):
            valid = valid & (token >= tokens + item.beyond - item.span)
        parts.prepare_params(k_pair + at, v_pair + at, room + i * part + 4 * lane, Int32(valid), cfg)
    pipeline.arrive(barriers, "empty", role, slot, lane)  # and the lanes see each other's parameters
    params = [parts.load_params(room + i * part + 16 * (lane // 4), cfg) for i in tiles]
    pipeline.wait_full(barriers, "s_full", role, use)
    tcgen05.fence_after()
    queries, unit = [query] * STEP_TILES, warp // (4 // folds.k_side(cfg).units)
    if cutlass.const_expr(folds.k_side(cfg).channel):
        pipeline.wait_full(barriers, "q_full", role, use)
        numbers = smem.reduction(cfg, shared, use[0])
        queries = [load_factors(numbers, lane, cfg, channel_query.unit_number(cfg, i, unit)) for i in tiles]
        pipeline.arrive(barriers, "q_empty", role, use[0], lane)  # the scores are there: so is Q^T free
    w = []
    for i in cutlass.range_constexpr(STEP_TILES):
        column = tensor + ledger.tile("s", use[0], i)
        if cutlass.const_expr(folds.k_side(cfg).units > 1):
            column = column + cfg.columns * unit
        s = tcgen05.load_rows([lane_address(column, warp, half) for half in range(HALVES)], cfg.load_columns)
        left = tokens - (i * TILE_TOKENS + 32 * warp + 4 * (lane // 4)) if folds.v_side(cfg).channel else None
        folded = fold_scores(s, params[i], *queries[i], cfg, left, item.soft_cap)
        if cutlass.const_expr(cfg.options.rows):
            first = 32 * warp + 4 * (lane // 4)
            folded = _mask(folded, item, tokens + item.beyond - i * TILE_TOKENS, first, cfg)
        w.append(folded)
    tcgen05.fence_before()
    pipeline.wait_empty(barriers, "o_empty", role, use)
    top = step_maxima(w, smem.reduction(cfg, shared, use[0]), warp, lane, cfg)
    sums = [
        probabilities(w[i], top[i], params[i], [p + smem.probs_tile(cfg, use[0], i) for p in probs], cfg) for i in tiles
    ]
    if cutlass.const_expr(folds.v_side(cfg).channel):
        write_tile_sums(sums, smem.reduction(cfg, shared, use[0]), warp, lane, cfg)
    cute.arch.fence_proxy("async.shared", space="cta")
    pipeline.arrive(barriers, "p_full", role, use[0], lane)
    add_step(*state, sums)


@cute.jit
def softmax_warp(args, shared, tensor: Int32, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """Every tile of the CTA's range: warp ``w`` of 4."""
    role, barriers, nh, layout = "softmax", shared.barriers, cfg.heads_per_thread, cfg.layout
    k_pair = shared.ring + parts.pair_offset(cfg, warp, lane, layout.k_params_offset)
    v_pair = shared.ring + parts.pair_offset(cfg, warp, lane, layout.v_params_offset)
    probs = [shared.probs + x for x in probs_offsets(warp, lane)]
    places = k_pair, v_pair, shared.params + warp * (cfg.param_bytes // 4), probs
    m, l, b = (cute.make_rmem_tensor((nh,), Float32) for _ in range(3))  # noqa: E741
    work = schedule.start(args, Int32(0), 1, lane, cfg.options)
    request, head, tile, left = work.request, work.head, work.tile, work.left
    slot, phase = Int32(0), Int32(0)
    step, item = (Int32(0), Int32(0)), (Int32(0), Int32(0))  # (buffer, phase)
    while left > 0:
        cut = schedule.cut_of(args, request, cfg.options)
        n = cutlass.min(left, cut.tiles - tile)
        tokens = walk.tokens_of(cut, tile, n)
        seen = _item(args, request, head, cut, walk.tokens_left(cut, tile) - tokens, lane, cfg)
        m.fill(parts.LOWEST)
        l.fill(0.0)
        b.fill(0.0)
        query = None
        if cutlass.const_expr(not folds.k_side(cfg).channel):
            pipeline.wait_full(barriers, "q_full", role, item)
            query = load_factors(smem.reduction(cfg, shared, item[0]), lane, cfg)
        for _ in cutlass.range(walk.steps_of(n), unroll=1):
            _step((m, l, b), query, shared, places, tensor, (slot, phase), step, tokens, seen, warp, lane, cfg)
            tokens = tokens - STEP_TOKENS
            step = pipeline.after(step)
            slot, phase = pipeline.next_slot(slot, phase, cfg.stages)
        if cutlass.const_expr(not folds.k_side(cfg).channel):
            pipeline.arrive(barriers, "q_empty", role, item[0], lane)
        pipeline.wait_empty(barriers, "sums_empty", role, item)
        write_sums(l, b, smem.reduction(cfg, shared, item[0]), warp, lane, cfg)
        pipeline.arrive(barriers, "sums_full", role, item[0], lane)
        item = pipeline.after(item)
        left = left - n
        tile = Int32(0)
        request, head = walk.next_item(cut.heads, request, head)
