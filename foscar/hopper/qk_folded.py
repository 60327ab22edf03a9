"""Scores where one product of all channels with one Q will not do: K per channel, or per token in channel groups.

The same codes in the same registers as qk.py, multiplied by mma.sync, because a warp then has a B operand of its own:
the Q' of its unit of tokens (channel_query.py), or Q itself, whose products are folded one channel group at a time, so
that only one group's accumulators are live.  The products are exact in int32; the results are logits in base 2.
Wide wgmmas (N = columns times units, or one accumulator set per group) keep up to 8 times the accumulators.

A thread's tokens and heads are those of qk.py: token ``32 w + 4 g + 2 i + rh``, heads ``t + 4 j``.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..common import device, fold
from . import folds, qk, smem
from .config import DecodeConfig

TOKENS = 2 * qk.HALVES  # of one thread


def accumulators(cfg: DecodeConfig) -> list[cute.Tensor]:
    """Logits, one rmem tensor of the thread's tokens per head of the thread."""
    return [cute.make_rmem_tensor((TOKENS,), Float32) for _ in range(cfg.heads_per_thread)]


def _operand(shared, lane, unit, j: int, cfg: DecodeConfig) -> list:
    """B of heads ``4 j .. 4 j + 3`` for the lane: two words a step."""
    base = shared.query + unit * (cfg.columns * cfg.head_dim) + 8 * cfg.head_dim * j + 16 * lane
    loaded = [device.load_shared(base + 512 * x, 4) for x in range(cfg.head_dim // 64)]
    return [four[i] for four in loaded for i in range(4)]


def _product(a: list, b: list, steps: range) -> list[Float32]:
    """The two tokens' scores over the channels of ``steps``, both terms joined."""
    c = [Int32(0)] * 4
    for s in steps:
        c = device.multiply_codes(a[4 * s : 4 * s + 4], b[2 * s : 2 * s + 2], c)
    return [Float32(c[2 * rh] * 256 + c[2 * rh + 1]) for rh in range(2)]


def _pair(address) -> tuple[Float32, Float32]:
    pair = device.load_shared(address, 2)
    return pair[0].bitcast(Float32), pair[1].bitcast(Float32)


def _codes(stage, i: int, cfg: DecodeConfig) -> list:
    found = dict(qk.load_codes(stage, i, cfg))
    return [found[r] for r in range(len(found))]


@cute.jit
def scores(z: list, shared, slot: Int32, thread_k: Int32, seen: tuple, warp: Int32, lane: Int32,
           cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """Fill ``z`` (:func:`accumulators`) with the logits of the tile in ``slot``.

    Args:
        thread_k: shared address of this thread's first vector of K in slot 0.
        seen: (first token that counts or None, the one after the last).
    """
    stage = slot * cfg.stage_bytes
    codes = [_codes(thread_k + stage, i, cfg) for i in range(qk.HALVES)]
    if cutlass.const_expr(folds.k_side(cfg).channel):
        _channel_scores(z, codes, shared, warp, lane, cfg)
    else:
        _group_scores(z, codes, shared, stage, seen, warp, lane, cfg)


def _channel_scores(z: list, codes: list, shared, warp, lane, cfg: DecodeConfig) -> None:
    """Row 2 of fold.py: the product with Q', and the unit's constant."""
    k = folds.k_side(cfg)
    steps = range(cfg.head_dim // 32)
    if k.unit >= 32:  # one unit of the warp's 32 tokens
        units = [Int32(0) if k.units == 1 else warp // (4 // k.units)]
        mine = units[0]
    else:  # two: of the lanes of the lower quads of tokens and of the upper ones
        units = [2 * warp, 2 * warp + 1]
        mine = 2 * warp + lane // 16
    for j in range(cfg.heads_per_thread):
        operands = [_operand(shared, lane, unit, j, cfg) for unit in units]
        factor, offset = _pair(shared.factors + 8 * (mine * cfg.heads + lane % 4 + 4 * j))
        for i in range(qk.HALVES):
            raw = [_product(codes[i], b, steps) for b in operands]
            for rh in range(2):
                dot = raw[0][rh]
                if len(raw) == 2:
                    dot = Float32(cutlass.select_(lane < 16, dot, raw[1][rh]))
                z[j][2 * i + rh] = device.fma(dot, factor, offset)


def _group_scores(z: list, codes: list, shared, stage, seen, warp, lane, cfg: DecodeConfig) -> None:
    """Row 1 of fold.py, group by group; a token that does not count has parameters 0."""
    k = folds.k_side(cfg)
    record, token = qk.block_offset(cfg, 2 * warp + lane // 16)
    quad = lane // 4 % 4 * 4
    pairs = shared.ring + stage + record + cfg.layout.k_params_offset + 4 * (token + quad)
    first = 32 * warp + lane // 4 * 4
    live = smem.live_tokens(first, TOKENS, seen)
    steps = k.group // 32
    operands = [_operand(shared, lane, 0, j, cfg) for j in range(cfg.heads_per_thread)]
    for x in range(k.parts):
        words = device.load_shared(pairs + 4 * cfg.page_size * x, TOKENS)
        params = [device.unpack_halves(Uint32(cutlass.select_(live[i], words[i], Uint32(0))), cfg.format.params)
                  for i in range(TOKENS)]  # fmt: skip
        for j in range(cfg.heads_per_thread):
            factor, q_sum = _pair(shared.factors + 8 * ((lane % 4 + 4 * j) * k.parts + x))
            for i in range(qk.HALVES):
                raw = _product(codes[i], operands[j], range(x * steps, (x + 1) * steps))
                for rh in range(2):
                    t = 2 * i + rh
                    part = fold.k_token_score(raw[rh] * factor, q_sum, *params[t], fma=device.fma)
                    z[j][t] = part if x == 0 else z[j][t] + part
