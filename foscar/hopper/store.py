"""The end of a segment: a finished item is written out; a part of one goes to the workspace for the combine.

A worker can share at most two items with others: the one its range begins in (slot 0) and the one it ends in when it
also holds that item's first tile (slot 1).  Partial results are normalized float32 outputs with their LSE in base 2.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32

from ..common import device, rows
from ..common.schedule import Work
from . import pv


@cute.jit
def _warp_sums(state, shared, warp: Int32, lane: Int32, barrier: Int32, cfg: cutlass.Constexpr) -> None:
    """Replace the thread's l and b by their sums over the warpgroup."""
    for j in cutlass.range_constexpr(cfg.heads_per_thread):
        total = device.butterfly(device.add, state.l[j], (4, 8, 16))
        offset = device.butterfly(device.add, state.b[j], (4, 8, 16))
        if lane < 4:
            at = 16 * (lane + 4 * j) + 4 * warp
            device.store_shared(shared.sums + at, [total.bitcast(Uint32)])
            device.store_shared(shared.offsets + at, [offset.bitcast(Uint32)])
    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
    for j in cutlass.range_constexpr(cfg.heads_per_thread):
        at = 16 * (lane % 4 + 4 * j)
        for tensor, base in ((state.l, shared.sums), (state.b, shared.offsets)):
            four = device.load_shared(base + at, 4)
            tensor[j] = device.tree(device.add, [four[i].bitcast(Float32) for i in range(4)])


@cute.jit
def _write(base: Int64, dtype: cutlass.Constexpr, values: list, warp: Int32, lane: Int32) -> None:
    """One head's channels of this thread to ``base`` (an address), rounded to ``dtype``."""
    width = 4 if dtype is Float32 else 2
    target = device.global_pointer(dtype, base + Int64(width * (8 * warp + lane // 4)), width)
    row = cute.make_tensor(target, cute.make_layout(32 * len(values)))
    for r in cutlass.range_constexpr(len(values)):
        row[32 * r] = dtype(values[r])


@cute.jit
def write_head(args, work: Work, item: rows.ItemRows, whole, index: Int32, out: list, lse, warp: Int32, lane: Int32,
               cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """Row ``index`` of an item, this thread's channels: a ``whole`` item's to the outputs, else to the workspace."""
    at = item.place(index)
    if whole:
        address = Int64(at.row) * args.out_stride + Int64(at.head) * args.out_head_stride
        dtype = BFloat16 if cutlass.const_expr(cfg.q_dtype == "bfloat16") else Float16
        factor, log_sum = rows.end_row(args, cfg.options, at.head, lse)
        _write(args.out + 2 * address, dtype, rows.scaled(out, factor), warp, lane)
        if (args.lse != Int64(0)) & (warp == 0) & (lane < 4):
            place = 4 * (Int64(at.row) * Int64(args.kv_heads * args.group) + Int64(at.head))
            target = device.global_pointer(Float32, args.lse + place, 4)
            cute.make_tensor(target, cute.make_layout(1))[0] = log_sum * args.lse_unit
    else:
        slot = 2 * work.worker
        if work.tile == 0:
            slot = slot + 1
        row = Int64(slot) * Int64(item.stride) + Int64(index)
        _write(args.partial_out + row * (4 * cfg.head_dim), Float32, out, warp, lane)
        if (warp == 0) & (lane < 4):
            target = device.global_pointer(Float32, args.partial_lse + row * 4, 4)
            cute.make_tensor(target, cute.make_layout(1))[0] = lse


@cute.jit
def finish(args, state, work: Work, whole, shared, warp: Int32, lane: Int32, barrier: Int32,
           cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """Write the segment that begins at ``work``; ``whole``: it is all of its item."""
    nh = cfg.heads_per_thread
    blocks = cfg.head_dim // 32
    _warp_sums(state, shared, warp, lane, barrier, cfg)
    factors = pv.position_factors(cfg, warp)
    item = rows.of_item(args, work.request, work.head, cfg.options)
    for j in cutlass.range_constexpr(nh):
        index = lane % 4 + 4 * j
        if index < item.count:
            # l = 0 is a row that sees nothing: zeros and -inf.  A NaN stays one.
            inverse = cutlass.select_(state.l[j] == Float32(0.0), Float32(0.0), Float32(1.0) / state.l[j])
            out = [
                device.fma(state.o[r * nh + j], factors[r] * Float32(1.0 / pv.PROB_TOP), state.b[j]) * inverse
                for r in range(blocks)
            ]
            write_head(args, work, item, whole, index, out, state.m[j] + device.log2(state.l[j]), warp, lane, cfg)
