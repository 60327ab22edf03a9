"""The end of a segment: a finished item is written out; a part of one goes to the workspace for the combine.

The workspace and its rules are hopper/store.py's, the threads hold the same channels and heads.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common import device, rows
from ..common.schedule import Work
from ..hopper import folds
from ..hopper.store import write_head
from . import lowfloat, unpack
from .config import DecodeConfig
from .softmax import PROB_LOG

# l, b and O are in units of PROB_TOP, O times 2^-9 besides (a code's byte as e4m3).
UNIT = 2.0**lowfloat.CODE_SHIFT


def _output(o, factor, b, cfg: DecodeConfig):
    """Before the division by the denominator; with V per channel its scale and bias are in O (correct.py)."""
    return o if folds.v_side(cfg).channel else device.fma(o, factor * Float32(UNIT), b)


@cute.jit
def finish(args, state: tuple, work: Work, whole, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """Write the segment that begins at ``work``; ``whole``: it is all of its item.  ``state``: m, l, b, O."""
    m, l, b, o = state  # noqa: E741
    nh, blocks = cfg.heads_per_thread, cfg.head_dim // 32
    factors = unpack.position_factors(cfg, warp)
    item = rows.of_item(args, work.request, work.head, cfg.options)
    for j in cutlass.range_constexpr(nh):
        index = lane % 4 + 4 * j
        if index < item.count:
            # l = 0 is a row that sees nothing: zeros and -inf.  A NaN stays one.
            inverse = cutlass.select_(l[j] == Float32(0.0), Float32(0.0), Float32(1.0) / l[j])
            out = [_output(o[j * blocks + r], factors[r], b[j], cfg) * inverse for r in range(blocks)]
            write_head(
                args, work, item, whole, index, out, m[j] + (device.log2(l[j]) - Float32(PROB_LOG)), warp, lane, cfg
            )
