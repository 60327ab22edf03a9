"""S^T = K Q^T of one tile: K's codes are masked into wgmma's A registers (u8), Q^T (s8) lies in shared memory.

Codes are integers and Q is rounded to 15 bits per head (query.py), so every score is exact in int32.

Warp ``w``, lane ``(g, t) = (lane // 4, lane % 4)`` holds tokens ``32 w + 4 g + 2 i + rh`` for the 64-row products
``i`` = 0, 1 and the row halves ``rh`` = 0, 1: the four tokens of one quad.  S^T comes back in the same threads, so a
thread's four scores of a head are neighbours in P^T too.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int8, Int32, Uint8, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ..common import device
from .config import TILE_TOKENS, DecodeConfig

HALVES = TILE_TOKENS // 64  # products of 64 tokens


def make_mma(cfg: DecodeConfig) -> cute.TiledMma:
    op = warpgroup.MmaI8Op(
        Uint8,
        Int8,
        Int32,
        (64, cfg.columns, 32),
        warpgroup.OperandSource.RMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    return cute.make_tiled_mma(op)


def accumulators(cfg: DecodeConfig) -> list[cute.Tensor]:
    """int32, one per 64 tokens; element ``4 j + 2 rh + term`` is token half ``rh``, head ``t + 4 j``."""
    shape = make_mma(cfg).partition_shape_C((64, cfg.columns))
    return [cute.make_rmem_tensor(shape, Int32) for _ in range(HALVES)]


def block_offset(cfg: DecodeConfig, block):
    """Where 16-token block ``block`` (a run-time value) of a tile begins: its page's record, its token in the page."""
    per_page = cfg.page_size // 16
    return (block // per_page) * cfg.layout.record_bytes, (block % per_page) * 16


def thread_offset(cfg: DecodeConfig, warp, lane):
    """Byte offset in the stage of this thread's first vector of K codes."""
    record, token = block_offset(cfg, 2 * warp + lane // 16)
    return record + token * cfg.layout.k_row_bytes + (lane % 16) * (4 * cfg.layout.k_vector_words)


def unpack(word: Uint32, bits: int) -> list[Uint32]:
    """A word of packed codes as u8 operand registers, one per bit position.

    At 2 bits positions 1 and 3 come out times 4; one shift keeps the factors that Q must absorb that small.
    """
    if bits == 2:
        high = word >> 4
        return [x & Uint32(m) for x in (word, high) for m in (0x03030303, 0x0C0C0C0C)]
    return [word & Uint32(0x0F0F0F0F), (word >> 4) & Uint32(0x0F0F0F0F)]


def load_codes(stage, i: int, cfg: DecodeConfig) -> list[tuple[int, Uint32]]:
    """(register, word) of wgmma's A operand for product ``i``: register ``4 step + 2 half + row``, and step ``s`` holds
    channels ``32 s .. 32 s + 31``.  mma.sync's A registers of one step are the same four."""
    bits = cfg.format.k.bits
    words_per_row = cfg.layout.k_row_bytes // 16
    vector = cfg.layout.k_vector_words
    planes = 2 * words_per_row // vector
    loaded = [device.load_shared(stage + (i * planes + v) * (64 * vector), vector) for v in range(planes)]
    found = []
    for j in range(2 * words_per_row):
        row, u = j // words_per_row, j % words_per_row
        for p, code in enumerate(unpack(loaded[j // vector][j % vector], bits)):
            step, half = divmod(p * words_per_row + u, 2)
            found.append((4 * step + 2 * half + row, code))
    return found


@cute.jit
def scores(s: list, stage: Int32, operand: cute.Tensor, cfg: cutlass.Constexpr) -> None:
    """Issue the products of one tile, one wgmma group per 64 tokens, without waiting.

    Args:
        s: :func:`accumulators`; valid after the groups are waited for.
        stage: shared address of this thread's first vector of K.
        operand: Q^T as B fragments.
    """
    mma = make_mma(cfg)  # local: its accumulate flag changes below
    for i in cutlass.range_constexpr(HALVES):
        a = mma.make_fragment_A(mma.partition_shape_A((64, cfg.head_dim)))
        registers = cute.recast_tensor(a, Uint32)
        for register, code in load_codes(stage, i, cfg):
            registers[register] = code
        warpgroup.fence()
        for k in cutlass.range_constexpr(cfg.head_dim // 32):
            mma.set(warpgroup.Field.ACCUMULATE, k != 0)
            cute.gemm(mma, s[i], a[None, None, k], operand[None, None, k], s[i])
        warpgroup.commit_group()
