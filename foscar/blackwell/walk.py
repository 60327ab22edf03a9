"""From one (request, KV head) to the next on the line of schedule.py."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def next_item(args, request: Int32, head: Int32):
    head = head + 1
    if head == args.kv_heads:
        head = Int32(0)
        request = request + 1
    return request, head
