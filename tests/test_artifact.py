"""The facts of a compiled kernel, read from PTX, host IR and ptxas notes; no GPU needed."""

import dataclasses
import json

import pytest
from support.tiny_kernel import BUILDER, NAME, Shape, TinyConfig

from foscar.common import artifact as art
from foscar.common import jit
from foscar.common.errors import CompileError

needs_dsl = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")
ARCH = "sm_90a"
TINY = TinyConfig()


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """An empty disk cache and an empty memory."""
    monkeypatch.setenv("FOSCAR_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("FOSCAR_KERNEL_PATH", "FOSCAR_JIT"):
        monkeypatch.delenv(name, raising=False)
    jit.forget()
    yield tmp_path
    jit.forget()


def get(config=TINY, arch=ARCH):
    return jit.load_or_compile(NAME, config, arch, BUILDER)


@needs_dsl
@pytest.mark.parametrize("threads, rows", [(128, 3), (64, 1)])
def test_launch_facts_of_a_compiled_kernel(threads, rows):
    a = get(TinyConfig(Shape(threads, rows)))
    assert a.cubin[:4] == b"\x7fELF" and a.entry in a.ptx and a.entry.encode() in a.cubin
    assert (a.block, a.threads) == ((threads, 1, 1), threads)
    assert f".reqntid {threads}" in a.ptx
    assert a.smem == 4 * threads * rows and a.static_smem == 0
    declared = [line.split()[1].lstrip(".") for line in a.ptx.splitlines() if line.strip().startswith(".param")]
    assert [p.type for p in a.params] == declared == ["u64", "u32", "u64", "f32", "u32"]
    assert [(p.offset, p.size) for p in a.params] == [(0, 8), (8, 4), (16, 8), (24, 4), (28, 4)]
    assert 0 < a.registers < 64 and a.spill_bytes == 0 and a.arch == ARCH and a.dsl == jit.dsl_version()


@needs_dsl
def test_other_architectures_compile_here():
    a = get(arch="sm_100a")
    assert a.arch == "sm_100a" and ".target sm_100a" in a.ptx
    assert get().cubin != a.cubin


@needs_dsl
def test_the_json_holds_the_facts(fresh):
    a = get()
    (folder,) = (fresh / "cache").glob(f"{NAME}-*")
    facts = json.loads((folder / art.FACTS).read_text())
    assert facts == json.loads(json.dumps(a.facts()))
    assert facts["config"]["shape"] == {"__dataclass__": "Shape", "threads": 128, "rows": 3}
    assert art.Artifact.load(folder) == a


@needs_dsl
def test_notes_that_cost_speed_are_kept_and_logged(caplog):
    a = get(dataclasses.replace(TINY, starved=True))
    assert len(a.costly_remarks) == 1 and "C7508" in a.costly_remarks[0]
    assert "C7508" in caplog.text
    assert get().remarks == ()


PTX = """
.extern .shared .align 1024 .b8 __dynamic_shmem__0[];
.shared .align 16 .b8 fixed[48];
.visible .entry k(
	.param .u8 k_param_0,
	.param .u64 k_param_1,
	.param .align 64 .b8 k_param_2[128],
	.param .f32 k_param_3
)
.reqntid 32, 4, 1
.minnctapersm 1
{
	.shared .align 4 .b32 inner[3][2];
	ret;
}
"""  # noqa: W191, E101


def test_reading_ptx():
    entry, params, block, static = art.parse_entry(PTX)
    assert (entry, block, static) == ("k", (32, 4, 1), 48 + 24)
    assert [(p.type, p.size, p.offset) for p in params] == [
        ("u8", 1, 0),
        ("u64", 8, 8),
        ("b8[128]", 128, 64),
        ("f32", 4, 192),
    ]
    with pytest.raises(CompileError, match="one kernel"):
        art.parse_entry(PTX + PTX)


def launch_ir(block=("%c32", "%c1", "%c1"), smem="%c64", cluster=False, name="host"):
    config = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
    attribute = "!llvm.struct<(i32, array<4 x i8>, array<64 x i8>)>"
    paths = [("1, 0", block[0]), ("1, 1", block[1]), ("1, 2", block[2]), ("2", smem), ("0, 0", "%arg0")]
    lines = [f"%c{n} = llvm.mlir.constant({n} : i32) : i32" for n in (1, 4, 32, 64)]
    for i, (path, value) in enumerate(paths):
        lines.append(f"%p{i} = llvm.getelementptr %9[0, {path}] : (!llvm.ptr) -> !llvm.ptr, {config}")
        lines.append(f"llvm.store {value}, %p{i} : i32, !llvm.ptr")
    if cluster:
        lines.append(f"%q = llvm.getelementptr %8[0, 0] : (!llvm.ptr) -> !llvm.ptr, {attribute}")
        lines.append("llvm.store %c4, %q : i32, !llvm.ptr")
    return "\n    ".join([f"  llvm.func @{name}(%arg0: i32) -> i32 {{", *lines]) + "\n  }\n"


def test_reading_the_launch():
    assert art.parse_launch(launch_ir()) == ((32, 1, 1), 64)
    for bad, message in (
        ("", "one kernel, not 0"),
        (launch_ir() + launch_ir(name="more"), "one kernel, not 2"),
        (launch_ir(smem="%arg0"), "compile-time constants"),
        (launch_ir(block=("%arg0", "%c1", "%c1")), "compile-time constants"),
        (launch_ir(cluster=True), "cluster"),
    ):
        with pytest.raises(CompileError, match=message):
            art.parse_launch(bad)


def test_reading_ptxas():
    text = (
        "x (C7514) Potential Performance Loss: ''wgmma'' ...\n"
        "Used 168 registers\n8 bytes spill stores, 4 bytes spill loads"
    )
    registers, spills, remarks = art.parse_ptxas(text)
    assert (registers, spills) == (168, 12)
    assert remarks == ("(C7514) Potential Performance Loss: 'wgmma' ...",)
    a = art.Artifact(b"", "", "k", ARCH, (1, 1, 1), 0, 0, (), remarks=(*remarks, "(C0001) harmless"))
    assert a.costly_remarks == remarks
    assert art.parse_ptxas("") == (None, None, ())
