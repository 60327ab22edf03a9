"""Which request, page and bytes an append's rows belong to, and reading and writing them (device code)."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32

from . import device
from .append_config import CHANNELS, DTYPES, AppendConfig
from .append_quantize import Side


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
def load_int32(address, index) -> Int32:
    """Element ``index`` (Int64) of an int32 array."""
    return load(Int32, address + 4 * index)


def first_item(row, request, group: int):
    """The first of the items of a request whose rows begin at ``row``: one for each of its token groups, and so spaced
    that no two requests' meet, whatever part of a group they begin and end in."""
    return row // group + 2 * request


@cute.jit
def request_of(args, index: Int32, group: cutlass.Constexpr) -> Int32:
    """The request of row ``index`` (``group`` None) or of item ``index``: see :func:`first_item`."""
    low = Int32(0)
    high = args.batch
    while low < high:
        middle = (low + high) >> 1
        end = load_int32(args.indptr, Int64(middle) + 1)
        if cutlass.const_expr(group is not None):
            end = first_item(end, middle + 1, group)
        if end <= index:
            low = middle + 1
        else:
            high = middle
    return low


@cute.jit
def place_of(args, row: Int32, page_size: cutlass.Constexpr):
    """(page id, token in the page) of a row; page -1 where it has no place in the cache."""
    request = row
    position = Int32(-1)
    if args.indptr != Int64(0):
        request = request_of(args, row, None)
    if request < args.batch:
        position = load_int32(args.lengths, Int64(request))
        if (args.indptr != Int64(0)) & (position >= 0):
            position = position + (row - load_int32(args.indptr, Int64(request)))
    column = position // page_size
    page = Int32(-1)
    if (position >= 0) & (column < args.max_pages):
        page = load_int32(args.pages, Int64(request) * args.table_stride + Int64(column))
        if page >= args.num_pages:
            page = Int32(-1)
    return page, Uint32(position) % page_size


def load_row(base, j, side: Side, cfg: AppendConfig) -> list[list[Float32]]:
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


# ---------------------------------------------------------------------------------------------- bytes of a record
def store(dtype, address, value) -> None:
    size = dtype.width // 8
    cute.make_tensor(device.global_pointer(dtype, address, size), cute.make_layout(1))[0] = value


def store_word(record, side: Side, token, j, word) -> None:
    """Word ``j`` of a token's packed row, whose bytes are together in K and apart in V."""
    if side.together:
        store(Uint32, record + Int64(side.byte(token, CHANNELS * Uint32(j))), word)
    else:
        for c in range(CHANNELS):
            store(Uint8, record + Int64(side.byte(token, CHANNELS * Uint32(j) + c)), Uint8(word >> (8 * c)))


def load(dtype, address):
    return cute.make_tensor(device.global_pointer(dtype, address, dtype.width // 8), cute.make_layout(1))[0]


def load_word(record, side: Side, token, j) -> Uint32:
    """What :func:`store_word` stored."""
    if side.together:
        return load(Uint32, record + Int64(side.byte(token, CHANNELS * Uint32(j))))
    word = Uint32(0)
    for c in range(CHANNELS):
        word = word | (Uint32(load(Uint8, record + Int64(side.byte(token, CHANNELS * Uint32(j) + c)))) << (8 * c))
    return word
