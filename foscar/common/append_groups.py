"""Appending to token groups (axis "channel"), a warp per group and head: append.plan_channels on the device.

The warp's lanes share the group's tokens and the words of a row.  Each lane goes over its tokens twice: for the
extremes of its channels, then for their codes.  A channel whose new values lie within the range that it has keeps its
pair and its old codes; any other is quantized again from its dequantized old values and the new ones.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from . import device
from .append_config import CHANNELS, DTYPES, THREADS
from .append_quantize import INFINITY, SMALL, Divisor, Side, add_code, fit, select
from .append_rows import first_item, load, load_int32, load_row, load_word, request_of, store, store_word


def _record(args, request, position, head, page_size: int):
    """(address of the record, token in it) of a position in a page that is there."""
    page = load_int32(args.pages, Int64(request) * args.table_stride + Int64(position // page_size))
    record = args.cache + Int64(page) * args.page_stride + Int64(head) * args.head_stride
    return record, Uint32(position) % page_size


@cute.jit
def _segment(args, item: Int32, group: cutlass.Constexpr):
    """(request, its length, its first row, first position of the group, first and last + 1 new position)."""
    request = item
    if args.indptr != Int64(0):
        request = request_of(args, item, group)
    start = Int32(-1)
    row = request
    stop = Int32(-1)
    base = Int32(0)
    if request < args.batch:
        start = load_int32(args.lengths, Int64(request))
        base = start // group * group
        stop = start + 1
        if args.indptr != Int64(0):
            row = load_int32(args.indptr, Int64(request))
            stop = start + (load_int32(args.indptr, Int64(request) + 1) - row)
            base = base + (item - first_item(row, request, group)) * group
        if start < 0:
            stop = Int32(-1)
    return request, start, row, base, cutlass.max(start, base), cutlass.min(stop, base + group)


@cute.jit
def _has_pages(args, request: Int32, base: Int32, last: Int32, page_size: cutlass.Constexpr):
    """Whether all pages of positions base .. last - 1 are in the cache."""
    good = Int32(1)
    for column in range(base // page_size, (last - 1) // page_size + 1):
        page = Int32(-1)
        if column < args.max_pages:
            page = load_int32(args.pages, Int64(request) * args.table_stride + Int64(column))
        if (page < 0) | (page >= args.num_pages):
            good = Int32(0)
    return good


def _old_value(word, pair, shift: int, side: Side) -> Float32:
    scale, bias = device.unpack_halves(pair, side.params)
    code = Float32((word >> shift) & Uint32(side.max_code))
    return device.arith("add.rn", device.arith("mul.rn", code, scale), bias)


def _codes(values: list, pairs, side: Side) -> Uint32:
    """The word of codes of ``values`` under ``pairs``."""
    word = Uint32(0)
    for i, shift in enumerate(_shifts(side)):
        scale, bias = device.unpack_halves(pairs[i], side.params)
        word = add_code(word, values[i], bias, Divisor.of(scale, side.params), side.max_code, shift)
    return word


def _shifts(side: Side) -> list[int]:
    """The bit of each of a lane's channels in its word."""
    return [8 * c + side.bits * p for p in range(side.positions) for c in range(CHANNELS)]


def _channel(i: int, j, side: Side):
    """Of a lane's value ``i``, in word ``j`` of a row."""
    return i // CHANNELS * side.row_bytes + CHANNELS * j + i % CHANNELS


@cute.jit
def append_groups(args, source: Int64, stride: Int64, head_stride: Int64, name: cutlass.Constexpr,
                  cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """This block's token groups of K or V ("k", "v"), each of this block's head."""
    side = Side.of(cfg, name)
    thread = cute.arch.thread_idx()[0]
    block, head, _ = cute.arch.block_idx()
    lane = thread % 32
    request, start, row, base, first, last = _segment(args, block * (THREADS // 32) + thread // 32, side.group)
    valid = Int32(0)
    if first < last:
        valid = _has_pages(args, request, base, last, cfg.page_size)
    if valid != 0:
        j = lane % side.lanes
        part = lane // side.lanes
        parts = 32 // side.lanes
        shifts = _shifts(side)
        count = len(shifts)
        low = cute.make_rmem_tensor((count,), Float32)
        high = cute.make_rmem_tensor((count,), Float32)
        old_low = cute.make_rmem_tensor((count,), Float32)
        old_high = cute.make_rmem_tensor((count,), Float32)
        old_pairs = cute.make_rmem_tensor((count,), Uint32)
        pairs = cute.make_rmem_tensor((count,), Uint32)
        for i in cutlass.range_constexpr(count):
            low[i] = old_low[i] = Float32(float("inf"))
            high[i] = old_high[i] = Float32(float("-inf"))
            old_pairs[i] = Uint32(0)
        seen = Uint32(0)
        rows = source + DTYPES[cfg.dtype] * Int64(head) * head_stride

        if base < first:
            record, token = _record(args, request, first - 1, head, cfg.page_size)
            for i in cutlass.range_constexpr(count):
                channel = _channel(i, j, side)
                old_pairs[i] = load(Uint32, record + Int64(side.param(token, Uint32(channel))))
            for position in range(base + part, first, parts):
                record, token = _record(args, request, position, head, cfg.page_size)
                word = load_word(record, side, token, j)
                seen = seen | word
                for i in cutlass.range_constexpr(count):
                    value = _old_value(word, old_pairs[i], shifts[i], side)
                    old_low[i] = device.min_nan(old_low[i], value)
                    old_high[i] = device.max_nan(old_high[i], value)
        for position in range(first + part, last, parts):
            x = load_row(rows + DTYPES[cfg.dtype] * Int64(row + (position - start)) * stride, j, side, cfg)
            for i in cutlass.range_constexpr(count):
                low[i] = device.min_nan(low[i], x[i // CHANNELS][i % CHANNELS])
                high[i] = device.max_nan(high[i], x[i // CHANNELS][i % CHANNELS])

        offsets = [side.lanes << i for i in range((parts - 1).bit_length())]
        seen = device.butterfly(lambda a, b: a | b, seen, offsets)
        kept = Uint32(0)  # masks of codes: those that stay, those that are 0 for one value or none
        blank = Uint32(0)
        padding = Uint32(0)
        for i in cutlass.range_constexpr(count):
            mask = side.max_code << shifts[i]
            lo = device.butterfly(device.min_nan, low[i], offsets)
            hi = device.butterfly(device.max_nan, high[i], offsets)
            scale, bias = device.unpack_halves(old_pairs[i], side.params)
            top = device.arith("add.rn", device.arith("mul.rn", scale, Float32(side.max_code)), bias)
            top = Float32(cutlass.select_((seen & Uint32(mask)) != Uint32(0), top, bias))
            nan = ((old_pairs[i] >> 16) & Uint32(0x7FFF)) > Uint32(INFINITY[side.params])
            keep = (base < first) & (nan | ((lo >= bias) & (hi <= top)))
            lo = device.min_nan(lo, device.butterfly(device.min_nan, old_low[i], offsets))
            hi = device.max_nan(hi, device.butterfly(device.max_nan, old_high[i], offsets))
            new_scale, new_bias, empty = fit(device.arith("add.rn", lo, Float32(0.0)), hi, side.max_code, side.params)
            pair = select(keep, old_pairs[i], new_scale | (new_bias << 16))
            kept = kept | select(keep, Uint32(mask), Uint32(0))
            blank = blank | select(empty, Uint32(mask), Uint32(0))
            if cutlass.const_expr(side.padded):
                beyond = _channel(i, j, side) >= side.head_dim
                pair = select(beyond, Uint32(SMALL[side.params]), pair)
                padding = padding | select(beyond, Uint32(mask), Uint32(0))
            pairs[i] = pair
        blank = (blank & ~kept) | padding

        for position in range(first + part, last, parts):
            x = load_row(rows + DTYPES[cfg.dtype] * Int64(row + (position - start)) * stride, j, side, cfg)
            word = _codes([value for four in x for value in four], pairs, side) & ~blank
            record, token = _record(args, request, position, head, cfg.page_size)
            store_word(record, side, token, j, word)
        if (base < first) & ((kept | padding) != Uint32(0xFFFFFFFF)):
            for position in range(base + part, first, parts):
                record, token = _record(args, request, position, head, cfg.page_size)
                word = load_word(record, side, token, j)
                again = _codes([_old_value(word, old_pairs[i], shifts[i], side) for i in range(count)], pairs, side)
                store_word(record, side, token, j, (word & kept) | (again & ~(kept | blank)))
        if part == 0:
            for column in range(base // cfg.page_size, (last - 1) // cfg.page_size + 1):
                record, _ = _record(args, request, column * cfg.page_size, head, cfg.page_size)
                token = Uint32(base) % cfg.page_size
                for i in cutlass.range_constexpr(count):
                    channel = _channel(i, j, side)
                    store(Uint32, record + Int64(side.param(token, Uint32(channel))), pairs[i])
