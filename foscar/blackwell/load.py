"""The load warp: pages of the CTA's tiles into the ring, one bulk copy per page, as on Hopper with one worker a CTA."""

from __future__ import annotations

from cutlass import Int32

from ..hopper import load
from . import pipeline


def load_warp(args, shared, lane: Int32, cfg) -> None:
    """Walk the CTA's range; see hopper/load.py for the page ids fetched ahead and the ring."""
    pipeline.source(shared.barriers, "full", "load", 0)  # hopper/load.py arrives and waits by pointers
    pipeline.target(shared.barriers, "empty", "load")
    load.load_warp(args, shared, Int32(0), lane, cfg)
