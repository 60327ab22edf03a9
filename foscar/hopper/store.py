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
from . import folds, pv


@cute.jit
def _warp_sums(state, shared, warp: Int32, lane: Int32, barrier: Int32, cfg: cutlass.Constexpr) -> None:
    """Replace the thread's l and b by their sums over the warpgroup."""
    nh = cfg.heads_per_thread
    rooms = [(state.l, 0, shared.sums)]
    if cutlass.const_expr(not folds.v_side(cfg).channel):
        rooms += [(state.b, x * nh, shared.offsets + 16 * cfg.heads * x) for x in range(folds.v_side(cfg).parts)]
    for j in cutlass.range_constexpr(nh):
        sums = [device.butterfly(device.add, tensor[first + j], (4, 8, 16)) for tensor, first, _ in rooms]
        if lane < 4:
            at = 16 * (lane + 4 * j) + 4 * warp
            for value, (_, _, base) in zip(sums, rooms, strict=True):
                device.store_shared(base + at, [value.bitcast(Uint32)])
    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
    for j in cutlass.range_constexpr(nh):
        at = 16 * (lane % 4 + 4 * j)
        for tensor, first, base in rooms:
            four = device.load_shared(base + at, 4)
            tensor[first + j] = device.tree(device.add, [four[i].bitcast(Float32) for i in range(4)])


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
        joined, log_sum = rows.join_windows(args, cfg, at, out, 8 * warp + lane // 4, 32, lse)
        address = Int64(at.row) * args.out_stride + Int64(at.head) * args.out_head_stride
        dtype = BFloat16 if cutlass.const_expr(cfg.q_dtype == "bfloat16") else Float16
        factor, log_sum = rows.end_row(args, cfg.options, at.head, log_sum)
        _write(args.out + 2 * address, dtype, rows.scaled(joined, factor), warp, lane)
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


def _output(state, r: int, j: int, factors: list, cfg):
    """Row block ``r`` of head ``j``, V's bias included, before the division by the denominator."""
    nh, v = cfg.heads_per_thread, folds.v_side(cfg)
    if v.channel:
        return state.o[r * nh + j]  # pv_channel.py has added all of it
    offset = state.b[32 * r // v.group * nh + j]
    return device.fma(state.o[r * nh + j], factors[r] * Float32(1.0 / pv.PROB_TOP), offset)


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
            out = [_output(state, r, j, factors, cfg) * inverse for r in range(blocks)]
            write_head(args, work, item, whole, index, out, state.m[j] + device.log2(state.l[j]), warp, lane, cfg)
