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


def tokens_left(cut, tile) -> Int32:
    """Of the request from tile ``tile`` of its items on."""
    return cut.length - (cut.first + tile) * TILE_TOKENS


def tokens_of(cut, tile, n) -> Int32:
    """Of a segment; ``cut``: schedule.cut_of its request."""
    return cutlass.min(tokens_left(cut, tile), n * TILE_TOKENS)


@cute.jit
def next_item(heads: Int32, request: Int32, head: Int32):
    """``heads``: items of the request (schedule.Cut)."""
    head = head + 1
    if head == heads:
        head = Int32(0)
        request = request + 1
    return request, head


assert STEP_TILES & (STEP_TILES - 1) == 0
