"""Quantizing new tokens into the cache's records, K and V per token, in one launch (device code).

Every row (one token of one head, of K or of V) is quantized by ``row bytes / 4`` neighbouring threads
(append_quantize.py), to the bytes of the torch path.  Consecutive rows are consecutive tokens of one head, whose V
bytes are neighbours.  Rows whose place is outside the table or the cache are skipped.  Nothing but the row's own bytes
is written: the words of K, the bytes of V, the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32

from . import device
from .append_config import CHANNELS, DTYPES, PARAMETERS, THREADS, AppendConfig
from .append_quantize import Side, quantize
from .artifact import Artifact
from .formats import PARAM_BYTES
from .jit import compile_jit


@dataclass
class Args:
    """The kernel's arguments; see append_config.PARAMETERS."""

    k: Int64
    k_stride: Int64
    k_head_stride: Int64
    v: Int64
    v_stride: Int64
    v_head_stride: Int64
    cache: Int64
    page_stride: Int64
    head_stride: Int64
    pages: Int64
    table_stride: Int64
    lengths: Int64
    indptr: Int64
    n: Int32
    batch: Int32
    max_pages: Int32
    num_pages: Int32


# ---------------------------------------------------------------------------------------------- where a row goes
def _int32(address, index) -> Int32:
    """Element ``index`` (Int64) of an int32 array."""
    return cute.make_tensor(device.global_pointer(Int32, address + 4 * index, 4), cute.make_layout(1))[0]


@cute.jit
def _request_of(args, row: Int32) -> Int32:
    """The request whose rows hold ``row``: how many of the requests end at or before it."""
    low = Int32(0)
    high = args.batch
    while low < high:
        middle = (low + high) >> 1
        if _int32(args.indptr, Int64(middle) + 1) <= row:
            low = middle + 1
        else:
            high = middle
    return low


@cute.jit
def _place(args, row: Int32, page_size: cutlass.Constexpr):
    """(page id, token in the page) of a row; page -1 where it has no place in the cache."""
    request = row
    position = Int32(-1)
    if args.indptr != Int64(0):
        request = _request_of(args, row)
    if request < args.batch:
        position = _int32(args.lengths, Int64(request))
        if (args.indptr != Int64(0)) & (position >= 0):
            position = position + (row - _int32(args.indptr, Int64(request)))
    column = position // page_size
    page = Int32(-1)
    if (position >= 0) & (column < args.max_pages):
        page = _int32(args.pages, Int64(request) * args.table_stride + Int64(column))
        if page >= args.num_pages:
            page = Int32(-1)
    return page, Uint32(position) % page_size


def _load(base, j, side: Side, cfg: AppendConfig) -> list[list[Float32]]:
    """[position][channel] of thread ``j``'s channels; beyond head_dim those of its last four repeat."""
    size = DTYPES[cfg.dtype]
    found = []
    for p in range(side.positions):
        channel = p * side.row_bytes + CHANNELS * j
        if side.padded:
            channel = cutlass.min(channel, Int32(side.head_dim - CHANNELS))
        address = base + size * Int64(channel)
        if size == 4:
            dtype, count = Float32, CHANNELS
        else:
            dtype, count = (Uint32, CHANNELS // 2) if cfg.vector else (Uint16, CHANNELS)
        align = size * CHANNELS if cfg.vector else size
        r = cute.make_rmem_tensor((count,), dtype)
        cute.autovec_copy(cute.make_tensor(device.global_pointer(dtype, address, align), cute.make_layout(count)), r)
        values = [r[i] for i in range(count)]
        if dtype is Uint32:
            values = [x for word in values for x in device.unpack_halves(word, cfg.dtype)]
        elif dtype is Uint16:
            values = [device.unpack_halves(Uint32(x), cfg.dtype)[0] for x in values]
        found.append(values)
    return found


# ---------------------------------------------------------------------------------------------- the kernel
def _store(dtype, address, value) -> None:
    size = dtype.width // 8
    cute.make_tensor(device.global_pointer(dtype, address, size), cute.make_layout(1))[0] = value


@cute.jit
def _append(args, source: Int64, stride: Int64, head_stride: Int64, name: cutlass.Constexpr,
            cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """This block's rows of K or V ("k", "v")."""
    side = Side.of(cfg, name)
    thread = cute.arch.thread_idx()[0]
    block, head, _ = cute.arch.block_idx()
    per_block = THREADS // side.lanes
    first = block * per_block + thread // 32 * (32 // side.lanes)  # the warp's
    if first < args.n:
        own = block * per_block + thread // side.lanes
        row = cutlass.min(own, args.n - 1)  # all lanes of a warp take part in its reductions
        j = Int32(Uint32(thread) % side.lanes)
        page, token = _place(args, row, cfg.page_size)
        base = source + DTYPES[cfg.dtype] * (Int64(row) * stride + Int64(head) * head_stride)
        word, pairs = quantize(_load(base, j, side, cfg), j, side)
        if (own < args.n) & (page >= 0):
            record = args.cache + Int64(page) * args.page_stride + Int64(head) * args.head_stride
            row_byte = CHANNELS * Uint32(j)
            if cutlass.const_expr(name == "k"):
                _store(Uint32, record + Int64(side.byte(token, row_byte)), word)
            else:
                for c in cutlass.range_constexpr(CHANNELS):
                    _store(Uint8, record + Int64(side.byte(token, row_byte + c)), Uint8(word >> (8 * c)))
            for i in cutlass.range_constexpr(len(pairs)):
                if j % min(side.lanes, side.group // CHANNELS) == 0:
                    start, pair = pairs[i]
                    _store(Uint32, record + Int64(side.param(token, Uint32(start))), pair)


@cute.kernel
def append_kernel(k: Int64, k_stride: Int64, k_head_stride: Int64, v: Int64, v_stride: Int64, v_head_stride: Int64,
                  cache: Int64, page_stride: Int64, head_stride: Int64, pages: Int64, table_stride: Int64,
                  lengths: Int64, indptr: Int64, n: Int32, batch: Int32, max_pages: Int32, num_pages: Int32,
                  cfg: cutlass.Constexpr):  # fmt: skip
    """Grid: :meth:`AppendConfig.grid`."""
    args = Args(k, k_stride, k_head_stride, v, v_stride, v_head_stride, cache, page_stride, head_stride, pages,
                table_stride, lengths, indptr, n, batch, max_pages, num_pages)  # fmt: skip
    if cute.arch.block_idx()[2] == 0:
        _append(args, k, k_stride, k_head_stride, "k", cfg)
    else:
        _append(args, v, v_stride, v_head_stride, "v", cfg)


@cute.jit
def host(k: Int64, k_stride: Int64, k_head_stride: Int64, v: Int64, v_stride: Int64, v_head_stride: Int64,
         cache: Int64, page_stride: Int64, head_stride: Int64, pages: Int64, table_stride: Int64,
         lengths: Int64, indptr: Int64, n: Int32, batch: Int32, max_pages: Int32, num_pages: Int32,
         cfg: cutlass.Constexpr, stream):  # fmt: skip
    """Only to compile: the kernel is launched from its cubin."""
    append_kernel(k, k_stride, k_head_stride, v, v_stride, v_head_stride, cache, page_stride, head_stride, pages,
                  table_stride, lengths, indptr, n, batch, max_pages, num_pages, cfg).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
    )  # fmt: skip


def build(config: AppendConfig, arch: str) -> Artifact:
    kinds = {"i64": Int64, "i32": Int32}
    return compile_jit(host, *(kinds[kind](1) for kind in PARAMETERS.values()), config, arch=arch)


assert PARAM_BYTES == 4  # a pair is stored as one word
