"""Merging the parts of items that were split over workers.

Each part is a normalized output with its LSE in base 2, so ``O = sum_s 2^(lse_s - lse) O_s`` and
``lse = log2 sum_s 2^lse_s`` (the associative merge of FlashAttention's split-KV).  Who shares an item follows from the
lengths, as in the decode kernel (schedule.py): an entry is an item where there are few, else a worker, which begins at
most one item that others finish; plan.combine_grid chooses.  Sinks and the output scale join at the end, once.
A CTA takes up to ``heads_per_cta`` query heads of one entry, its warps share out heads and then parts, and CTAs with
less than two parts to merge return at once.  The kernel follows the decode kernel on the same stream with programmatic
stream serialization: it starts early, reads the lengths (complete, or the decode kernel had not started) and then waits
for the decode kernel's results itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64

from . import device, rows, schedule
from .plan import COMBINE_WARPS as WARPS

BATCH = 8  # parts that a warp has in flight


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
    group: Int32
    lse_unit: Float32
    workers: Int32  # of the decode kernel's grid
    by_item: Int32
    heads_per_cta: Int32
    q_indptr: Int64 | None = None
    window: Int32 | None = None
    sinks: Int64 | None = None
    out_scale: Float32 | None = None
    rows: Int32 | None = None  # of an item of the decode kernel
    items_per_request: Int32 | None = None  # the most there can be


def _floats(address, count: int, align: int) -> cute.Tensor:
    return cute.make_tensor(device.global_pointer(Float32, address, align), cute.make_layout(count))


@cute.jit
def _row(first: Int32, s: Int32, group: Int32, head: Int32) -> Int64:
    """Workspace row of part ``s``: the first worker's range ends in the item (slot 1), the others' begin in it."""
    slot = 2 * (first + s)
    if s == 0:
        slot = slot + 1
    return Int64(slot) * Int64(group) + Int64(head)


@cute.jit
def _merge(acc: cute.Tensor, partial_out: Int64, partial_lse: Int64, first: Int32, begin: Int32, step: Int32,
           count: Int32, group: Int32, head: Int32, lane: Int32, cfg: cutlass.Constexpr):  # fmt: skip
    """Parts ``begin``, ``begin + step``, ... of a head by one warp; ``acc`` (zeros) gets the lane's channels.

    Returns (m, total): ``acc = sum 2^(lse - m) O`` and ``total = sum 2^(lse - m)``, m the largest LSE.
    """
    width, head_dim = cfg.head_dim // 32, cfg.head_dim
    m, total = Float32(float("-inf")), Float32(0.0)
    for base in cutlass.range(begin, count, step * BATCH, unroll=1):
        # All loads first: one trip to memory for BATCH parts. Past the end the last part is read with weight 0.
        parts, lses = [], []
        for i in cutlass.range_constexpr(BATCH):
            row = _row(first, cutlass.min(base + i * step, count - 1), group, head)
            part = cute.make_rmem_tensor((width,), Float32)
            cute.autovec_copy(_floats(partial_out + 4 * (row * head_dim + width * lane), width, 4 * width), part)
            parts.append(part)
            lses.append(_floats(partial_lse + 4 * row, 1, 4)[0])
        top = device.tree(cute.arch.fmax, [m, *lses])
        if cutlass.const_expr(cfg.options.rows):  # a row may see nothing at all, so all may be -inf
            top = cute.arch.fmax(top, Float32(rows.LOWEST))
        old = device.exp2(m - top)
        m, total = top, total * old
        for c in cutlass.range_constexpr(width):
            acc[c] = acc[c] * old
        for i in cutlass.range_constexpr(BATCH):
            weight = Float32(cutlass.select_(base + i * step < count, device.exp2(lses[i] - top), Float32(0.0)))
            total = total + weight
            for c in cutlass.range_constexpr(width):
                acc[c] = device.fma(weight, parts[i][c], acc[c])
    return m, total


@cute.jit
def _join(sums: cute.Tensor, stats: cute.Tensor, channel: Int32, begin: Int32, end: Int32, cfg: cutlass.Constexpr):
    """(output channel, LSE in base 2) from the warps ``begin`` .. ``end - 1`` of one head."""
    top = Float32(rows.LOWEST if cutlass.const_expr(cfg.options.rows) else float("-inf"))
    for w in cutlass.range(begin, end, unroll=1):
        top = cute.arch.fmax(top, stats[0, w])
    value, total = Float32(0.0), Float32(0.0)
    for w in cutlass.range(begin, end, unroll=1):
        weight = device.exp2(stats[0, w] - top)
        value = device.fma(weight, sums[channel, w], value)
        total = device.fma(weight, stats[1, w], total)
    value = value / total
    if cutlass.const_expr(cfg.options.rows):
        value = cutlass.select_(total == Float32(0.0), Float32(0.0), value)
    return value, top + device.log2(total)


@cute.kernel
def combine_kernel(values: list, names: cutlass.Constexpr, cfg: cutlass.Constexpr):
    """Grid: entries times ``ceil(group / heads_per_cta)``, with KernelOptions.rows an item's rows for the group."""
    args = Args(**dict(zip(names, values, strict=True)))
    options = cfg.options
    group, heads = args.group, args.kv_heads
    if cutlass.const_expr(options.rows):
        group, heads = args.rows, args.items_per_request
    heads_per_cta = args.heads_per_cta
    width = cfg.head_dim // 32
    thread = cute.arch.thread_idx()[0]
    warp, lane = thread // 32, thread % 32
    chunks = (group + heads_per_cta - 1) // heads_per_cta
    entry, chunk = cute.arch.block_idx()[0] // chunks, cute.arch.block_idx()[0] % chunks
    allocator = cutlass.memory.SmemAllocator()
    sums = allocator.allocate_tensor(Float32, cute.make_layout((cfg.head_dim, WARPS)), byte_alignment=16)
    stats = allocator.allocate_tensor(Float32, cute.make_layout((2, WARPS)), byte_alignment=16)
    cute.arch.griddepcontrol_launch_dependents()
    request, head_line, first, count = Int32(0), Int32(0), Int32(0), Int32(0)
    if args.by_item != 0:
        split = schedule.split_of_item(args, options, args.workers, heads, entry, lane)
        request, head_line, first, count = split.request, split.head, split.first, split.count
    else:
        split = schedule.split_of_worker(args, options, args.workers, entry, lane)
        request, head_line, first, count = split.request, split.head, split.first, split.count
    cute.arch.griddepcontrol_wait()
    if count > 1:
        slices = WARPS // cutlass.min(heads_per_cta, WARPS)  # warps that share one head's parts
        at_once = WARPS // slices
        item = rows.of_item(args, request, head_line, options)
        end = cutlass.min((chunk + 1) * heads_per_cta, item.count)
        for base in cutlass.range(chunk * heads_per_cta, end, at_once, unroll=1):
            head = base + warp // slices
            if (head < end) & (warp // slices < at_once):
                acc = cute.make_rmem_tensor((width,), Float32)
                acc.fill(0.0)
                m, total = _merge(acc, args.partial_out, args.partial_lse, first, warp % slices, slices, count, group,
                                  head, lane, cfg)  # fmt: skip
                for c in cutlass.range_constexpr(width):
                    sums[width * lane + c, warp] = acc[c]
                if lane == 0:
                    stats[0, warp] = m
                    stats[1, warp] = total
            cute.arch.sync_threads()
            dtype = BFloat16 if cutlass.const_expr(cfg.out_dtype == "bfloat16") else Float16
            for i in cutlass.range(thread, cutlass.min(end - base, at_once) * cfg.head_dim, cfg.threads, unroll=1):
                local, channel = i // cfg.head_dim, i % cfg.head_dim
                place = item.place(base + local)
                value, log_sum = _join(sums, stats, channel, local * slices, (local + 1) * slices, cfg)
                factor, log_sum = rows.end_row(args, options, place.head, log_sum)
                (value,) = rows.scaled([value], factor)
                at = Int64(place.row) * args.out_stride + Int64(place.head) * args.out_head_stride + Int64(channel)
                target = cute.make_tensor(device.global_pointer(dtype, args.out + 2 * at, 2), cute.make_layout(1))
                target[0] = dtype(value)
                if (channel == 0) & (args.lse != Int64(0)):
                    row = Int64(place.row) * Int64(args.kv_heads * args.group) + Int64(place.head)
                    _floats(args.lse + 4 * row, 1, 4)[0] = log_sum * args.lse_unit
            cute.arch.sync_threads()


@cute.jit
def host(values: list, names: cutlass.Constexpr, cfg: cutlass.Constexpr, stream):
    """Only to compile: the kernel is launched from its cubin.

    One CTA per SM is promised so that ptxas spends registers on loads in flight instead of on occupancy.
    """
    combine_kernel(values, names, cfg).launch(
        grid=[1, 1, 1], block=[cfg.threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )
