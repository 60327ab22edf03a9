"""What the examples say to bad arguments: one line, also without a GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from foscar.common import jit

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(monkeypatch, name: str, *arguments: str) -> None:
    """The example's main, as on a machine without a GPU."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    importlib.import_module(name).main()


@pytest.mark.parametrize(
    "setting, words",
    [
        ("kv_stages=99", "shared memory: 3 warpgroups x .99 stages"),
        ("math_registers=120", "registers: the launch gives 512 threads"),
        ("kv_stages=many", "kv_stages must be a whole number, not 'many'"),
        ("kv_stages=2.5", "kv_stages must be a whole number, not 2.5"),
        ("kv_stages={[]:1}", "kv_stages must be a whole number"),
        ("kv_stages", "kv_stages must be a whole number, not ''"),
        ("stages=3", "the tile config has math_warpgroups, kv_stages"),
    ],
)
def test_bench_settings(monkeypatch, setting, words):
    with pytest.raises(SystemExit, match=words) as info:
        run(monkeypatch, "bench_decode", "--set", setting)
    assert info.value.code.startswith("--set") and "\n" not in info.value.code


@pytest.mark.parametrize("arguments", [("--heads", "8:0"), ("--shapes", "0x5"), ("--shapes", "16")])
def test_bench_lists(monkeypatch, capsys, arguments):
    with pytest.raises(SystemExit):
        run(monkeypatch, "bench_decode", *arguments)
    assert f"{arguments[0]}: expected a list such as 16" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "{}", "no JSON"])
def test_files_that_hold_something_else(monkeypatch, tmp_path, content):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    for name, option in (("real_model", "--load"), ("hopper_model", "--json")):
        with pytest.raises(SystemExit) as info:
            run(monkeypatch, name, option, str(path))
        assert option in str(info.value.code) and "\n" not in str(info.value.code)


def test_nothing_measured_is_said(monkeypatch, capsys, tmp_path):
    run(monkeypatch, "bench_decode", "--json", str(tmp_path / "bench.json"))
    assert "bench.json was not written" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["bench_decode", "bench_startup", "quickstart"])
def test_help(monkeypatch, capsys, name):
    with pytest.raises(SystemExit, match="^0$"):
        run(monkeypatch, name, "--help")
    assert f"python examples/{name}.py" in capsys.readouterr().out


@pytest.mark.skipif(jit.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")
def test_host_times_without_a_gpu(monkeypatch):
    """Every call goes through the kernels' host code with the launch left out, and is timed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    bench = importlib.import_module("bench_startup")
    monkeypatch.setattr(bench, "CALLS", 2)
    monkeypatch.setattr(bench, "REPEATS", 1)
    launches = []
    monkeypatch.setattr(bench._Stub, "__call__", lambda self, grid, stream: launches.append(grid))
    with bench.stubbed_launch():
        rows = list(bench.host_rows(bench.Step(torch.device("cpu")), lambda: None))
    assert [name.split()[3].rstrip(",") for name, _ in rows] == [
        "wrapper.run", "wrapper.plan", "wrapper.plan", "decode_attention", "torch.ops.foscar.decode_attention",
        "cache.append", "cache.append",
    ]  # fmt: skip
    assert len(launches) == 3 * 3 * 2  # run, decode_attention and the operator, three times, two kernels each
