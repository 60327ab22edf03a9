"""Quantizing new tokens into the cache's records in one launch (device code).

Per token, every row (one token of one head, of K or of V) is quantized by ``row bytes / 4`` neighbouring threads
(append_quantize.py), to the bytes of the torch path.  Consecutive rows are consecutive tokens of one head, whose V
bytes are neighbours.  Rows whose place is outside the table or the cache are skipped.  Nothing but the row's own bytes
is written: the words of K, the bytes of V, the pairs.  Per channel, a warp has a token group: append_groups.py.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from .append_config import CHANNELS, DTYPES, PARAMETERS, THREADS, AppendConfig
from .append_groups import append_groups
from .append_quantize import Side, quantize
from .append_rows import Args, load_row, place_of, store, store_word
from .artifact import Artifact
from .formats import PARAM_BYTES
from .jit import compile_jit


# ---------------------------------------------------------------------------------------------- the kernel
@cute.jit
def _append_tokens(args, source: Int64, stride: Int64, head_stride: Int64, name: cutlass.Constexpr,
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
        page, token = place_of(args, row, cfg.page_size)
        base = source + DTYPES[cfg.dtype] * (Int64(row) * stride + Int64(head) * head_stride)
        word, pairs = quantize(load_row(base, j, side, cfg), j, side)
        if (own < args.n) & (page >= 0):
            record = args.cache + Int64(page) * args.page_stride + Int64(head) * args.head_stride
            store_word(record, side, token, j, word)
            for i in cutlass.range_constexpr(len(pairs)):
                if j % min(side.lanes, side.group // CHANNELS) == 0:
                    start, pair = pairs[i]
                    store(Uint32, record + Int64(side.param(token, Uint32(start))), pair)


@cute.jit
def _append(args, source: Int64, stride: Int64, head_stride: Int64, name: cutlass.Constexpr,
            cfg: cutlass.Constexpr) -> None:  # fmt: skip
    if cutlass.const_expr(getattr(cfg.format, name).axis == "token"):
        _append_tokens(args, source, stride, head_stride, name, cfg)
    else:
        append_groups(args, source, stride, head_stride, name, cfg)


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
