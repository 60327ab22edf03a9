"""Kernels compiled ahead of time: what the command builds, that a process needs nothing else, and what it refuses."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.gpu_kernels import INT2
from support.inputs import make_case

import foscar
from foscar import aot, api
from foscar.blackwell import decode as blackwell_decode
from foscar.common import jit
from foscar.common.append_config import AppendConfig
from foscar.common.errors import CompileError, MissingDependencyError
from foscar.common.formats import KVFormat
from foscar.common.plan import CombineConfig
from foscar.hopper.config import DecodeConfig, TileConfig
from foscar.hopper.decode import kernels

needs_dsl = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """An empty memory and no settings but the shared disk cache, which saves compiling a kernel that is known."""
    for name in ("FOSCAR_KERNEL_PATH", "FOSCAR_JIT"):
        monkeypatch.delenv(name, raising=False)
    jit.forget()
    yield
    jit.forget()


def jobs_of(command: str) -> list[aot.Job]:
    return aot._jobs(aot._parser().parse_args(shlex.split(command)))


def configs_of(command: str) -> list[DecodeConfig]:
    return [job.config for job in jobs_of(command) if not isinstance(job.config, (CombineConfig, AppendConfig))]


def child(code: str, **env: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path} | env, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- what is built
def test_every_combination_is_built_with_its_combine_and_append():
    jobs = jobs_of(
        "--arch sm_90a --formats int2,k4v2-bf16 --head-dims 64,128 --page-sizes 16,64 --heads 4,5 "
        "--q-dtypes bfloat16,float16 --out x"
    )
    unique = list(dict.fromkeys(jobs))
    assert len(jobs) == 3 * 32 and len(unique) == 32 + 4 + 16
    assert {j.config.heads for j in unique if j.name == "hopper_decode"} == {4, 8}
    assert {j.config.format for j in unique if j.name == "hopper_decode"} == {
        KVFormat.int2(), KVFormat.make(4, 2, params="bfloat16"),
    }  # fmt: skip
    assert len({str(j) for j in unique}) == len(unique)


def test_knobs_and_architectures():
    (config,) = configs_of("--arch sm_90a --formats int4 --set kv_stages=2 --set math_warpgroups=1 --out x")
    assert config.tile == TileConfig(kv_stages=2, math_warpgroups=1)
    jobs = jobs_of("--arch sm_100a,sm_103a --formats int4 --out x")
    assert [(j.name, j.arch) for j in jobs] == [
        (name, arch) for arch in ("sm_100a", "sm_103a") for name in ("blackwell_decode", "blackwell_combine", "append")
    ]
    assert [j.builder for j in jobs[:2]] == [b for _, _, b, _ in blackwell_decode.kernels(jobs[0].config)]


@pytest.mark.parametrize("arch", list(aot.ARCHS))
def test_what_is_built_is_what_calls_ask_for(arch, monkeypatch):
    """The config of a call on a GPU, for every group of heads, is one that the command makes."""
    asked = []

    def decoder(config, index):
        asked.append(config)
        raise InterruptedError

    monkeypatch.setattr(api, "device_arch", lambda device: arch)
    monkeypatch.setattr(api, "_backend", lambda name, cache: "cuda")
    monkeypatch.setattr(api, "decoder" if arch == "sm_90a" else "blackwell_decoder", decoder)
    for group in range(1, 17):
        fmt, page, dtype = (("int2", 16), ("k4v2-bf16", 64))[group % 2] + (("bfloat16", "float16")[group // 2 % 2],)
        case = make_case([3], fmt=KVFormat.parse(fmt), page_size=page, group_heads=group, dtype=getattr(torch, dtype))
        with pytest.raises(InterruptedError):
            foscar.decode_attention(case.q, *case.tables)
        (config,) = configs_of(f"--arch {arch} --formats {fmt} --page-sizes {page} --heads {group} --q-dtypes {dtype} "
                               "--out x")  # fmt: skip
        assert asked.pop() == config


# ---------------------------------------------------------------------------------------------- building
USE = """
import sys
import importlib.abc

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl"):
            raise ImportError(f"{name} is not for this process")

sys.meta_path.insert(0, Blocked())
from support.decode_checks import assert_contract, case_for
from support.gpu_kernels import INT2
from support.runners import EmulatorRunner
from foscar.hopper.decode import Tables

case = case_for(INT2, [130, 1], kv_heads=1)
out, lse = EmulatorRunner(2).decode(case.q, case.cache, Tables(case.block_table, case.seq_lens))
assert_contract(out, lse, case)
print("decoded", "cutlass" in sys.modules)
"""
ONE = "--arch sm_90a --formats int2 --head-dims 128 --page-sizes 64 --heads 4 --q-dtypes bfloat16"


@needs_dsl
def test_a_process_without_the_dsl_decodes_from_the_folder(tmp_path, capsys):
    folder = tmp_path / "kernels"
    aot.main([*shlex.split(ONE), "--jobs", "1", "--out", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    names = sorted(p.name for p in folder.iterdir())
    assert [n.split("-")[0] for n in names] == ["append", "hopper_combine", "hopper_decode"]
    assert [bool(re.match(rf"\[{i}/3\] \w+ sm_90a \(.*: [\d.]+ s, \d+ KiB$", x)) for i, x in
            enumerate(lines[:3], 1)] == [True] * 3  # fmt: skip
    nbytes = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert lines[3].startswith(f"{folder}: 3 kernels, {nbytes / 2**20:.1f} MiB: 3 made, 0 there already, ")

    settings = {"FOSCAR_JIT": "0", "FOSCAR_CACHE_DIR": str(tmp_path / "empty")}
    done = child(USE, FOSCAR_KERNEL_PATH=str(folder), **settings)
    assert (done.returncode, done.stdout.split()) == (0, ["decoded", "False"]), done.stderr
    done = child(USE, **settings)
    assert done.returncode != 0 and "no compiled kernel hopper_decode" in done.stderr.splitlines()[-1]

    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    aot.main([*shlex.split(ONE), "--out", str(folder)])
    assert "3 kernels" in (line := capsys.readouterr().out) and "0 made, 3 there already" in line
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


TINY = """
from support import tiny_kernel as t
from foscar import aot

if __name__ == "__main__":
    jobs = [aot.Job(t.NAME, t.TinyConfig(t.Shape(n)), "sm_90a", t.BUILDER) for n in (32, 64, 128)]
    print(aot.build("FOLDER", jobs + jobs[:1], 3, print))
"""


@needs_dsl
def test_several_processes_and_what_is_broken(tmp_path):
    folder, script = tmp_path / "kernels", tmp_path / "script.py"
    script.write_text(TINY.replace("FOLDER", str(folder)))
    log = tmp_path / "compiles"
    run = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    settings = {"FOSCAR_CACHE_DIR": str(tmp_path / "cache"), "FOSCAR_TEST_COMPILES": str(log)}
    done = child(run, **settings)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[:5] for line in lines[:-1]] == ["[1/3]", "[2/3]", "[3/3]"] and lines[-1].startswith("3 kernels, ")
    assert len(log.read_text().split()) == 3 and len(set(log.read_text().split())) > 1
    broken = sorted(folder.iterdir())[0]
    (broken / "kernel.cubin").write_bytes(b"")
    done = child(run, **settings)
    assert "1 made, 2 there already" in done.stdout.splitlines()[-1], done.stderr
    assert (broken / "kernel.cubin").stat().st_size > 0


# ---------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    "options, words",
    [
        ("--arch sm_80", "--arch: there are kernels for sm_90a, sm_100a, sm_103a, not for sm_80"),
        ("--arch ,", "--arch: there are kernels for .*, not for nothing"),
        ("--arch sm_90a --formats int3", r"--formats: bits must be one of \(2, 4\), not 3"),
        ("--arch sm_90a --formats int2,fp8", "--formats: a format's name is int2, int4, .*; not 'fp8'"),
        ("--arch sm_90a --formats ,", "nothing to do"),
        ("--arch sm_90a --head-dims 100", "head_dim.* 100"),
        ("--arch sm_90a --page-sizes 8", "page_size must be one of .*, not 8"),
        ("--arch sm_90a --heads four", "--heads: expected whole numbers such as 64,128, not 'four'"),
        ("--arch sm_90a --heads 0", "--heads: expected whole numbers"),
        ("--arch sm_90a --q-dtypes float32", "q_dtype must be one of .*, not 'float32'"),
        ("--arch sm_90a --set stages=3", "--set stages=3: the tile config of sm_90a has math_warpgroups, kv_stages"),
        ("--arch sm_90a --set kv_stages=many", "kv_stages must be a whole number, not 'many'"),
        ("--arch sm_90a --set kv_stages=99", r"shared memory: .*\(99 stages"),
        ("--arch sm_100a --set math_warpgroups=1", "the tile config of sm_100a has kv_stages$"),
    ],
)
def test_what_cannot_be_built_is_one_line(options, words, tmp_path):
    with pytest.raises(SystemExit, match="^foscar.aot: ") as info:
        aot.main([*options.split(), "--out", str(tmp_path / "kernels")])
    assert re.search(words, info.value.code) and "\n" not in info.value.code
    assert not (tmp_path / "kernels").exists()


@pytest.mark.parametrize("where", ["a file", "a file/below", "/proc/kernels"])
def test_a_folder_that_cannot_be_written_is_refused_before_compiling(where, tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    monkeypatch.setattr(jit, "export_kernel", lambda *a: pytest.fail("compiled"))
    with pytest.raises(SystemExit, match="^foscar.aot: --out: ") as info:
        aot.main([*shlex.split(ONE), "--jobs", "1", "--out", str(tmp_path / where)])
    assert "\n" not in info.value.code


def test_without_a_compiler_nothing_starts(tmp_path, monkeypatch):
    command = [*shlex.split(ONE), "--out", str(tmp_path / "kernels")]
    monkeypatch.setenv("FOSCAR_JIT", "0")
    with pytest.raises(SystemExit, match="^foscar.aot: FOSCAR_JIT=0 forbids compiling"):
        aot.main(command)
    monkeypatch.delenv("FOSCAR_JIT")
    monkeypatch.setattr(jit, "dsl_version", lambda: None)
    with pytest.raises(SystemExit, match="^foscar.aot: compiling kernels needs nvidia-cutlass-dsl: pip install"):
        aot.main(command)


# ---------------------------------------------------------------------------------------------- a missing kernel
TUNED = DecodeConfig(KVFormat.parse("k4v2-bf16"), 64, 16, 12, "float16", TileConfig(kv_stages=2, math_warpgroups=1))


@pytest.mark.parametrize("config", [INT2, TUNED], ids=["plain", "tuned"])
@pytest.mark.parametrize("why", ["forbidden", "no dsl"])
def test_a_missing_kernel_names_the_command_that_makes_it(config, why, tmp_path, monkeypatch):
    monkeypatch.setenv("FOSCAR_CACHE_DIR", str(tmp_path))
    if why == "forbidden":
        monkeypatch.setenv("FOSCAR_JIT", "0")
    else:
        monkeypatch.setattr(jit, "dsl_version", lambda: None)
    for name, part, builder, _ in kernels(config):
        with pytest.raises((CompileError, MissingDependencyError)) as info:
            jit.load_or_compile(name, part, "sm_90a", builder)
        message = str(info.value)
        found = re.search(r"python -m foscar.aot (.*? --out FOLDER) and name FOLDER in FOSCAR_KERNEL_PATH$", message)
        assert found and "\n" not in message
        assert aot.Job(name, part, "sm_90a", builder) in jobs_of(found[1])
