"""The Hopper kernel's configuration: what fits, what is refused with which arithmetic, and its parameters' order."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from support.gpu_kernels import ALL as EVERY_OPTION
from support.gpu_kernels import KERNELS, OPTIONS, name_of
from support.inputs import fits

from foscar.common import jit
from foscar.common.config import MAX_HEADS, Q_DTYPES
from foscar.common.errors import FormatError
from foscar.common.formats import PAGE_SIZES, KVFormat
from foscar.common.plan import KernelOptions
from foscar.common.tensor_format import PADDED_HEAD_DIMS
from foscar.hopper import arguments, folds
from foscar.hopper.config import (
    ARCH,
    REGISTERS,
    SHARED_BYTES,
    STATIC_BYTES,
    TILE_TOKENS,
    ConfigError,
    DecodeConfig,
    TileConfig,
)
from foscar.hopper.decode import kernels

HEADS = range(4, MAX_HEADS + 1, 4)
ALL = list(itertools.product((2, 4), (2, 4), (64, 128), PAGE_SIZES, HEADS, Q_DTYPES))


def config(tile: dict | None = None, fmt: KVFormat | None = None, **changes) -> DecodeConfig:
    options = {"head_dim": 128, "page_size": 64, "heads": 4} | changes
    return DecodeConfig(fmt or KVFormat.int2(), **options, tile=TileConfig(**(tile or {})))


# ---------------------------------------------------------------------------------------------- what fits
@pytest.mark.parametrize("warpgroups", [None, 1, 2, 3])
def test_every_supported_combination_fits(warpgroups):
    assert len(ALL) == 2 * 2 * 2 * 4 * 4 * 2
    for k_bits, v_bits, head_dim, page_size, heads, q_dtype in ALL:
        tile = TileConfig(math_warpgroups=warpgroups)
        c = DecodeConfig(KVFormat.make(k_bits, v_bits), head_dim, page_size, heads, q_dtype, tile)
        w = c.warpgroups
        assert w in (1, 2, 3) and (warpgroups is None or w == warpgroups)
        assert 2 <= c.stages <= TileConfig.MAX_STAGES
        shared = w * (c.stages * c.stage_bytes + c.workspace_bytes) + STATIC_BYTES
        assert shared <= SHARED_BYTES and f"{shared} of {SHARED_BYTES} B shared" in c.describe()
        if c.stages < TileConfig.MAX_STAGES:
            assert shared + w * c.stage_bytes > SHARED_BYTES, "one more stage would fit"
        assert c.threads == 128 * (w + 1) and c.threads * c.launch_registers <= REGISTERS
        assert tile.load_registers <= c.launch_registers <= c.math_registers
        assert 128 * (w * c.math_registers + tile.load_registers) <= c.threads * c.launch_registers
        assert c.stage_bytes == TILE_TOKENS // page_size * c.layout.record_bytes


SIDES = [("token", g) for g in (None, 32, 64, 128)] + [("channel", g) for g in (None, 16, 32, 48, 64, 96, 128, 256)]


def test_every_fold_fits():
    """Whatever has a record has a kernel; warpgroups give way where two stages need the room."""
    found = set()
    for bits, (k_axis, k_group), (v_axis, v_group), head_dim, page_size, heads in itertools.product(
        (2, 4), SIDES, SIDES, PADDED_HEAD_DIMS, PAGE_SIZES, (4, 16)
    ):
        fmt = KVFormat.make(bits, k_axis=k_axis, k_group=k_group, v_axis=v_axis, v_group=v_group)
        if fits(fmt, head_dim, page_size):
            c = DecodeConfig(fmt, head_dim, page_size, heads)
            assert c.stages >= 2 and folds.k_side(c).units * folds.k_side(c).unit == TILE_TOKENS
            found.add((c.head_dim, c.warpgroups))
    assert {d for d, _ in found} == set(PADDED_HEAD_DIMS) and {w for _, w in found} == {1, 2, 3}


@pytest.mark.parametrize(
    "name, page_size, k, v",
    [
        ("k2c128v2", 64, folds.Side(True, 1, 128, 128), folds.Side(False, 1, 128, 128)),
        ("k2c256v2c16", 16, folds.Side(True, 1, 128, 128), folds.Side(True, 1, 128, 16)),
        ("k2c48v2c96", 16, folds.Side(True, 1, 128, 16), folds.Side(True, 1, 128, 32)),
        ("k2cv2t32", 32, folds.Side(True, 1, 128, 32), folds.Side(False, 4, 32, 128)),
    ],
)
def test_folds_by_hand(name, page_size, k, v):
    c = config(fmt=KVFormat.parse(name), page_size=page_size)
    assert (folds.k_side(c), folds.v_side(c)) == (k, v)


def test_sizes_by_hand():
    """INT2, head_dim 128, 64-token pages: 64 x (32 + 4) bytes each of K and V; a tile is two pages."""
    c = config()
    assert c.layout.record_bytes == 4608 and c.pages_per_tile == 2 and c.stage_bytes == 9216
    assert c.columns == 8 and c.query_bytes == 1024 and c.prob_bytes == 1024
    assert "4608 B per (page, head), 72 B per token and KV head" in c.describe()


def test_every_tile_override_reaches_the_config():
    c = config({"math_warpgroups": 2, "kv_stages": 4, "math_registers": 200, "load_registers": 40})
    assert (c.warpgroups, c.stages, c.math_registers, c.tile.load_registers) == (2, 4, 200, 40)
    assert "2 math warpgroups x 4 stages x 9216 B" in c.describe() and "200/40 registers" in c.describe()
    for f in dataclasses.fields(TileConfig):
        assert f.name in ("math_warpgroups", "kv_stages", "math_registers", "load_registers"), "a knob without a test"


# ---------------------------------------------------------------------------------------------- what does not
def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


@pytest.mark.parametrize("kv_stages", [0, 1, 9, 100])
def test_shared_memory_is_refused_with_its_arithmetic(kv_stages):
    with pytest.raises(ConfigError, match=r"shared memory: .* at least 2 stages and at most \d+ B fit") as info:
        config({"kv_stages": kv_stages, "math_warpgroups": 3})
    w, stages, stage, workspace, static, total, *_ = numbers(str(info.value))
    assert (w, stages, stage, static) == (3, kv_stages, 9216, STATIC_BYTES)
    assert total == w * (stages * stage + workspace) + static


def test_registers_are_refused_with_their_arithmetic():
    with pytest.raises(ConfigError, match="registers: .* the kernel would wait for ever") as info:
        config({"math_warpgroups": 3, "math_registers": 240})
    per_warpgroup, w, math, load, need, threads, launch, pool = numbers(str(info.value))
    assert need == per_warpgroup * (w * math + load) > pool == threads * launch
    assert (w, math, threads) == (3, 240, 512)


@pytest.mark.parametrize(
    "tile, launch",
    [
        ({"math_warpgroups": 3, "math_registers": 120}, 128),
        ({"math_warpgroups": 2, "math_registers": 160}, 168),
        ({"math_warpgroups": 1, "math_registers": 232}, 240),
        ({"math_warpgroups": 3, "load_registers": 136, "math_registers": 128}, 128),
    ],
)
def test_registers_only_fall_in_load_warps_and_rise_in_math_warps(tile, launch):
    """setmaxnreg.inc to less than a thread has, and .dec to more, are undefined."""
    with pytest.raises(ConfigError, match="registers: the launch gives .* setmaxnreg lowers the one, raises") as info:
        config(tile)
    threads, registers, again, most, got, load, math = numbers(str(info.value))
    assert threads == again == 128 * (tile["math_warpgroups"] + 1) and registers == REGISTERS
    assert got == launch == min(REGISTERS // threads // 8 * 8, most)
    assert (load, math) == (tile.get("load_registers", 32), tile["math_registers"])


@pytest.mark.parametrize(
    "tile, message",
    [
        ({"math_warpgroups": 0}, "math_warpgroups must be 1, 2 or 3 .* not 0"),
        ({"math_warpgroups": 4}, "math_warpgroups must be 1, 2 or 3 .* not 4"),
        ({"math_registers": 100}, "math_registers must be a multiple of 8 from 24 to 240, not 100"),
        ({"math_registers": 256}, "math_registers must be a multiple of 8 from 24 to 240, not 256"),
        ({"load_registers": 16}, "load_registers must be a multiple of 8 from 24 to 240, not 16"),
    ],
)
def test_knobs_out_of_range(tile, message):
    with pytest.raises(ConfigError, match=message):
        config(tile)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"head_dim": 96}, "takes head_dim 64, 128 and 256, not 96"),
        ({"page_size": 48}, "page_size must be one of"),
        ({"page_size": 256}, "page_size must be one of"),
        ({"heads": 5}, "heads must be 4, 8, 12 or 16 .* not 5"),
        ({"heads": 20}, "heads must be 4, 8, 12 or 16 .* not 20"),
        ({"q_dtype": "float32"}, "q_dtype must be one of .* not 'float32'"),
        ({"fmt": KVFormat.make(4, v_axis="channel", v_group=48)}, "V: a group of 48 tokens neither divides nor is"),
        ({"fmt": KVFormat.make(2, k_group=96)}, "K: a group of 96 channels does not divide head_dim 128"),
    ],
)
def test_what_the_kernel_does_not_take(changes, message):
    with pytest.raises(FormatError, match=message):
        config(**changes)


def test_a_tile_of_another_type():
    with pytest.raises(TypeError, match="tile must be a foscar.TileConfig, not dict"):
        DecodeConfig(KVFormat.int2(), 128, 64, 4, tile={"kv_stages": 3})


def test_a_group_spelled_out_is_the_same_kernel_shape():
    assert config(fmt=KVFormat.make(2, k_group=128, v_group=128)).stage_bytes == config().stage_bytes


# ---------------------------------------------------------------------------------------------- parameters
ANNOTATIONS = {"i64": "Int64", "i32": "Int32", "f32": "Float32"}


def annotated(names: dict[str, str]) -> dict[str, str]:
    return {name: ANNOTATIONS[kind] for name, kind in names.items()}


def fields_of(arguments_class) -> dict[str, str]:
    """Name -> annotation of a kernel's arguments, those of options without their ``| None``."""
    return {f.name: f.type.removesuffix(" | None") for f in dataclasses.fields(arguments_class)}


def test_names_and_kinds_are_those_of_the_kernels():
    pytest.importorskip("cutlass", reason="the kernels need nvidia-cutlass-dsl")
    from foscar.common import combine
    from foscar.hopper import kernel

    every = KernelOptions(*[True] * len(dataclasses.fields(KernelOptions)))
    assert arguments.decode() == arguments.DECODE and arguments.combine() == arguments.COMBINE
    decode = {**annotated(arguments.decode(every)), "rows": "Int32"}  # which the decode kernel knows when compiled
    assert fields_of(kernel.Args) == decode
    assert fields_of(combine.Args) == annotated(arguments.combine(every))
    plain = list(annotated(arguments.DECODE).items())
    assert list(fields_of(kernel.Args).items())[: len(plain)] == plain


@pytest.mark.skipif(jit.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("c", [KERNELS[0], next(c for c in OPTIONS if c.options.name == EVERY_OPTION)], ids=name_of)
def test_compiled_kernels_take_these_parameters(c):
    """Types, sizes and natural alignment in the PTX; threads and shared memory as the config says."""
    size = {"i64": 8, "i32": 4, "f32": 4}
    for name, part, builder, names in kernels(c):
        artifact = jit.load_or_compile(name, part, ARCH, builder)
        assert len(artifact.params) == len(names), name
        for param, kind in zip(artifact.params, names.values(), strict=True):
            assert (param.size, param.type == "f32") == (size[kind], kind == "f32")
            assert param.offset % param.size == 0
        assert artifact.threads == part.threads
        assert part is not c or artifact.registers == c.launch_registers
        assert not artifact.costly_remarks, name
        if part is c:
            used = c.warpgroups * (c.stages * c.stage_bytes + c.workspace_bytes)
            assert used <= artifact.smem + artifact.static_smem <= min(used + STATIC_BYTES, SHARED_BYTES)
