"""Opcodes against answers worked out by hand from the PTX ISA's definitions."""

import numpy as np
import pytest

from ptx_emulator import EmulatorError, Launch, PtxError, decode
from ptx_emulator.handmade import evaluate, module

INF, NAN = float("inf"), float("nan")


def bits(x) -> int:
    return int(np.float32(x).view(np.uint32))


# instruction, result type, inputs, expected first lanes
# fmt: off
INTEGER = [
    ("add.s32 d, a, b", "s32", {"a": ("s32", [2**31 - 1, -5]), "b": ("s32", [1, 3])}, [-2**31, -2]),
    ("sub.u16 d, a, b", "u16", {"a": ("u16", [0, 7]), "b": ("u16", [1, 7])}, [65535, 0]),
    ("mul.lo.s32 d, a, b", "s32", {"a": ("s32", [65536, -3]), "b": ("s32", [65537, 5])}, [65536, -15]),
    ("mul.hi.u32 d, a, b", "u32", {"a": ("u32", [2**32 - 1, 2**31]), "b": ("u32", [2**32 - 1, 4])}, [2**32 - 2, 2]),
    ("mul.hi.s32 d, a, b", "s32", {"a": ("s32", [-1, 715827883]), "b": ("s32", [1, 18])}, [-1, 3]),
    ("mul.hi.u64 d, a, b", "u64", {"a": ("u64", [2**63]), "b": ("u64", [6])}, [3]),
    ("mul.wide.s16 d, a, b", "s32", {"a": ("s16", [-32768]), "b": ("s16", [-32768])}, [2**30]),
    ("mul.wide.u32 d, a, b", "u64", {"a": ("u32", [2**32 - 1]), "b": ("u32", [2**32 - 1])}, [(2**32 - 1) ** 2]),
    ("mad.lo.s32 d, a, b, c", "s32", {"a": ("s32", [7]), "b": ("s32", [-6]), "c": ("s32", [2])}, [-40]),
    ("mad.wide.s32 d, a, b, c", "s64", {"a": ("s32", [-2]), "b": ("s32", [2**31 - 1]), "c": ("s64", [5])}, [7 - 2**32]),
    ("div.s32 d, a, b", "s32", {"a": ("s32", [-7, 7, -8]), "b": ("s32", [2, -2, 4])}, [-3, -3, -2]),
    ("rem.s32 d, a, b", "s32", {"a": ("s32", [-7, 7]), "b": ("s32", [2, -2])}, [-1, 1]),
    ("div.u32 d, a, b", "u32", {"a": ("u32", [2**32 - 1]), "b": ("u32", [10])}, [429496729]),
    ("abs.s32 d, a", "s32", {"a": ("s32", [-9])}, [9]),
    ("neg.s32 d, a", "s32", {"a": ("s32", [9])}, [-9]),
    ("min.s32 d, a, b", "s32", {"a": ("s32", [-1]), "b": ("s32", [1])}, [-1]),
    ("min.u32 d, a, b", "u32", {"a": ("u32", [2**32 - 1]), "b": ("u32", [1])}, [1]),
    ("shl.b32 d, a, b", "b32", {"a": ("u32", [1, 1, 3]), "b": ("u32", [31, 32, 1])}, [2**31, 0, 6]),
    ("shr.s32 d, a, b", "s32", {"a": ("s32", [-8, -8]), "b": ("u32", [1, 40])}, [-4, -1]),
    ("shr.u32 d, a, b", "u32", {"a": ("u32", [2**31, 5]), "b": ("u32", [31, 32])}, [1, 0]),
    ("shr.s16 d, a, 1", "s16", {"a": ("s16", [-3])}, [-2]),
    ("shf.l.wrap.b32 d, a, b, c", "b32", {"a": ("u32", [0x80000001]), "b": ("u32", [0x12345678]), "c": ("u32", [36])},
     [0x23456788]),
    ("shf.r.wrap.b32 d, a, b, c", "b32", {"a": ("u32", [0x12345678]), "b": ("u32", [0x9]), "c": ("u32", [4])},
     [0x91234567]),
    ("shf.r.clamp.b32 d, a, b, c", "b32", {"a": ("u32", [1]), "b": ("u32", [2]), "c": ("u32", [99])}, [2]),
    ("lop3.b32 d, a, b, c, 0xEA", "b32", {"a": ("u32", [0b1100]), "b": ("u32", [0b1010]), "c": ("u32", [1])}, [0b1001]),
    ("lop3.b32 d, a, b, c, 0x1B", "b32", {"a": ("u32", [0xF0]), "b": ("u32", [0xCC]), "c": ("u32", [0xAA])},
     [0xFFFFFF1B]),
    ("prmt.b32 d, a, b, 0x5410", "b32", {"a": ("u32", [0x33221100]), "b": ("u32", [0x77665544])}, [0x55441100]),
    ("prmt.b32 d, a, b, c", "b32", {"a": ("u32", [0x332211F0]), "b": ("u32", [0x77665544]), "c": ("u32", [0x7F08])},
     [0x7700F0FF & 0xFFFFFFFF]),
    ("bfe.u32 d, a, 4, 8", "u32", {"a": ("u32", [0x12345678])}, [0x67]),
    ("bfe.s32 d, a, 4, 4", "s32", {"a": ("u32", [0x12345FF8])}, [-1]),
    ("bfi.b32 d, a, b, 8, 4", "b32", {"a": ("u32", [0xAB]), "b": ("u32", [0xFFFFFFFF])}, [0xFFFFFBFF]),
    ("popc.b32 d, a", "u32", {"a": ("u32", [0xF00F])}, [8]),
    ("clz.b32 d, a", "u32", {"a": ("u32", [1, 0])}, [31, 32]),
    ("brev.b32 d, a", "b32", {"a": ("u32", [0b110])}, [0x60000000]),
    ("not.b16 d, a", "b16", {"a": ("u16", [0xFF00])}, [0x00FF]),
    ("selp.b32 d, a, b, p", "b32", {"a": ("u32", [1]), "b": ("u32", [2]), "p": ("pred", [1, 0])}, [1, 2]),
]
FLOAT = [
    ("add.f32 d, a, b", "f32", {"a": ("f32", [2.0**24, 1.5]), "b": ("f32", [1, 2])}, [2.0**24, 3.5]),
    ("fma.rn.f32 d, a, b, c", "f32", {"a": ("f32", [1 + 2.0**-23]), "b": ("f32", [1 - 2.0**-23]), "c": ("f32", [-1])},
     [-2.0**-46]),
    # just below the middle of two float32, but on it after rounding to float64: must not round twice
    ("fma.rn.f32 d, a, b, c", "f32",
     {"a": ("f32", [2.0**-12 * (1 + 2.0**-18)]), "b": ("f32", [2.0**-12 * (1 - 2.0**-18)]),
      "c": ("f32", [1 + 2.0**-23])}, [1 + 2.0**-23]),
    ("max.f32 d, a, b", "f32", {"a": ("f32", [NAN, -1]), "b": ("f32", [2, -3])}, [2, -1]),
    ("max.NaN.f32 d, a, b", "f32", {"a": ("f32", [NAN]), "b": ("f32", [2])}, [NAN]),
    ("ex2.approx.ftz.f32 d, a", "f32", {"a": ("f32", [3, -1, -INF, -140])}, [8, 0.5, 0, 0]),
    ("lg2.approx.f32 d, a", "f32", {"a": ("f32", [8])}, [3]),
    ("rcp.approx.ftz.f32 d, a", "f32", {"a": ("f32", [4, 0])}, [0.25, INF]),
    ("mul.ftz.f32 d, a, b", "f32", {"a": ("f32", [2.0**-100]), "b": ("f32", [2.0**-40])}, [0]),
    ("neg.f32 d, a", "f32", {"a": ("f32", [1])}, [-1]),
]
CONVERT = [
    ("cvt.s64.s32 d, a", "s64", {"a": ("s32", [-1])}, [-1]),
    ("cvt.u64.u32 d, a", "u64", {"a": ("u32", [2**32 - 1])}, [2**32 - 1]),
    ("cvt.u32.u64 d, a", "u32", {"a": ("u64", [2**40 + 7])}, [7]),
    ("cvt.s32.s8 d, a", "s32", {"a": ("u32", [0x80])}, [-128]),
    ("cvt.u16.u32 d, a", "u16", {"a": ("u32", [0x12345])}, [0x2345]),
    ("cvt.sat.u8.s32 d, a", "b32", {"a": ("s32", [300, -4])}, [255, 0]),
    ("cvt.rzi.s32.f32 d, a", "s32", {"a": ("f32", [-2.7, 3e9, NAN])}, [-2, 2**31 - 1, 0]),
    ("cvt.rni.s32.f32 d, a", "s32", {"a": ("f32", [2.5, 3.5])}, [2, 4]),
    ("cvt.rn.f32.s32 d, a", "f32", {"a": ("s32", [16777217])}, [16777216]),
    ("cvt.rn.f32.u32 d, a", "f32", {"a": ("u32", [2**32 - 1])}, [2.0**32]),
    ("cvt.rn.f16.f32 d, a", "f16", {"a": ("f32", [65519, 65520, 2.0**-25 * 1.5])}, [65504, INF, 2.0**-24]),
    ("cvt.f32.f16 d, a", "f32", {"a": ("f16", [2.0**-24])}, [2.0**-24]),
    ("cvt.rn.bf16.f32 d, a", "b16", {"a": ("f32", [1 + 2.0**-8, 1 + 3 * 2.0**-8])}, [0x3F80, 0x3F82]),
    ("cvt.f32.bf16 d, a", "f32", {"a": ("b16", [0x3F80])}, [1]),
    ("cvt.rn.f16x2.f32 d, a, b", "b32", {"a": ("f32", [1]), "b": ("f32", [2])}, [0x3C004000]),
    ("cvt.rn.bf16x2.f32 d, a, b", "b32", {"a": ("f32", [1]), "b": ("f32", [-2])}, [0x3F80C000]),
    ("cvt.rn.satfinite.e4m3x2.f32 d, a, b", "b16", {"a": ("f32", [448, 17, NAN]), "b": ("f32", [1e9, 2.0**-9, -0.0])},
     [0x7E7E, 0x5801, 0x7F80]),
    ("cvt.rn.satfinite.e5m2x2.f32 d, a, b", "b16", {"a": ("f32", [1e9]), "b": ("f32", [1.25])}, [0x7B3D]),
    ("cvt.rn.f16x2.e4m3x2 d, a", "b32", {"a": ("b16", [0x7E01])}, [(0x5F00 << 16) | 0x1800]),
    ("cvt.rna.tf32.f32 d, a", "b32", {"a": ("f32", [1 + 2.0**-11])}, [bits(1 + 2.0**-10)]),
]
COMPARE = [
    ("setp.lt.s32 d, a, b", {"a": ("s32", [-1, 1]), "b": ("s32", [0, 0])}, [True, False]),
    ("setp.lt.u32 d, a, b", {"a": ("u32", [2**32 - 1]), "b": ("u32", [0])}, [False]),
    ("setp.ne.f32 d, a, b", {"a": ("f32", [NAN, 1]), "b": ("f32", [NAN, 2])}, [False, True]),
    ("setp.neu.f32 d, a, b", {"a": ("f32", [NAN, 1]), "b": ("f32", [1, 1])}, [True, False]),
    ("setp.nan.f32 d, a, b", {"a": ("f32", [NAN, 1]), "b": ("f32", [1, 1])}, [True, False]),
    ("setp.gt.or.s32 d, a, b, p", {"a": ("s32", [0, 0]), "b": ("s32", [0, 0]), "p": ("pred", [1, 0])}, [True, False]),
]
# fmt: on


@pytest.mark.parametrize(
    "text,result,inputs,expected", INTEGER + FLOAT + CONVERT, ids=lambda x: x if type(x) is str else ""
)
def test_value(text, result, inputs, expected):
    got = evaluate(text, result, **inputs)[: len(expected)]
    np.testing.assert_array_equal(got, np.array(expected).astype(got.dtype))


@pytest.mark.parametrize("text,inputs,expected", COMPARE, ids=lambda x: x if type(x) is str else "")
def test_comparison(text, inputs, expected):
    assert evaluate(text, "pred", **inputs)[: len(expected)].tolist() == expected


def lane_values(text, result="u32", **inputs):
    return evaluate(text, result, **inputs).tolist()


def test_shuffles():
    lane = ("u32", list(range(32)))
    assert lane_values("shfl.sync.bfly.b32 d, a, 5, 31, -1", a=lane) == [i ^ 5 for i in range(32)]
    assert lane_values("shfl.sync.idx.b32 d, a, 3, 31, -1", a=lane) == [3] * 32
    assert lane_values("shfl.sync.down.b32 d, a, 2, 31, -1", a=lane) == [i + 2 if i < 30 else i for i in range(32)]
    assert lane_values("shfl.sync.up.b32 d, a, 1, 0, -1", a=lane) == [max(i - 1, 0) for i in range(32)]
    eight = 0x1800 | 7  # segments of 8 lanes
    assert lane_values(f"shfl.sync.idx.b32 d, a, 1, {eight}, -1", a=lane) == [i // 8 * 8 + 1 for i in range(32)]


def test_votes_and_reductions():
    odd = ("pred", [0, 1])
    assert lane_values("vote.sync.ballot.b32 d, p, -1", p=odd) == [0xAAAAAAAA] * 32
    assert evaluate("vote.sync.any.pred d, p, -1", "pred", p=odd).all()
    assert not evaluate("vote.sync.all.pred d, p, -1", "pred", p=odd).any()
    assert lane_values("redux.sync.add.s32 d, a, -1", a=("u32", list(range(32)))) == [496] * 32
    assert lane_values("redux.sync.xor.b32 d, a, -1", a=("u32", [1, 3])) == [0] * 32


def test_divergent_lanes_meet_again():
    """Lanes go two ways, then add a ballot of all 32."""
    out = np.zeros(32, np.uint32)
    Launch(
        module("""
        ld.param.u64 %q0, [out];
        mov.u32 %r0, %tid.x;
        setp.lt.u32 %p0, %r0, 7;
        @%p0 bra LOW;
        mov.u32 %r1, 100;
        bra.uni JOIN;
        LOW: mov.u32 %r1, 200;
        JOIN: vote.sync.ballot.b32 %r2, %p0, 0xffffffff;
        add.u32 %r1, %r1, %r2;
        mad.wide.u32 %q1, %r0, 4, %q0;
        st.global.u32 [%q1], %r1;"""),
        1,
        32,
        [out],
    ).run()
    assert out.tolist() == [327] * 7 + [227] * 25


def test_loop_with_different_trip_counts():
    out = np.zeros(32, np.uint32)
    Launch(
        module("""
        ld.param.u64 %q0, [out];
        mov.u32 %r0, %tid.x;
        mov.u32 %r1, 0; mov.u32 %r2, 0;
        AGAIN: setp.ge.u32 %p0, %r1, %r0;
        @%p0 bra DONE;
        add.u32 %r2, %r2, %r1; add.u32 %r1, %r1, 1;
        bra AGAIN;
        DONE: mad.wide.u32 %q1, %r0, 4, %q0;
        st.global.u32 [%q1], %r2;"""),
        1,
        32,
        [out],
    ).run()
    assert out.tolist() == [i * (i - 1) // 2 for i in range(32)]


def test_atomics_and_vectors():
    counter, out = np.zeros(4, np.uint32), np.zeros((32, 4), np.uint32)
    Launch(
        module(
            """
        ld.param.u64 %q0, [out]; ld.param.u64 %q1, [c];
        mov.u32 %r0, %tid.x;
        atom.global.add.u32 %r1, [%q1], 2;
        red.global.max.s32 [%q1+4], %r0;
        atom.global.cas.b32 %r2, [%q1+8], 0, 9;
        mad.wide.u32 %q2, %r0, 16, %q0;
        st.global.v4.b32 [%q2], {%r1, %r0, %r2, 5};""".replace("5}", "%r0}"),
            ".param .u64 out, .param .u64 c",
        ),
        1,
        32,
        [out, counter],
    ).run()
    assert counter.tolist() == [64, 31, 9, 0]
    assert out[:, 0].tolist() == [2 * i for i in range(32)] and out[:, 2].tolist() == [0] + [9] * 31


@pytest.mark.parametrize(
    "text",
    [
        "frobnicate.b32 %r0, %r1;",
        "add.s32.sat8 %r0, %r1, %r2;",
        "add.b32 %r0, %r1, %r2;",
        "add.s32 %r0, %q1, %r2;",
        "mul.bf16x2.lo %r0, %r1, %r2;",
        "add.s32 %r0, %r1;",
        "mov.u32 %r0, %nosuch;",
        "setp.lo.s32 %p0, %r1, %r2;",
        "cvt.rn.e4m3x2.f32 %h0, %f0, %f1;",
        "ld.shared.v3.b32 {%r0,%r1,%r2}, [%r3];",
        "bra NOWHERE;",
        "mov.u32 %r0, %undeclared9;",
        "wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16 {%f0,%f1,%f2,%f3,%f4,%f5}, %q0, %q1, %p0, 1, 1, 0, 0;",
        "tcgen05.frob.b32 %r0;",
        "@%r1 mov.u32 %r0, 1;",
        "cp.async.bulk.global.global [%q0], [%q1], %r0;",
    ],
)
def test_what_is_not_understood_is_refused(text):
    with pytest.raises(EmulatorError) as e:
        Launch(module(text), 1, 32, [np.zeros(4, np.uint32)])
        Launch(module(text), 1, 32, [np.zeros(4, np.uint32)]).run()
    assert (
        "line" in str(e.value) or "nosuch" in str(e.value) or "undeclared9" in str(e.value) or "NOWHERE" in str(e.value)
    )


def test_errors_name_the_line():
    with pytest.raises(PtxError, match="line 12: unknown opcode frobnicate"):
        decode(module("frobnicate.b32 %r0, %r1;"))


@pytest.mark.parametrize("offset,why", [(4 * 32, "outside"), (-4, "belongs to no array|outside"), (2, "misaligned")])
def test_global_accesses_are_checked(offset, why):
    from ptx_emulator import MemoryFault

    with pytest.raises(MemoryFault, match=why):
        Launch(
            module(f"ld.param.u64 %q0, [out]; ld.global.b32 %r0, [%q0+{offset}];"), 1, 32, [np.zeros(32, "u4")]
        ).run()
