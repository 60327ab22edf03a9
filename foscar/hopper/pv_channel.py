"""P V where V has parameters per channel: fold.py's row 4, for every unit of tokens (folds.py) in a tile.

A unit's exact product and the sum of P over it become its part of O in float32; the units of a tile share the tile's
maximum and so their weight.  The sums are of P before its rounding, like the denominator's: what the 16-bit rounding
of P is off by multiplies a code's range, not V's bias.

Units of 16 tokens, half a step of the contraction index, are multiplied with the other half of A zero.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from ..common import device, fold
from . import folds, pv, smem, softmax
from .config import DecodeConfig

EARLY = 2  # units of a tile whose parameters are loaded before the slot is released


@cute.jit
def store_sums(sums: list, shared, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """Every warp's sums of P (half a warp's where a unit is no more), for :func:`unit_sums` after a barrier."""
    halves = folds.v_side(cfg).unit == 16
    bits = (8, 4) if halves else (16, 8, 4)
    mine = [sums[j][1] for j in range(cfg.heads_per_thread)]
    base, totals, shared_bits = device.spread(device.add, mine, lane, bits)
    for i, total in enumerate(totals):
        head = lane % 4 + 4 * (base + i)
        at = 32 * head + 8 * warp + 4 * (lane // 16) if halves else 16 * head + 4 * warp
        device.store_shared_where((lane & shared_bits) == 0, shared.offsets + at, total.bitcast(Uint32))


def unit_sums(shared, lane, j: int, cfg: DecodeConfig) -> list[Float32]:
    """The sums of P over the tile's units, head ``lane % 4 + 4 j``."""
    units = folds.v_side(cfg).units
    words = 8 if units == 8 else 4
    base = shared.offsets + 4 * words * (lane % 4 + 4 * j)
    parts = [x.bitcast(Float32) for i in range(0, words, 4) for x in _four(base + 4 * i)]
    each = words // units
    return [device.tree(device.add, parts[i : i + each]) for i in range(0, words, each)]


def _four(address) -> list:
    loaded = device.load_shared(address, 4)
    return [loaded[i] for i in range(4)]


def load_pairs(base, units, seen, cfg: DecodeConfig) -> list[list[Uint32]]:
    """``[unit][row block]`` (scale, bias) words of the thread's channels.

    Args:
        base: shared address of channel ``8 w + g`` in the slot; ``units``: which ones.
        seen: which tokens of the tile count (:func:`smem.live_unit`), None: all; a unit of others gets zeros, its
            bytes may be anything.
    """
    unit = folds.v_side(cfg).unit
    found = []
    for u in units:
        at = base + smem.unit_pairs(cfg, unit, u, cfg.layout.v_params_offset, seen)
        row = [device.load_shared(at + 128 * r, 1)[0] for r in range(cfg.head_dim // 32)]
        if seen is not None:
            live = smem.live_unit(u, unit, seen)
            row = [Uint32(cutlass.select_(live, w, Uint32(0))) for w in row]
        found.append(row)
    return found


@cute.jit
def _add(state, d: cute.Tensor, first: cutlass.Constexpr, pairs: list, p_sum: list, weights: tuple, factors: list,
         cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """A unit's part to row blocks ``first`` .. of O; ``weights``: (of what O holds, None: applied already; the tile's),
    per head."""
    nh = cfg.heads_per_thread
    old, new = weights
    for r in cutlass.range_constexpr(cute.size(d) // (2 * nh)):
        scale, bias = device.unpack_halves(pairs[first + r], cfg.format.params)
        scale = scale * (factors[first + r] * Float32(1.0 / pv.PROB_TOP))
        for j in cutlass.range_constexpr(nh):
            e = (r // 2) * 4 * nh + 4 * j + 2 * (r % 2)
            exact = Float32(d[e] * 256 + d[e + 1])
            part = fold.v_channel_output(exact, p_sum[j], scale, bias, fma=device.fma)
            o = (first + r) * nh + j
            before = state.o[o] if cutlass.const_expr(old is None) else state.o[o] * old[j]
            state.o[o] = device.fma(part, new[j], before)


@cute.jit
def add_tile(state, sums: list, words: list, early: list, base: Int32, seen, me, shared, operand: cute.Tensor,
             cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """The whole of a tile's P V, unit by unit; P^T and its sums are complete in shared memory.

    Args:
        words: of pv.load_words; ``early``: :func:`load_pairs` of all units, or empty: they are loaded here.
        base, seen: of :func:`load_pairs`.
    """
    nh, units, blocks = cfg.heads_per_thread, folds.v_side(cfg).units, pv.row_blocks(cfg)
    factors = pv.position_factors(cfg, me.warp)
    old, new = [], []
    for u in cutlass.range_constexpr(units):
        for block in cutlass.range_constexpr(blocks):
            (d,) = pv.accumulate([pv.unpack(words, me.masks, block, u, cfg)], [operand], u, cfg)
            if cutlass.const_expr(block == 0):
                p_sum = [unit_sums(shared, me.lane, j, cfg)[u] for j in range(nh)]
                pairs = early[u] if cutlass.const_expr(len(early) > 0) else load_pairs(base, [u], seen, cfg)[0]
            if cutlass.const_expr(u == 0 and block == 0):
                weights = [softmax.advance(state, sums, j, cfg) for j in range(nh)]
                old, new = [w[0] for w in weights], [w[1] for w in weights]
            warpgroup.wait_group(0)
            first = block * (cfg.head_dim // 32 // blocks)
            before = old if cutlass.const_expr(u == 0) else None
            _add(state, d, first, pairs, p_sum, (before, new), factors, cfg)
