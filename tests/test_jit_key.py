"""Compile keys: whatever generates code changes the key."""

import dataclasses
from pathlib import Path

import pytest
from support import tiny_kernel
from support.perturb import perturbations
from support.tiny_kernel import BUILDER, NAME, TinyConfig

from foscar.common import jit, sources
from foscar.common.formats import KVFormat
from foscar.common.sources import source_files
from foscar.hopper.config import DecodeConfig

ARCH = "sm_90a"

CONFIGS = [
    TinyConfig(),
    DecodeConfig(KVFormat.int2(), head_dim=128, page_size=64, heads=8),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_every_field_changes_the_key(config):
    keys = {"": jit.compile_key(NAME, config, ARCH, BUILDER)}
    for path, changed in perturbations(config):
        keys[path] = jit.compile_key(NAME, changed, ARCH, BUILDER)
    assert len(set(keys.values())) == len(keys), keys
    assert len(keys) > len(dataclasses.fields(config))


def test_name_arch_builder_and_sources_change_the_key(monkeypatch):
    keys = {
        jit.compile_key(NAME, TinyConfig(), ARCH, BUILDER),
        jit.compile_key("other", TinyConfig(), ARCH, BUILDER),
        jit.compile_key(NAME, TinyConfig(), "sm_100a", BUILDER),
        jit.compile_key(NAME, TinyConfig(), ARCH, "support.tiny_kernel:other"),
    }
    monkeypatch.setattr(jit, "source_fingerprint", lambda modules: "edited")
    keys.add(jit.compile_key(NAME, TinyConfig(), ARCH, BUILDER))
    assert len(keys) == 5


def test_the_fingerprint_covers_the_device_code_and_no_more():
    files = source_files(("foscar.hopper.build",))
    device_code = {p.stem for p in (sources.ROOT / "hopper").glob("*.py")} - {"__init__", "decode"}
    assert {f"foscar.hopper.{name}" for name in device_code} <= files.keys()
    assert {"foscar.common.formats", "foscar.common.fold", "foscar.common.combine"} <= files.keys()
    assert not {"foscar.api", "foscar.common.cache", "foscar.common.reference"} & files.keys()
    own = source_files(("support.tiny_kernel",))
    assert own["support.tiny_kernel"] == Path(tiny_kernel.__file__)
    assert jit.source_fingerprint(("foscar.hopper.kernel",)) != jit.source_fingerprint(())


def test_equal_values_of_different_types_have_different_keys():
    @dataclasses.dataclass(frozen=True)
    class One:
        value: object

    keys = [jit.compile_key(NAME, One(v), ARCH, BUILDER) for v in (1, True, 1.0, "1", None, (1,), One(1))]
    assert len(set(keys)) == len(keys)


def test_configs_that_make_no_key():
    @dataclasses.dataclass
    class Loose:
        value: int = 0

    @dataclasses.dataclass(frozen=True)
    class Odd:
        value: object = dataclasses.field(default_factory=object)

    with pytest.raises(TypeError, match="frozen dataclass, not .*Loose"):
        jit.compile_key(NAME, Loose(), ARCH, BUILDER)
    with pytest.raises(TypeError, match="object cannot be part of a compile key"):
        jit.compile_key(NAME, Odd(), ARCH, BUILDER)
