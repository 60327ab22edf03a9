"""tcgen05.st and .ld: where every shape puts a thread's registers, seen through 32x32b (a lane per thread)."""

import numpy as np
import pytest

from ptx_emulator import EmulatorError, Launch
from ptx_emulator.handmade import module

BODY = """
ld.param.u64 %q0, [out];
mov.u32 %r0, %tid.x; mov.u32 %r2, smem; shr.u32 %r10, %r0, 5;
setp.ne.u32 %p1, %r10, 0;
@%p1 bra START;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
START: bar.sync 0;
ld.shared.b32 %r12, [%r2]; shl.b32 %r13, %r10, 21; add.u32 %r14, %r12, %r13; add.u32 %r15, %r14, UPPER;
mul.lo.u32 %r3, %r0, 16;
mov.u32 %r20, %r3; add.u32 %r21, %r3, 1; add.u32 %r22, %r3, 2; add.u32 %r23, %r3, 3;
add.u32 %r24, %r3, 4; add.u32 %r25, %r3, 5; add.u32 %r26, %r3, 6; add.u32 %r27, %r3, 7;
tcgen05.st.sync.aligned.SHAPE.b32 [%r14], {%r20, %r21, %r22, %r23};
tcgen05.st.sync.aligned.SHAPE.b32 [%r15], {%r24, %r25, %r26, %r27};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x8.b32 {%r30, %r31, %r32, %r33, %r34, %r35, %r36, %r37}, [%r14];
tcgen05.wait::ld.sync.aligned;
mad.wide.u32 %q8, %r0, 32, %q0;
st.global.v4.b32 [%q8], {%r30, %r31, %r32, %r33}; st.global.v4.b32 [%q8+16], {%r34, %r35, %r36, %r37};
bar.sync 0;
@%p1 bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r12, 32;
END:
"""


def run(shape: str, upper: int) -> np.ndarray:
    """[128 lanes, 8 columns] of words ``16 thread + register``; registers 4 to 7 were stored ``upper`` further on."""
    out = np.zeros((128, 8), np.uint32)
    text = BODY.replace("SHAPE", shape).replace("UPPER", str(upper))
    Launch(module(text, ".param .u64 out", target="sm_100a"), 1, 128, [out], smem=1024).run()
    return out


def place(row, column, count: int) -> np.ndarray:
    """The same from a shape's lane and column of each register of a thread, in two halves of 16 lanes."""
    want = np.zeros((128, 8), np.uint32)
    for thread in range(128):
        for r in range(count):
            for half in range(2):
                lane = thread // 32 * 32 + 16 * half + row(thread % 32, r)
                want[lane, column(thread % 32, r)] = 16 * thread + r + 4 * half
    return want


def test_16x128b():
    """Four columns a repetition: the fragment of a 16-bit A operand of mma.sync, one word for two elements."""
    got = run("16x128b.x2", 16 << 16)
    want = place(lambda t, r: t // 4 + 8 * (r % 2), lambda t, r: 4 * (r // 2) + t % 4, 4)
    np.testing.assert_array_equal(got, want)


def test_16x256b():
    got = run("16x256b.x1", 16 << 16)
    want = place(lambda t, r: t // 4 + 8 * (r // 2), lambda t, r: 2 * (t % 4) + r % 2, 4)
    np.testing.assert_array_equal(got, want)


def test_32x32b():
    want = np.arange(128, dtype=np.uint32)[:, None] * 16 + np.arange(8, dtype=np.uint32)
    np.testing.assert_array_equal(run("32x32b.x4", 4), want)


@pytest.mark.parametrize("shape, upper", [("16x128b.x4", 16 << 16), ("16x128b.x2", 8 << 16), ("16x64b.x4", 16 << 16)])
def test_refused(shape, upper):
    """The wrong number of registers, a half that does not begin at lane 0 or 16, a shape that is not modelled."""
    with pytest.raises(EmulatorError):
        run(shape, upper)
