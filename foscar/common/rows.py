"""The rows of an item: which row of q, and of the results, each is, and how a finished one ends.

Without KernelOptions.rows an item's rows are the query heads of its group.  With it, row ``r`` of a (request, KV head)
is query token ``r // group``, head ``r % group`` of the group, and an item has the rows from ``chunk * args.rows`` on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from . import device, schedule
from .plan import KernelOptions

LOWEST = -1e30  # stands for the maximum of nothing where -inf would make a NaN


@dataclass
class Place:
    """Where one row of an item is."""

    row: Int32  # of q, out and lse
    head: Int32  # query head
    token: Int32 | None = None  # of the request's query tokens; it may have less


@dataclass
class ItemRows:
    """The rows of an item."""

    group: Int32
    kv_head: Int32
    count: Int32  # rows there are: indices below it
    stride: Int32  # rows that the workspace has for an item
    row: Int32  # of q: the first query token's
    first: Int32 | None = None  # row of the (request, KV head) that is row 0 here
    q_len: Int32 | None = None

    def place(self, index) -> Place:
        """Of row ``index``."""
        if self.first is None:
            return Place(self.row, self.kv_head * self.group + index)
        token = (self.first + index) // self.group
        head = self.first + index - token * self.group
        return Place(self.row + token, self.kv_head * self.group + head, token)


def of_item(args, request, head, options: KernelOptions) -> ItemRows:
    """The rows of item ``head`` of a request (see schedule.py)."""
    if not options.rows:
        return ItemRows(args.group, head, args.group, args.group, request)
    cut = schedule.cut_of(args, request, options)
    kv_head = cut.kv_head(head)
    first = (head - kv_head * cut.chunks) * args.rows
    count = cutlass.min(cut.q_len * args.group - first, args.rows)
    return ItemRows(args.group, kv_head, count, args.rows, cut.q_row, first, cut.q_len)


@cute.jit
def read_query(args, item: ItemRows, index: Int32, lane: Int32, cfg: cutlass.Constexpr) -> cute.Tensor:
    """The lane's channels of row ``index`` of the item, as packed 16-bit pairs; zeros for a padded row."""
    words = cfg.head_dim // 64
    pairs = cute.make_rmem_tensor((words,), Uint32)
    pairs.fill(0)
    if index < item.count:
        at = item.place(index)
        address = args.q + 2 * (Int64(at.row) * args.q_stride + Int64(at.head) * args.q_head_stride)
        source = device.global_pointer(Uint32, address + Int64(4 * words * lane), 4 * words)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(words)), pairs)
    return pairs


def _float(address) -> Float32:
    return cute.make_tensor(device.global_pointer(Float32, address, 4), cute.make_layout(1))[0]


def join_windows(args, cfg, at: Place, values: list, first, step: int, lse) -> tuple[list, Float32]:
    """With KernelOptions.exact, a row over its packed tokens joined with the same row over its tokens in 16 bits.

    Args:
        values: its normalized output in the channels ``first``, ``first + step``, ...; ``lse``: in base 2.

    Returns:
        (values, lse) over all tokens; as they are without the option.
    """
    if not cfg.options.exact:
        return values, lse
    row = Int64(at.row) * Int64(args.kv_heads * args.group) + Int64(at.head)
    address = args.exact_out + 4 * (row * cfg.head_dim + Int64(first))
    others = [_float(address + 4 * step * i) for i in range(len(values))]
    other = _float(args.exact_lse + 4 * row)
    top = cute.arch.fmax(cute.arch.fmax(lse, other), Float32(LOWEST))
    own, weight = device.exp2(lse - top), device.exp2(other - top)
    total = own + weight
    inverse = cutlass.select_(total == Float32(0.0), Float32(0.0), Float32(1.0) / total)
    joined = [device.fma(weight, b, own * a) * inverse for a, b in zip(values, others, strict=True)]
    return joined, top + device.log2(total)


def end_row(args, options: KernelOptions, query_head, lse):
    """A row over all its tokens: (what its normalized output is to be multiplied by or None, its LSE in base 2).

    A sink is one more token of the softmax, with a value of zero.
    """
    factor = None
    if options.sinks:
        at = device.global_pointer(Float32, args.sinks + 4 * cutlass.Int64(query_head), 4)
        sink = cute.make_tensor(at, cute.make_layout(1))[0] * Float32(math.log2(math.e))
        top = cute.arch.fmax(cute.arch.fmax(lse, sink), Float32(LOWEST))
        own = device.exp2(lse - top)
        total = own + device.exp2(sink - top)
        factor = cutlass.select_(total == Float32(0.0), Float32(0.0), own / total)
        lse = top + device.log2(total)
    if options.out_scale:
        factor = args.out_scale if factor is None else factor * args.out_scale
    return factor, lse


def scaled(values: list, factor) -> list:
    return values if factor is None else [v * factor for v in values]
