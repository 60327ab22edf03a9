"""Merging the parts of items that were split over workers.

Each part is a normalized output with its LSE in base 2, so ``O = sum_s 2^(lse_s - lse) O_s`` and
``lse = log2 sum_s 2^lse_s`` (the associative merge of FlashAttention's split-KV).  Who shares an item follows from the
lengths, as in the decode kernel (schedule.py): an entry is an item where there are few, else a worker, which begins at
most one item that others finish; plan.combine_grid chooses.  Sinks and the output scale join at the end, once.

A *column* is a query head's channels, or ``4 << lane_bits`` of them: a part's share of it is read by ``1 << lane_bits``
lanes, 16 bytes each, so that a warp reads several parts of a narrow column at once.  A CTA takes a power of two of
one entry's; its warps share out the columns and then the parts of each.  Few items are cut into narrow columns, so that
their many parts are read by many SMs.  CTAs with less than two parts to merge return at once.

The kernel follows the decode kernel on the same stream with programmatic stream serialization: it starts early, reads
the lengths (complete, or the decode kernel had not started) and then waits for the decode kernel's results itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64

from . import device, rows, schedule
from .plan import COMBINE_WARPS as WARPS

BATCH = 4  # parts that a lane has in flight
WIDTH = 4  # channels that a lane has of a part: 16 bytes
NOTHING = -3.4028234663852886e38  # the largest LSE of no parts, or of rows that see nothing: -inf less it is no NaN


@dataclass
class Args:
    """The kernel's arguments: the decode kernel's (hopper/kernel.py), and how its own grid is cut."""

    out: Int64
    out_stride: Int64
    out_head_stride: Int64
    lse: Int64
    partial_out: Int64
    partial_lse: Int64
    lengths: Int64
    batch: Int32
    kv_heads: Int32
    kv_heads_inverse: Int32  # plan.inverse_of
    group: Int32
    lse_unit: Float32
    workers_inverse: Int32
    workers: Int32  # of the decode kernel's grid
    by_item: Int32
    column_bits: Int32  # log2 of a CTA's columns
    lane_bits: Int32  # log2 of the lanes that share a part: at most 5, and WIDTH << lane_bits <= head_dim
    q_indptr: Int64 | None = None
    window: Int32 | None = None
    sinks: Int64 | None = None
    out_scale: Float32 | None = None
    rows: Int32 | None = None  # of an item of the decode kernel
    slots: Int64 | None = None
    packed_lens: Int64 | None = None
    n_sink: Int32 | None = None
    exact_out: Int64 | None = None
    exact_lse: Int64 | None = None


@dataclass
class Parts:
    """One head's parts in the workspace, and where a lane reads them."""

    out: Int64  # address of the lane's channels in row 0
    lse: Int64
    first: Int32  # worker
    count: Int32
    group: Int32  # workspace rows of a slot
    head: Int32

    def row(self, s) -> Int64:
        """Workspace row of part ``s``: the first worker's range ends in the item (slot 1), the others' begin in it."""
        slot = 2 * (self.first + s) + cutlass.select_(s == 0, Int32(1), Int32(0))
        return Int64(slot * self.group + self.head)


def _floats(address, count: int) -> cute.Tensor:
    return cute.make_tensor(device.global_pointer(Float32, address, 4 * count), cute.make_layout(count))


@cute.jit
def _merge(parts: Parts, begin: Int32, step: Int32, cfg: cutlass.Constexpr):
    """Every ``step``-th part from ``begin`` on: (the lane's channels of ``sum 2^(lse - m) O`` and last
    ``sum 2^(lse - m)``, m, the largest LSE of these parts)."""
    acc = cute.make_rmem_tensor((WIDTH + 1,), Float32)
    acc.fill(0.0)
    m = Float32(NOTHING)
    for base in cutlass.range(begin, parts.count, step * BATCH, unroll=1):
        # All loads first: one trip to memory for BATCH parts. Past the end the last part is read with weight 0.
        values, lses = [], []
        for i in cutlass.range_constexpr(BATCH):
            row = parts.row(cutlass.min(base + i * step, parts.count - 1))
            value = cute.make_rmem_tensor((WIDTH,), Float32)
            cute.autovec_copy(_floats(parts.out + 4 * cfg.head_dim * row, WIDTH), value)
            values.append(value)
            lses.append(_floats(parts.lse + 4 * row, 1)[0])
        top = device.tree(cute.arch.fmax, [m, *lses])
        old = device.exp2(m - top)
        m = top
        for c in cutlass.range_constexpr(WIDTH + 1):
            acc[c] = acc[c] * old
        for i in cutlass.range_constexpr(BATCH):
            here = base + i * step < parts.count
            weight = Float32(cutlass.select_(here, device.exp2(lses[i] - top), Float32(0.0)))
            acc[WIDTH] = acc[WIDTH] + weight
            for c in cutlass.range_constexpr(WIDTH):
                acc[c] = device.fma(weight, values[i][c], acc[c])
    return acc, m


@cute.jit
def _over_lanes(acc: cute.Tensor, m: Float32, lane_bits: Int32) -> Float32:
    """Sums over the lanes that hold the same channels of other parts, for the largest ``m``, which is returned."""
    top = m
    for bit in cutlass.range_constexpr(2, 5):
        if lane_bits <= bit:
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << bit))
    weight = device.exp2(m - top)
    for c in cutlass.range_constexpr(WIDTH + 1):
        acc[c] = acc[c] * weight
    for bit in cutlass.range_constexpr(2, 5):
        if lane_bits <= bit:
            for c in cutlass.range_constexpr(WIDTH + 1):
                acc[c] = acc[c] + cute.arch.shuffle_sync_bfly(acc[c], offset=1 << bit)
    return top


@cute.jit
def _join(sums: cute.Tensor, stats: cute.Tensor, unit: Int32, first: Int32, count: Int32, cfg: cutlass.Constexpr):
    """(output channels of lane ``unit``, LSE in base 2) from the warps ``first`` .. ``first + count - 1``."""
    top = Float32(NOTHING)
    for w in cutlass.range_constexpr(WARPS):
        if w < count:
            top = cute.arch.fmax(top, stats[1, first + w])
    acc = cute.make_rmem_tensor((WIDTH + 1,), Float32)
    acc.fill(0.0)
    for w in cutlass.range_constexpr(WARPS):
        if w < count:
            weight = device.exp2(stats[1, first + w] - top)
            acc[WIDTH] = device.fma(weight, stats[0, first + w], acc[WIDTH])
            for c in cutlass.range_constexpr(WIDTH):
                acc[c] = device.fma(weight, sums[WIDTH * unit + c, first + w], acc[c])
    inverse = device.reciprocal(acc[WIDTH])
    if cutlass.const_expr(cfg.options.rows):
        inverse = cutlass.select_(acc[WIDTH] == Float32(0.0), Float32(0.0), inverse)
    for c in cutlass.range_constexpr(WIDTH):
        acc[c] = acc[c] * inverse
    return acc, top + device.log2(acc[WIDTH])


@cute.jit
def _store(args, place, channel: Int32, values: list, log_sum: Float32, cfg: cutlass.Constexpr) -> None:
    """A row's channels from ``channel`` on, and with channel 0 its LSE."""
    values, log_sum = rows.join_windows(args, cfg, place, values, channel, 1, log_sum)
    factor, log_sum = rows.end_row(args, cfg.options, place.head, log_sum)
    at = Int64(place.row) * args.out_stride + Int64(place.head) * args.out_head_stride + Int64(channel)
    dtype = BFloat16 if cutlass.const_expr(cfg.out_dtype == "bfloat16") else Float16
    target = cute.make_tensor(device.global_pointer(dtype, args.out + 2 * at, 2), cute.make_layout(WIDTH))
    for c, value in enumerate(rows.scaled(values, factor)):
        target[c] = dtype(value)
    if (channel == 0) & (args.lse != Int64(0)):
        row = Int64(place.row) * Int64(args.kv_heads * args.group) + Int64(place.head)
        _floats(args.lse + 4 * row, 1)[0] = log_sum * args.lse_unit


@cute.kernel
def combine_kernel(values: list, names: cutlass.Constexpr, cfg: cutlass.Constexpr):
    """Grid: a request's items, requests (or workers and 1), and the CTAs that an entry's columns take.

    An item's rows are its query heads, or with KernelOptions.rows (query token, head) pairs.
    """
    args = Args(**dict(zip(names, values, strict=True)))
    options = cfg.options
    group = args.rows if cutlass.const_expr(options.rows) else args.group
    thread = cute.arch.thread_idx()[0]
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    lane_bits = args.lane_bits
    head_bits = (cfg.head_dim // WIDTH).bit_length() - 1 - lane_bits  # log2 of a head's columns
    item_head, request, chunk = cute.arch.block_idx()
    begin = chunk << args.column_bits
    allocator = cutlass.memory.SmemAllocator()
    sums = allocator.allocate_tensor(Float32, cute.make_layout((WIDTH * 32, WARPS)), byte_alignment=16)
    stats = allocator.allocate_tensor(Float32, cute.make_layout((2, WARPS)), byte_alignment=8)
    cute.arch.griddepcontrol_launch_dependents()
    first, count = Int32(0), Int32(0)
    if args.by_item != 0:
        split = schedule.split_of_item(args, options, args.workers, request, item_head, lane)
        request, item_head, first, count = split.request, split.head, split.first, split.count
    else:
        split = schedule.split_of_worker(args, options, args.workers, item_head, lane)
        request, item_head, first, count = split.request, split.head, split.first, split.count
    cute.arch.griddepcontrol_wait()
    if count > 1:
        slice_bits = cutlass.max(WARPS.bit_length() - 1 - args.column_bits, Int32(0))
        slices = Int32(1) << slice_bits  # warps that share one column's parts
        at_once = Int32(WARPS) >> slice_bits
        mine = warp >> slice_bits
        item = rows.of_item(args, request, item_head, options)
        end = cutlass.min(begin + (Int32(1) << args.column_bits), item.count << head_bits)
        for base in cutlass.range(begin, end, at_once, unroll=1):
            column = base + mine
            if column < end:
                head = column >> head_bits
                unit = (column - (head << head_bits) << lane_bits) + (lane & (1 << lane_bits) - 1)
                parts = Parts(args.partial_out + Int64(4 * WIDTH * unit), args.partial_lse, first, count, group, head)
                part_bits = 5 - lane_bits  # log2 of the parts that a warp reads at once
                part = ((warp - (mine << slice_bits)) << part_bits) + (lane >> lane_bits)
                acc, m = _merge(parts, part, slices << part_bits, cfg)
                m = _over_lanes(acc, m, lane_bits)
                if lane < (1 << lane_bits):
                    for c in cutlass.range_constexpr(WIDTH):
                        sums[WIDTH * lane + c, warp] = acc[c]
                if lane == 0:
                    stats[0, warp] = acc[WIDTH]
                    stats[1, warp] = m
            cute.arch.sync_threads()
            local = thread >> lane_bits
            column = base + local
            if (column < end) & (local < at_once):
                unit = thread - (local << lane_bits)
                result, log_sum = _join(sums, stats, unit, local << slice_bits, slices, cfg)
                head = column >> head_bits
                channel = WIDTH * ((column - (head << head_bits) << lane_bits) + unit)
                _store(args, item.place(head), channel, [result[c] for c in range(WIDTH)], log_sum, cfg)
            cute.arch.sync_threads()


@cute.jit
def host(values: list, names: cutlass.Constexpr, cfg: cutlass.Constexpr, stream):
    """Only to compile: the kernel is launched from its cubin."""
    combine_kernel(values, names, cfg).launch(
        grid=[1, 1, 1], block=[cfg.threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )
