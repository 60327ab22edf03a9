"""Which tokens a request has in 16 bits, where they are, and how many are packed (windows.py has the layout)."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import device
from .plan import KernelOptions


def lengths_of(args, request, length) -> tuple[Int32, Int32, Int32, Int32]:
    """(window slot, tokens, those in the history, those after it) of a request of ``length`` tokens; no slot: none."""

    def entry(address, i):
        return cute.make_tensor(device.global_pointer(Int32, address + 4 * Int64(i), 4), cute.make_layout(1))[0]

    slot = entry(args.slots, request)
    length = cutlass.select_(slot >= 0, length, Int32(0))
    slot = cutlass.max(slot, Int32(0))
    beyond = cutlass.max(length - args.n_sink, Int32(0))
    history = cutlass.min(entry(args.packed_lens, slot), beyond)
    return slot, length, history, beyond - history


def packed_lengths(args, request, length, options: KernelOptions) -> tuple[Int32, Int32 | None]:
    """(packed tokens, those in 16 bits after them) of a request; without KernelOptions.exact (``length``, None)."""
    return lengths_of(args, request, length)[2:] if options.exact else (length, None)


@dataclass
class Tokens:
    """An item's tokens in 16 bits: index 0 .. count - 1, the sink's first."""

    sink: Int32  # of them in the sink
    count: Int32
    first: Int32  # position of the first one after the sink, less its index
    length: Int32  # of the request
    entry: Int32  # of the ring, of the first one after the sink
    capacity: Int32
    sink_row: Int64  # rows of the storages before this item's
    recent_row: Int64

    def address(self, sink_base, recent_base, index, row_bytes: int) -> Int64:
        """Of a token's row."""
        inside = index < self.sink
        entry = self.entry + index - self.sink
        entry = entry - cutlass.select_(entry >= self.capacity, self.capacity, Int32(0))
        row = cutlass.select_(inside, self.sink_row + Int64(index), self.recent_row + Int64(entry))
        return cutlass.select_(inside, sink_base, recent_base) + row * row_bytes

    def position(self, index) -> Int32:
        """In the request."""
        return index + cutlass.select_(index < self.sink, Int32(0), self.first)


def of_item(args, request, kv_head, length) -> Tokens:
    """Of an item of a request of ``length`` tokens."""
    slot, length, history, recent = lengths_of(args, request, length)
    sink = cutlass.min(length, args.n_sink)
    row = Int64(slot) * Int64(args.kv_heads) + Int64(kv_head)
    return Tokens(
        sink=sink,
        count=sink + cutlass.min(recent, args.capacity),
        first=history,
        length=length,
        entry=(args.n_sink + history) % cutlass.max(args.capacity, Int32(1)),
        capacity=args.capacity,
        sink_row=row * Int64(args.n_sink),
        recent_row=row * Int64(args.capacity),
    )
