"""Quantizing new tokens into the cache's records, K and V per token, in one launch (device code).

``quantize.py`` is the specification: the kernel computes its float32 arithmetic operation by operation, so that the
bytes are those of the torch path.  A row (one token of one head, of K or of V) is shared by ``row bytes / 4`` threads;
thread ``j`` makes word ``j`` of the packed row: four consecutive channels at each bit position.  Consecutive rows are
consecutive tokens of one head, whose V bytes are neighbours.  Rows whose place is outside the table or the cache are
skipped.  Nothing but the row's own bytes is written: the words of K, the bytes of V, the pairs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32

from . import device
from .append_config import CHANNELS, DTYPES, PARAMETERS, THREADS, AppendConfig
from .artifact import Artifact
from .formats import PARAM_BYTES
from .jit import compile_jit

INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}  # bits
NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0}
SMALL = {"float16": 0x0001, "bfloat16": 0x3380}  # quantize.CONSTANT_SCALE
assert struct.unpack("<ef", struct.pack("<HI", SMALL["float16"], SMALL["bfloat16"] << 16)) == (2.0**-24, 2.0**-24)


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


@dataclass(frozen=True)
class Side:
    """What differs between K and V at compile time."""

    bits: int
    group: int
    row_bytes: int
    lanes: int  # threads of a row
    head_dim: int
    params: str
    byte: object  # the record's byte of (token, row byte)
    param: object  # the record's pair of (token, channel)

    @classmethod
    def of(cls, cfg: AppendConfig, name: str) -> Side:
        layout = cfg.layout
        f = getattr(cfg.format, name)
        group, row_bytes, byte, param = (
            getattr(layout, f"{name}_{what}") for what in ("group", "row_bytes", "byte", "param")
        )
        return cls(f.bits, group, row_bytes, cfg.lanes(row_bytes), cfg.head_dim, cfg.format.params, byte, param)

    @property
    def positions(self) -> int:
        return 8 // self.bits

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def padded(self) -> bool:
        """Whether the record has more channels than k and v."""
        return self.head_dim < self.row_bytes * self.positions


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


# ---------------------------------------------------------------------------------------------- quantizing
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


def _wide(bits, dtype: str) -> Float32:
    return device.unpack_halves(bits, dtype)[0]


def _endless(bits, dtype: str):
    """Whether a 16-bit float is infinite or NaN."""
    return (bits & Uint32(0x7FFF)) >= Uint32(INFINITY[dtype])


def _select(condition, a, b) -> Uint32:
    return Uint32(cutlass.select_(condition, a, b))


def _below(bits) -> Uint32:
    """The next smaller value of a finite 16-bit float (quantize._below)."""
    smaller = _select(bits == Uint32(0), Uint32(0x8001), bits - Uint32(1))
    return _select(bits < Uint32(0x8000), smaller, bits + Uint32(1))


def _fit(lo, hi, max_code: int, dtype: str):
    """quantize.fit_parameters: the bits of scale and bias, and whether all codes are 0."""
    steps = Float32(max_code)
    near = device.to_half(lo, dtype)
    wide = _wide(near, dtype)
    step = _wide(device.to_half(device.arith("div.rn", device.arith("sub.rn", hi, wide), steps), dtype), dtype)
    above = device.arith("sub.rn", wide, lo) > device.arith("mul.rn", step, Float32(0.5))
    bias = _select(above, _below(near), near)
    span = device.arith("sub.rn", hi, _wide(bias, dtype))
    scale = device.to_half(device.arith("div.rn", span, steps), dtype)
    short = device.arith("mul.rn", _wide(scale, dtype), Float32(max_code + 0.5)) < span
    scale = _select(short, (scale & Uint32(0x7FFF)) + Uint32(1), scale)
    constant = lo == hi
    bias = _select(constant, near, bias)
    bad = _endless(near, dtype) | (_endless(scale, dtype) & (lo != hi))
    empty = constant | bad
    scale = _select(empty, Uint32(SMALL[dtype]), scale)
    return scale, _select(bad, Uint32(NAN[dtype]), bias), empty


def _code(x, scale, bias, max_code: int) -> Int32:
    """quantize.nearest_codes."""
    q = device.arith("div.rn", device.arith("sub.rn", x, bias), scale)
    return cutlass.min(cutlass.max(device.round_to_int(q), Int32(0)), Int32(max_code))


def _quantize(x, j, side: Side):
    """Thread ``j``'s word of the packed row, and (first channel, pair as a word) of every group that it has part in."""
    per = max(1, side.group // side.row_bytes)  # positions of a group
    offsets = [1 << i for i in range((min(side.lanes, side.group // CHANNELS) - 1).bit_length())]
    word, pairs = Uint32(0), []
    for first in range(0, side.positions, per):
        values = [value for p in range(first, first + per) for value in x[p]]
        lo = device.butterfly(device.min_nan, device.tree(device.min_nan, values), offsets)
        hi = device.butterfly(device.max_nan, device.tree(device.max_nan, values), offsets)
        lo = device.arith("add.rn", lo, Float32(0.0))  # -0 is 0
        scale, bias, empty = _fit(lo, hi, side.max_code, side.params)
        wide_scale, wide_bias = _wide(scale, side.params), _wide(bias, side.params)
        for p in range(first, first + per):
            part = Uint32(0)
            for c in range(CHANNELS):
                code = _code(x[p][c], wide_scale, wide_bias, side.max_code)
                part = part | (Uint32(code) << (8 * c + side.bits * p))
            channel = p * side.row_bytes + CHANNELS * j
            unused = empty | (channel >= side.head_dim) if side.padded else empty
            word = word | _select(unused, Uint32(0), part)
        channel = first * side.row_bytes + (CHANNELS * j if side.group < side.row_bytes else 0 * j)
        start = channel // side.group * side.group
        pair = scale | (bias << 16)
        if side.padded:  # a group of padding alone
            pair = _select(start >= side.head_dim, Uint32(SMALL[side.params]), pair)
        pairs.append((start, pair))
    return word, pairs


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
        word, pairs = _quantize(_load(base, j, side, cfg), j, side)
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
