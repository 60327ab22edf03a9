"""The load warp: pages of the CTA's steps into the ring, one bulk copy per page."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..common import schedule
from ..hopper.load import first_page, page_ids, unseen_pages
from . import pipeline, walk
from .bulk import copy_page, expect_bytes
from .config import STEP_TILES

ROLE = "load"


@cute.jit
def _load_step(args, shared, ids: Int32, first: Int32, skip: Int32, pages: Int32, base: Int64, slot: Int32,
               phase: Int32, cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """Wait for the slot, then copy the pages whose ids lanes ``first + skip`` .. ``first + pages - 1`` hold."""
    record = cfg.layout.record_bytes
    pipeline.wait(shared.barriers, "empty", ROLE, slot, phase)
    found = [cute.arch.shuffle_sync(ids, first + i) for i in range(STEP_TILES * cfg.pages_per_tile)]
    barrier = pipeline.source(shared.barriers, "full", ROLE, slot).toint()
    target = shared.ring + slot * cfg.stage_bytes
    with cute.arch.elect_one():
        expect_bytes(barrier, (pages - skip) * record)
        for i, page in enumerate(found):
            source = base + Int64(page) * args.page_stride
            here = i < pages
            if cfg.options.window:
                here = (i >= skip) & here
            copy_page(here, target + i * record, source, record, barrier)


@cute.jit
def load_warp(args, shared, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """Walk the CTA's range; page ids are fetched 32 at a time, one chunk ahead."""
    per_step = STEP_TILES * cfg.pages_per_tile
    chunk = 32 // per_step  # steps whose page ids one register of the warp holds
    work = schedule.start(args, Int32(0), 1, lane, cfg.options)
    request, head, tile, left = work.request, work.head, work.tile, work.left
    slot, phase = Int32(0), Int32(1)
    while left > 0:
        cut = schedule.cut_of(args, request, cfg.options)
        n = cutlass.min(left, cut.tiles - tile)
        row = first_page(args, request)
        first = (cut.first + tile) * cfg.pages_per_tile
        end = first + (walk.tokens_of(cut, tile, n) + (cfg.page_size - 1)) // cfg.page_size
        base = args.cache + Int64(cut.kv_head(head)) * args.head_stride
        steps = walk.steps_of(n)
        ahead = page_ids(args, row, first + lane, end)
        for done in cutlass.range(0, steps, chunk, unroll=1):
            ids = ahead
            ahead = page_ids(args, row, first + (done + chunk) * per_step + lane, end)
            for q in cutlass.range(cutlass.min(steps - done, chunk), unroll=1):
                here = cutlass.min(end - first - (done + q) * per_step, per_step)
                skip = Int32(0)
                if cutlass.const_expr(cfg.options.window):
                    skip = unseen_pages(cut, first + (done + q) * per_step, per_step, cfg)
                _load_step(args, shared, ids, q * per_step, skip, here, base, slot, phase, cfg)
                slot, phase = pipeline.next_slot(slot, phase, cfg.stages)
        left = left - n
        tile = Int32(0)
        request, head = walk.next_item(cut.heads, request, head)


assert STEP_TILES * 128 // 16 <= 32  # one register of the warp holds a step's page ids
