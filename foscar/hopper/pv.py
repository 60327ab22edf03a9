"""O^T += V^T P^T of one tile: V's codes are masked into wgmma's A registers, P^T (two u8 terms) in shared memory.

A is u8: a mask at bit position ``p`` leaves the code times ``2^(bits p)``, a factor of the output channel that the
store takes out.  Sums are exact in int32; each tile's are added to O in float32 with the weight of the tile's own
maximum.  Warp ``w``, lane ``(g, t)``, 64-row product ``m``, row half ``rh``: channel ``64 m + 32 rh + 8 w + g``.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ..common import device
from . import folds
from .config import TILE_TOKENS, DecodeConfig

PROB_TOP = 65535.0  # P = 1 as an integer of two u8 terms
# 240 (a 4-bit code at position 1) x 65535 x TILE_TOKENS must stay below 2^31.
assert 240 * int(PROB_TOP) * TILE_TOKENS < 2**31


def make_mma(cfg: DecodeConfig) -> cute.TiledMma:
    op = warpgroup.MmaI8Op(
        Uint8,
        Uint8,
        Int32,
        (64, cfg.prob_columns, 32),
        warpgroup.OperandSource.RMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    return cute.make_tiled_mma(op)


def split_positions(cfg: DecodeConfig) -> bool:
    """Whether the bytes of one row serve two warps (16 row bytes: head_dim 64 at 2 bits), each half of the codes."""
    return cfg.layout.v_row_bytes == 16


def thread_offset(cfg: DecodeConfig, warp, lane):
    """Byte offset from the start of a V block of this thread's first vector."""
    groups = cfg.layout.v_block_tokens // 16
    first = warp % 2 if split_positions(cfg) else warp
    return 4 * groups * (32 * first + lane)


def code_masks(cfg: DecodeConfig, warp) -> list[Uint32]:
    """One mask per register that a word gives, in ascending bit position."""
    bits = cfg.format.v.bits
    ones = ((1 << bits) - 1) * 0x01010101
    if split_positions(cfg):  # warps 0, 1: positions 0 and 2; warps 2, 3: positions 1 and 3
        shift = Uint32(2 * (warp // 2))
        return [Uint32(ones << (4 * rh)) << shift for rh in range(2)]
    return [Uint32(ones << (bits * p)) for p in range(8 // bits)]


def position_factors(cfg: DecodeConfig, warp) -> list[Float32]:
    """Per row block ``2 m + rh``: the reciprocal of the factor that masking leaves in the output channel."""
    layout, bits = cfg.layout, cfg.format.v.bits
    common = Float32(1.0)
    if split_positions(cfg):
        common = cutlass.select_(warp >= 2, Float32(2.0**-bits), Float32(1.0))
    rows = range(0, cfg.head_dim, 32)
    return [common * Float32(2.0 ** (-bits * (c // layout.v_row_bytes))) for c in rows]


@cute.jit
def load_words(stage: Int32, cfg: cutlass.Constexpr) -> list:
    """All words of V that this thread needs of a tile: ``[16-token group][word]``."""
    layout = cfg.layout
    n = layout.v_block_tokens
    groups = n // 16
    per_group = max(1, layout.v_row_bytes // 32)
    words = []
    for block in cutlass.range_constexpr(TILE_TOKENS // n):
        page, token = divmod(block * n, cfg.page_size)
        base = page * layout.record_bytes + layout.v_offset + token * layout.v_row_bytes
        vectors = [device.load_shared(stage + (base + 512 * groups * u), groups) for u in range(per_group)]
        words.extend([[v[i] for v in vectors] for i in range(groups)])
    return words


def in_turn(cfg: DecodeConfig) -> bool:
    """Whether row blocks are multiplied and promoted one after the other: 64 accumulators at once would spill."""
    return cfg.head_dim // 64 * cfg.prob_columns // 2 >= 64


def row_blocks(cfg: DecodeConfig) -> int:
    """How many blocks of output channels are multiplied apart: one, or one per 64 channels."""
    return cfg.head_dim // 64 if folds.prob_shape(cfg)[1] > 1 or in_turn(cfg) else 1


def steps(cfg: DecodeConfig, unit: int) -> range:
    """Steps of 32 tokens of a unit (folds.py); V with parameters per token: the tile's."""
    tokens = folds.v_side(cfg).unit
    return range(unit * tokens // 32, -(-(unit + 1) * tokens // 32))


@cute.jit
def unpack(words: list, masks: list, block: cutlass.Constexpr, unit: cutlass.Constexpr,
           cfg: cutlass.Constexpr) -> cute.Tensor:  # fmt: skip
    """A row block of the words of a unit as wgmma's A registers; zeros where a step holds other tokens than the unit's
    16."""
    mma = make_mma(cfg)
    rows = cfg.head_dim // row_blocks(cfg)
    tokens = folds.v_side(cfg).unit
    first, count = steps(cfg, unit).start, len(steps(cfg, unit))
    a = mma.make_fragment_A(mma.partition_shape_A((rows, 32 * count)))
    per_group = len(words[0])
    zero = device.separate_zero() if tokens == 16 else None
    for group in cutlass.range_constexpr(2 * first, 2 * (first + count)):
        for p, mask in enumerate(masks):
            for u in cutlass.range_constexpr(per_group):
                m, rh = divmod(p * per_group + u, 2)
                if cutlass.const_expr(m // (rows // 64) == block):
                    registers = cute.recast_tensor(a[None, m % (rows // 64), group // 2 - first], Uint32)
                    other = tokens == 16 and group != unit
                    registers[rh + 2 * (group % 2)] = zero if other else words[group][u] & mask
    return a


@cute.jit
def accumulate(a: list, operands: list, unit: cutlass.Constexpr, cfg: cutlass.Constexpr) -> list:
    """Issue the products of row blocks over a unit's tokens without waiting; returns their int32 accumulators.

    Args:
        a: of :func:`unpack`, per row block.
        operands: of each, P^T as B fragments (:func:`operand_of`).

    Element ``m * 2 * heads_per_thread * 2 + 4 j + 2 rh + term``: row block ``2 m + rh``, head ``t + 4 j``; with two
    channel groups of V side by side, ``j`` counts the heads of both.
    """
    mma = make_mma(cfg)  # local: its accumulate flag changes below
    shape = mma.partition_shape_C((cfg.head_dim // row_blocks(cfg), cfg.prob_columns))
    d = [cute.make_rmem_tensor(shape, Int32) for _ in a]
    first, count = steps(cfg, unit).start, len(steps(cfg, unit))
    warpgroup.fence()
    for k in cutlass.range_constexpr(count):
        mma.set(warpgroup.Field.ACCUMULATE, k != 0)
        for i in cutlass.range_constexpr(len(a)):
            cute.gemm(mma, d[i], a[i][None, None, k], operands[i][None, None, first + k], d[i])
    warpgroup.commit_group()
    return d


def operand_of(operands: list, block: int, cfg: DecodeConfig) -> cute.Tensor:
    """P^T of a row block, from the fragments of all channel groups."""
    return operands[block * len(operands) // row_blocks(cfg)]
