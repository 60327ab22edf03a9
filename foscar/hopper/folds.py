"""The shape that the folds of common/fold.py take within a tile, from the cache's format alone (no DSL import).

A *unit* is as many of a tile's tokens as share the parameters of axis "channel": the group, or what groups and tiles
have in common where a group is larger than a tile or straddles its end.  Its parameters are those of the page that
holds its first token: a record repeats the pairs of a group that is larger than a page.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..common.formats import RecordLayout
from ..common.plan import TILE_TOKENS


@dataclass(frozen=True)
class Side:
    """K or V of a kernel.

    Args:
        channel: whether a pair belongs to a channel and a token group; else to a token and a channel group.
        parts: channel groups of a token's pairs (1 where ``channel``).
        group: channels of one part.
        unit: tokens of a tile with the same parameters (TILE_TOKENS where not ``channel``).
    """

    channel: bool
    parts: int
    group: int
    unit: int

    @property
    def plain(self) -> bool:
        """One pair per token."""
        return not self.channel and self.parts == 1

    @property
    def units(self) -> int:
        return TILE_TOKENS // self.unit


@functools.cache
def _side(layout: RecordLayout, name: str) -> Side:
    group, dim = getattr(layout, f"{name}_group"), layout.padded_head_dim
    if getattr(layout.format, name).axis == "channel":
        return Side(True, 1, dim, math.gcd(group, TILE_TOKENS))
    return Side(False, dim // group, group, TILE_TOKENS)


def k_side(cfg) -> Side:
    return _side(cfg.layout, "k")


def v_side(cfg) -> Side:
    return _side(cfg.layout, "v")


def token_values(cfg) -> int:
    """float32 that softmax.prepare_params keeps per token."""
    v = v_side(cfg)
    return 2 * k_side(cfg).plain + (0 if v.channel else 3 if v.plain else 2 + 2 * v.parts)


def factor_pairs(cfg) -> int:
    """(factor, sum) pairs per head: one, or one per channel group of K, or (channel K) one per unit."""
    k = k_side(cfg)
    return k.units if k.channel else k.parts


def query_operands(cfg) -> int:
    """Q^T in shared memory: one, or one per unit of a K with parameters per channel."""
    k = k_side(cfg)
    return k.units if k.channel else 1


def prob_shape(cfg) -> tuple[int, int]:
    """(P^T side by side in one operand, operands): a product covers 64 channels, two groups of 32 or one group."""
    v = v_side(cfg)
    beside = 2 if v.parts > 1 and v.group == 32 else 1
    return beside, v.parts // beside


def offset_slots(cfg) -> int:
    """Times four float32 per head in the room for offsets: one per part of V, or a V unit's sum of P per half warp."""
    v = v_side(cfg)
    return 2 if v.unit == 16 else v.parts


def unit_offset(cfg, unit: int, units, section: int, latest=None):
    """Byte offset in a stage of the pairs of unit ``units`` (of ``unit`` tokens each; a run-time value or not).

    ``latest``: what the first page of a unit of several is to be replaced by, as a function of it; None: nothing.
    """
    page, layout = cfg.page_size, cfg.layout
    if unit >= page:
        first = units * (unit // page)
        if latest is not None and unit > page:
            first = latest(first)
        return first * layout.record_bytes + section
    per_page = page // unit
    pairs = 4 * layout.padded_head_dim
    return (units // per_page) * layout.record_bytes + (units % per_page) * pairs + section
