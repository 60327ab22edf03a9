"""Mutations of a correct kernel (ring.py), one line each: every one must be caught, by a report or by wrong results."""

import numpy as np
import pytest

from ptx_emulator import EmulatorError, ring

WANT = ring.expected(*ring.inputs())
RUNS = ({}, {"schedule": "late"}, {"seed": 1}, {"seed": 2}, {"seed": 3})


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_the_kernel_itself_is_right(options):
    np.testing.assert_array_equal(ring.run(**options), WANT)


def nth(text: str, n: int, new: str = ""):
    """Replaces the n-th occurrence (from 0)."""

    def mutate(body: str) -> str:
        parts = body.split(text)
        assert len(parts) > n + 1, f"{text!r} occurs {len(parts) - 1} times"
        return text.join(parts[: n + 1]) + new + text.join(parts[n + 1 :])

    return mutate


FENCE = "fence.proxy.async.shared::cta;"
# name: (mutation, what kinds of report are right; "wrong" means a wrong result)
# fmt: off
MUTANTS = {
    "descriptor: leading offset":
        (nth(f"or.b64 %q10, %q10, {8 << 16}", 0, f"or.b64 %q10, %q10, {16 << 16}"), "wrong race"),
    "descriptor: start address": (nth("shr.u32 %r30, %r30, 4", 0, "shr.u32 %r30, %r30, 5"), "wrong race memory"),
    "descriptor: swizzle 128": (nth(f"%q10, {8 << 16}", 0, f"%q10, {(8 << 16) + (1 << 62)}"), "wrong race"),
    "descriptor: reserved bits": (nth("shr.u32 %r30, %r30, 4", 0, "shl.b32 %r30, %r30, 2"), "ptx memory"),
    "consumer starts with the wrong phase": (nth("mov.u32 %r5, 0", 0, "mov.u32 %r5, 1"), "race deadlock wrong sync"),
    "producer starts with the wrong phase": (nth("mov.u32 %r5, 1", 0, "mov.u32 %r5, 0"), "deadlock"),
    "consumer never flips its phase": (nth("@%p5 xor.b32 %r5, %r5, 1;", 1), "race deadlock wrong sync"),
    "producer never flips its phase": (nth("@%p5 xor.b32 %r5, %r5, 1;", 0), "race deadlock wrong sync"),
    "expect_tx too large": (nth("%r6+0], 2048", 0, "%r6+0], 4096"), "deadlock"),
    "expect_tx too small": (nth("%r6+0], 2048", 0, "%r6+0], 1024"), "sync race wrong deadlock"),
    "copy too short": (nth("mov.u32 %r8, 2048", 0, "mov.u32 %r8, 1024"), "deadlock"),
    "copy not a multiple of 16": (nth("mov.u32 %r8, 2048", 0, "mov.u32 %r8, 2044"), "memory"),
    "copy to the other slot":
        (nth("add.u32 %r7, %r7, 1024", 0, "xor.b32 %r7, %r7, 2048; add.u32 %r7, %r7, 1024"), "race wrong"),
    "copy completes on the wrong barrier":
        (nth("add.u32 %r9, %r6, 0", 0, "add.u32 %r9, %r1, 0"), "deadlock sync race wrong"),
    "no wait for the full slot": (nth("@!%p3 bra FILLED;", 0), "race"),
    "no wait for the empty slot": (nth("@!%p3 bra FREE;", 0), "race sync"),
    "no arrival on the empty slot": (nth("@%p4 mbarrier.arrive.shared.b64 _, [%r6+16];", 0), "deadlock"),
    "every lane arrives on the empty slot": (nth("@%p4 mbarrier.arrive", 0, "mbarrier.arrive"), "sync race deadlock"),
    "a lane releases the slot before the others have read it": (nth("bar.warp.sync 0xffffffff;", 0), "race"),
    "slot released before it is read": (lambda body: nth(
        "ld.shared.v4.b32", 0, "elect.sync _|%p4, -1; @%p4 mbarrier.arrive.shared.b64 _, [%r6+16]; ld.shared.v4.b32")(
        nth("@%p4 mbarrier.arrive.shared.b64 _, [%r6+16];", 0)(body)), "race"),
    "empty barrier of three arrivals": (nth("[%r1+16], 4", 0, "[%r1+16], 3"), "sync race deadlock"),
    "empty barrier of five arrivals": (nth("[%r1+16], 4", 0, "[%r1+16], 5"), "deadlock"),
    "no fence after mbarrier.init": (nth("fence.mbarrier_init.release.cluster;", 0), "sync"),
    "no barrier after mbarrier.init": (nth("bar.sync 0;", 0), "sync"),
    "no proxy fence before wgmma": (nth(FENCE, 0), "race"),
    "no barrier before wgmma": (nth("bar.sync 1, 128;", 0), "race"),
    "no barrier after wgmma": (nth("bar.sync 2, 128;", 0), "race"),
    "barrier of too few threads": (nth("bar.sync 1, 128", 0, "bar.sync 1, 64"), "race"),
    "barrier of too many threads": (nth("bar.sync 1, 128", 0, "bar.sync 1, 160"), "deadlock"),
    "no wgmma.fence": (nth("wgmma.fence.sync.aligned;", 0), "hazard"),
    "no commit": (nth("wgmma.commit_group.sync.aligned;", 0), "hazard"),
    "no wait": (nth("wgmma.wait_group.sync.aligned 0;", 0), "hazard"),
    "waits for all but one": (nth("wgmma.wait_group.sync.aligned 0", 0, "wgmma.wait_group.sync.aligned 1"), "hazard"),
    "two fragment registers swapped":
        (nth("{%r20, %r21, %r22, %r23}, %q10", 0, "{%r21, %r20, %r22, %r23}, %q10"), "wrong"),
    "a mask one bit too wide": (nth("%r21, 0x0f0f0f0f", 0, "%r21, 0x1f0f0f0f"), "wrong"),
    "accumulator not cleared": (nth("setp.ne.b32 %p7, 0, 0", 0, "setp.ne.b32 %p7, 1, 0"), "wrong"),
    "no proxy fence before the bulk store": (nth(FENCE, 1), "race"),
    "no barrier before the bulk store": (nth("bar.sync 3, 128;", 0), "race"),
    "no commit of the bulk store": (nth("cp.async.bulk.commit_group;", 0), "hazard"),
    "no wait for the bulk store": (nth("cp.async.bulk.wait_group.read 0;", 0), "hazard"),
    "bulk store beyond the output": (nth("mov.u32 %r16, 2048", 0, "mov.u32 %r16, 2064"), "memory"),
    "one tile too many": (nth("setp.lt.u32 %p8, %r3, %r40", 0, "setp.le.u32 %p8, %r3, %r40"), "deadlock memory"),
    "shared load out of bounds": (nth("shl.b32 %r13, %r0, 4", 0, "shl.b32 %r13, %r0, 8"), "memory race wrong"),
    "misaligned shared load":
        (nth("add.u32 %r7, %r7, %r13;", 0, "add.u32 %r7, %r7, %r13; add.u32 %r7, %r7, 8;"), "memory"),
}
# fmt: on


def outcome(mutate, options) -> str:
    """'' if the mutant went unnoticed."""
    try:
        got = ring.run(mutate, **options)
    except EmulatorError as e:
        return e.kind
    return "" if np.array_equal(got, WANT) else "wrong"


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    mutate, allowed = MUTANTS[name]
    found = [outcome(mutate, options) for options in RUNS]
    assert any(found), "nothing noticed"
    assert {x for x in found if x} <= set(allowed.split()), found
