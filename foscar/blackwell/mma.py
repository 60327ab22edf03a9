"""The MMA warp: S^T = K Q^T and O^T = V^T P^T of every tile, by one thread.

The scores of step i + 1 are issued before the products with V of step i, so that the tensor cores have work while the
softmax of step i runs.  Both accumulators begin anew with every tile: O is added up in float32 by the correct warps.
The loop takes BUFFERS steps a turn, so that buffers are constants.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common import device, schedule
from ..hopper import folds
from . import channel_query, digits, pipeline, smem, tcgen05, walk
from .config import BUFFERS, STEP_BYTES, STEP_TILES, TILE_TOKENS, DecodeConfig
from .tmem import TensorLedger

STEP = STEP_BYTES  # 32 elements in e4m3, 64 in e2m1
ROLE = "mma"


def _products(d, a, b, row_bytes: int, cfg: DecodeConfig, unit: int | None = None, more: bool = False) -> None:
    """All steps of one product, or of every ``unit`` bytes of the contraction index one product beside the other, by
    one thread; ``more``: added to what ``d`` holds."""
    instruction = tcgen05.instruction_descriptor(TILE_TOKENS, cfg.columns)
    first = tcgen05.operand_descriptor(b)
    for step in range(row_bytes // STEP):
        descriptor = first + (STEP * step >> 4)
        number, at = divmod(STEP * step, unit or row_bytes)
        target = d + cfg.columns * number if number else d
        tcgen05.multiply(target, a + STEP // 4 * step, descriptor, row_bytes, instruction, more or at > 0)


def _values_of(d, a, b, cfg: DecodeConfig) -> None:
    """All of V^T P^T of a tile, unit by unit, by one thread."""
    _products(d, a, b, TILE_TOKENS, cfg, folds.v_side(cfg).unit)


def _scores_of(d, a, b, tensor, cfg: DecodeConfig) -> None:
    """All steps of K Q^T, by one thread; ``tensor``: of tensor memory, ``b``: of Q's operands."""
    if not cfg.digit_steps:
        for step in reversed(range(cfg.byte_steps)):
            operand = b + step * (cfg.columns * cfg.head_dim) if step else b
            _products(d, a, operand, cfg.head_dim, cfg, more=step < cfg.byte_steps - 1)
        return
    instruction, row_bytes = tcgen05.digit_descriptor(TILE_TOKENS, cfg.columns), cfg.head_dim // 2
    scales = [tensor + TensorLedger(cfg).column("scale", step) for step in range(cfg.digit_steps)]
    for digit in reversed(range(cfg.digit_steps)):  # the small products first
        first = tcgen05.operand_descriptor(b + digit * digits.operand_bytes(cfg))
        for step in range(row_bytes // STEP):
            accumulate = digit < cfg.digit_steps - 1 or step > 0
            descriptor, both = first + (STEP * step >> 4), (scales[0], scales[digit])
            tcgen05.multiply(d, a + STEP // 4 * step, descriptor, row_bytes, instruction, accumulate, both)


@cute.jit
def _scores(shared, tensor: Int32, buffer: cutlass.Constexpr, phase: Int32, query: Int32,
            cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """Of the step in ``buffer``, in its ``phase``; ``query``: which buffer of Q."""
    ledger, barriers = TensorLedger(cfg), shared.barriers
    pipeline.wait(barriers, "codes_full", ROLE, buffer, phase)
    tcgen05.fence_after()
    for i in cutlass.range_constexpr(STEP_TILES):
        d, a = (tensor + ledger.tile(room, buffer, i) for room in ("s", "k"))
        for unit in cutlass.range_constexpr(folds.k_side(cfg).units):
            number = channel_query.unit_number(cfg, i, unit) if folds.k_side(cfg).channel else 0
            operand = shared.query + smem.query_operand(cfg, query, number)
            _scores_of(d + cfg.columns * unit if unit else d, a, operand, tensor, cfg)
    tcgen05.commit(pipeline.source(barriers, "s_full", ROLE, buffer))


@cute.jit
def _values(shared, tensor: Int32, buffer: cutlass.Constexpr, phase: Int32, cfg: cutlass.Constexpr) -> None:
    ledger, barriers = TensorLedger(cfg), shared.barriers
    pipeline.wait(barriers, "p_full", ROLE, buffer, phase)  # which the softmax gives only where O is free, too
    tcgen05.fence_after()
    for i in cutlass.range_constexpr(STEP_TILES):
        d, a = (tensor + ledger.tile(room, buffer, i) for room in ("o", "v"))
        _values_of(d, a, shared.probs + smem.probs_tile(cfg, buffer, i), cfg)
    tcgen05.commit(pipeline.source(barriers, "o_full", ROLE, buffer))
    tcgen05.commit(pipeline.source(barriers, "codes_empty", ROLE, buffer))


def _await_query(shared, buffer, phase, cfg: DecodeConfig) -> Int32:
    """The item's tiles; that Q^T is free again, the softmax says, which waits for the scores."""
    pipeline.wait_full(shared.barriers, "q_full", ROLE, (buffer, phase))
    n = Int32(device.load_shared(smem.reduction(cfg, shared, buffer).tiles, 1)[0])
    cute.arch.mbarrier_arrive(pipeline.source(shared.barriers, "q_empty", ROLE, buffer))
    return n


@cute.jit
def _walk(shared, tensor: Int32, left: Int32, cfg: cutlass.Constexpr) -> None:
    """By one thread: every step of the CTA's ``left`` tiles; what item they belong to, the query warps say."""
    query, q_phase = Int32(1), Int32(1)  # of the item at hand: before the first
    rest, before, phase = Int32(0), Int32(0), Int32(0)  # steps of the item not issued; whether one is half done
    while rest + left + before > 0:
        for buffer in cutlass.range_constexpr(BUFFERS):
            more = rest + left
            if more > 0:
                if cutlass.const_expr(folds.k_side(cfg).channel):  # a query of every step
                    query, q_phase = pipeline.after((query, q_phase))
                    n = _await_query(shared, query, q_phase, cfg)
                    if rest == 0:
                        rest = walk.steps_of(n)
                        left = left - n
                elif rest == 0:
                    query, q_phase = pipeline.after((query, q_phase))
                    n = _await_query(shared, query, q_phase, cfg)
                    rest = walk.steps_of(n)
                    left = left - n
                rest = rest - 1
                _scores(shared, tensor, buffer, phase, query, cfg)
            if before > 0:
                _values(shared, tensor, 1 - buffer, phase ^ (1 - buffer), cfg)  # of the step before
            before = more
        phase = phase ^ 1


@cute.jit
def mma_warp(args, shared, tensor: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    tiles = schedule.start(args, Int32(0), 1, lane, cfg.options).left
    with cute.arch.elect_one():
        _walk(shared, tensor, tiles, cfg)


assert BUFFERS == 2  # the step before is in the other buffer
