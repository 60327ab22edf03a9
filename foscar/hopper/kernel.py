"""Split-KV decode attention over a packed paged cache, for Hopper (sm_90a).

Roles of one CTA (persistent, one per SM), W = math_warpgroups::

    warpgroup 0          load: warp w < W feeds math warpgroup w      (load.py; load_registers)
    warpgroups 1 .. W    math: one worker each                        (math_registers)

A worker is a pair (load warp, math warpgroup) with its own range of tiles of 128 tokens (common/schedule.py), its own
ring of ``stages`` slots, running (m, l, b, O) and named barrier (w + 1): pairs never wait for each other.

Edges::

    load --full[slot]--> math     1 arrival (expect_tx: the bytes of the tile's pages), completed by the bulk copies
    math --empty[slot]-> load     4 arrivals, one per math warp, after V's words are in registers
    math: barrier w + 1, 128 threads, twice a tile (maxima; P^T stored), once per item for Q, once for its sums

One tile i, in the order of the data (the scores of tile i + 1 are computed under the softmax of tile i)::

    load:  pages -> slot
    math:  wait full[i + 1] | V words, prepared parameters of i -> registers | S_i folded | K words of i + 1 -> u8
           A registers, Q K^T .. | maxima, barrier | parameters of i + 1 prepared | exp2, P^T -> shared |
           V words -> u8 A registers, release slot i | barrier | P V .. | wait | promote

While one warpgroup waits, the other two issue; that is why W = 3.

Other folds than one pair per token (folds.py) change the steps, not the edges:

- K per channel: Q' of i + 1 is prepared before the first barrier (channel_query.py), and Q K^T follows it;
- K in channel groups: Q K^T, folded at once, also follows the first barrier (qk_folded.py);
- V per channel: every unit of tokens is multiplied and promoted by itself (pv_channel.py); sums of P per unit go
  along with P^T; slot i is released after its last unit's parameters are loaded.

Tried and slower (INT2, 64 x 32K or 16 x 16K, page 64): four math warpgroups of 112 registers (8 heads: 375 us against
351); P V of tile i under the folding of tile i + 1 as well (8 heads: 57 us against 53, 4 heads: equal); the last bit
position of V unmasked and corrected in the store (moves take the masks' place).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from ..common import device, rows, schedule
from . import arguments, folds, load, pv, qk, qk_folded, query, smem, softmax, stages, store
from .config import TILE_TOKENS, DecodeConfig


@dataclass
class Args:
    """The kernel's arguments. Addresses are Int64; strides of q and out in elements, of the cache in bytes."""

    q: Int64  # [batch, kv_heads * group, head_dim] 16-bit
    q_stride: Int64
    q_head_stride: Int64
    cache: Int64  # records
    page_stride: Int64
    head_stride: Int64
    pages: Int64  # int32 page ids
    table_stride: Int64  # entries from one request's list to the next one's
    indptr: Int64  # int32 [batch + 1] starts of the lists, or 0: a dense table
    lengths: Int64  # int32 [batch]
    out: Int64  # [batch, kv_heads * group, head_dim], like q
    out_stride: Int64
    out_head_stride: Int64
    lse: Int64  # float32 [batch, kv_heads * group], or 0
    partial_out: Int64  # float32 [2 * workers, group, head_dim]
    partial_lse: Int64  # float32 [2 * workers, group], base 2
    batch: Int32
    kv_heads: Int32
    kv_heads_inverse: Int32  # plan.inverse_of
    group: Int32  # query heads per KV head
    workers_inverse: Int32  # of all in the grid
    sm_scale_log2: Float32  # sm_scale * log2(e); with a soft-cap times 2 / soft_cap (soft_cap.py)
    lse_unit: Float32  # 1: LSE in base 2; ln 2: natural
    # Of kernels that have the option; q's and the results' first dimension is query tokens where there is q_indptr.
    q_indptr: Int64 | None = None  # int32 [batch + 1], or 0: one query token per request
    window: Int32 | None = None  # keys that a row sees, at most 2^30
    soft_cap_log2: Float32 | None = None  # soft_cap * log2(e)
    sinks: Int64 | None = None  # float32 [kv_heads * group], natural logits
    out_scale: Float32 | None = None
    slots: Int64 | None = None  # int32 [batch], of the requests' windows; -1: a request without tokens
    packed_lens: Int64 | None = None  # int32 [slots]: tokens of the history; lengths count those in 16 bits too
    n_sink: Int32 | None = None
    exact_out: Int64 | None = None  # float32 [q rows, kv_heads * group, head_dim]: window_kernel.py's results
    exact_lse: Int64 | None = None  # float32 [q rows, kv_heads * group], base 2
    rows: Int32 | None = None  # of an item: the config's heads


@dataclass
class Thread:
    """This thread's fixed shared addresses and values."""

    warp: Int32  # in its warpgroup
    lane: Int32
    barrier: Int32
    token: Int32  # of a tile, whose parameters this thread prepares
    k: Int32
    k_pair: Int32
    v: Int32
    v_pair: Int32
    v_channel: Int32  # pair of the thread's first output channel, were V's parameters per channel
    prepared: Int32  # this thread's token in the warp's room
    params: Int32  # the four tokens of this thread's scores there
    probs: Int32
    masks: list


@dataclass
class Item:
    """What the tiles of one item share: per row of the thread, and for masks."""

    factor: list
    q_sum: list
    span: Int32 | None  # tokens from the earliest that a row sees to the end
    q_len: Int32 | None  # query tokens that are no further than the tokens here
    limit: list  # per row: its position less the request's length
    window: Int32 | None
    soft_cap: Float32 | None  # in base 2


def _thread(cfg: DecodeConfig, shared, worker, warp, lane) -> Thread:
    layout = cfg.layout
    column, k = 2 * (lane % 4), 32 * warp + 4 * (lane // 4)
    room = shared.params + warp * (cfg.param_bytes // 4)
    return Thread(
        warp=warp,
        lane=lane,
        barrier=worker + 1,
        token=32 * warp + lane,
        k=shared.ring + qk.thread_offset(cfg, warp, lane),
        k_pair=shared.ring + softmax.pair_offset(cfg, warp, lane, layout.k_params_offset),
        v=shared.ring + pv.thread_offset(cfg, warp, lane),
        v_pair=shared.ring + softmax.pair_offset(cfg, warp, lane, layout.v_params_offset),
        v_channel=shared.ring + 4 * (8 * warp + lane // 4),
        prepared=room + 4 * lane,
        params=room + 16 * (lane // 4),
        probs=shared.probs + smem.operand_byte(cfg.prob_columns, column, k),
        masks=pv.code_masks(cfg, warp),
    )


@cute.jit
def _tile(args, me: Thread, shared, state, s: list, operands: tuple, item: Item, slots: tuple, left: Int32,
          last: cutlass.Constexpr, cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """One tile, whose scores are in ``s``: softmax, P V, and meanwhile Q K^T of the tile ahead.

    ``slots``: this tile's and the one ahead's; ``left`` tokens count from this tile on; ``last``: nothing is ahead.
    """
    slot, ahead = slots
    v = folds.v_side(cfg)
    words = pv.load_words(me.v + slot * cfg.stage_bytes, cfg)
    params = softmax.load_params(me.params, cfg)
    w = softmax.fold_scores(s, params, item.factor, item.q_sum, cfg, item.soft_cap)
    seen = None  # a tile before the last is full
    if cutlass.const_expr(v.channel and (last or cfg.options.window)):
        seen = stages.seen_of(item, left, cfg)
        w = softmax.exclude(w, me.token // 4 * 4, seen)
    if cutlass.const_expr(cfg.options.rows):
        w = softmax.mask(w, item, left, 32 * me.warp + 4 * (me.lane // 4), cfg)
    if cutlass.const_expr(not last):
        stages.scores_ahead(me, args, shared, s, operands, item, ahead, left - TILE_TOKENS, True, False, cfg)
    top = softmax.tile_maxima(w, shared, me.warp, me.lane, me.barrier, cfg)
    if cutlass.const_expr(not last):
        stages.scores_ahead(me, args, shared, s, operands, item, ahead, left - TILE_TOKENS, False, False, cfg)
    sums = softmax.probabilities(w, top, params, me.probs, cfg)
    if cutlass.const_expr(v.channel):
        stages.channel_values(me, shared, state, sums, words, operands[1][0], slot, seen, cfg)
    else:
        stages.values(me, shared, state, sums, words, operands[1], slot, cfg)


@cute.jit
def _item(args, shared, request: Int32, head: Int32, cut: schedule.Cut, lane: Int32, cfg: cutlass.Constexpr) -> Item:
    """What load_query left in shared memory, and which tokens the thread's rows see."""
    factor, q_sum, limit = [], [], []
    for j in cutlass.range_constexpr(cfg.heads_per_thread if folds.k_side(cfg).plain else 0):
        pair = device.load_shared(shared.factors + 8 * (lane % 4 + 4 * j), 2)
        factor.append(pair[0].bitcast(Float32))
        q_sum.append(pair[1].bitcast(Float32))
    q_len = cut.q_len
    if cutlass.const_expr(cfg.options.rows):
        if cutlass.const_expr(cfg.options.exact):
            q_len = q_len - cut.recent
        item = rows.of_item(args, request, head, cfg.options)
        for j in cutlass.range_constexpr(cfg.heads_per_thread):
            limit.append(item.place(lane % 4 + 4 * j).token - q_len)
    return Item(factor, q_sum, cut.span, q_len, limit, args.window, args.soft_cap_log2)


@cute.jit
def math_warpgroup(args, shared, worker: Int32, thread: Int32, cfg: cutlass.Constexpr) -> None:
    """Walk the worker's range of tiles, item by item; ``thread`` counts within the warpgroup."""
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    me = _thread(cfg, shared, worker, warp, lane)
    k = folds.k_side(cfg)
    operands = (
        smem.fragments(qk.make_mma(cfg), shared.query_operand, thread) if k.plain else None,
        [smem.fragments(pv.make_mma(cfg), x, thread) for x in shared.probs_operands],
    )
    state = softmax.new_state(cfg)
    s = qk.accumulators(cfg) if k.plain else qk_folded.accumulators(cfg)
    work = schedule.start(args, worker, cfg.warpgroups, lane, cfg.options)
    request, head, tile, position, left = work.request, work.head, work.tile, work.position, work.left
    slot = Int32(0)
    phase = Int32(0)
    while left > 0:
        cut = schedule.cut_of(args, request, cfg.options)
        n = cutlass.min(left, cut.tiles - tile)
        query.load_query(args, request, head, shared, warp, lane, cfg)
        softmax.reset(state)
        cute.arch.barrier(barrier_id=me.barrier, number_of_threads=128)
        item = _item(args, shared, request, head, cut, lane, cfg)
        left_tokens = cut.length - (cut.first + tile) * TILE_TOKENS
        cute.arch.mbarrier_wait(shared.full + slot, phase)
        if cutlass.const_expr(k.plain):
            stages.prepare(me, item, slot, left_tokens, cfg)
            qk.scores(s, me.k + slot * cfg.stage_bytes, operands[0], cfg)
            warpgroup.wait_group(0)
        else:
            stages.scores_ahead(me, args, shared, s, operands, item, slot, left_tokens, True, True, cfg)
            cute.arch.barrier(barrier_id=me.barrier, number_of_threads=128)
            stages.scores_ahead(me, args, shared, s, operands, item, slot, left_tokens, False, True, cfg)
            cute.arch.barrier(barrier_id=me.barrier, number_of_threads=128)  # before Q' of the next tile is stored
        cute.arch.sync_warp()
        for _ in cutlass.range(n - 1, unroll=1):
            ahead = slot + 1
            wrap = Int32(ahead == cfg.stages)
            ahead = ahead - cfg.stages * wrap
            phase = phase ^ wrap
            cute.arch.mbarrier_wait(shared.full + ahead, phase)
            _tile(args, me, shared, state, s, operands, item, (slot, ahead), left_tokens, False, cfg)
            left_tokens = left_tokens - TILE_TOKENS
            slot = ahead
        _tile(args, me, shared, state, s, operands, item, (slot, slot), left_tokens, True, cfg)
        slot = slot + 1
        if slot == cfg.stages:
            slot = Int32(0)
            phase = phase ^ 1
        here = work.at(request, head, tile, position, left)
        if cutlass.const_expr(cfg.options.exact):
            cute.arch.griddepcontrol_wait()  # for window_kernel.py's results
        store.finish(args, state, here, n == cut.tiles, shared, warp, lane, me.barrier, cfg)
        left = left - n
        position = position + n
        tile = Int32(0)
        head = head + 1
        if head == cut.heads:
            head = Int32(0)
            request = request + 1


@cute.kernel
def decode_kernel(values: list, cfg: cutlass.Constexpr):
    """Raw pointers and numbers only (see :class:`Args` and arguments.py), so that any launcher can call it."""
    args = Args(**dict(zip(arguments.decode(cfg.options), values, strict=True)), rows=Int32(cfg.heads))
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    ledger = smem.allocate(cfg)
    if thread == 0:
        smem.init_barriers(ledger, cfg)
    cute.arch.sync_threads()
    # Launched with programmatic stream serialization: what came before on the stream is complete from here on.
    # The window kernel waited for that itself before it let this one start.
    if cutlass.const_expr(not cfg.options.exact):
        cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    if warp < 4:
        cute.arch.setmaxregister_decrease(cfg.tile.load_registers)
        if warp < cfg.warpgroups:
            load.load_warp(args, ledger.of(cfg, warp), warp, thread % 32, cfg)
    else:
        cute.arch.setmaxregister_increase(cfg.math_registers)
        worker = warp // 4 - 1
        math_warpgroup(args, ledger.of(cfg, worker), worker, thread % 128, cfg)


@cute.jit
def host(values: list, cfg: cutlass.Constexpr, stream):
    """Only to compile: the kernel is launched from its cubin."""
    decode_kernel(values, cfg).launch(
        grid=[1, 1, 1], block=[cfg.threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )  # fmt: skip
