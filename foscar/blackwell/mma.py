"""The MMA warp: S^T = K Q^T and O^T = V^T P^T of every tile, by one thread.

The scores of tile i + 1 are issued before the product with V of tile i, so that the tensor cores have work while the
softmax of tile i runs.  Both accumulators begin anew with every tile: O is added up in float32 by the correct warps.
The loop takes CODE_BUFFERS tiles a turn, so that buffers and most phases are constants.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common import device, schedule
from . import digits, pipeline, smem, tcgen05
from .config import BUFFERS, CODE_BUFFERS, TILE_TOKENS, DecodeConfig
from .tmem import TensorLedger

STEP = 32  # bytes of an operand's row of one instruction: 32 elements in e4m3, 64 in e2m1
ROLE = "mma"


def _products(d, a, b, row_bytes: int, cfg: DecodeConfig) -> None:
    """All steps of one product, by one thread."""
    instruction = tcgen05.instruction_descriptor(TILE_TOKENS, cfg.columns)
    first = tcgen05.operand_descriptor(b)
    for step in range(row_bytes // STEP):
        descriptor = first + (STEP * step >> 4)
        tcgen05.multiply(d, a + STEP // 4 * step, descriptor, row_bytes, instruction, step > 0)


def _scores_of(d, a, b, tensor, cfg: DecodeConfig) -> None:
    """All steps of K Q^T, by one thread; ``tensor``: of tensor memory, ``b``: of Q's operands."""
    if not cfg.digit_steps:
        _products(d, a, b, cfg.head_dim, cfg)
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
def _scores(shared, tensor: Int32, codes: cutlass.Constexpr, phase: Int32, item: Int32, cfg: cutlass.Constexpr) -> None:
    """``codes``: the tile's buffer of codes, in its ``phase``."""
    ledger, barriers, buffer = TensorLedger(cfg), shared.barriers, codes % BUFFERS
    pipeline.wait(barriers, "codes_full", ROLE, codes, phase)
    tcgen05.fence_after()
    d, a = tensor + ledger.column("s", buffer), tensor + ledger.column("k", codes)
    _scores_of(d, a, shared.query + (item & 1) * cfg.query_bytes, tensor, cfg)
    tcgen05.commit(pipeline.source(barriers, "s_full", ROLE, buffer))


@cute.jit
def _values(shared, tensor: Int32, codes: cutlass.Constexpr, cfg: cutlass.Constexpr) -> None:
    ledger, barriers, buffer = TensorLedger(cfg), shared.barriers, codes % BUFFERS
    phase = codes // BUFFERS % 2  # of everything double-buffered: the same in every turn
    pipeline.wait(barriers, "p_full", ROLE, buffer, phase)  # which the softmax gives only where O is free, too
    tcgen05.fence_after()
    d, a = tensor + ledger.column("o", buffer), tensor + ledger.column("v", codes)
    _products(d, a, shared.probs + buffer * cfg.prob_bytes, TILE_TOKENS, cfg)
    tcgen05.commit(pipeline.source(barriers, "o_full", ROLE, buffer))
    tcgen05.commit(pipeline.source(barriers, "codes_empty", ROLE, codes))


@cute.jit
def _walk(shared, tensor: Int32, total: Int32, cfg: cutlass.Constexpr) -> None:
    """By one thread: every tile of the CTA's range; what item they belong to, the query warps say."""
    barriers = shared.barriers
    item = Int32(-1)  # of the scores
    rest = Int32(0)  # tiles of the item that are not issued
    for turn in cutlass.range((total + CODE_BUFFERS) // CODE_BUFFERS, unroll=1):
        phase = turn & 1
        for codes in cutlass.range_constexpr(CODE_BUFFERS):
            count = CODE_BUFFERS * turn + codes
            if count < total:
                if rest == 0:
                    item = item + 1
                    pipeline.wait_full(barriers, "q_full", ROLE, item)
                    rest = Int32(device.load_shared(smem.reduction(cfg, shared, item & 1).tiles, 1)[0])
                    cute.arch.mbarrier_arrive(pipeline.source(barriers, "q_empty", ROLE, item & 1))
                rest = rest - 1
                _scores(shared, tensor, codes, phase, item, cfg)
            if (count > 0) & (count <= total):
                _values(shared, tensor, (codes - 1) % CODE_BUFFERS, cfg)  # of the tile before


@cute.jit
def mma_warp(args, shared, tensor: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    tiles = schedule.start(args, Int32(0), 1, lane).left
    with cute.arch.elect_one():
        _walk(shared, tensor, tiles, cfg)


assert CODE_BUFFERS == 2 * BUFFERS == 4
