"""How the work of a launch is cut: the schedule's arithmetic on the host, in pure integers.

The device computes the same from the lengths it reads (``schedule.py``); the host needs only sizes that do not
depend on lengths, so a captured graph replays correctly with others.  The rest serves tests and inspection.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_TOKENS = 128  # of a stage and of a softmax step: 256 fail the numeric contract on an attention sink


def tiles_of(length: int, tile_tokens: int) -> int:
    """Tiles of one (request, KV head): an empty request has one, which writes its zeros."""
    return max(1, -(-length // tile_tokens))


@dataclass(frozen=True)
class Segment:
    """Tiles ``[tile, tile + tiles)`` of one (request, KV head), taken by ``worker``."""

    worker: int
    request: int
    head: int
    tile: int
    tiles: int


@dataclass(frozen=True)
class Workspace:
    """Device memory beside inputs and outputs: sizes in elements."""

    partial_out: int  # float32
    partial_lse: int  # float32

    @classmethod
    def sizes(cls, workers: int, group: int, head_dim: int) -> Workspace:
        """Every worker shares at most two items with others."""
        rows = 2 * workers * group
        return cls(rows * head_dim, rows)


def ranges(total: int, workers: int) -> list[tuple[int, int]]:
    """Worker ``i``'s range on the line of ``total`` tiles; workers beyond ``total`` get none."""
    n = min(total, workers)
    return [(total * i // n, total * (i + 1) // n) for i in range(n)]


def segments(lengths: list[int], kv_heads: int, workers: int, tile_tokens: int) -> list[Segment]:
    """The whole launch, in the order of the line: requests outside, KV heads inside."""
    items = [(b, h, tiles_of(n, tile_tokens)) for b, n in enumerate(lengths) for h in range(kv_heads)]
    total = sum(t for _, _, t in items)
    result = []
    cuts = iter(enumerate(ranges(total, workers)))
    worker, (_, end) = next(cuts)
    position = 0
    for b, h, tiles in items:
        tile = 0
        while tile < tiles:
            if position == end:
                worker, (_, end) = next(cuts)
            n = min(tiles - tile, end - position)
            result.append(Segment(worker, b, h, tile, n))
            tile += n
            position += n
    return result


def combine_grid(items: int, workers: int, group: int, ctas: int) -> tuple[int, int, int]:
    """(by_item, heads_per_cta, CTAs) of the combine kernel for ``items`` (request, KV head) pairs.

    Few items are split into many parts each, so a CTA takes one head; of many items most are whole or in two parts,
    so a CTA takes all heads, and looking per worker instead of per item bounds the CTAs that only look.
    """
    by_item = items < workers
    heads_per_cta = 1 if items * group <= 2 * ctas else group
    return int(by_item), heads_per_cta, (items if by_item else workers) * -(-group // heads_per_cta)


COMBINE_WARPS = 8


@dataclass(frozen=True)
class CombineConfig:
    """The combine kernel.

    Args:
        head_dim: 64, 128 or 256.
        out_dtype: "bfloat16" or "float16".
    """

    head_dim: int
    out_dtype: str = "bfloat16"

    @property
    def threads(self) -> int:
        return 32 * COMBINE_WARPS
