"""A small decode-like kernel written by hand, with everything a real one synchronizes: the emulator's test subject.

One producer warp fills a ring of two slots by bulk copies (full and empty mbarriers); one math warpgroup waits for a
slot, loads 16 bytes per thread, masks them to e4m3 codes (A in registers), writes B to shared memory itself (generic
proxy, then fence and named barrier), multiplies, and adds the tile to its float32 sum. The sum leaves through shared
memory and a bulk store. Every mutant in test_mutants.py changes one line of it.
"""

from __future__ import annotations

import numpy as np

from .handmade import module
from .launch import Launch
from .lowfloat import E4M3

TILES, N = 5, 8
FULL, EMPTY, SLOTS, B_TILE, STAGE, SMEM = 0, 16, 1024, 1024 + 4096, 6144, 6144 + 2048

BODY = f"""
ld.param.u64 %q0, [out]; ld.param.u64 %q1, [codes]; ld.param.u64 %q2, [b]; ld.param.u32 %r40, [tiles];
mov.u32 %r0, %tid.x; mov.u32 %r1, smem; shr.u32 %r2, %r0, 5;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1+{FULL}], 1; mbarrier.init.shared.b64 [%r1+{FULL + 8}], 1;
mbarrier.init.shared.b64 [%r1+{EMPTY}], 4; mbarrier.init.shared.b64 [%r1+{EMPTY + 8}], 4;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
mov.u32 %r3, 0; mov.u32 %r4, 0;
setp.lt.u32 %p1, %r2, 4;
@%p1 bra MATH;

mov.u32 %r5, 1;
PRODUCE:
setp.ge.u32 %p2, %r3, %r40;
@%p2 bra END;
mad.lo.u32 %r6, %r4, 8, %r1;
FREE: mbarrier.try_wait.parity.shared.b64 %p3, [%r6+{EMPTY}], %r5;
@!%p3 bra FREE;
elect.sync _|%p4, -1;
@!%p4 bra NEXT;
mbarrier.arrive.expect_tx.shared.b64 _, [%r6+{FULL}], 2048;
mad.wide.u32 %q4, %r3, 2048, %q1; mad.lo.u32 %r7, %r4, 2048, %r1;
add.u32 %r7, %r7, {SLOTS};
mov.u32 %r8, 2048; add.u32 %r9, %r6, {FULL};
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%q4], %r8, [%r9];
NEXT:
add.u32 %r3, %r3, 1; xor.b32 %r4, %r4, 1;
setp.eq.u32 %p5, %r4, 0;
@%p5 xor.b32 %r5, %r5, 1;
bra PRODUCE;

MATH:
mov.u32 %r5, 0;
mov.f32 %f10, 0f00000000; mov.f32 %f11, 0f00000000; mov.f32 %f12, 0f00000000; mov.f32 %f13, 0f00000000;
shl.b32 %r10, %r0, 2; cvt.u64.u32 %q5, %r10;
add.u32 %r11, %r1, %r10;
add.u32 %r30, %r1, {B_TILE}; shr.u32 %r30, %r30, 4;
cvt.u64.u32 %q10, %r30; or.b64 %q10, %q10, {8 << 16};
TILE:
mad.wide.u32 %q6, %r3, 256, %q2; add.s64 %q6, %q6, %q5;
setp.ge.u32 %p6, %r0, 64;
@%p6 bra STORED;
ld.global.b32 %r12, [%q6];
st.shared.b32 [%r11+{B_TILE}], %r12;
STORED:
mad.lo.u32 %r6, %r4, 8, %r1;
FILLED: mbarrier.try_wait.parity.shared.b64 %p3, [%r6+{FULL}], %r5;
@!%p3 bra FILLED;
mad.lo.u32 %r7, %r4, 2048, %r1; shl.b32 %r13, %r0, 4; add.u32 %r7, %r7, %r13;
ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r7+{SLOTS}];
bar.warp.sync 0xffffffff;
elect.sync _|%p4, -1;
@%p4 mbarrier.arrive.shared.b64 _, [%r6+{EMPTY}];
and.b32 %r20, %r20, 0x0f0f0f0f; and.b32 %r21, %r21, 0x0f0f0f0f;
and.b32 %r22, %r22, 0x0f0f0f0f; and.b32 %r23, %r23, 0x0f0f0f0f;
fence.proxy.async.shared::cta;
bar.sync 1, 128;
setp.ne.b32 %p7, 0, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {{%f0, %f1, %f2, %f3}}, {{%r20, %r21, %r22, %r23}}, %q10, %p7, 1, 1;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
bar.sync 2, 128;
add.f32 %f10, %f10, %f0; add.f32 %f11, %f11, %f1; add.f32 %f12, %f12, %f2; add.f32 %f13, %f13, %f3;
add.u32 %r3, %r3, 1; xor.b32 %r4, %r4, 1;
setp.eq.u32 %p5, %r4, 0;
@%p5 xor.b32 %r5, %r5, 1;
setp.lt.u32 %p8, %r3, %r40;
@%p8 bra TILE;

shl.b32 %r14, %r0, 4; add.u32 %r14, %r14, %r1;
st.shared.v4.b32 [%r14+{STAGE}], {{%f10, %f11, %f12, %f13}};
fence.proxy.async.shared::cta;
bar.sync 3, 128;
setp.ne.u32 %p9, %r0, 0;
@%p9 bra END;
add.u32 %r15, %r1, {STAGE}; mov.u32 %r16, 2048;
cp.async.bulk.global.shared::cta.bulk_group [%q0], [%r15], %r16;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
END:
"""
PARAMS = ".param .u64 out, .param .u64 codes, .param .u64 b, .param .u32 tiles"


def text(mutate=None) -> str:
    body = BODY if mutate is None else mutate(BODY)
    return module(body, PARAMS)


def inputs(seed: int = 0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (TILES, 128, 4, 4)).astype(np.uint8)
    b = (rng.integers(0, 2, (TILES, 2, N, 16)) * 0x80 | 0x38).astype(np.uint8)  # +-1, core matrices of 8 rows
    return codes, b


def expected(codes: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The result in the order the kernel stores it: thread, register. Codes 0..15 are the integers times 2^-9."""
    total = np.zeros((64, N))
    for tile in range(TILES):
        a = np.zeros((64, 32))
        for thread in range(128):
            w, t = divmod(thread, 32)
            for i in range(4):
                c = 4 * (t % 4) + 16 * (i // 2)
                a[16 * w + t // 4 + 8 * (i % 2), c : c + 4] = (codes[tile, thread, i] & 15) * 2.0**-9
        values = E4M3[b[tile]]  # [half of K, n, 16]
        total += a @ np.concatenate([values[0], values[1]], 1).T
    out = np.zeros((128, 4), np.float32)
    for thread in range(128):
        w, t = divmod(thread, 32)
        for i in range(4):
            out[thread, i] = total[16 * w + t // 4 + 8 * (i // 2), 2 * (t % 4) + i % 2]
    return out


def run(mutate=None, **options) -> np.ndarray:
    codes, b = inputs()
    out = np.zeros((128, 4), np.float32)
    Launch(text(mutate), 1, 160, [out, codes, b, TILES], smem=SMEM, max_instructions=200_000, **options).run()
    return out
