"""Which tiles a worker takes: the device-side schedule, read from the lengths at run time.

An *item* is one (request, KV head); it has ``max(1, ceil(length / TILE_TOKENS))`` tiles, so that an empty request is
visited too.  All tiles, request-major, head-minor, form one line of ``total`` tiles, cut into ``workers`` equal
ranges: worker ``i`` takes ``[total * i // workers, total * (i + 1) // workers)`` (:func:`bound`).  A worker is one math
warpgroup and its load warp; both walk the same range, so they need no messages about it.

``plan.py`` states the same arithmetic on the host for workspace sizes and tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common import device
from .config import TILE_TOKENS

TILE_SHIFT = TILE_TOKENS.bit_length() - 1


@dataclass
class Work:
    """Where a worker stands on the line of tiles."""

    request: Int32
    head: Int32  # KV head
    tile: Int32  # within the item
    position: Int32  # on the line
    left: Int32  # tiles to the end of the worker's range
    total: Int32  # tiles of the launch
    workers: Int32  # that take part
    worker: Int32  # which one this is

    def at(self, request, head, tile, position, left) -> Work:
        return Work(request, head, tile, position, left, self.total, self.workers, self.worker)


def lengths_of(args) -> cute.Tensor:
    return cute.make_tensor(device.global_pointer(Int32, args.lengths, 4), cute.make_layout(args.batch))


def tiles_of(length) -> Int32:
    return cutlass.max((length + (TILE_TOKENS - 1)) >> TILE_SHIFT, Int32(1))


@cute.jit
def _total_tiles(lengths: cute.Tensor, batch: Int32, lane: Int32) -> Int32:
    total = Int32(0)
    for i in cutlass.range(lane, batch, 32, unroll=1):
        total = total + tiles_of(lengths[i])
    return device.butterfly(device.add, total, (1, 2, 4, 8, 16))


@cute.jit
def _find_request(lengths: cute.Tensor, batch: Int32, lane: Int32, line: Int32):
    """The request that holds position ``line`` of one head's line of tiles, and the tiles before it."""
    count = Int32(0)
    before = Int32(0)
    running = Int32(0)
    for base in cutlass.range(0, batch, 32, unroll=1):
        tiles = Int32(0)
        if base + lane < batch:
            tiles = tiles_of(lengths[base + lane])
        upto = tiles
        for k in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(upto, offset=1 << k, mask_and_clamp=0)
            if lane >= (1 << k):
                upto = upto + other
        upto = upto + running
        running = cute.arch.shuffle_sync(upto, 31)
        if (tiles > 0) & (upto <= line):
            count = count + 1
            before = upto
    request = device.butterfly(device.add, count, (1, 2, 4, 8, 16))
    return request, device.butterfly(cutlass.max, before, (1, 2, 4, 8, 16))


def bound(total, workers, i) -> Int32:
    """``total * i // workers`` without a 64-bit division (a product of two numbers of workers fits in 31 bits)."""
    each = total // workers
    return each * i + (total - each * workers) * i // workers


@cute.jit
def worker_of(work: Work, tile: Int32) -> Int32:
    """The worker that takes tile ``tile`` of the line: an estimate, then steps to the exact one."""
    guess = Int32(Float32(tile) * Float32(work.workers) / Float32(work.total))
    while bound(work.total, work.workers, guess) > tile:
        guess = guess - 1
    while bound(work.total, work.workers, guess + 1) <= tile:
        guess = guess + 1
    return guess


@cute.jit
def start(args, local: Int32, per_cta: cutlass.Constexpr, lane: Int32) -> Work:
    """The work of worker ``local`` (0 .. per_cta - 1) of this CTA."""
    cta = cute.arch.block_idx()[0]
    ctas = cute.arch.grid_dim()[0]
    lengths = lengths_of(args)
    total = _total_tiles(lengths, args.batch, lane) * args.kv_heads
    workers = cutlass.min(ctas * per_cta, total)
    # Neighbours share a CTA, so that every SM gets the same bytes; where not every worker has a tile, CTAs come first.
    worker = cta * per_cta + local
    if total < ctas * per_cta:
        worker = local * ctas + cta
    begin = bound(total, workers, worker)
    left = bound(total, workers, worker + 1) - begin
    if worker >= workers:
        left = Int32(0)
        begin = Int32(0)
    request, before = _find_request(lengths, args.batch, lane, begin // args.kv_heads)
    inside = begin - before * args.kv_heads
    tiles = tiles_of(lengths[request])
    return Work(request, inside // tiles, inside % tiles, begin, left, total, workers, worker)
