"""tcgen05.mma kind::mxf4 against sums written out in numpy, and one-line faults, on the kernel of test_tcgen05.py."""

import numpy as np
import pytest

from ptx_emulator import EmulatorError, Launch
from ptx_emulator.handmade import module, place
from ptx_emulator.test_tcgen05 import A_AT, B_AT, BODY, PARAMS, descriptor, nth

M, N, K = 128, 8, 64
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of a code's lower three bits; the fourth is the sign
MULTIPLY = "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X [%r15], AOPERAND, %q11, %r40, "
SCALED = BODY.replace(
    "tcgen05.wait::st.sync.aligned;",
    """ld.param.u64 %q4, [scales]; mad.wide.u32 %q9, %r0, 32, %q4;
ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%q9]; ld.global.v4.b32 {%r24, %r25, %r26, %r27}, [%q9+16];
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r14+96], {%r20, %r21, %r22, %r23, %r24, %r25, %r26, %r27};
add.u32 %r52, %r12, 96; add.u32 %r53, %r12, 100;
tcgen05.wait::st.sync.aligned;""",
).replace("tcgen05.mma.cta_group::1.kind::KIND [%r15], AOPERAND, %q11, %r40, %p5;", MULTIPLY + "[%r52], [%r53], %p5;")


def numbers(codes: np.ndarray) -> np.ndarray:
    return np.where(codes & 8, -1.0, 1.0) * VALUES[codes & 7]


def pairs(codes: np.ndarray) -> np.ndarray:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def scale_words(scales: np.ndarray) -> np.ndarray:
    """[rows, 4] bytes to [128 lanes, rows / 32] words, the same in all quarters."""
    out = np.zeros((128, -(-len(scales) // 32), 4), np.uint8)
    for row, four in enumerate(scales):
        out[row % 32 :: 32, row // 32] = four
    return out.view(np.uint32)[..., 0]


def run(*, tensor=True, acc=1, swizzle=0, ids=(0, 2), extra=0, lane=None, nan=False, mutate=lambda s: s, **options):
    """``extra``: bits of the instruction descriptor to flip; ``lane``: one whose scale of A is not like the others'."""
    rng = np.random.default_rng(7)
    a, b = (rng.integers(0, 16, (rows, K)).astype(np.uint8) for rows in (M, N))
    scale_a, scale_b = (rng.integers(124, 131, (rows, 4)).astype(np.uint8) for rows in (M, N))
    if nan:
        scale_a[5, ids[0] + 1] = 255
    image = np.zeros(65536, np.uint8)
    data, lead_a, stride_a = place(pairs(a), True, swizzle)
    image[: len(data)] = data
    data, lead_b, stride_b = place(pairs(b), True, swizzle)
    image[B_AT - A_AT :][: len(data)] = data
    scales = np.full((128, 8), 0x7F7F7F7F, np.uint32)
    scales[:, :4], scales[:, 4:5] = scale_words(scale_a), scale_words(scale_b)
    if lane is not None:
        scales[lane, 0] ^= 0x01010101
    c = rng.integers(-50, 50, (M, N)).astype(np.float32)
    out = np.zeros((M, N), np.float32)
    instruction = 1 << 7 | 1 << 10 | N >> 3 << 17 | 1 << 23 | 1 << 27 | ids[0] << 29 | ids[1] << 4
    text = mutate(SCALED).replace("AOPERAND", "[%r16]" if tensor else "%q10")
    args = [out, image, pairs(a), c, descriptor(A_AT, lead_a, stride_a, swizzle),
            descriptor(B_AT, lead_b, stride_b, swizzle), instruction ^ extra, acc, scales]  # fmt: skip
    Launch(module(text, PARAMS + ", .param .u64 scales", target="sm_100a"), 1, 128, args, smem=67584,
           max_instructions=100_000, **options).run()  # fmt: skip
    want = c.astype(np.float64) * acc
    for block in range(2):
        part = slice(32 * block, 32 * block + 32)
        of_a, of_b = (np.exp2(s[:, i + block].astype(float) - 127) for s, i in ((scale_a, ids[0]), (scale_b, ids[1])))
        want += numbers(a[:, part]) @ numbers(b[:, part]).T * of_a[:, None] * of_b
    if nan:
        want[5] = np.nan
    return out, want.astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [{}, {"tensor": False}, {"acc": 0}, {"swizzle": 32}, {"swizzle": 32, "tensor": False}, {"ids": (2, 0)},
     {"ids": (2, 2)}, {"nan": True}, {"schedule": "late"}, {"seed": 1}, {"seed": 2}], ids=str,
)  # fmt: skip
def test_products(options):
    got, want = run(**options)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("bit", [0, 3, 6, 8, 11, 12, 15, 16, 23, 24, 28, 31])
def test_wrong_descriptors_are_refused(bit):
    with pytest.raises(EmulatorError, match="not valid for kind::mxf4"):
        run(extra=1 << bit)


def test_scales_must_be_in_all_quarters():
    with pytest.raises(EmulatorError, match="quarters of tensor memory differ"):
        run(lane=70)


@pytest.mark.parametrize("bit", [13, 14, 17, 29, 4])
def test_other_descriptors_are_other_products(bit):
    """Signs, N, scale IDs; odd IDs are refused."""
    try:
        got, want = run(extra=1 << bit)
    except EmulatorError as e:
        assert bit in (29, 4) and "not valid" in str(e) or bit == 17 and "N 0" in str(e)
        return
    assert not np.array_equal(got, want)


# fmt: off
MUTANTS = {
    "scales from other columns": nth("add.u32 %r53, %r12, 100", 0, "add.u32 %r53, %r12, 101"),
    "scales exchanged": nth("[%r52], [%r53]", 0, "[%r53], [%r52]"),
    "scales not waited for": nth("tcgen05.wait::st.sync.aligned;", 0),
    "scales not there": nth("add.u32 %r52, %r12, 96", 0, "add.u32 %r52, %r12, 510"),
    "A from the wrong columns": nth("add.u32 %r16, %r12, 32", 0, "add.u32 %r16, %r12, 33"),
    "wrong column of D": nth("add.u32 %r15, %r12, 64", 0, "add.u32 %r15, %r12, 65"),
    "accumulate flag inverted": nth("setp.ne.u32 %p5", 0, "setp.eq.u32 %p5"),
    "no barrier before the mma": nth("bar.sync 1, 128;", 0),
    "every lane issues": nth("@!%p4 bra WAIT;", 0),
}
# fmt: on


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    found = []
    for options in ({}, {"schedule": "late"}, {"seed": 1}, {"seed": 2}):
        try:
            got, want = run(mutate=MUTANTS[name], **options)
            found.append("" if np.array_equal(got, want) else "wrong")
        except EmulatorError as e:
            found.append(e.kind)
    assert any(found), "nothing noticed"
