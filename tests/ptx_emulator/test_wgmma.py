"""wgmma: fragments, descriptors, numerics and the rules of its asynchrony, on kernels written by hand."""

import numpy as np
import pytest

from ptx_emulator import Hazard, Launch, SyncError
from ptx_emulator.handmade import KIND_SIZE, module, operand, place

RNG = np.random.default_rng(7)


def descriptor(address: int, leading: int, stride: int, swizzle: int) -> int:
    code = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    return (address & 0x3FFFF) >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | code << 62


B_AT, A_AT = 1024, 1024 + 32768  # shared-memory addresses in these kernels


def kernel(
    shape: str,
    types: str,
    n: int,
    *,
    regs: bool,
    acc: int,
    tail: str,
    fence="wgmma.fence.sync.aligned;",
    commit="wgmma.commit_group.sync.aligned;",
    wait="wgmma.wait_group.sync.aligned 0;",
    after="",
) -> str:
    """Copies 64 KB of image to shared memory, runs one wgmma of `types` on it and stores D, one warpgroup."""
    count = n // (4 if types.startswith("f16.") else 2)
    d = ", ".join(f"%d{i}" for i in range(count))
    a = "{%a0, %a1, %a2, %a3}" if regs else "%q10"
    lines = [
        f".reg .b32 %d<{count}>; .reg .b32 %a<4>;",
        """
        ld.param.u64 %q0, [out]; ld.param.u64 %q1, [image]; ld.param.u64 %q2, [areg]; ld.param.u64 %q3, [c];
        ld.param.u64 %q10, [adesc]; ld.param.u64 %q11, [bdesc];
        mov.u32 %r0, %tid.x; mov.u32 %r2, smem; mov.u32 %r1, 0;
        COPY: mad.lo.u32 %r3, %r1, 128, %r0; shl.b32 %r3, %r3, 4;
        cvt.u64.u32 %q5, %r3; add.s64 %q5, %q5, %q1; add.s32 %r4, %r3, %r2;
        ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%q5]; st.shared.v4.b32 [%r4], {%r5, %r6, %r7, %r8};
        add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 32; @%p1 bra COPY;
        fence.proxy.async.shared::cta; bar.sync 0;
        mad.wide.u32 %q6, %r0, 16, %q2; ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%q6];
        """,
        f"mad.wide.u32 %q7, %r0, {4 * count}, %q3; mad.wide.u32 %q8, %r0, {4 * count}, %q0;",
    ]
    lines += [f"ld.global.b32 %d{i}, [%q7+{4 * i}];" for i in range(count)]
    lines += [
        f"setp.ne.b32 %p0, {acc}, 0;",
        fence,
        f"wgmma.mma_async.sync.aligned.{shape}.{types} {{{d}}}, {a}, %q11, %p0{tail};",
        commit,
        after,
        wait,
    ]
    lines += [f"st.global.b32 [%q8+{4 * i}], %d{i};" for i in range(count)]
    params = ", ".join(f".param .u64 {p}" for p in ("out", "image", "areg", "c", "adesc", "bdesc"))
    return module("\n".join(lines), params)


def fragment(raw: np.ndarray) -> np.ndarray:
    """A [64, K] as registers [128 threads, 4], from the figures of 9.7.15.5.1: thread t of warp w holds, in register i,
    row 16w + t/4 + 8(i%2), and 4 bytes from byte 4(t%4) + 16(i/2)."""
    rows = raw.view(np.uint8).reshape(64, -1)
    out = np.zeros((128, 4), np.uint32)
    for thread in range(128):
        w, t = divmod(thread, 32)
        for i in range(4):
            r, c = 16 * w + t // 4 + 8 * (i % 2), 4 * (t % 4) + 16 * (i // 2)
            out[thread, i] = rows[r, c : c + 4].copy().view(np.uint32)[0]
    return out


def d_fragment(values: np.ndarray) -> np.ndarray:
    """D [64, N] as registers [128 threads, N/2]."""
    n = values.shape[1]
    out = np.zeros((128, n // 2), values.dtype)
    for thread in range(128):
        w, t = divmod(thread, 32)
        for i in range(n // 2):
            out[thread, i] = values[16 * w + t // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2]
    return out


def run(
    kind_a, kind_b, n, *, regs, acc=1, swizzle_a=0, swizzle_b=0, a_k_major=True, b_k_major=True, seed=None, **options
):
    k = 32 // KIND_SIZE[kind_a]
    raw_a, a = operand(RNG, kind_a, 64, k)
    raw_b, b = operand(RNG, kind_b, n, k)
    integer = kind_a in ("u8", "s8")
    image = np.zeros(65536, np.uint8)
    data, lead_b, stride_b = place(raw_b, b_k_major, swizzle_b)
    image[: len(data)] = data
    data, lead_a, stride_a = place(raw_a, a_k_major, swizzle_a)
    image[32768:][: len(data)] = data
    dtype = np.int32 if integer else np.float32
    c = RNG.integers(-100, 100, (64, n)).astype(dtype)
    out = np.zeros((128, n // 2), dtype)
    wide = KIND_SIZE[kind_a] == 2
    tail = "" if integer else ", 1, 1"
    if wide:
        tail += "" if regs else f", {int(not a_k_major)}"
        tail += f", {int(not b_k_major)}"
    types = f"{'s32' if integer else 'f32'}.{kind_a}.{kind_b}"
    text = kernel(f"m64n{n}k{k}", types, n, regs=regs, acc=acc, tail=tail, **options)
    args = [
        out,
        image,
        fragment(raw_a),
        d_fragment(c),
        descriptor(A_AT, lead_a, stride_a, swizzle_a),
        descriptor(B_AT, lead_b, stride_b, swizzle_b),
    ]
    Launch(text, 1, 128, args, smem=65536, seed=seed).run()
    return out, d_fragment((a @ b.T + (c if acc else 0)).astype(dtype))


@pytest.mark.parametrize("n", [8, 24, 32])
@pytest.mark.parametrize(
    "kinds",
    [("f16", "f16"), ("bf16", "bf16"), ("e4m3", "e4m3"), ("u8", "u8"), ("u8", "s8"), ("s8", "u8")],
    ids="-".join,
)
def test_a_in_registers(kinds, n):
    got, want = run(*kinds, n, regs=True)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("kind", ["f16", "e4m3", "u8"])
def test_swizzles_k_major(kind, swizzle):
    got, want = run(kind, kind, 16, regs=False, swizzle_a=swizzle, swizzle_b=swizzle)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("regs", [True, False])
def test_mn_major(regs, swizzle):
    got, want = run(
        "bf16", "bf16", 64, regs=regs, swizzle_a=swizzle, swizzle_b=swizzle, a_k_major=False, b_k_major=False
    )
    np.testing.assert_array_equal(got, want)


def test_scale_d_zero_ignores_the_accumulator():
    got, want = run("f16", "f16", 8, regs=True, acc=0, seed=1)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "options,why",
    [
        ({"wait": ""}, "still in flight"),
        ({"fence": ""}, "wgmma.fence is missing"),
        ({"commit": ""}, "still in flight|never committed"),
        ({"wait": "wgmma.wait_group.sync.aligned 1;"}, "still in flight"),
        ({"after": "mov.b32 %a0, 0;"}, "still in flight"),
    ],
)
@pytest.mark.parametrize("seed", [None, 1])
def test_broken_synchronization_is_reported(options, why, seed):
    with pytest.raises(Hazard, match=why):
        run("f16", "f16", 8, regs=True, seed=seed, **options)


def test_warps_must_agree():
    with pytest.raises(SyncError, match="disagree"):
        run(
            "f16",
            "f16",
            8,
            regs=True,
            fence="""wgmma.fence.sync.aligned;
            setp.lt.u32 %p2, %r0, 32; @%p2 add.s64 %q11, %q11, 1;""",
        )
