"""The tensor cores' rounding as measured on Hopper: kept bits, truncation, exact integers; and mma.sync."""

import numpy as np
import pytest

from ptx_emulator import Launch, matrix
from ptx_emulator.handmade import KIND_SIZE, module, operand
from ptx_emulator.lowfloat import E4M3, encode_e4m3


def dot(products, c, kind):
    """Products given as rows of A against ones."""
    return times(products, [1.0] * len(products), c, kind)


def times(a, b, c, kind):
    a, b, c = (np.array([x], np.float64) for x in (a, b, [c]))
    return float(matrix.multiply_float(a, b, c, (kind, kind), matrix.hopper_adder(kind))[0, 0])


@pytest.mark.parametrize("kind,kept", [("e4m3", 13), ("f16", 25), ("bf16", 25)])
def test_window(kind, kept):
    """Addends keep `kept` bits below the largest exponent, accumulator included; what is below is cut off."""
    unit = 2.0**-kept
    assert dot([1.0, -1.0, unit], 0, kind) == unit
    assert dot([1.0, -1.0, unit / 2], 0, kind) == 0
    assert dot([1.0, -1.0, unit * 1.5], 0, kind) == unit  # not rounded
    assert dot([1.0, -1.0, -unit * 1.5], 0, kind) == -unit
    assert dot([unit / 2] * 4, 1.0, kind) == 1  # each is cut off before the sum
    if kept == 25:
        assert dot([0.0], 2.0**-149, kind) == 2.0**-149  # float32 subnormals are kept
    assert dot([1.0, -1.0], unit, kind) == unit
    assert dot([unit], 1.0, kind) == (1 + unit if kept < 24 else 1.0)  # float32 itself holds 23
    assert np.isnan(dot([np.nan], 0, kind)) and dot([np.inf], 0, kind) == np.inf


@pytest.mark.parametrize("kind,kept", [("e4m3", 13), ("f16", 25)])
def test_exponents_of_products_are_sums_of_exponents(kind, kept):
    """1.5 x 1.5 = 2.25 counts as 2^0: what lies `kept` bits below that is not lost."""
    unit = 2.0**-kept
    assert times([1.5, 1.5, unit], [1.5, -1.5, 1.0], 0, kind) == unit
    assert times([1.5, unit], [1.5, 1.0], -2.25, kind) == 0  # but the accumulator 2.25 is 2^1


def test_results_of_8_bit_products_keep_14_bits():
    unit = 2.0**-13
    assert dot([1.0, unit], 0, "e4m3") == 1 + unit
    assert dot([1.0, 1.0, unit], 0, "e4m3") == 2
    assert dot([1.0, 1.0, 2 * unit], 0, "e4m3") == 2 + 2 * unit
    assert dot([-1.0, -1.0, -unit], 0, "e4m3") == -2
    assert dot([1.0, 1.0, 2.0**-13], 0, "f16") == 2 + unit


def test_the_error_of_accumulating_in_place_is_the_measured_one():
    """4096 positive products in e4m3: 7e-2 too small in place, 4e-4 promoted every 128 (measured: 7.1e-2, 3.8e-4)."""
    rng = np.random.default_rng(0)
    a, b = (E4M3[encode_e4m3(rng.random((r, 4096)) * 448)] for r in (64, 8))
    exact = a @ b.T
    for every, low, high in ((4096, 6e-2, 8.5e-2), (128, 2e-4, 9e-4)):
        total = np.zeros((64, 8), np.float32)
        for start in range(0, 4096, every):
            c = None
            for i in range(start, start + every, 32):
                step = a[:, i : i + 32], b[:, i : i + 32]
                c = matrix.multiply_float(*step, c, ("e4m3", "e4m3"), matrix.NARROW).astype(np.float64)
            total += c.astype(np.float32)
        error = float(((exact - total) / exact).mean())
        assert low < error < high and (every < 4096 or (total < exact).all())


def test_integers_are_exact_and_saturate_on_request():
    a, b = np.full((1, 32), 255), np.full((1, 32), 255)
    c = np.array([[2**31 - 5]], np.int32)
    assert matrix.multiply_integer(a, b, None, False)[0, 0] == 255 * 255 * 32
    assert matrix.multiply_integer(a, b, c, True)[0, 0] == 2**31 - 1
    assert matrix.multiply_integer(a, b, c, False)[0, 0] == 255 * 255 * 32 - 2**31 - 5


@pytest.mark.parametrize(
    "kinds", [("f16", "f16"), ("bf16", "bf16"), ("u8", "u8"), ("s8", "u8"), ("e4m3", "e4m3")], ids="-".join
)
@pytest.mark.parametrize("k_bytes", [16, 32])
def test_mma_sync(kinds, k_bytes):
    rng = np.random.default_rng(3)
    k = k_bytes // KIND_SIZE[kinds[0]]
    raw_a, a = operand(rng, kinds[0], 16, k)
    raw_b, b = operand(rng, kinds[1], 8, k)
    t = "s32" if kinds[0] in ("u8", "s8") else "f32"
    halves = k_bytes // 16
    regs = np.zeros((32, 8), np.uint32)  # a0..a3, b0, b1, the fragments of 9.7.14.5
    for lane in range(32):
        for i in range(2 * halves):
            at = 4 * (lane % 4) + 16 * (i // 2)
            regs[lane, i] = raw_a.view(np.uint8)[lane // 4 + 8 * (i % 2), at : at + 4].copy().view(np.uint32)[0]
        for i in range(halves):
            at = 4 * (lane % 4) + 16 * i
            regs[lane, 4 + i] = raw_b.view(np.uint8)[lane // 4, at : at + 4].copy().view(np.uint32)[0]
    ra, rb = ", ".join(f"%r{10 + i}" for i in range(2 * halves)), ", ".join(f"%r{14 + i}" for i in range(halves))
    out = np.zeros((32, 4), np.int32 if t == "s32" else np.float32)
    Launch(
        module(
            f"""ld.param.u64 %q0, [out]; ld.param.u64 %q1, [in]; mov.u32 %r0, %tid.x;
        mad.wide.u32 %q2, %r0, 32, %q1; mad.wide.u32 %q3, %r0, 16, %q0; mov.b32 %r1, 0;
        ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%q2]; ld.global.v2.b32 {{%r14, %r15}}, [%q2+16];
        mma.sync.aligned.m16n8k{k}.row.col.{t}.{kinds[0]}.{kinds[1]}.{t} {{%r20, %r21, %r22, %r23}}, {{{ra}}}, {{{rb}}},
            {{%r1, %r1, %r1, %r1}};
        st.global.v4.b32 [%q3], {{%r20, %r21, %r22, %r23}};""",
            ".param .u64 out, .param .u64 in",
        ),
        1,
        32,
        [out, regs],
    ).run()
    want = a @ b.T
    for lane in range(32):
        for i in range(4):
            assert out[lane, i] == want[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]
