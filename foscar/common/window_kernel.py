"""Attention over the tokens that a cache keeps in 16 bits: the first of a request (sink), the last (a ring).

A CTA has one item: a (request, KV head), with KernelOptions.rows a chunk of its rows (schedule.py).  Its warps take
blocks of 16 tokens in turn, of sink and ring laid end to end, each with its own online softmax::

    S [16 rows, 16 tokens] = Q K^T     mma.sync; K is loaded from global memory straight into the operand's registers
    P = exp2(S - m)                    m the row's running maximum; the sums of P stay float32
    O [16 rows, D] += P V              V of four tokens, paired by byte permutes into the operand's registers

Which channel is which index of the contraction, and which column of O, follows from loads of 16 bytes: lane (g, t), g =
lane / 4, t = lane % 4, has channels 32 j + 8 t .. + 7 of Q and K, and channels 64 i + 8 g .. + 7 of V.  At the end the
warps' parts are merged in shared memory.  Results are normalized float32 with LSEs in base 2, a row that sees no
token zeros and -inf; the decode kernel joins them to whole items, the combine to split ones (rows.join_windows).

Operands have the windows' type.  A bfloat16 query is multiplied by a power of two per row to fit float16, a float16 one
is the sum of two bfloat16; P is one float16 or the sum of two bfloat16.  So only P is rounded, to 11 or 16 bits.

The kernel precedes the decode kernel, which starts as soon as SMs are free: it reads the cache, which nothing before it
still writes because this kernel waited for that, and waits for these results at the end of its first item.  So neither
the decode kernel nor the combine have work of their own for windows, and the grids of all three fit their own work.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from . import device, rows, schedule, window_query, window_tokens
from .soft_cap import cap_logit
from .window_config import BLOCK, ROWS, WARPS
from .window_tokens import Tokens


@dataclass
class Args:
    """The kernel's arguments, named as the decode kernel's (hopper/kernel.py)."""

    q: Int64
    q_stride: Int64
    q_head_stride: Int64
    lengths: Int64
    batch: Int32
    kv_heads: Int32
    group: Int32
    sm_scale_log2: Float32
    slots: Int64
    packed_lens: Int64
    n_sink: Int32
    exact_out: Int64
    exact_lse: Int64
    capacity: Int32  # entries of a ring
    items_per_request: Int32  # the most there can be
    sink_k: Int64  # [slots, kv_heads, n_sink, head_dim] 16-bit
    sink_v: Int64
    recent_k: Int64  # [slots, kv_heads, capacity, head_dim], position p at p % capacity
    recent_v: Int64
    q_indptr: Int64 | None = None
    soft_cap_log2: Float32 | None = None
    rows: Int32 | None = None


def _load_rows(address, offsets: list) -> list:
    """Four words at each offset from a global address."""
    found = []
    for offset in offsets:
        words = cute.make_rmem_tensor((4,), Uint32)
        source = device.global_pointer(Uint32, address + Int64(offset), 16)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)
        found.append(words)
    return found


def _scores(k: list, query: Int32, lane: Int32, cfg) -> list:
    """[tokens 0-7 or 8-15][register]: rows g, g and g + 8, g + 8, tokens 2 t and 2 t + 1."""
    s = [[Float32(0.0)] * 4 for _ in range(2)]
    for j in range(cfg.head_dim // 32):
        for term in range(cfg.query_terms):
            at = query + term * (32 * cfg.head_dim) + 512 * j + 16 * lane
            low, high = (device.load_shared(at + half * (16 * cfg.head_dim), 4) for half in (0, 1))
            for step in (0, 2):
                a = [low[step], high[step], low[step + 1], high[step + 1]]
                for n in (0, 1):
                    b = [k[n][j][step], k[n][j][step + 1]]
                    s[n] = device.multiply_halves(a, b, s[n], cfg.dtype)
    return s


def _logits(s: list, args, tokens: Tokens, block, t, factors: list, limits: list | None, cfg) -> list:
    """In base 2, -inf for what a row does not see."""
    found = []
    for n in range(2):
        for c in range(4):
            x = s[n][c] * factors[c // 2]
            if cfg.options.soft_cap:
                x = cap_logit(x, args.soft_cap_log2, Float32(0.0), cfg.options.wide_cap)
            index = block * BLOCK + 8 * n + 2 * t + c % 2
            seen = index < tokens.count
            if limits is not None:
                seen = seen & (tokens.position(index) <= limits[c // 2])
            found.append(Float32(cutlass.select_(seen, x, Float32(float("-inf")))))
    return found


def _add_values(acc: cute.Tensor, p: list, v: list, cfg) -> None:
    """``acc`` + P V: p[score register], v[token][i] four words."""
    operands = window_query.terms_of(p, cfg.prob_terms, cfg.dtype)  # words: rows g, g + 8 of tokens 0-7, then of 8-15
    for i in range(cfg.head_dim // 64):
        for jj in range(8):
            selector = 0x5410 if jj % 2 == 0 else 0x7632
            words = [v[token][i][jj // 2] for token in range(4)]
            b = [device.byte_permute(words[x], words[x + 1], selector) for x in (0, 2)]
            base = 4 * (8 * i + jj)
            c = [acc[base + x] for x in range(4)]
            for a in operands:
                c = device.multiply_halves(a, b, c, cfg.dtype)
            for x in range(4):
                acc[base + x] = c[x]


@cute.jit
def _block(args, tokens: Tokens, block: Int32, query: Int32, factors: list, limits: list | None, acc: cute.Tensor,
           m: cute.Tensor, total: cute.Tensor, lane: Int32, cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """One block of tokens; ``m`` and ``total`` of rows g and g + 8, the total of this lane's tokens alone."""
    g, t, row_bytes, last = lane // 4, lane % 4, 2 * cfg.head_dim, tokens.count - 1
    # Past the end the last token is read again, with weight 0.
    k, v = [], []
    for n in cutlass.range_constexpr(2):
        index = cutlass.min(block * BLOCK + 8 * n + g, last)
        address = tokens.address(args.sink_k, args.recent_k, index, row_bytes) + Int64(16 * t)
        k.append(_load_rows(address, [64 * j for j in range(cfg.head_dim // 32)]))
    for n in cutlass.range_constexpr(4):
        index = cutlass.min(block * BLOCK + 8 * (n // 2) + 2 * t + n % 2, last)
        address = tokens.address(args.sink_v, args.recent_v, index, row_bytes) + Int64(16 * g)
        v.append(_load_rows(address, [128 * i for i in range(cfg.head_dim // 64)]))
    w = _logits(_scores(k, query, lane, cfg), args, tokens, block, t, factors, limits, cfg)
    shrink, top = [], []
    for half in cutlass.range_constexpr(2):
        mine = [m[half], *(w[4 * n + 2 * half + c] for n in range(2) for c in range(2))]
        top.append(device.butterfly(cute.arch.fmax, device.tree(cute.arch.fmax, mine), (1, 2)))
        shrink.append(device.exp2(m[half] - top[half]))
        m[half] = top[half]
    p = [device.exp2(x - top[i % 4 // 2]) for i, x in enumerate(w)]
    for half in cutlass.range_constexpr(2):
        mine = [p[4 * n + 2 * half + c] for n in range(2) for c in range(2)]
        total[half] = device.fma(total[half], shrink[half], device.tree(device.add, mine))
    for i in cutlass.range_constexpr(cfg.head_dim // 8):
        for x in cutlass.range_constexpr(4):
            acc[4 * i + x] = acc[4 * i + x] * shrink[x // 2]
    _add_values(acc, p, v, cfg)


@cute.jit
def _leave(sums: cute.Tensor, stats: cute.Tensor, acc: cute.Tensor, m: cute.Tensor, total: cute.Tensor, warp: Int32,
           lane: Int32, cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """A warp's part: sums [channel, row, warp], stats [m or total, row, warp]."""
    g, t = lane // 4, lane % 4
    for half in cutlass.range_constexpr(2 if cfg.heads > 8 else 1):
        row = g + 8 * half
        whole = device.butterfly(device.add, total[half], (1, 2))
        if row < cfg.heads:
            for i in cutlass.range_constexpr(cfg.head_dim // 64):
                for jj in cutlass.range_constexpr(8):
                    for column in cutlass.range_constexpr(2):
                        value = acc[4 * (8 * i + jj) + 2 * half + column]
                        sums[64 * i + 8 * (2 * t + column) + jj, row, warp] = value
            if t == 0:
                stats[0, row, warp] = m[half]
                stats[1, row, warp] = whole


@cute.jit
def _merge(args, item: rows.ItemRows, sums: cute.Tensor, stats: cute.Tensor, thread: Int32,
           cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """All warps' parts of all rows, written out."""
    for i in cutlass.range(thread, item.count * cfg.head_dim, cfg.threads, unroll=1):
        row, channel = i // cfg.head_dim, i % cfg.head_dim
        top = device.tree(cute.arch.fmax, [stats[0, row, w] for w in range(WARPS)])
        value, total = Float32(0.0), Float32(0.0)
        for w in cutlass.range_constexpr(WARPS):
            weight = device.exp2(stats[0, row, w] - top)
            value = device.fma(weight, sums[channel, row, w], value)
            total = device.fma(weight, stats[1, row, w], total)
        inverse = cutlass.select_(total == Float32(0.0), Float32(0.0), Float32(1.0) / total)
        place = item.place(row)
        at = Int64(place.row) * Int64(args.kv_heads * args.group) + Int64(place.head)
        address = args.exact_out + 4 * (at * cfg.head_dim + Int64(channel))
        cute.make_tensor(device.global_pointer(Float32, address, 4), cute.make_layout(1))[0] = value * inverse
        if channel == 0:
            target = device.global_pointer(Float32, args.exact_lse + 4 * at, 4)
            cute.make_tensor(target, cute.make_layout(1))[0] = top + device.log2(total)


@cute.jit
def _attend(args, request: Int32, head: Int32, room: tuple, thread: Int32, cfg: cutlass.Constexpr) -> None:
    query, factor_room, sums, stats = room
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    item = rows.of_item(args, request, head, cfg.options)
    tokens = window_tokens.of_item(args, request, item.kv_head, schedule.lengths_of(args)[request])
    window_query.stage_query(args, item, query, factor_room, warp, lane, cfg)
    cute.arch.sync_threads()
    acc = cute.make_rmem_tensor((cfg.head_dim // 2,), Float32)
    m, total = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
    acc.fill(0.0)
    total.fill(0.0)
    m.fill(rows.LOWEST)
    factors = [device.load_shared(factor_room + 4 * (lane // 4 + 8 * half), 1)[0].bitcast(Float32) for half in (0, 1)]
    limits = None
    if cutlass.const_expr(cfg.options.rows):
        limits = [tokens.length - item.q_len + item.place(lane // 4 + 8 * half).token for half in (0, 1)]
    for block in cutlass.range(warp, (tokens.count + BLOCK - 1) // BLOCK, WARPS, unroll=1):
        _block(args, tokens, block, query, factors, limits, acc, m, total, lane, cfg)
    _leave(sums, stats, acc, m, total, warp, lane, cfg)
    cute.arch.sync_threads()
    _merge(args, item, sums, stats, thread, cfg)


@cute.kernel
def window_kernel(values: list, names: cutlass.Constexpr, cfg: cutlass.Constexpr):
    """Grid: batch times ``items_per_request``."""
    args = Args(**dict(zip(names, values, strict=True)), rows=Int32(cfg.heads))
    thread = cute.arch.thread_idx()[0]
    request = cute.arch.block_idx()[0] // args.items_per_request
    head = cute.arch.block_idx()[0] % args.items_per_request
    allocator = cutlass.memory.SmemAllocator()
    query = allocator.allocate_tensor(
        Uint32, cute.make_layout(cfg.query_terms * ROWS * cfg.head_dim // 2), byte_alignment=16
    )
    factors = allocator.allocate_tensor(Float32, cute.make_layout(ROWS), byte_alignment=16)
    # A pad of four floats: rows of one channel fall into different banks.
    shape = (cfg.head_dim, cfg.heads, WARPS)
    stride = (1, cfg.head_dim + 4, cfg.heads * (cfg.head_dim + 4))
    sums = allocator.allocate_tensor(Float32, cute.make_layout(shape, stride=stride), byte_alignment=16)
    stats = allocator.allocate_tensor(Float32, cute.make_layout((2, cfg.heads, WARPS)), byte_alignment=16)
    # What came before on the stream is complete from here on, also for the decode kernel that starts now.
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    heads = args.kv_heads
    if cutlass.const_expr(cfg.options.rows):
        heads = schedule.cut_of(args, request, cfg.options).heads
    if head < heads:
        room = (query.iterator.toint(), factors.iterator.toint(), sums, stats)
        _attend(args, request, head, room, thread, cfg)


@cute.jit
def host(values: list, names: cutlass.Constexpr, cfg: cutlass.Constexpr, stream):
    """Only to compile: the kernel is launched from its cubin."""
    window_kernel(values, names, cfg).launch(
        grid=[1, 1, 1], block=[cfg.threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )
