"""tcgen05: layouts, kinds and asynchrony on a kernel written by hand. One warpgroup; warp 0 issues everything."""

import numpy as np
import pytest

from ptx_emulator import EmulatorError, Launch
from ptx_emulator.handmade import KIND_SIZE, module, operand, place

CODE = {"f16": 0, "bf16": 1, "e4m3": 0, "e5m2": 1, "e2m1": 5, "u8": 0, "s8": 1}
FAMILY = {"f16": "f16", "bf16": "f16", "u8": "i8", "s8": "i8"}
A_AT, B_AT, D_COLUMN, A_COLUMN = 2048, 2048 + 32768, 64, 32


def descriptor(address: int, leading: int, stride: int, swizzle: int) -> int:
    code = {0: 0, 128: 2, 64: 4, 32: 6}[swizzle]
    return address >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | code << 61


def instruction(kind_a, kind_b, m, n, a_k_major=True, b_k_major=True) -> int:
    d = 2 if kind_a in ("u8", "s8") else 1
    return (
        d << 4
        | CODE[kind_a] << 7
        | CODE[kind_b] << 10
        | (not a_k_major) << 15
        | (not b_k_major) << 16
        | n >> 3 << 17
        | m >> 4 << 24
    )


BODY = """
ld.param.u64 %q0, [out]; ld.param.u64 %q1, [image]; ld.param.u64 %q2, [arows]; ld.param.u64 %q3, [c];
ld.param.u64 %q10, [adesc]; ld.param.u64 %q11, [bdesc]; ld.param.u32 %r40, [idesc]; ld.param.u32 %r41, [acc];
mov.u32 %r0, %tid.x; mov.u32 %r2, smem; mov.u32 %r1, 0; shr.u32 %r10, %r0, 5; and.b32 %r11, %r0, 31;
setp.ne.u32 %p1, %r10, 0; setp.ne.u32 %p2, %r0, 0;
@%p1 bra COPY;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 512;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
@%p2 bra COPY;
mbarrier.init.shared.b64 [%r2+8], 1;
fence.mbarrier_init.release.cluster;
COPY: mad.lo.u32 %r3, %r1, 128, %r0; shl.b32 %r3, %r3, 4;
cvt.u64.u32 %q5, %r3; add.s64 %q5, %q5, %q1; add.s32 %r4, %r3, %r2;
ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%q5]; st.shared.v4.b32 [%r4+1024], {%r5, %r6, %r7, %r8};
add.s32 %r1, %r1, 1; setp.lt.s32 %p3, %r1, 32; @%p3 bra COPY;
fence.proxy.async.shared::cta;
bar.sync 0;
ld.shared.b32 %r12, [%r2];
shl.b32 %r13, %r10, 21; add.u32 %r14, %r12, %r13;
mad.wide.u32 %q6, %r0, 32, %q2;
ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%q6]; ld.global.v4.b32 {%r24, %r25, %r26, %r27}, [%q6+16];
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r14+32], {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27};
mad.wide.u32 %q7, %r0, 32, %q3;
ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%q7]; ld.global.v4.b32 {%r24, %r25, %r26, %r27}, [%q7+16];
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r14+64], {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 1, 128;
@%p1 bra WAIT;
tcgen05.fence::after_thread_sync;
elect.sync _|%p4, -1;
@!%p4 bra WAIT;
add.u32 %r15, %r12, 64; add.u32 %r16, %r12, 32;
setp.ne.u32 %p5, %r41, 0;
tcgen05.mma.cta_group::1.kind::KIND [%r15], AOPERAND, %q11, %r40, %p5;
add.u32 %r17, %r2, 8;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r17];
WAIT: mbarrier.try_wait.parity.shared.b64 %p6, [%r2+8], 0;
@!%p6 bra WAIT;
tcgen05.fence::after_thread_sync;
tcgen05.ld.sync.aligned.32x32b.x8.b32 {%r30, %r31, %r32, %r33, %r34, %r35, %r36, %r37}, [%r14+64];
tcgen05.wait::ld.sync.aligned;
mad.wide.u32 %q8, %r0, 32, %q0;
st.global.v4.b32 [%q8], {%r30, %r31, %r32, %r33}; st.global.v4.b32 [%q8+16], {%r34, %r35, %r36, %r37};
tcgen05.fence::before_thread_sync;
bar.sync 0;
@%p1 bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r12, 512;
END:
"""
PARAMS = (
    ".param .u64 out, .param .u64 image, .param .u64 arows, .param .u64 c, .param .u64 adesc, .param .u64 bdesc, "
    ".param .u32 idesc, .param .u32 acc"
)


def packed(raw: np.ndarray, kind: str, tensor: bool) -> np.ndarray:
    """4-bit elements as the operand wants them: bits 2..5 of a byte, or pairs in the first 8 of 16 bytes."""
    if kind != "e2m1":
        return raw
    if tensor:
        return raw << 2
    pairs = (raw[:, 0::2] | raw[:, 1::2] << 4).reshape(len(raw), -1, 8)
    return np.concatenate([pairs, np.zeros_like(pairs)], -1).reshape(len(raw), -1)


def run(
    kind_a="f16",
    kind_b=None,
    *,
    m=128,
    tensor=False,
    acc=1,
    swizzle=0,
    a_k_major=True,
    b_k_major=True,
    n=8,
    mutate=lambda s: s,
    before="",
    **options,
):
    """N is at most 8 columns here (one tcgen05.ld.x8)."""
    rng = np.random.default_rng(11)
    kind_b = kind_b or kind_a
    k = 32 // KIND_SIZE[kind_a]
    raw_a, a = operand(rng, kind_a, m, k)
    raw_b, b = operand(rng, kind_b, n, k)
    image = np.zeros(65536, np.uint8)
    data, lead_a, stride_a = place(packed(raw_a, kind_a, False), a_k_major, swizzle)
    image[: len(data)] = data
    data, lead_b, stride_b = place(packed(raw_b, kind_b, False), b_k_major, swizzle)
    image[B_AT - A_AT :][: len(data)] = data
    dtype = np.int32 if kind_a in ("u8", "s8") else np.float32
    c, rows = rng.integers(-50, 50, (128, n)).astype(dtype), np.zeros((128, 32), np.uint8)
    lanes = np.arange(m) if m == 128 else np.arange(m) // 16 * 32 + np.arange(m) % 16
    rows[:m] = packed(raw_a, kind_a, True).view(np.uint8) if m == 128 else 0
    text = BODY.replace("KIND", FAMILY.get(kind_a, "f8f6f4")).replace("AOPERAND", "[%r16]" if tensor else "%q10")
    out = np.zeros((128, n), dtype)
    Launch(
        module(before + mutate(text), PARAMS, target="sm_100a"),
        1,
        128,
        [
            out,
            image,
            rows,
            c,
            descriptor(A_AT, lead_a, stride_a, swizzle),
            descriptor(B_AT, lead_b, stride_b, swizzle),
            instruction(kind_a, kind_b, m, n, a_k_major, b_k_major),
            acc,
        ],
        smem=67584,
        max_instructions=100_000,
        **options,
    ).run()
    want = c.copy()
    want[lanes] = (a @ b.T + (c[lanes] if acc else 0)).astype(dtype)
    return out, want


KINDS = [("f16", None), ("bf16", None), ("e4m3", None), ("e4m3", "e5m2"), ("e2m1", "e4m3"), ("u8", "s8"), ("s8", "u8")]


@pytest.mark.parametrize("tensor", [False, True], ids=["shared", "tensor"])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_kinds(kinds, tensor):
    got, want = run(*kinds, tensor=tensor)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "options",
    [
        {"m": 64},
        {"acc": 0},
        {"swizzle": 32},
        {"swizzle": 64},
        {"swizzle": 128},
        {"a_k_major": False, "swizzle": 64},
        {"schedule": "late"},
        {"seed": 1},
        {"seed": 2},
    ],
    ids=str,
)
def test_shapes_layouts_and_schedules(options):
    got, want = run("f16", **({"m": 64} | options))
    np.testing.assert_array_equal(got, want)


def test_disabled_lanes_and_scaled_accumulator():
    """Lanes 1 and 33 keep their old D; D = A B + D / 4."""
    got, want = run(
        "f16",
        mutate=nth("%r40, %p5;", 0, "%r40, {%r50, %r51, %r52, %r52}, %p5, 2;"),
        before="""
        mov.b32 %r50, 2; mov.b32 %r51, 2; mov.b32 %r52, 0;""",
    )
    got0, want0 = run("f16", acc=0)
    old = want - want0
    expected = want0 + old / 4
    expected[[1, 33]] = old[[1, 33]]
    np.testing.assert_array_equal(got, expected)


def nth(text, n, new=""):
    def mutate(body):
        parts = body.split(text)
        assert len(parts) > n + 1
        return text.join(parts[: n + 1]) + new + text.join(parts[n + 1 :])

    return mutate


# fmt: off
MUTANTS = {
    "no wait::ld": nth("tcgen05.wait::ld.sync.aligned;", 0),
    "no wait::st": nth("tcgen05.wait::st.sync.aligned;", 0),
    "no wait for the commit": lambda s: nth("mbarrier.try_wait.parity.shared.b64 %p6, [%r2+8], 0;", 0)(
        nth("@!%p6 bra WAIT;", 0)(s)),
    "wait for the wrong phase": nth("[%r2+8], 0;", 0, "[%r2+8], 1;"),
    "no commit": nth("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r17];", 0),
    "no barrier before the mma": nth("bar.sync 1, 128;", 0),
    "no proxy fence": nth("fence.proxy.async.shared::cta;", 0),
    "lane of another warp": nth("shl.b32 %r13, %r10, 21", 0, "shl.b32 %r13, %r10, 20"),
    "lane left out": nth("add.u32 %r14, %r12, %r13", 0, "mov.u32 %r14, %r12"),
    "wrong column of D": nth("add.u32 %r15, %r12, 64", 0, "add.u32 %r15, %r12, 68"),
    "column out of range": nth("add.u32 %r15, %r12, 64", 0, "add.u32 %r15, %r12, 508"),
    "columns not allocated": lambda s: s.replace(", 512;", ", 32;"),
    "no dealloc": nth("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r12, 512;", 0),
    "dealloc of another size": nth("%r12, 512;", 0, "%r12, 256;"),
    "every lane issues": nth("@!%p4 bra WAIT;", 0),
    "A from the wrong columns": nth("add.u32 %r16, %r12, 32", 0, "add.u32 %r16, %r12, 36"),
    "accumulate flag inverted": nth("setp.ne.u32 %p5", 0, "setp.eq.u32 %p5"),
    "dealloc before the loads": lambda s: nth("bar.sync 0;\n@%p1 bra END;", 0, "@%p1 bra END;")(
        s.replace("tcgen05.wait::ld.sync.aligned;", "")),
}
# fmt: on


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    found = []
    for options in ({}, {"schedule": "late"}, {"seed": 1}, {"seed": 2}):
        try:
            got, want = run("e4m3", tensor=True, mutate=MUTANTS[name], **options)
            found.append("" if np.array_equal(got, want) else "wrong")
        except EmulatorError as e:
            found.append(e.kind)
    assert any(found), "nothing noticed"
