"""Codes of a tile from the ring to tensor memory: masks only.

V and 4-bit K: a masked byte 0..15 read as e4m3 is the code times 2^-9, exactly; five instructions for 16 codes of 2
bits, three for 8 of 4.  At 2 bits positions 1 and 3 come out times 4, which the store takes out of the channel.
2-bit K: a masked nibble read as e2m1 is half the code; three instructions for 16 codes, no factors (digits.py).

Thread ``(w, g, t)`` reads what Hopper's math thread reads (hopper/qk.py, pv.py) and stores it as rows of A, 16 lanes at
a time (tcgen05.store_rows), so that products come back in the fragments of a wgmma accumulator:

- K: lane ``32 w + 16 i + 8 rh + g`` is token ``32 w + 4 g + 2 i + rh``; byte ``b`` of column ``4 j + t`` is channel
  ``16 j + 4 t + b``, at 2 bits its lower half, the upper one that channel + head_dim / 2;
- V: lane ``32 w + 8 r + g`` is channel ``32 r + 8 w + g`` (head_dim 64: r < 2, other lanes are never read); byte ``b``
  of column ``4 j + t`` is token ``16 j + 4 t + b``.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..common import device, schedule
from ..hopper import pv, qk
from . import digits, pipeline, tcgen05, walk
from .config import BUFFERS, STEP_TILES, DecodeConfig
from .tmem import SCALE_COLUMNS, TensorLedger, lane_address

HALVES = 2  # of a warp's 32 lanes of tensor memory


def positions(word: Uint32, bits: int) -> list[Uint32]:
    """A word of packed codes as e4m3 operand words, one per bit position."""
    return qk.unpack(word, bits)


def position_factors(cfg: DecodeConfig, warp) -> list[Float32]:
    """Per row block ``r`` of V: the reciprocal of the factor that masking leaves in the output channel."""
    if cfg.format.v.bits == 4:
        return [Float32(1.0)] * (cfg.head_dim // 32)
    if pv.split_positions(cfg):
        return [Float32(cutlass.select_(warp >= 2, Float32(0.25), Float32(1.0)))] * (cfg.head_dim // 32)
    rows = range(0, cfg.head_dim, 32)
    return [Float32(1.0 if c // cfg.layout.v_row_bytes % 2 == 0 else 0.25) for c in rows]


def k_operands(word: Uint32, cfg: DecodeConfig) -> list[Uint32]:
    """A word of packed codes of K as operand words, one per mask."""
    if not cfg.digit_steps:
        return positions(word, cfg.format.k.bits)
    return [word & Uint32(0x33333333), (word >> 2) & Uint32(0x33333333)]


@cute.jit
def load_k(stage: Int32, cfg: cutlass.Constexpr) -> list:
    """All words of K that this thread needs of a tile: ``[half][row][word of the row]``."""
    per_row, vector = cfg.layout.k_row_bytes // 16, cfg.layout.k_vector_words
    planes = 2 * per_row // vector
    words = []
    for i in cutlass.range_constexpr(HALVES):
        loaded = [device.load_shared(stage + (i * planes + v) * (64 * vector), vector) for v in range(planes)]
        flat = [x[k] for x in loaded for k in range(vector)]
        words.append([flat[:per_row], flat[per_row:]])
    return words


@cute.jit
def store_k(words: list, tensor: Int32, warp: Int32, cfg: cutlass.Constexpr) -> None:
    """To the columns at ``tensor``."""
    for i in cutlass.range_constexpr(HALVES):
        rows = [[k_operands(word, cfg) for word in row] for row in words[i]]
        count, per_row = len(rows[0][0]), len(rows[0])
        columns = [rows[rh][u][p] for p in range(count) for u in range(per_row) for rh in range(2)]
        tcgen05.store_rows(lane_address(tensor, warp, i), columns)


def store_scales(tensor: Int32, warp: Int32, cfg: DecodeConfig) -> None:
    """The scales of all steps of Q's digits, this warp's lanes; ``tensor``: of tensor memory."""
    ledger = TensorLedger(cfg)
    for step in range(cfg.digit_steps):
        for i in range(HALVES):
            room = lane_address(tensor + ledger.column("scale", step), warp, i)
            tcgen05.store_rows(room, [digits.scale_word(step)] * (SCALE_COLUMNS // 2))


def _v_codes(word: Uint32, split_mask, cfg: DecodeConfig) -> list[Uint32]:
    if split_mask is None:
        return positions(word, cfg.format.v.bits)
    return [word & split_mask, (word >> 4) & split_mask]


@cute.jit
def store_v(words: list, tensor: Int32, warp: Int32, cfg: cutlass.Constexpr) -> None:
    """``words`` of hopper/pv.py's load_words, ``[16-token group][word]``, to the columns at ``tensor``."""
    mask = None
    if cutlass.const_expr(pv.split_positions(cfg)):  # warps 0, 1: positions 0 and 2; warps 2, 3: positions 1 and 3
        mask = Uint32(0x03030303) << Uint32(2 * (warp // 2))
    groups = [[_v_codes(word, mask, cfg) for word in group] for group in words]
    blocks = [[codes[p] for p in range(len(group[0])) for codes in group] for group in groups]  # [group][r]
    for i in cutlass.range_constexpr(cfg.head_dim // 64):
        columns = [block[2 * i + rh] for block in blocks for rh in range(2)]
        tcgen05.store_rows(lane_address(tensor, warp, i), columns)


@cute.jit
def _step(shared, k_words: Int32, v_words: Int32, tensor: Int32, slot: Int32, phase: Int32, buffer: Int32,
          empty: Int32, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """The tiles of one step; ``empty``: the phase in which their buffer is free."""
    role, barriers, ledger = "unpack", shared.barriers, TensorLedger(cfg)
    pipeline.wait(barriers, "full", role, slot, phase)
    tiles = []
    for i in cutlass.range_constexpr(STEP_TILES):
        at = slot * cfg.stage_bytes + i * cfg.tile_bytes
        tiles.append((load_k(k_words + at, cfg), pv.load_words(v_words + at, cfg)))
    pipeline.arrive(barriers, "empty", role, slot, lane)
    pipeline.wait(barriers, "codes_empty", role, buffer, empty)
    tcgen05.fence_after()
    for i in cutlass.range_constexpr(STEP_TILES):
        store_k(tiles[i][0], tensor + ledger.tile("k", buffer, i), warp, cfg)
        store_v(tiles[i][1], tensor + ledger.tile("v", buffer, i), warp, cfg)
    tcgen05.wait_stores()
    tcgen05.fence_before()
    pipeline.arrive(barriers, "codes_full", role, buffer, lane)


@cute.jit
def unpack_warp(args, shared, tensor: Int32, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """Every tile of the CTA's range: warp ``w`` of 4."""
    role, barriers = "unpack", shared.barriers
    k_words = shared.ring + qk.thread_offset(cfg, warp, lane)
    v_words = shared.ring + pv.thread_offset(cfg, warp, lane)
    work = schedule.start(args, Int32(0), 1, lane, cfg.options)
    request, head, tile, left = work.request, work.head, work.tile, work.left
    slot, phase, buffer, empty = Int32(0), Int32(0), Int32(0), Int32(1)
    store_scales(tensor, warp, cfg)  # handed over with the first codes
    while left > 0:
        cut = schedule.cut_of(args, request, cfg.options)
        n = cutlass.min(left, cut.tiles - tile)
        for _ in cutlass.range(walk.steps_of(n), unroll=1):
            _step(shared, k_words, v_words, tensor, slot, phase, buffer, empty, warp, lane, cfg)
            buffer, empty = pipeline.after((buffer, empty))
            slot, phase = pipeline.next_slot(slot, phase, cfg.stages)
        left = left - n
        tile = Int32(0)
        request, head = walk.next_item(cut.heads, request, head)
    # The CTA's memory must outlive the commits that nobody else waits for; where there were none, the waits are over.
    for _ in cutlass.range_constexpr(BUFFERS):
        pipeline.wait(barriers, "codes_empty", role, buffer, empty)
        buffer, empty = pipeline.after((buffer, empty))
