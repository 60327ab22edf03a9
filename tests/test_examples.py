"""What the examples say to bad arguments: one line, also without a GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("name", ["bench_decode", "quickstart"])
def test_help(monkeypatch, capsys, name):
    with pytest.raises(SystemExit, match="^0$"):
        run(monkeypatch, name, "--help")
    assert f"python examples/{name}.py" in capsys.readouterr().out
