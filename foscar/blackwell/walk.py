"""From one (request, KV head) to the next on the line of schedule.py, and a segment's steps.

A segment, the tiles of one item that a CTA takes, begins at tile ``tile`` of the item and has ``n`` tiles: steps of
STEP_TILES.  Of an odd number the last step's second tile has no tokens: it is not loaded, and its probabilities are 0.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .config import STEP_TILES, TILE_TOKENS


def steps_of(n) -> Int32:
    return (n + (STEP_TILES - 1)) >> (STEP_TILES.bit_length() - 1)


def tokens_of(length, tile, n) -> Int32:
    """Of a segment."""
    return cutlass.min(length - tile * TILE_TOKENS, n * TILE_TOKENS)


@cute.jit
def next_item(args, request: Int32, head: Int32):
    head = head + 1
    if head == args.kv_heads:
        head = Int32(0)
        request = request + 1
    return request, head


assert STEP_TILES & (STEP_TILES - 1) == 0
