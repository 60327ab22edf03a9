"""The disk cache under many processes and faults, machines without the DSL; no GPU needed."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiny_kernel
from support.tiny_kernel import BUILDER, NAME, TinyConfig

from foscar.common import artifact as art
from foscar.common import jit, kernel_store
from foscar.common.errors import CompileError, MissingDependencyError

needs_dsl = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")
ROOT = Path(__file__).resolve().parents[1]
ARCH = "sm_90a"


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """An empty disk cache, an empty memory and a log of compilations."""
    monkeypatch.setenv("FOSCAR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FOSCAR_TEST_COMPILES", str(tmp_path / "compiles"))
    for name in ("FOSCAR_KERNEL_PATH", "FOSCAR_JIT"):
        monkeypatch.delenv(name, raising=False)
    jit.forget()
    yield tmp_path
    jit.forget()


TINY = TinyConfig()


def get(config=TINY, arch=ARCH):
    return jit.load_or_compile(NAME, config, arch, BUILDER)


def compiles(tmp_path):
    path = tmp_path / "compiles"
    return len(path.read_text().split()) if path.exists() else 0


def fake_artifact(config=TINY, dsl="1.2.3"):
    """A kernel that no compiler made, with the identity of a real one."""
    key = jit.compile_key(NAME, config, ARCH, BUILDER)
    params = (art.Param("u64", 8, 0),)
    return art.Artifact(
        b"\x7fELF" + dsl.encode(), ".ptx", "entry", ARCH, (32, 1, 1), 0, 0, params, dsl=dsl, name=NAME, key=key
    )


def plant(root, artifact):
    folder = root / (kernel_store.stem(NAME, ARCH, artifact.key) + artifact.dsl)
    assert kernel_store.save(artifact, folder)
    return folder


@pytest.fixture
def fake_build(monkeypatch):
    """Compilations give :func:`fake_artifact`."""
    built = dataclasses.replace(fake_artifact(), name="", key="")
    monkeypatch.setattr(jit, "dsl_version", lambda: "1.2.3")
    monkeypatch.setattr(tiny_kernel, "build", lambda config, arch: built)


# ---------------------------------------------------------------------------------------------- processes
CHILD = """
import os, sys, time
from foscar.common import jit
from support import tiny_kernel as t
ready, go = sys.argv[1:3]
if ready:
    open(ready, "w").close()
    while not os.path.exists(go):
        time.sleep(0.002)
a = jit.load_or_compile(t.NAME, t.TinyConfig(), "sm_90a", t.BUILDER)
print(a.cubin_sha256, "cutlass" in sys.modules)
"""


def start_child(ready="", go=""):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", CHILD, str(ready), str(go)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(child):
    out, err = child.communicate(timeout=100)
    assert child.returncode == 0, err
    return out.split()


@needs_dsl
def test_eight_processes_compile_once(fresh):
    """Public report 23."""
    go = fresh / "go"
    ready = [fresh / f"ready{i}" for i in range(8)]
    children = [start_child(r, go) for r in ready]
    while not all(r.exists() for r in ready):
        assert all(c.poll() is None for c in children), [c.communicate() for c in children if c.poll() is not None]
    go.touch()
    results = [finish(c) for c in children]
    assert compiles(fresh) == 1
    assert len({digest for digest, _ in results}) == 1
    assert sorted(imported for _, imported in results) == ["False"] * 7 + ["True"]
    names = [p.name for p in (fresh / "cache").iterdir() if p.name != ".locks"]
    assert len(names) == 1 and names[0].startswith(NAME)


@needs_dsl
def test_a_second_process_neither_compiles_nor_imports_the_dsl(fresh):
    """Public report 24."""
    digest = get().cubin_sha256
    assert finish(start_child()) == [digest, "False"]
    assert compiles(fresh) == 1


@needs_dsl
def test_memory_serves_the_same_object(fresh):
    assert get() is get() and compiles(fresh) == 1
    jit.forget()
    assert get() is not None and compiles(fresh) == 1


# ---------------------------------------------------------------------------------------------- faults
def damage(folder, how):
    cubin = folder / art.CUBIN
    if how == "truncated cubin":
        cubin.write_bytes(cubin.read_bytes()[:-7])
    elif how == "flipped ptx":
        (folder / art.PTX).write_text("//" + (folder / art.PTX).read_text())
    elif how == "no cubin":
        cubin.unlink()
    elif how == "empty json":
        (folder / art.FACTS).write_text("")
    elif how == "another kernel":
        facts = json.loads((folder / art.FACTS).read_text()) | {"key": "0" * 64}
        (folder / art.FACTS).write_text(json.dumps(facts))
    elif how == "missing fact":
        facts = json.loads((folder / art.FACTS).read_text())
        del facts["params"]
        (folder / art.FACTS).write_text(json.dumps(facts))
    elif how in ("a file", "a dangling link"):
        shutil.rmtree(folder)
        folder.touch() if how == "a file" else folder.symlink_to("nowhere")
    else:
        facts = json.loads((folder / art.FACTS).read_text())
        facts[how] = facts[how] + 1 if how == "smem" else facts[how][:-1]
        (folder / art.FACTS).write_text(json.dumps(facts))


WAYS = ["truncated cubin", "flipped ptx", "no cubin", "empty json", "another kernel", "missing fact", "a file",
        "a dangling link", "smem", "block", "params", "entry", "arch"]  # fmt: skip


@pytest.mark.parametrize("how", WAYS)
def test_broken_entries_are_set_aside_and_rebuilt(fresh, monkeypatch, how):
    built = dataclasses.replace(fake_artifact(), name="", key="")
    monkeypatch.setattr(jit, "dsl_version", lambda: "1.2.3")
    monkeypatch.setattr(tiny_kernel, "build", lambda config, arch: built)
    good = get()
    (folder,) = (fresh / "cache").glob(f"{NAME}-*")
    for _ in range(2):  # the second time, an older broken one is in the way
        damage(folder, how)
        jit.forget()
        assert get() == good
        assert {p.name for p in (fresh / "cache").glob(f"{NAME}-*")} == {folder.name, folder.name + ".corrupt"}
        assert art.Artifact.load(folder, good.key, ARCH) == good
    with pytest.raises(ValueError, match=f"is for {ARCH}, not for sm_100a"):
        art.Artifact.load(folder, good.key, "sm_100a")


@pytest.mark.parametrize("how", ["truncated cubin", "smem", "a file"])
def test_an_export_replaces_a_broken_one(fresh, fake_build, how):
    folder = jit.export_kernel(fresh / "shipped", NAME, TINY, ARCH, BUILDER)
    damage(folder, how)
    assert jit.export_kernel(fresh / "shipped", NAME, TINY, ARCH, BUILDER) == folder
    assert art.Artifact.load(folder) == get()


def test_an_unreadable_kernel_is_not_set_aside(fresh, fake_build, monkeypatch, caplog):
    good = get()
    (folder,) = (fresh / "cache").glob(f"{NAME}-*")
    jit.forget()
    with monkeypatch.context() as patch:
        patch.setattr(art.Path, "read_bytes", lambda path: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        assert get() == good
    assert "cannot read kernel" in caplog.text and "broken" not in caplog.text
    assert [p.name for p in (fresh / "cache").glob(f"{NAME}-*")] == [folder.name]


def test_sources_edited_after_the_import_write_nothing(fresh, fake_build, monkeypatch, caplog):
    """The process holds the old code, its key may name the new one."""
    monkeypatch.setattr(jit, "_IMPORTED", Path(tiny_kernel.__file__).stat().st_mtime - 1)
    jit._warn_edited.cache_clear()
    for _ in range(2):
        assert get().name == NAME
        jit.forget()
    assert not list((fresh / "cache").glob(f"{NAME}-*"))
    assert caplog.text.count("edited after this process started: kernels compiled here stay in memory") == 1
    with pytest.raises(CompileError, match="tiny_kernel.py was edited after .*: export .* from a new one"):
        jit.export_kernel(fresh / "shipped", NAME, TINY, ARCH, BUILDER)
    assert not (fresh / "shipped").exists()


def test_a_build_for_another_architecture_is_refused(fake_build):
    with pytest.raises(CompileError, match="for sm_100a gave a kernel for sm_90a"):
        get(arch="sm_100a")


@pytest.mark.parametrize("where", ["a file", "proc", "no home"])
def test_a_place_that_cannot_be_written_costs_no_kernel(fresh, monkeypatch, where, caplog):
    monkeypatch.setattr(jit, "dsl_version", lambda: "1.2.3")
    monkeypatch.setattr(
        tiny_kernel, "build", lambda config, arch: dataclasses.replace(fake_artifact(), name="", key="")
    )
    (fresh / "file").touch()
    if where == "no home":
        monkeypatch.delenv("FOSCAR_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
        assert kernel_store.cache_dir() is None
    else:
        monkeypatch.setenv("FOSCAR_CACHE_DIR", str(fresh / "file") if where == "a file" else "/proc/foscar")
    assert get().name == NAME
    assert where == "no home" or "stays in memory" in caplog.text


def test_a_read_only_cache_still_serves(fresh, monkeypatch):
    monkeypatch.setattr(jit, "dsl_version", lambda: "1.2.3")
    planted = fake_artifact()
    plant(fresh / "cache", planted)
    monkeypatch.setattr(kernel_store, "save", None)
    monkeypatch.setattr(kernel_store, "locked", None)
    assert get() == planted
    assert not (fresh / "cache" / ".locks").exists()


def test_the_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    assert kernel_store.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("FOSCAR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kernel_store.cache_dir() == tmp_path / "xdg" / "foscar"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kernel_store.cache_dir() == tmp_path / "home" / ".cache" / "foscar"


# ---------------------------------------------------------------------------------------------- without compiling
def test_jit_forbidden_names_the_kernel_and_the_way_out(monkeypatch, fresh):
    monkeypatch.setenv("FOSCAR_JIT", "0")
    with pytest.raises(CompileError) as e:
        get()
    message = str(e.value)
    for part in (
        NAME,
        ARCH,
        str(fresh / "cache"),
        "FOSCAR_JIT=0",
        "export_kernel",
        "TinyConfig(",
        "FOSCAR_KERNEL_PATH",
    ):
        assert part in message
    assert "\n" not in message and compiles(fresh) == 0


def test_without_the_dsl_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(jit, "dsl_version", lambda: None)
    with pytest.raises(MissingDependencyError, match=r'pip install "nvidia-cutlass-dsl>=4.8,<4.9"') as e:
        get()
    assert NAME in str(e.value) and "\n" not in str(e.value)


def test_versions_of_the_dsl(monkeypatch, fresh):
    old, new = fake_artifact(dsl="4.8.1"), fake_artifact(dsl="4.10.0")
    for a in (old, new):
        plant(fresh / "cache", a)
    monkeypatch.setattr(jit, "dsl_version", lambda: None)
    assert get().dsl == "4.10.0"  # the newest, and no string comparison
    jit.forget()
    monkeypatch.setattr(jit, "dsl_version", lambda: "4.8.1")
    assert get().dsl == "4.8.1"
    jit.forget()
    monkeypatch.setattr(jit, "dsl_version", lambda: "9.9")
    monkeypatch.setattr(tiny_kernel, "build", lambda config, arch: fake_artifact(dsl="9.9"))
    assert get().dsl == "9.9"
    jit.forget()
    monkeypatch.setattr(jit, "dsl_version", lambda: "7.7")
    monkeypatch.setenv("FOSCAR_JIT", "0")
    assert get().dsl == "9.9"


def test_kernels_compiled_ahead_of_time_come_first(monkeypatch, fresh):
    monkeypatch.setattr(jit, "dsl_version", lambda: "1.2.3")
    monkeypatch.setattr(
        tiny_kernel, "build", lambda config, arch: dataclasses.replace(fake_artifact(), name="", key="")
    )
    folder = jit.export_kernel(fresh / "shipped", NAME, TinyConfig(), ARCH, BUILDER)
    assert folder.parent == fresh / "shipped"
    assert jit.export_kernel(fresh / "shipped", NAME, TinyConfig(), ARCH, BUILDER) == folder
    (folder / art.PTX).unlink()  # only the cubin is needed to launch
    jit.forget()
    monkeypatch.setattr(jit, "dsl_version", lambda: None)
    monkeypatch.setenv("FOSCAR_CACHE_DIR", str(fresh / "nothing"))
    monkeypatch.setenv("FOSCAR_KERNEL_PATH", os.pathsep.join(["/nonexistent", str(fresh / "shipped")]))
    assert get().ptx == "" and get().cubin == fake_artifact().cubin
    damage(folder, "truncated cubin")  # never touched, only passed over
    jit.forget()
    with pytest.raises(MissingDependencyError):
        get()
    assert folder.is_dir()


def test_a_failing_build_names_the_kernel(monkeypatch):
    def broken(config, arch):
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr(jit, "dsl_version", lambda: "1.2.3")
    monkeypatch.setattr(tiny_kernel, "build", broken)
    with pytest.raises(CompileError, match=f"^compiling {NAME} for {ARCH} failed: ValueError: first line$"):
        get()
