"""The compiled kernels without a GPU: the checks of test_decode_gpu.py in the PTX emulator, at small sizes.

Every decode runs in order, with asynchronous operations as late as they may complete, and under three random seeds.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import decode_checks as checks
from support.compare import assert_equal
from support.gpu_kernels import INT2, INT2_FP16, INT4, LAYOUTS, MIXED, TILES, name_of, with_heads
from support.runners import EmulatorRunner, ScheduledRunner

from foscar.common import jit
from foscar.common.cache import PagedKVCache

pytestmark = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")


def kernels(*configs):
    return pytest.mark.parametrize("config", configs, ids=name_of)


@pytest.fixture
def runner():
    return ScheduledRunner()


@kernels(*LAYOUTS, *MIXED)
def test_unpack(runner, config):
    """Tokens and channels of every residue: each bit position, warp, page and block of a tile is among them."""
    tokens = (0, 42, 63, 74, 127) if config.heads > 8 else (1, 58, 127)
    step = config.head_dim // config.heads - 1 if config.heads <= 8 else 7
    checks.k_unpack(runner, config, tokens=tokens, channels=range(0, config.head_dim, step), kv_heads=1)
    checks.v_unpack(runner, config, tokens=(*tokens, 12, 95), kv_heads=1)


@kernels(INT2, MIXED[1])
def test_stages(runner, config):
    checks.scores(runner, config, requests=3)
    checks.uniform_weights(runner, config, (1, 127, 129))


@kernels(MIXED[1])
def test_strides(runner, config):
    checks.strides(runner, config)


@pytest.mark.parametrize("group", [1, 5, 16])
def test_store(runner, group):
    checks.store(runner, with_heads(group), group)


@kernels(INT2, INT4)
def test_combine(config):
    checks.combine(ScheduledRunner(ctas=2), config)


@kernels(INT2, INT4, *TILES, LAYOUTS[0])
def test_whole(config):
    checks.whole(ScheduledRunner(ctas=2), config, batch=6, longest=300)


@pytest.mark.parametrize("where", ["k", "v", "q"])
def test_nan(runner, where):
    checks.nan_stays(runner, INT2, where)


def test_extremes(runner):
    checks.magnitudes(runner, INT2_FP16)
    checks.peaked(runner, INT2)
    checks.shared_pages(runner, MIXED[0])


def test_long(runner):
    """Many tiles of one worker: in every order for a while, and once for longer."""
    for r, length in ((runner, 1100), (EmulatorRunner(), 8192)):
        checks.flat(r, INT2_FP16, length, v_mean=0.0)
        checks.sink(r, INT2_FP16, length)


@pytest.mark.parametrize("far", ["pages", "heads"])
def test_offsets_beyond_31_bits(far):
    """Public report 9: the same records, apart in memory by more than 2^31 bytes, of which few are ever touched."""
    small = checks.case_for(INT2, [2 * 64 + 3], seed=6, extra_pages=0)
    pages, heads, record = small.cache.data.shape
    strides = {"pages": (2**30 + 2**20, 8192), "heads": (8192, 5 * 2**29)}[far]
    extent = (pages - 1) * strides[0] + (heads - 1) * strides[1] + record
    assert extent > 2**31
    data = torch.empty(extent, dtype=torch.uint8).as_strided((pages, heads, record), (*strides, 1))
    data.copy_(small.cache.data)
    large = dataclasses.replace(small, cache=PagedKVCache(pages, 64, heads, 128, INT2.format, data=data))
    for got, want in zip(*(checks.decode(EmulatorRunner(), INT2, case) for case in (large, small)), strict=True):
        assert_equal(got, want)
