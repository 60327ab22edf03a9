"""Which tiles a worker takes: the device-side schedule, read from the lengths at run time.

An *item* is one (request, KV head); it has ``max(1, ceil(length / TILE_TOKENS))`` tiles, so that an empty request is
visited too.  With a sliding window its first tile is the one of the earliest token that any row of the request sees.
Where a request may have more query rows than an item has room for, there is an item per chunk of rows, and *head* in
this file counts (KV head, chunk) pairs, chunks innermost: neighbours on the line read the same pages.
All tiles, request-major, head-minor, form one line of ``total`` tiles, cut into ``workers`` equal
ranges: worker ``i`` takes ``[total * i // workers, total * (i + 1) // workers)`` (:class:`Line`).  A worker is one math
warpgroup and its load warp; both walk the same range, so they need no messages about it.
A worker shares at most two items with others; which, the combine finds from the same lengths (:func:`split_of_item`).

``plan.py`` states the same arithmetic on the host for workspace sizes and tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import device, window_tokens
from .plan import PLAIN, TILE_TOKENS, KernelOptions

TILE_SHIFT = TILE_TOKENS.bit_length() - 1


@dataclass
class Work:
    """Where a worker stands on the line of tiles."""

    request: Int32
    head: Int32  # KV head and row chunk
    tile: Int32  # within the item
    position: Int32  # on the line
    left: Int32  # tiles to the end of the worker's range
    total: Int32  # tiles of the launch
    workers: Int32  # that take part
    worker: Int32  # which one this is

    def at(self, request, head, tile, position, left) -> Work:
        return Work(request, head, tile, position, left, self.total, self.workers, self.worker)


@dataclass
class Requests:
    """The arguments that the schedule reads, by the names that they have in every kernel's; None: not there."""

    lengths: Int64
    batch: Int32
    kv_heads: Int32
    kv_heads_inverse: Int32  # plan.inverse_of
    group: Int32
    workers_inverse: Int32  # of the number that the grid has
    rows: Int32 | None = None  # of an item
    q_indptr: Int64 | None = None  # int32 [batch + 1], or 0: a query token per request
    window: Int32 | None = None  # keys that a row sees, itself included; at most 2^30


@dataclass
class Cut:
    """One request as it is cut into items."""

    length: Int32  # packed tokens; 0 where there is no query row
    first: Int32  # tile of the request that is tile 0 of its items
    tiles: Int32  # of an item
    heads: Int32  # items: KV heads times row chunks
    chunks: Int32 | None = None  # per KV head
    q_row: Int32 | None = None  # of the first query token
    q_len: Int32 | None = None  # query tokens
    span: Int32 | None = None  # tokens from the earliest that a row sees to the end
    recent: Int32 | None = None  # tokens in 16 bits after the packed ones

    def kv_head(self, head) -> Int32:
        """Of item ``head`` of the request."""
        return head if self.chunks is None else head // self.chunks


def lengths_of(args) -> cute.Tensor:
    return cute.make_tensor(device.global_pointer(Int32, args.lengths, 4), cute.make_layout(args.batch))


def tiles_of(length) -> Int32:
    return cutlass.max((length + (TILE_TOKENS - 1)) >> TILE_SHIFT, Int32(1))


@cute.jit
def _query_rows(args, request: Int32):
    """The request's first row of q, and how many it has."""
    first, count = request, Int32(1)
    if args.q_indptr != Int64(0):
        bounds = cute.make_tensor(device.global_pointer(Int32, args.q_indptr, 4), cute.make_layout(1 << 30))
        first = bounds[request]
        count = bounds[request + 1] - first
    return first, count


def cut_of(args, request, options: KernelOptions) -> Cut:
    """How ``request`` is cut (plan.Cut on the host)."""
    length, recent = window_tokens.packed_lengths(args, request, lengths_of(args)[request], options)
    if not (options.rows or options.window):
        return Cut(length, Int32(0), tiles_of(length), args.kv_heads)
    chunks, q_row, q_len, heads, first, span = None, None, Int32(1), args.kv_heads, Int32(0), length
    if options.rows:
        q_row, q_len = _query_rows(args, request)
        length = cutlass.select_(q_len > 0, length, Int32(0))
        chunks = cutlass.max((q_len * args.group + (args.rows - 1)) // args.rows, Int32(1))
        heads = args.kv_heads * chunks
    if options.window:
        start = cutlass.max(length - q_len + 1 - args.window, Int32(0))
        first, span = start >> TILE_SHIFT, length - start
    return Cut(length, first, tiles_of(length) - first, heads, chunks, q_row, q_len, span, recent)


def _line_tiles(args, request, options: KernelOptions) -> Int32:
    """Tiles of the request on the line of one KV head."""
    cut = cut_of(args, request, options)
    return cut.tiles if cut.chunks is None else cut.tiles * cut.chunks


@dataclass
class Scan:
    """One KV head's line of tiles, shared out over a warp: a lane has ``share`` consecutive requests."""

    share: Int32
    own: Int32  # tiles of the lane's requests
    upto: Int32  # and of all before
    total: Int32


def _upto(own: Int32, lane: Int32) -> Int32:
    """The sum of ``own`` over this and all lower lanes."""
    upto = own
    for k in range(5):
        other = cute.arch.shuffle_sync_up(upto, offset=1 << k, mask_and_clamp=0)
        upto = upto + cutlass.select_(lane >= (1 << k), other, Int32(0))
    return upto


@cute.jit
def _scan(args, options: cutlass.Constexpr, lane: Int32) -> Scan:
    share = (args.batch + 31) >> 5
    own = Int32(0)
    first = lane * share
    for i in cutlass.range(first, cutlass.min(first + share, args.batch), unroll=1):
        own = own + _line_tiles(args, i, options)
    upto = _upto(own, lane)
    return Scan(share, own, upto, cute.arch.shuffle_sync(upto, 31))


def _lanes_before(upto: Int32, line: Int32) -> Int32:
    """How many lanes' tiles end at or before position ``line``; ``upto`` does not fall from lane to lane."""
    return Int32(cute.arch.popc(cute.arch.vote_ballot_sync(upto <= line)))


@cute.jit
def _find_request(args, options: cutlass.Constexpr, lane: Int32, scan: Scan, line: Int32):
    """The request that holds position ``line`` (below the total), and the tiles before it."""
    holder = _lanes_before(scan.upto, line)
    before = cute.arch.shuffle_sync(scan.upto - scan.own, holder)
    request = holder * scan.share
    if scan.share > 1:
        end = cutlass.min(request + scan.share, args.batch)
        passed = Int32(32)
        while passed == 32:  # 32 of the lane's requests at a time; one of them holds the position
            own = Int32(0)
            if request + lane < end:
                own = _line_tiles(args, request + lane, options)
            upto = _upto(own, lane) + before
            passed = _lanes_before(upto, line)
            before = cute.arch.shuffle_sync(upto - own, cutlass.min(passed, 31))
            if passed == 32:
                before = cute.arch.shuffle_sync(upto, 31)
            request = request + passed
    return request, before


@cute.jit
def _tiles_before(args, options: cutlass.Constexpr, lane: Int32, request: Int32):
    """Tiles of one KV head's line: all, and those before ``request``."""
    total = Int32(0)
    before = Int32(0)
    for i in cutlass.range(lane, args.batch, 32, unroll=1):
        tiles = _line_tiles(args, i, options)
        total = total + tiles
        before = before + cutlass.select_(i < request, tiles, Int32(0))
    return device.warp_add(total), device.warp_add(before)


def share(total, workers, i, divide):
    """``total * i // workers`` by ``divide``, a division by ``workers``, in 31 bits (a product of two numbers of
    workers fits)."""
    each = divide(total)
    return each * i + divide((total - each * workers) * i)


@dataclass
class Line:
    """The line of tiles of a launch, cut into ranges."""

    total: Int32
    most: Int32  # workers of the grid
    inverse: Int32  # plan.inverse_of(most)
    workers: Int32  # that take part

    @classmethod
    def make(cls, args, total, most) -> Line:
        return cls(total, most, args.workers_inverse, cutlass.min(most, total))

    def bound(self, i) -> Int32:
        """``total * i // workers``, where worker ``i``'s range begins, and that of ``i - 1`` ends."""
        many = share(self.total, self.most, i, lambda n: device.divide(n, self.most, self.inverse))
        return cutlass.select_(self.total < self.most, i, many)


@cute.jit
def worker_of(total: Int32, workers: Int32, tile: Int32) -> Int32:
    """The worker that takes tile ``tile`` of the line: an estimate, then steps to the exact one.

    Worker ``i`` begins at or before the tile if ``total * i < (tile + 1) * workers``: products instead of divisions.
    """
    end = Int64(tile + 1) * Int64(workers)
    guess = Int32(Float32(tile) * Float32(workers) * device.reciprocal(Float32(total)))
    while Int64(total) * Int64(guess) >= end:
        guess = guess - 1
    while Int64(total) * Int64(guess + 1) < end:
        guess = guess + 1
    return guess


@cute.jit
def start(args, local: Int32, per_cta: cutlass.Constexpr, lane: Int32, options: cutlass.Constexpr = PLAIN) -> Work:
    """The work of worker ``local`` (0 .. per_cta - 1) of this CTA."""
    cta = cute.arch.block_idx()[0]
    ctas = cute.arch.grid_dim()[0]
    scan = _scan(args, options, lane)
    line = Line.make(args, scan.total * args.kv_heads, ctas * per_cta)
    # Neighbours share a CTA, so that every SM gets the same bytes; where not every worker has a tile, CTAs come first.
    worker = cta * per_cta + local
    if line.total < line.most:
        worker = local * ctas + cta
    begin = line.bound(worker)
    left = line.bound(worker + 1) - begin
    if worker >= line.workers:
        left = Int32(0)
        begin = Int32(0)
    position = device.divide(begin, args.kv_heads, args.kv_heads_inverse)
    request, before = _find_request(args, options, lane, scan, position)
    inside = begin - before * args.kv_heads
    tiles = cut_of(args, request, options).tiles
    head = device.quotient(inside, tiles)
    return Work(request, head, inside - head * tiles, begin, left, line.total, line.workers, worker)


@dataclass
class Split:
    """An item that several workers share."""

    request: Int32
    head: Int32
    first: Int32  # worker, the one that takes the item's first tile
    count: Int32  # workers, that one and the following; less than 2: nothing to merge


@cute.jit
def split_of_item(args, options: cutlass.Constexpr, most: Int32, request: Int32, head: Int32, lane: Int32) -> Split:
    """Who shares item ``head`` of ``request`` where up to ``most`` workers take part; by one warp."""
    tiles_of_head, before = _tiles_before(args, options, lane, request)
    cut = cut_of(args, request, options)
    line, tiles = Line.make(args, tiles_of_head * args.kv_heads, most), cut.tiles
    begin = before * args.kv_heads + head * tiles
    first, count = Int32(0), Int32(0)
    if cutlass.const_expr(options.rows):
        if head < cut.heads:
            first = worker_of(line.total, line.workers, begin)
            count = worker_of(line.total, line.workers, begin + tiles - 1) - first + 1
    else:
        first = worker_of(line.total, line.workers, begin)
        count = worker_of(line.total, line.workers, begin + tiles - 1) - first + 1
    return Split(request, head, first, count)


@cute.jit
def split_of_worker(args, options: cutlass.Constexpr, most: Int32, worker: Int32, lane: Int32) -> Split:
    """The item that ``worker`` begins and others finish (it is the last of its range); by one warp."""
    scan = _scan(args, options, lane)
    line = Line.make(args, scan.total * args.kv_heads, most)
    place = cutlass.min(worker, line.workers - 1)
    last = line.bound(place + 1) - 1
    position = device.divide(last, args.kv_heads, args.kv_heads_inverse)
    request, before = _find_request(args, options, lane, scan, position)
    tiles = cut_of(args, request, options).tiles
    head = device.quotient(last - before * args.kv_heads, tiles)
    begin = before * args.kv_heads + head * tiles
    count = worker_of(line.total, line.workers, begin + tiles - 1) - place + 1
    if (worker >= line.workers) | (begin < line.bound(place)):
        count = Int32(0)
    return Split(request, head, place, count)
