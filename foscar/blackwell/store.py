"""The end of a segment: a finished item is written out; a part of one goes to the workspace for the combine.

The workspace and its rules are hopper/store.py's, the threads hold the same channels and heads.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64

from ..common import device
from ..hopper.schedule import Work
from ..hopper.store import _note_split, _write, write_split
from . import lowfloat, unpack
from .softmax import PROB_LOG

# l, b and O are in units of PROB_TOP, O times 2^-9 besides (a code's byte as e4m3).
UNIT = 2.0**lowfloat.CODE_SHIFT


@cute.jit
def finish(args, state: tuple, work: Work, tiles: Int32, n: Int32, warp: Int32, lane: Int32,
           cfg: cutlass.Constexpr) -> None:  # fmt: skip
    """Write the segment of ``n`` tiles that begins at ``work``; the item has ``tiles``.  ``state``: m, l, b, O."""
    m, l, b, o = state  # noqa: E741
    nh, blocks = cfg.heads_per_thread, cfg.head_dim // 32
    factors = unpack.position_factors(cfg, warp)
    whole = n == tiles
    query_heads = args.kv_heads * args.group
    slot = 2 * work.worker
    if work.tile == 0:
        slot = slot + 1
    for j in cutlass.range_constexpr(nh):
        index = lane % 4 + 4 * j
        if index < args.group:
            # l = 0 is an empty request: zeros and -inf.  A NaN stays one.
            inverse = cutlass.select_(l[j] == Float32(0.0), Float32(0.0), Float32(1.0) / l[j])
            out = [device.fma(o[j * blocks + r], factors[r] * Float32(UNIT), b[j]) * inverse for r in range(blocks)]
            lse = m[j] + (device.log2(l[j]) - Float32(PROB_LOG))
            head = work.head * args.group + index
            if whole:
                address = Int64(work.request) * args.out_stride + Int64(head) * args.out_head_stride
                dtype = BFloat16 if cutlass.const_expr(cfg.q_dtype == "bfloat16") else Float16
                _write(args.out + 2 * address, dtype, out, warp, lane)
                if (args.lse != Int64(0)) & (warp == 0) & (lane < 4):
                    at = 4 * (Int64(work.request) * Int64(query_heads) + Int64(head))
                    target = device.global_pointer(Float32, args.lse + at, 4)
                    cute.make_tensor(target, cute.make_layout(1))[0] = lse * args.lse_unit
            else:
                row = Int64(slot) * Int64(args.group) + Int64(index)
                _write(args.partial_out + row * (4 * cfg.head_dim), Float32, out, warp, lane)
                if (warp == 0) & (lane < 4):
                    target = device.global_pointer(Float32, args.partial_lse + row * 4, 4)
                    cute.make_tensor(target, cute.make_layout(1))[0] = lse
    if (work.tile == 0) & (warp == 0) & (lane == 0):
        _note_split(args, work, tiles, n)


__all__ = ["finish", "write_split"]
