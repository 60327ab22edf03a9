"""The softmax of one tile, folded parameters included, and the running state over tiles.

Domains, in order (fold.py's rows 1 and 3, one pair per token):

1. ``s``: the exact integer product, the two terms of Q joined, as float32;
2. ``z = k_scale s + k_bias q_sum``: the folded score, in the units of ``s``;
3. ``x = factor z``: the logit in base 2; never formed alone, but for a soft-cap (soft_cap.py);
4. ``w = x + log2(v_scale)``: its maximum M over the tile's 128 tokens is exact, so ``p' = 2^(w - M) <= 1``;
5. ``p'`` rounded to 16 bits, in two u8 terms, is the operand of P V: V's scale is in it already;
6. ``p' / v_scale`` is the softmax numerator in units of 2^M; it and its product with V's bias are summed in float32.

Quantizing p' to the tile's own maximum keeps 16 bits also for light tiles after a heavy one.  The state (m, l, b, O)
is in units of 2^m: l the denominator, b the sum of P times V's bias, O in integer units of ``PROB_TOP``.

Other folds change the ends only.  Where K's scores come folded (qk_folded.py), steps 1 to 3 are done.  Where V has
several channel groups, step 4 takes the largest of a token's scales, and step 5 makes an operand per group: p' times
the group's share of that scale.  One maximum for all groups keeps one set of reductions; a group is thereby rounded
relative to the largest of the tile over all channels.  Where V has parameters per channel, step 4 adds nothing, P
itself is the operand, and its sums over units of tokens go to pv_channel.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..common import device, fold
from ..common.rows import LOWEST
from ..common.soft_cap import cap_logit
from . import folds, qk, smem
from .config import TILE_TOKENS, DecodeConfig
from .pv import PROB_TOP

MAGIC = 8388608.0  # 2^23: adding it leaves a float's integer part in the low mantissa bits
# Stands in for a V scale of 0, so that its logarithm and reciprocal, and bias / scale, are finite.
SMALLEST_SCALE = {"float16": 2.0**-64, "bfloat16": 2.0**-100}
TOKENS = 4  # of one thread in a tile


@dataclass
class TokenParams:
    """Per token of the thread, float32 in registers (rmem tensors of TOKENS elements); None or empty: not there."""

    k_scale: cute.Tensor | None
    k_bias: cute.Tensor | None
    v_log: cute.Tensor | None  # log2 of V's scale (the largest of several); -inf for a token that does not count
    v_reciprocal: cute.Tensor | None
    v_ratio: cute.Tensor | None  # V's bias / scale
    v_scales: tuple = ()  # of several channel groups: scale / largest scale * PROB_TOP
    v_ratios: tuple = ()  # and bias / largest scale


@dataclass
class State:
    """The running state of a warpgroup's thread, float32 in registers.

    ``m``, ``l``: [head]; ``b``: [V's channel group][head]; ``o``: [row block][head].
    """

    m: cute.Tensor
    l: cute.Tensor  # noqa: E741 - the field's name for the denominator
    b: cute.Tensor
    o: cute.Tensor


def new_state(cfg: DecodeConfig) -> State:
    nh = cfg.heads_per_thread
    sizes = (nh, nh, nh * folds.v_side(cfg).parts, nh * cfg.head_dim // 32)
    return State(*(cute.make_rmem_tensor((n,), Float32) for n in sizes))


def reset(state: State) -> None:
    state.m.fill(LOWEST)
    state.l.fill(0.0)
    state.b.fill(0.0)
    state.o.fill(0.0)


def pair_offset(cfg: DecodeConfig, warp, lane, section: int):
    """Byte offset in the stage of the parameter pair of token ``32 warp + lane``; ``section``: see RecordLayout."""
    record, token = qk.block_offset(cfg, 2 * warp + lane // 16)
    return record + section + 4 * (token + lane % 16)


@cute.jit
def prepare_params(k_pair: Int32, v_pair: Int32, room: Int32, valid: Int32, cfg: cutlass.Constexpr) -> None:
    """A tile's parameters as float32 to the warp's room, one token per lane: a quarter of the work of doing it per use.

    Args:
        k_pair, v_pair: shared addresses of the lane's two pairs (of the first channel group).
        room: shared address of the lane's first word; the values (folds.token_values) lie 128 bytes apart.
        valid: whether the lane's token counts; the bytes of one that does not may be anything.
    """
    k, v = folds.k_side(cfg), folds.v_side(cfg)
    at = [k_pair] if k.plain else []
    if cutlass.const_expr(not v.channel):
        at = at + [v_pair + 4 * cfg.page_size * x if x else v_pair for x in range(v.parts)]
    words = [Uint32(cutlass.select_(valid != 0, device.load_shared(x, 1)[0], Uint32(0))) for x in at]
    pairs = [device.unpack_halves(w, cfg.format.params) for w in words]
    values = pairs.pop(0) if k.plain else []
    if cutlass.const_expr(not v.channel):
        scales, biases = [p[0] for p in pairs], [p[1] for p in pairs]
        top = device.max_nan(device.tree(device.max_nan, scales), Float32(SMALLEST_SCALE[cfg.format.params]))
        log = Float32(cutlass.select_(valid != 0, device.log2(top), Float32(float("-inf"))))
        reciprocal = device.reciprocal(top)
        values = [*values, log, reciprocal]
        if cutlass.const_expr(v.parts > 1):
            values = values + [x * reciprocal * Float32(PROB_TOP) for x in scales]
        values = values + [x * reciprocal for x in biases]
    for i, value in enumerate(values):
        device.store_shared(room + 128 * i, [value.bitcast(Uint32)])


@cute.jit
def load_params(room: Int32, cfg: cutlass.Constexpr) -> TokenParams:
    """The thread's four tokens of what :func:`prepare_params` stored; ``room`` is the address of the first."""
    k, v = folds.k_side(cfg), folds.v_side(cfg)
    values = []
    for i in cutlass.range_constexpr(folds.token_values(cfg)):
        values.append(cute.recast_tensor(device.load_shared(room + 128 * i, TOKENS), Float32))
    own = values[2:] if k.plain else values
    k_scale, k_bias = values[:2] if k.plain else (None, None)
    if cutlass.const_expr(v.channel):
        return TokenParams(k_scale, k_bias, None, None, None)
    log, rest = own[0], own[1:]
    if cutlass.const_expr(v.plain):
        return TokenParams(k_scale, k_bias, log, *rest)
    n = 1 + v.parts
    return TokenParams(k_scale, k_bias, log, rest[0], None, tuple(rest[1:n]), tuple(rest[n:]))


@cute.jit
def tile_maxima(w: list, shared, warp: Int32, lane: Int32, barrier: Int32, cfg: cutlass.Constexpr) -> list:
    """The tile's maximum of every head of the thread: over lanes by shuffles, over warps through shared memory.

    Holds one barrier of the warpgroup.
    """
    mine = [device.tree(cute.arch.fmax, x) for x in w]
    base, values, shared_bits = device.spread(cute.arch.fmax, mine, lane, (16, 8, 4))
    for i in cutlass.range_constexpr(len(values)):
        at = shared.maxima + 16 * (lane % 4 + 4 * (base + i)) + 4 * warp
        device.store_shared_where((lane & shared_bits) == 0, at, values[i].bitcast(Uint32))
    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
    result = []
    for j in cutlass.range_constexpr(cfg.heads_per_thread):
        four = device.load_shared(shared.maxima + 16 * (lane % 4 + 4 * j), 4)
        result.append(device.tree(cute.arch.fmax, [four[i].bitcast(Float32) for i in range(4)]))
    return result


def mask_scores(w: list, limit: list, window) -> list:
    """``w[head][token]`` with -inf for tokens that a row does not see: those after ``limit[head]`` and, where there is
    a ``window`` (None: not), those up to ``limit[head] - window``; both count from the thread's first token."""
    none = Float32(float("-inf"))
    masked = []
    for row, last in zip(w, limit, strict=True):
        seen = [i <= last for i in range(TOKENS)]
        if window is not None:
            seen = [a & (i > last - window) for i, a in enumerate(seen)]
        masked.append([Float32(cutlass.select_(a, x, none)) for a, x in zip(seen, row, strict=True)])
    return masked


@cute.jit
def mask(w: list, item, left: Int32, first: Int32, cfg: cutlass.Constexpr) -> list:
    """Scores of a tile from which on the request has ``left`` tokens, masked where a row sees less than another.

    Args:
        item: its q_len, limit and window (kernel.Item).
        first: the thread's first token of the tile.
    """
    edge = left - item.q_len < TILE_TOKENS - 1
    if cutlass.const_expr(cfg.options.window):
        edge = edge | (left > item.window)
    if edge:
        w = mask_scores(w, [x + (left - first) for x in item.limit], item.window)
    return w


@cute.jit
def fold_scores(s: list, params: TokenParams, factor: list, q_sum: list, cfg: cutlass.Constexpr, cap=None) -> list:
    """Steps 1 to 4 of the domains above: ``w[head][token]`` from the accumulators of :func:`qk.scores`.

    ``factor`` and ``q_sum`` are per head of the thread (query.py); with qk_folded.py's scores, logits already, unused.
    With a soft-cap ``cap`` is it in base 2, and the factor is ``2 / cap`` times what it would be without.
    Where V has parameters per channel, tokens that do not count are not excluded: see :func:`exclude`.
    """
    bare = folds.v_side(cfg).channel
    w = []
    for j in cutlass.range_constexpr(cfg.heads_per_thread):
        row = []
        for i in cutlass.range_constexpr(TOKENS):
            v_log = Float32(0.0) if bare else params.v_log[i]
            if cutlass.const_expr(folds.k_side(cfg).plain):
                e = 4 * j + 2 * (i % 2)
                raw = Float32(s[i // 2][e] * 256 + s[i // 2][e + 1])
                z = fold.k_token_score(raw, q_sum[j], params.k_scale[i], params.k_bias[i], fma=device.fma)
                y = z * factor[j] if bare or cfg.options.soft_cap else None
            else:
                z, y = None, Float32(s[j][i])
            if cutlass.const_expr(cfg.options.soft_cap):
                row.append(cap_logit(y, cap, v_log, cfg.options.wide_cap))
            elif cutlass.const_expr(bare):
                row.append(y)
            elif cutlass.const_expr(y is None):
                row.append(device.fma(z, factor[j], v_log))
            else:
                row.append(y + v_log)
        w.append(row)
    return w


def exclude(w: list, first, seen: tuple) -> list:
    """``w`` with -inf for tokens that do not count; ``first`` is the thread's, ``seen`` of :func:`smem.live_unit`."""
    live = smem.live_tokens(first, TOKENS, seen)
    return [
        [Float32(cutlass.select_(c, x, Float32(float("-inf")))) for c, x in zip(live, row, strict=True)] for row in w
    ]


def _split(bits: list) -> tuple[Uint32, Uint32]:
    """Four tokens' integers as words of high and of low bytes."""
    first, second = device.byte_permute(bits[0], bits[1], 0x5410), device.byte_permute(bits[2], bits[3], 0x5410)
    return device.byte_permute(first, second, 0x7531), device.byte_permute(first, second, 0x6420)


@cute.jit
def probabilities(w: list, top: list, params: TokenParams, room: Int32, cfg: cutlass.Constexpr) -> list:
    """Folded scores to P^T in shared memory; the warpgroup's barrier must follow before wgmma reads it.

    Args:
        w, top: of :func:`fold_scores` and :func:`tile_maxima`.
        room: shared address of the thread's first word of P^T.

    Returns:
        Per head: (tile maximum, sum of the numerators, their sums times V's biases: one per channel group of a V with
        parameters per token), this thread's tokens.
    """
    v = folds.v_side(cfg)
    sums = []
    stores = []
    for j in cutlass.range_constexpr(cfg.heads_per_thread):
        # A tile with no token at all has the maximum -inf; any finite number serves instead.
        shift = cute.arch.fmax(top[j], Float32(LOWEST))
        total = Float32(0.0)
        ratios = () if v.channel else (params.v_ratio,) if v.plain else params.v_ratios
        offsets = [Float32(0.0) for _ in ratios]
        scales = params.v_scales if len(params.v_scales) else ([Float32(PROB_TOP)] * TOKENS,)
        bits = [[] for _ in scales]
        for i in cutlass.range_constexpr(TOKENS):
            x = device.exp2(w[j][i] - shift)
            total = total + x if v.channel else device.fma(x, params.v_reciprocal[i], total)
            offsets = [fold.v_token_offset(b, x, r[i], fma=device.fma) for b, r in zip(offsets, ratios, strict=True)]
            for part, scale in zip(bits, scales, strict=True):
                part.append(device.fma(x, scale[i], Float32(MAGIC)).bitcast(Uint32))
        for part, values in enumerate(bits):
            stores.append((room + (smem.probs_byte(cfg, part) + 128 * j), *_split(values)))
        sums.append((top[j], total, offsets))
    for address, high, low in stores:
        device.store_shared(address, [high])
        device.store_shared(address + 16, [low])
    cute.arch.fence_proxy("async.shared", space="cta")
    return sums


def advance(state: State, sums: list, j: int, cfg: DecodeConfig) -> tuple[Float32, Float32]:
    """Head ``j``'s maximum and sums take in a tile's; returns the weights of what O holds and of the tile."""
    top, total, offsets = sums[j]
    m = cute.arch.fmax(state.m[j], top)
    old, new = device.exp2(state.m[j] - m), device.exp2(top - m)
    state.m[j] = m
    state.l[j] = device.fma(state.l[j], old, total * new)
    for x, offset in enumerate(offsets):
        b = x * cfg.heads_per_thread + j
        state.b[b] = device.fma(state.b[b], old, offset * new)
    return old, new


def _add(state: State, weights: tuple, j: int, d: cute.Tensor, first: int, cfg: DecodeConfig) -> None:
    """The accumulator of row blocks from ``first`` on, head ``j``, to O."""
    old, new = weights
    nh, beside = cfg.heads_per_thread, folds.prob_shape(cfg)[0]
    for r in range(cute.size(d) // (4 * nh * beside) * 2):
        column_group = r % beside * nh + j  # of two groups side by side, a row block has one
        e = (r // 2) * 4 * nh * beside + 4 * column_group + 2 * (r % 2)
        exact = d[e] * 256 + d[e + 1]
        o = (first + r) * nh + j
        state.o[o] = device.fma(Float32(exact), new, state.o[o] * old)


@cute.jit
def promote(state: State, sums: list, d: list, cfg: cutlass.Constexpr) -> None:
    """Add a tile to the running state: the int32 product becomes float32 with the weight 2^(tile max - new max)."""
    rows = cfg.head_dim // 32 // len(d)  # of one accumulator
    for j in cutlass.range_constexpr(cfg.heads_per_thread):
        weights = advance(state, sums, j, cfg)
        for block in cutlass.range_constexpr(len(d)):
            _add(state, weights, j, d[block], rows * block, cfg)


@cute.jit
def promote_block(state: State, weights: list, d: cute.Tensor, block: cutlass.Constexpr,
                  cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """One row block of 64 channels alone; ``weights``: :func:`advance` of every head."""
    for j in cutlass.range_constexpr(cfg.heads_per_thread):
        _add(state, weights[j], j, d, 2 * block, cfg)
