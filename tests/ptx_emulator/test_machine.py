"""The machine around the instructions: barriers, copies, memories, schedules, reports, counters, the debugger."""

import numpy as np
import pytest

from ptx_emulator import (
    Deadlock,
    Debugger,
    EmulatorError,
    Hazard,
    Launch,
    Memory,
    MemoryFault,
    Ptr,
    Race,
    SyncError,
    ring,
)
from ptx_emulator.handmade import module

STORE = "mov.u32 %r0, %tid.x; ld.param.u64 %q0, [out]; mad.wide.u32 %q1, %r0, 4, %q0;"


def run(body: str, threads: int, *, words: int = 0, smem: int = 1024, grid=1, **options) -> np.ndarray:
    out = np.zeros(words or threads, np.uint32)
    Launch(module(STORE + body), grid, threads, [out], smem=smem, max_instructions=100_000, **options).run()
    return out


# ---- named barriers ----------------------------------------------------------------------------------------------
NEIGHBOUR = """mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 4, %r1; st.shared.u32 [%r2], %r0;
{barrier}
xor.b32 %r3, %r0, 32; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %r4, [%r3]; st.global.u32 [%q1], %r4;"""


@pytest.mark.parametrize(
    "barrier",
    [
        "bar.sync 0;",
        "barrier.cta.sync 3, 64;",
        "barrier.cta.sync.aligned 3;",
        "bar.sync 5, 64;",
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
    ],
)
@pytest.mark.parametrize("seed", [None, 1])
def test_barriers_order_shared_memory(barrier, seed):
    assert run(NEIGHBOUR.format(barrier=barrier), 64, seed=seed).tolist() == [i ^ 32 for i in range(64)]


def test_a_missing_barrier_is_a_race():
    with pytest.raises(
        Race, match="shared address 0x480 written by warp 1 at line 12 and read earlier by warp 0 at line 14"
    ):
        run(NEIGHBOUR.format(barrier=""), 64)
    with pytest.raises(Race):
        run(NEIGHBOUR.format(barrier="bar.warp.sync 0xffffffff;"), 64)


def test_arrive_and_sync():
    """Warp 1 arrives without waiting; warp 0 waits for it."""
    body = """mov.u32 %r1, smem; setp.lt.u32 %p0, %r0, 32; @%p0 bra READER;
        st.shared.u32 [%r1], 77; bar.arrive 4, 64; bra END;
        READER: bar.sync 4, 64; ld.shared.u32 %r2, [%r1]; st.global.u32 [%q1], %r2;
        END:"""
    assert run(body.replace("77", "%r0"), 64).tolist() in [[i] * 32 + [0] * 32 for i in range(32, 64)]


@pytest.mark.parametrize("kind,expected", [("popc.u32 %r5", 40), ("or.pred %p5", 1), ("and.pred %p5", 0)])
def test_barrier_reductions(kind, expected):
    body = (
        f"setp.lt.u32 %p1, %r0, 40; bar.red.{kind}, 2, 64, %p1;"
        + ("selp.b32 %r5, 1, 0, %p5;" if "pred" in kind else "")
        + "st.global.u32 [%q1], %r5;"
    )
    assert run(body, 64).tolist() == [expected] * 64


def test_barrier_misuse():
    with pytest.raises(SyncError, match="96 threads of 64"):
        run("bar.sync 1, 96;", 64)
    with pytest.raises(SyncError, match="barrier 1 used with .* threads while .* are expected"):
        run("setp.lt.u32 %p0, %r0, 32; @%p0 bra A; bar.sync 1, 64; bra B; A: bar.sync 1, 96; B:", 96)


# ---- mbarriers and bulk copies -----------------------------------------------------------------------------------
COPY = """mov.u32 %r1, smem; setp.ne.u32 %p0, %r0, 0; @%p0 bra GO;
mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;
add.u32 %r2, %r1, 128; mov.u32 %r3, 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%q0], %r3, [%r1];
GO: bar.sync 0;
LOOP: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra LOOP;
mad.lo.u32 %r4, %r0, 4, %r1; ld.shared.u32 %r5, [%r4+128]; add.u32 %r5, %r5, 1; bar.sync 0; st.global.u32 [%q1], %r5;"""


@pytest.mark.parametrize("options", [{}, {"schedule": "late"}, {"seed": 1}, {"seed": 2}], ids=str)
def test_bulk_copy(options):
    out = np.arange(32, dtype=np.uint32)
    Launch(module(STORE + COPY), 1, 32, [out], smem=1024, **options).run()
    assert out.tolist() == list(range(1, 33))


def test_deadlock_report_says_who_waits_for_what():
    with pytest.raises(Deadlock) as e:
        run(COPY.replace("_, [%r1], 128", "_, [%r1], 144"), 64, words=64)
    text = str(e.value)
    assert "mbarrier.try_wait" in text and "16 bytes pending" in text and "cta 0 warp 1" in text


def test_uninitialised_mbarrier():
    with pytest.raises(SyncError, match="no initialised mbarrier"):
        run("mov.u32 %r1, smem; mbarrier.arrive.shared.b64 _, [%r1];", 32)


@pytest.mark.parametrize(
    "wait,fails",
    [
        ("cp.async.wait_group 0; bar.sync 0;", False),
        ("cp.async.wait_all; bar.sync 0;", False),
        ("bar.sync 0;", True),
        ("cp.async.wait_group 1; bar.sync 0;", True),
    ],
)
def test_cp_async(wait, fails):
    body = f"""mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 4, %r1; cp.async.ca.shared.global [%r2], [%q1], 4;
        cp.async.commit_group; {wait}
        ld.shared.u32 %r5, [%r2]; add.u32 %r5, %r5, 1; st.global.u32 [%q1], %r5;"""
    out = np.arange(32, dtype=np.uint32)
    launch = Launch(module(STORE + body), 1, 32, [out], smem=1024, schedule="late")
    if fails:
        with pytest.raises((Hazard, Race)):
            launch.run()
            assert out.tolist() != list(range(1, 33))
            raise Hazard("wrong data")
    else:
        launch.run()
        assert out.tolist() == list(range(1, 33))


@pytest.mark.parametrize("noinc,count", [(".noinc", 32), ("", 1)])
@pytest.mark.parametrize("schedule", ["inorder", "late", "random"])
def test_cp_async_with_mbarrier(noinc, count, schedule):
    own = "" if noinc else "@%p3 mbarrier.arrive.shared.b64 _, [%r1];"
    body = f"""mov.u32 %r1, smem; setp.eq.u32 %p3, %r0, 0; @%p3 mbarrier.init.shared.b64 [%r1], {count}; bar.sync 0;
        mad.lo.u32 %r2, %r0, 4, %r1; cp.async.ca.shared.global [%r2+8], [%q1], 4;
        cp.async.mbarrier.arrive{noinc}.shared.b64 [%r1]; bar.sync 0; {own}
        W: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra W;
        xor.b32 %r3, %r0, 1; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %r5, [%r3+8]; st.global.u32 [%q1], %r5;"""
    out = np.arange(32, dtype=np.uint32)
    Launch(module(STORE + body), 1, 32, [out], smem=1024, schedule=schedule, seed=5).run()
    assert out.tolist() == [i ^ 1 for i in range(32)]


# ---- memory and arguments ----------------------------------------------------------------------------------------
def test_pointers_at_byte_offsets_scalars_and_structs():
    text = module(
        """ld.param.u64 %q0, [out]; ld.param.s32 %r1, [n]; ld.param.f32 %f1, [x]; ld.param.b32 %r2, [s+4];
        mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0; @%p0 bra END;
        st.global.u32 [%q0], %r1; st.global.f32 [%q0+4], %f1; st.global.b32 [%q0+8], %r2; END:""",
        ".param .u64 out, .param .s32 n, .param .f32 x, .param .align 4 .b8 s[8]",
    )
    out = np.zeros(8, np.uint32)
    Launch(text, 1, 32, [Ptr(out, 8), -2, 1.5, b"\1\0\0\0\2\0\0\0"]).run()
    assert out.tolist() == [0, 0, 2**32 - 2, 0x3FC00000, 2, 0, 0, 0]
    with pytest.raises(MemoryFault, match="outside its 32 bytes"):
        Launch(text, 1, 32, [Ptr(out, 28), 0, 0.0, bytes(8)]).run()
    with pytest.raises(EmulatorError, match="3 arguments for 4"):
        Launch(text, 1, 32, [out, 1, 2.0])


def test_torch_tensors_and_several_launches_over_one_memory():
    torch = pytest.importorskip("torch")
    x = torch.zeros(64, dtype=torch.bfloat16)
    view = x[32:]
    text = module("""ld.param.u64 %q0, [out]; mov.u32 %r0, %tid.x; mad.wide.u32 %q1, %r0, 2, %q0;
        ld.global.b16 %h0, [%q1]; add.u16 %h0, %h0, 1; st.global.b16 [%q1], %h0;""")
    memory = Memory()
    for _ in range(3):
        Launch(text, 1, 32, [view], memory=memory).run()
    assert x.view(torch.int16).tolist() == [0] * 32 + [3] * 32
    strided = torch.zeros(64, 2, dtype=torch.int16)[:, 1]
    Launch(text, 1, 1, [strided]).run()
    assert strided.tolist() == [1] + [0] * 63


def test_host_addresses():
    """Arguments that were prepared as integers for a GPU: data_ptr() of registered tensors."""
    torch = pytest.importorskip("torch")
    x = torch.zeros(64, dtype=torch.int16)
    text = module("""ld.param.u64 %q0, [out]; mov.u32 %r0, %tid.x; mad.wide.u32 %q1, %r0, 2, %q0;
        ld.global.b16 %h0, [%q1]; add.u16 %h0, %h0, 1; st.global.b16 [%q1], %h0;""")
    memory = Memory(host_addresses=True)
    with pytest.raises(MemoryFault):
        Launch(text, 1, 32, [x.data_ptr()], memory=memory).run()
    memory.register(x[8:], "x")
    Launch(text, 1, 32, [x[32:].data_ptr()], memory=memory).run()
    assert x.tolist() == [0] * 32 + [1] * 32
    with pytest.raises(MemoryFault, match="x [+] 128 is outside"):
        Launch(text, 1, 32, [x[33:].data_ptr()], memory=memory).run()


def test_generic_and_local_addresses():
    body = """mov.u32 %r1, smem; cvt.u64.u32 %q5, %r1; cvta.shared.u64 %q6, %q5;
        mad.wide.u32 %q7, %r0, 4, %q6; st.u32 [%q7], %r0; ld.shared.u32 %r2, [%r1+12]; ld.u32 %r3, [%q7];
        add.u32 %r2, %r2, %r3; st.u32 [%q1], %r2;"""
    assert run(body, 32).tolist() == [3 + i for i in range(32)]


@pytest.mark.parametrize(
    "body,why",
    [
        ("mov.u32 %r1, smem; ld.shared.u32 %r2, [%r1+1024];", "shared access"),
        ("mov.u32 %r1, 16; ld.shared.u32 %r2, [%r1];", "shared access"),
        ("mov.u32 %r1, smem; ld.shared.v4.u32 {%r2, %r3, %r4, %r5}, [%r1+8];", "misaligned"),
        ("mov.u64 %q5, 0; ld.global.u32 %r2, [%q5];", "belongs to no array"),
    ],
)
def test_faults_name_warp_and_line(body, why):
    with pytest.raises(MemoryFault, match=f"cta 0 warp 0, line 1[0-9]: .*{why}"):
        run(body, 32)


# ---- grids, schedules, counters, debugging -----------------------------------------------------------------------
def test_grid_and_the_last_cta_to_finish():
    """Every CTA adds its number; the last one to arrive at a counter writes the total."""
    text = module("""ld.param.u64 %q0, [out]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x;
        setp.ne.u32 %p0, %r0, 0; @%p0 bra END;
        red.global.add.u32 [%q0], %r1; atom.acq_rel.gpu.global.inc.u32 %r3, [%q0+4], 99;
        sub.u32 %r2, %r2, 1; setp.ne.u32 %p1, %r3, %r2; @%p1 bra END;
        ld.global.u32 %r4, [%q0]; st.global.u32 [%q0+8], %r4; END:""")
    for seed in (None, 1, 2):
        out = np.zeros(3, np.uint32)
        assert Launch(text, 10, 64, [out], seed=seed).run().ctas == 10
        assert out.tolist() == [45, 10, 45]


def test_ctas_that_wait_for_each_other_need_to_be_resident():
    text = module("""ld.param.u64 %q0, [out]; mov.u32 %r1, %ctaid.x;
        red.global.add.u32 [%q0], 1; SPIN: ld.acquire.gpu.global.u32 %r2, [%q0]; nanosleep.u32 20;
        setp.lt.u32 %p0, %r2, 64; @%p0 bra SPIN;""")
    out = np.zeros(1, np.uint32)
    Launch(text, 2, 32, [out], resident=2).run()
    with pytest.raises(EmulatorError, match="endless loop"):
        Launch(text, 2, 32, [np.zeros(1, np.uint32)], resident=1, max_instructions=5000).run()


def test_the_same_seed_gives_the_same_run():
    order = []
    for seed in (1, 1, 2):
        steps = []
        ring.run(seed=seed, debug=Debugger(on_instruction=lambda w, g, i, s=steps: s.append((w.index, i.line))))
        order.append(steps)
    assert order[0] == order[1] != order[2]


def test_counters():
    codes, b = ring.inputs()
    out = np.zeros((128, 4), np.float32)
    c = Launch(ring.text(), 1, 160, [out, codes, b, ring.TILES], smem=ring.SMEM, conflicts=True).run()
    assert c.matrix_operations["wgmma"] == ring.TILES and c.multiply_adds["wgmma"] == ring.TILES * 64 * 8 * 32
    assert c.bytes["global bulk load"] == ring.TILES * 2048 and c.bytes["global bulk store"] == 2048
    assert c.opcodes["wgmma.wait_group.sync.aligned"] == 4 * ring.TILES
    assert c.role([4])["copy"] == ring.TILES and c.role(range(4))["matrix"] > 0
    assert c.instructions == sum(c.by_class.values()) and c.bank_conflicts == 0


def test_bank_conflicts_are_counted():
    counters = []
    for stride in (4, 8, 128, 16):
        text = module(STORE + f"mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, {stride}, %r1; ld.shared.u32 %r3, [%r2];")
        counters.append(Launch(text, 1, 32, [np.zeros(32, "u4")], smem=4096, conflicts=True).run().bank_conflicts)
    assert counters == [0, 1, 31, 3]


def test_trace_registers_and_watch():
    lines = []
    d = Debugger(trace={0}, registers=("%r1",), lane=3, watches=[(1024 + 4, 1024 + 8)], write=lines.append)
    run("mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 4, %r1; st.shared.u32 [%r2], %r0;", 32, debug=d)
    text = "\n".join(lines)
    assert "cta 0 warp 0 line 12: mov.u32 %r1, smem   # %r1=1024 (0x400)" in text
    assert "shared 0x404..0x408 changed by cta 0 warp 0 line 12: st.shared.u32 [%r2], %r0" in text
    assert "ff ff ff ff\n    01 00 00 00" in text


def test_poison_makes_unwritten_shared_memory_visible():
    out = run("mov.u32 %r1, smem; ld.shared.u32 %r2, [%r1]; st.global.u32 [%q1], %r2;", 32)
    assert out.tolist() == [0xFFFFFFFF] * 32
