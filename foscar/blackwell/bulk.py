"""Bulk copies by one thread, as PTX text: shared addresses of 32 bits and a predicate instead of a branch."""

from __future__ import annotations

from cutlass import Int32, Int64

from ..common import device


def expect_bytes(barrier, count) -> None:
    """Arrive at the mbarrier and expect ``count`` bytes."""
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    device._asm(None, [Int32(barrier), Int32(count)], text, "r,r,~{memory}", True)


def copy_page(condition, target, source, size: int, barrier) -> None:
    """Where ``condition`` holds, ``size`` bytes from global ``source`` (Int64) to shared ``target``."""
    text = (
        "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[$1], [$2], {size}, [$3]; }}"
    )
    device._asm(None, [Int32(condition), Int32(target), Int64(source), Int32(barrier)], text, "r,r,l,r,~{memory}", True)
