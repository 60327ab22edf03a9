"""Which tiles a worker takes: the device-side schedule, read from the lengths at run time.

An *item* is one (request, KV head); it has ``max(1, ceil(length / TILE_TOKENS))`` tiles, so that an empty request is
visited too.  All tiles, request-major, head-minor, form one line of ``total`` tiles, cut into ``workers`` equal
ranges: worker ``i`` takes ``[total * i // workers, total * (i + 1) // workers)`` (:func:`bound`).  A worker is one math
warpgroup and its load warp; both walk the same range, so they need no messages about it.
A worker shares at most two items with others; which, the combine finds from the same lengths (:func:`split_of_item`).

``plan.py`` states the same arithmetic on the host for workspace sizes and tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import device
from .plan import TILE_TOKENS

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
def _total_tiles(lengths: cute.Tensor, batch: Int32, lane: Int32, request: Int32):
    """Tiles of one head's line: all, and those before ``request``."""
    total = Int32(0)
    before = Int32(0)
    for i in cutlass.range(lane, batch, 32, unroll=1):
        tiles = tiles_of(lengths[i])
        total = total + tiles
        if i < request:
            before = before + tiles
    lanes = (1, 2, 4, 8, 16)
    return device.butterfly(device.add, total, lanes), device.butterfly(device.add, before, lanes)


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
def worker_of(total: Int32, workers: Int32, tile: Int32) -> Int32:
    """The worker that takes tile ``tile`` of the line: an estimate, then steps to the exact one.

    Worker ``i`` begins at or before the tile if ``total * i < (tile + 1) * workers``: products instead of divisions.
    """
    end = Int64(tile + 1) * Int64(workers)
    guess = Int32(Float32(tile) * Float32(workers) / Float32(total))
    while Int64(total) * Int64(guess) >= end:
        guess = guess - 1
    while Int64(total) * Int64(guess + 1) < end:
        guess = guess + 1
    return guess


@cute.jit
def start(args, local: Int32, per_cta: cutlass.Constexpr, lane: Int32) -> Work:
    """The work of worker ``local`` (0 .. per_cta - 1) of this CTA."""
    cta = cute.arch.block_idx()[0]
    ctas = cute.arch.grid_dim()[0]
    lengths = lengths_of(args)
    total = _total_tiles(lengths, args.batch, lane, Int32(0))[0] * args.kv_heads
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


@dataclass
class Split:
    """An item that several workers share."""

    request: Int32
    head: Int32
    first: Int32  # worker, the one that takes the item's first tile
    count: Int32  # workers, that one and the following; less than 2: nothing to merge


@cute.jit
def split_of_item(lengths: cute.Tensor, batch: Int32, kv_heads: Int32, most: Int32, item: Int32, lane: Int32) -> Split:
    """Who shares ``item`` (request * kv_heads + KV head) where up to ``most`` workers take part; by one warp."""
    request, head = item // kv_heads, item % kv_heads
    line, before = _total_tiles(lengths, batch, lane, request)
    total, tiles = line * kv_heads, tiles_of(lengths[request])
    workers = cutlass.min(most, total)
    begin = before * kv_heads + head * tiles
    first = worker_of(total, workers, begin)
    return Split(request, head, first, worker_of(total, workers, begin + tiles - 1) - first + 1)


@cute.jit
def split_of_worker(lengths: cute.Tensor, batch: Int32, kv_heads: Int32, most: Int32, worker: Int32,
                    lane: Int32) -> Split:  # fmt: skip
    """The item that ``worker`` begins and others finish (it is the last of its range); by one warp."""
    total = _total_tiles(lengths, batch, lane, Int32(0))[0] * kv_heads
    workers = cutlass.min(most, total)
    place = cutlass.min(worker, workers - 1)
    end = bound(total, workers, place + 1)
    request, before = _find_request(lengths, batch, lane, (end - 1) // kv_heads)
    tiles = tiles_of(lengths[request])
    head = (end - 1 - before * kv_heads) // tiles
    begin = before * kv_heads + head * tiles
    count = worker_of(total, workers, begin + tiles - 1) - place + 1
    if (worker >= workers) | (begin < bound(total, workers, place)):
        count = Int32(0)
    return Split(request, head, place, count)
