"""The load warp: brings the pages of one math warpgroup's tiles into its ring, one bulk copy per page."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.experimental.primitives.nvvm_wrapper as primitives
from cutlass import Int32, Int64, Uint32

from ..common import device, schedule
from .config import TILE_TOKENS


@cute.jit
def page_ids(args, row: Int64, index: Int32, end: Int32) -> Int32:
    """Entry ``index`` of a request's page list, 0 past its end (entries there are never read)."""
    page = Int32(0)
    if index < end:
        ids = cute.make_tensor(device.global_pointer(Int32, args.pages + 4 * row, 4), cute.make_layout(1 << 30))
        page = ids[index]
    return page


@cute.jit
def first_page(args, request: Int32) -> Int64:
    """Where a request's page list begins: a row of a dense table, or ``indptr`` of a compressed one."""
    row = Int64(request) * args.table_stride
    if args.indptr != Int64(0):
        starts = cute.make_tensor(device.global_pointer(Int32, args.indptr, 4), cute.make_layout(1 << 30))
        row = Int64(starts[request])
    return row


def unseen_pages(cut: schedule.Cut, first, most: int, cfg) -> Int32:
    """How many of the ``most`` pages from page ``first`` of a request on lie wholly before its windows."""
    unseen = (cut.length - cut.span) // cfg.page_size
    return cutlass.max(cutlass.min(unseen - first, most), 0)


@cute.jit
def _load_tile(args, shared, ids: Int32, first: Int32, skip: Int32, pages: Int32, base: Int64, slot: Int32,
               phase: Int32, cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """Wait for the slot, then copy the pages whose ids lanes ``first + skip`` .. ``first + pages - 1`` hold."""
    record = cfg.layout.record_bytes
    cute.arch.mbarrier_wait(shared.empty + slot, phase)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(shared.full + slot, (pages - skip) * record)
    target = shared.ring + slot * cfg.stage_bytes
    for i in cutlass.range_constexpr(cfg.pages_per_tile):
        page = cute.arch.shuffle_sync(ids, first + i)  # all shuffles first: 8 % slower at page size 16
        here = i < pages
        if cutlass.const_expr(cfg.options.window):
            here = (i >= skip) & here
        if here:
            with cute.arch.elect_one():
                source = device.global_pointer(Uint32, base + Int64(page) * args.page_stride, 16)
                room = cute.make_ptr(Uint32, target + i * record, cute.AddressSpace.smem, assumed_align=16)
                primitives.cp_async_bulk_shared_cluster_global(room, source, shared.full + slot, record)


@cute.jit
def load_warp(args, shared, local: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """Walk the worker's range; page ids are fetched 32 at a time, one chunk ahead."""
    per_tile = cfg.pages_per_tile
    chunk = 32 // per_tile  # tiles whose page ids one register of the warp holds
    work = schedule.start(args, local, cfg.warpgroups, lane, cfg.options)
    request, head, tile, left = work.request, work.head, work.tile, work.left
    slot = Int32(0)
    phase = Int32(1)
    while left > 0:
        cut = schedule.cut_of(args, request, cfg.options)
        n = cutlass.min(left, cut.tiles - tile)
        tile = tile + cut.first
        row = first_page(args, request)
        pages = (cut.length + (cfg.page_size - 1)) // cfg.page_size
        base = args.cache + Int64(cut.kv_head(head)) * args.head_stride
        ahead = page_ids(args, row, tile * per_tile + lane, pages)
        for done in cutlass.range(0, n, chunk, unroll=1):
            ids = ahead
            ahead = page_ids(args, row, (tile + done + chunk) * per_tile + lane, pages)
            for q in cutlass.range(cutlass.min(n - done, chunk), unroll=1):
                here = cutlass.max(cutlass.min(pages - (tile + done + q) * per_tile, per_tile), 0)
                skip = Int32(0)
                if cutlass.const_expr(cfg.options.window):
                    skip = unseen_pages(cut, (tile + done + q) * per_tile, per_tile, cfg)
                _load_tile(args, shared, ids, q * per_tile, skip, here, base, slot, phase, cfg)
                slot = slot + 1
                if slot == cfg.stages:
                    slot = Int32(0)
                    phase = phase ^ 1
        left = left - n
        tile = Int32(0)
        head = head + 1
        if head == cut.heads:
            head = Int32(0)
            request = request + 1


assert TILE_TOKENS // 16 <= 32  # one register of the warp holds a tile's page ids
