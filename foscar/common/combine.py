"""Merging the parts of items that were split over workers: one CTA per (request, query head).

Each part is a normalized output with its LSE in base 2, so ``O = sum_s 2^(lse_s - lse) O_s`` and
``lse = log2 sum_s 2^lse_s`` (the associative merge of FlashAttention's split-KV).  CTAs of items that one worker
finished alone return at once.  The kernel follows the decode kernel on the same stream with programmatic stream
serialization: it may start early and waits for the decode kernel's results itself.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64

from . import device
from .plan import COMBINE_WARPS as WARPS


def _floats(address, count: int, align: int) -> cute.Tensor:
    return cute.make_tensor(device.global_pointer(Float32, address, align), cute.make_layout(count))


@cute.jit
def _part(first: Int32, s: Int32) -> Int64:
    """The workspace slot of part ``s``: the first worker's range ends in the item (slot 1), the others' begin there."""
    slot = 2 * (first + s)
    if s == 0:
        slot = slot + 1
    return Int64(slot)


@cute.jit
def _stage_lse(staged: cute.Tensor, partial_lse: Int64, first: Int32, count: Int32, row: Int64, group: Int64,
               thread: Int32) -> None:  # fmt: skip
    """All parts' LSEs to shared memory, one thread each: one trip to memory."""
    for s in cutlass.range(thread, count, 32 * WARPS, unroll=1):
        staged[s] = _floats(partial_lse + 4 * (_part(first, s) * group + row), 1, 4)[0]


@cute.jit
def _merged_lse(staged: cute.Tensor, count: Int32, lane: Int32):
    """(maximum LSE, sum of 2^(LSE - maximum)) over the parts, by every warp."""
    top = Float32(float("-inf"))
    for s in cutlass.range(lane, count, 32, unroll=1):
        top = cute.arch.fmax(top, staged[s])
    top = device.butterfly(cute.arch.fmax, top, (1, 2, 4, 8, 16))
    total = Float32(0.0)
    for s in cutlass.range(lane, count, 32, unroll=1):
        total = total + device.exp2(staged[s] - top)
    return top, device.butterfly(device.add, total, (1, 2, 4, 8, 16))


@cute.kernel
def combine_kernel(out: Int64, out_stride: Int64, out_head_stride: Int64, lse: Int64, partial_out: Int64,
                   partial_lse: Int64, splits: Int64, kv_heads: Int32, group: Int32, lse_unit: Float32,
                   cfg: cutlass.Constexpr):  # fmt: skip
    """Grid: batch * kv_heads * group CTAs. Arguments as in the decode kernel."""
    width = cfg.head_dim // 32
    thread = cute.arch.thread_idx()[0]
    warp, lane = thread // 32, thread % 32
    block = cute.arch.block_idx()[0]
    item, index = block // group, block % group
    allocator = cutlass.memory.SmemAllocator()
    sums = allocator.allocate_tensor(Float32, cute.make_layout((cfg.head_dim, WARPS)), byte_alignment=16)
    staged = allocator.allocate_tensor(Float32, cute.make_layout(cfg.max_parts), byte_alignment=16)
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    pair = cute.make_tensor(device.global_pointer(Int32, splits + 8 * Int64(item), 8), cute.make_layout(2))
    first, count = pair[0], pair[1]
    if count > 1:
        group64, row = Int64(group), Int64(index)
        _stage_lse(staged, partial_lse, first, count, row, group64, thread)
        cute.arch.sync_threads()
        top, total = _merged_lse(staged, count, lane)
        acc = cute.make_rmem_tensor((width,), Float32)
        acc.fill(0.0)
        for s in cutlass.range(warp, count, WARPS, unroll=8):
            at = _part(first, s) * group64 + row
            part = cute.make_rmem_tensor((width,), Float32)
            cute.autovec_copy(_floats(partial_out + 4 * (at * cfg.head_dim + width * lane), width, 4 * width), part)
            weight = device.exp2(staged[s] - top)
            for i in cutlass.range_constexpr(width):
                acc[i] = device.fma(weight, part[i], acc[i])
        for i in cutlass.range_constexpr(width):
            sums[width * lane + i, warp] = acc[i]
        cute.arch.sync_threads()
        request, head = item // kv_heads, item % kv_heads * group + index
        if thread < cfg.head_dim:
            value = device.tree(device.add, [sums[thread, w] for w in range(WARPS)]) / total
            dtype = BFloat16 if cutlass.const_expr(cfg.out_dtype == "bfloat16") else Float16
            at = Int64(request) * out_stride + Int64(head) * out_head_stride + Int64(thread)
            target = cute.make_tensor(device.global_pointer(dtype, out + 2 * at, 2), cute.make_layout(1))
            target[0] = dtype(value)
        if (thread == 0) & (lse != Int64(0)):
            at = Int64(request) * Int64(kv_heads * group) + Int64(head)
            _floats(lse + 4 * at, 1, 4)[0] = (top + device.log2(total)) * lse_unit


@cute.jit
def host(out: Int64, out_stride: Int64, out_head_stride: Int64, lse: Int64, partial_out: Int64, partial_lse: Int64,
         splits: Int64, kv_heads: Int32, group: Int32, lse_unit: Float32, cfg: cutlass.Constexpr,
         stream):  # fmt: skip
    """Only to compile: the kernel is launched from its cubin."""
    combine_kernel(out, out_stride, out_head_stride, lse, partial_out, partial_lse, splits, kv_heads, group, lse_unit,
                   cfg).launch(grid=[1, 1, 1], block=[cfg.threads, 1, 1], stream=stream)  # fmt: skip
