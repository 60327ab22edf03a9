"""The Blackwell kernel's config, ledgers, pipelines and choice by architecture; nothing here compiles a kernel."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from support import gpu_kernels
from support.blackwell import INT2, INT4, LAYOUTS, MIXED, config
from support.inputs import make_case

from foscar import api
from foscar.blackwell import config as config_module
from foscar.blackwell.config import (
    BUFFERS,
    CODE_BUFFERS,
    ROLES,
    SHARED_BYTES,
    ConfigError,
    DecodeConfig,
    TileConfig,
    first_warp,
)
from foscar.blackwell.decode import kernels
from foscar.blackwell.tmem import TensorLedger, lane_address
from foscar.common import jit, sources
from foscar.common.errors import FormatError, UnsupportedDeviceError
from foscar.common.formats import KVFormat
from foscar.common.sources import source_files

needs_dsl = pytest.mark.skipif(jit.dsl_version() is None, reason="needs nvidia-cutlass-dsl")


@pytest.mark.parametrize("c", [*LAYOUTS, *MIXED], ids=lambda c: c.format.name)
def test_every_default_config_fits(c):
    assert 2 <= c.stages <= TileConfig.MAX_STAGES and c.shared_bytes <= SHARED_BYTES
    assert c.columns % 16 == 0 and c.columns >= 2 * c.heads
    ledger = TensorLedger(c)
    ledger.check()
    assert ledger.allocated in (32, 64, 128, 256, 512)
    taken = [
        range(first, first + columns)
        for room, columns in ledger.rooms.items()
        for first in (
            ledger.column(room, b) for b in range(CODE_BUFFERS if room in ("k", "v") else BUFFERS)
        )
    ]  # fmt: skip
    columns = sorted(itertools.chain(*taken))
    assert columns == list(range(ledger.used)), "rooms overlap or leave gaps"


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"60 stages x 9216 B .* = \d+ B: at least 2 stages"):
        config(2, 2, 128, 64, 4, "bfloat16", kv_stages=60)
    with pytest.raises(ConfigError, match="1 stages"):
        config(2, 2, 128, 64, 4, "bfloat16", kv_stages=1)
    with pytest.raises(FormatError, match="head_dim 64 and 128, not 256"):
        config(2, 2, 256, 64, 4, "bfloat16")
    with pytest.raises(FormatError, match="K quantized per token"):
        DecodeConfig(KVFormat.make(2, k_axis="channel"), 128, 64, 4)
    with pytest.raises(FormatError, match="heads must be 4, 8, 12 or 16"):
        config(2, 2, 128, 64, 20, "bfloat16")
    with pytest.raises(TypeError, match=r"blackwell.config.TileConfig, not TileConfig|blackwell.config.TileConfig"):
        DecodeConfig(KVFormat.int2(), 128, 64, 4, tile=gpu_kernels.TileConfig())


def test_roles():
    """A warp reaches the 32 lanes of tensor memory of its number modulo four."""
    assert sum(ROLES.values()) == 16
    for role in ("unpack", "softmax", "correct"):
        assert ROLES[role] == 4 and first_warp(role) % 4 == 0
    assert [lane_address(7, w, h) for w in (0, 3) for h in (0, 1)] == [7, 7 | 16 << 16, 7 | 96 << 16, 7 | 112 << 16]


@needs_dsl
def test_edges():
    from foscar.blackwell import pipeline

    edges = {e.name: e for e in pipeline.edges(5)}
    assert len(edges) == len(pipeline.edges(5))
    arrivals = {name: e.arrivals for name, e in edges.items()}
    assert arrivals == {
        "full": 1, "empty": 8, "codes_full": 4, "codes_empty": 1, "q_full": 2, "q_empty": 5, "s_full": 1, "p_full": 4,
        "o_full": 1, "o_empty": 4, "sums_full": 4, "sums_empty": 4,
    }  # fmt: skip
    assert edges["full"].depth == edges["empty"].depth == 5
    for e in edges.values():
        assert {*e.sources, *e.targets} <= ROLES.keys() and not {*e.sources} & {*e.targets}
    barriers = pipeline.Barriers(0, 5)
    assert pipeline.at(barriers, "empty", 1) == 6
    pipeline.source(barriers, "s_full", "mma", 0)
    with pytest.raises(ConfigError, match="softmax is no end of edge s_full"):
        pipeline.source(barriers, "s_full", "softmax", 0)
    with pytest.raises(ConfigError, match=r"nobody of load arrives at edge Edge\(name='full'"):
        pipeline.check(barriers)


@needs_dsl
def test_operands_swizzled_in_shared_memory():
    """Every byte once, and where the emulator's descriptor reads it."""
    from ptx_emulator.matrix import Descriptor, element_addresses

    from foscar.blackwell.tcgen05 import instruction_descriptor, operand_byte

    for width in (64, 128):
        got = torch.tensor([[operand_byte(width, row, k) for k in range(width)] for row in range(32)])
        assert sorted(got.flatten().tolist()) == list(range(32 * width))
        for step in range(width // 32):
            d = Descriptor(1024 + 32 * step, 16, 8 * width, width)
            want = torch.tensor(element_addresses(d, True, 32, 32, 1)) - 1024
            assert torch.equal(got[:, 32 * step : 32 * step + 32], want)
    assert instruction_descriptor(128, 32) == 0x8080010
    with pytest.raises(AssertionError):
        instruction_descriptor(128, 8)


def test_the_compile_key_covers_all_device_code():
    files = source_files(("foscar.blackwell.build",))
    device_code = {p.stem for p in (sources.ROOT / "blackwell").glob("*.py")} - {"__init__", "decode"}
    shared = {"hopper.load", "common.schedule", "hopper.softmax", "hopper.store", "common.device", "common.fold"}
    assert {*(f"foscar.blackwell.{name}" for name in device_code), *(f"foscar.{name}" for name in shared)} <= {*files}


def test_choice_by_architecture(monkeypatch):
    chosen = []

    def decoder(config, index):
        chosen.append(type(config).__module__)
        raise UnsupportedDeviceError("enough seen")

    monkeypatch.setattr(api, "_backend", lambda name, cache: "cuda")
    monkeypatch.setattr(api, "decoder", decoder)
    monkeypatch.setattr(api, "blackwell_decoder", decoder)
    case = make_case([20], page_size=16)
    for arch in ("sm_90a", "sm_100a", "sm_103a"):
        monkeypatch.setattr(api, "device_arch", lambda device, arch=arch: arch)
        with pytest.raises(UnsupportedDeviceError, match="enough seen"):
            api.decode_attention(case.q, *case.tables)
    assert chosen == ["foscar.hopper.config", *[config_module.__name__] * 2]
    monkeypatch.setattr(api, "device_arch", lambda device: "sm_120a")
    with pytest.raises(
        UnsupportedDeviceError, match="^there are kernels for sm_90a .* sm_100a, sm_103a .* not for sm_120a"
    ) as e:
        api.decode_attention(case.q, *case.tables)
    assert "\n" not in str(e.value)
    with pytest.raises(TypeError, match="blackwell"):
        monkeypatch.setattr(api, "device_arch", lambda device: "sm_100a")
        api.decode_attention(case.q, *case.tables, tile=gpu_kernels.TileConfig())


@needs_dsl
@pytest.mark.parametrize("c", [INT2, INT4], ids=["int2", "int4"])
def test_kernels_of_all_architectures_side_by_side(c):
    """No GPU of either kind is here."""
    from foscar.hopper.config import ARCH
    from foscar.hopper.decode import kernels as hopper_kernels

    hopper = next(h for h in gpu_kernels.KERNELS if (h.format, h.head_dim, h.page_size, h.heads, h.q_dtype)
                  == (c.format, c.head_dim, c.page_size, c.heads, c.q_dtype))  # fmt: skip
    built = [jit.load_or_compile(*job[:2], arch, job[2])
             for arch, found in ((ARCH, hopper_kernels(hopper)), ("sm_100a", kernels(c)), ("sm_103a", kernels(c)))
             for job in found]  # fmt: skip
    assert [a.arch for a in built] == [ARCH, ARCH, "sm_100a", "sm_100a", "sm_103a", "sm_103a"]
    assert all(a.cubin[:4] == b"\x7fELF" for a in built) and len({a.key for a in built}) == 6
    for a in (built[2], built[4]):
        assert a.threads == 512 and a.registers <= 128 and "tcgen05.mma" in a.ptx and "kind::i8" not in a.ptx
    assert SimpleNamespace(**vars(built[2])).smem <= c.shared_bytes
