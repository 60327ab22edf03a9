"""The Blackwell kernel in the PTX emulator: the checks of test_decode_emulated.py, same formats, same contract."""

from __future__ import annotations

import pytest
from support import decode_checks as checks
from support.blackwell import (
    INT2,
    INT2_FP16,
    INT4,
    INT4_FP16,
    LAYOUTS,
    MIXED,
    BlackwellRunner,
    like,
    name_of,
)
from support.gpu_kernels import with_heads

from foscar.common import jit

pytestmark = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")


def kernels(*configs):
    return pytest.mark.parametrize("config", configs, ids=name_of)


@pytest.fixture
def runner():
    return BlackwellRunner()


@kernels(*LAYOUTS, *MIXED)
def test_unpack(runner, config):
    """Tokens and channels of every residue: each bit position, warp, page and block of a tile is among them."""
    tokens = (0, 21, 42, 63, 74, 106, 127) if config.heads > 8 else (1, 58, 127)
    step = config.head_dim // config.heads - 1 if config.heads <= 8 else 7
    checks.k_unpack(runner, config, tokens=tokens, channels=range(0, config.head_dim, step), kv_heads=1)
    checks.v_unpack(runner, config, tokens=(*tokens, 12, 95), kv_heads=1)


@kernels(INT2, MIXED[1])
def test_stages(runner, config):
    checks.scores(runner, config, requests=3)
    checks.uniform_weights(runner, config, (1, 127, 129))
    checks.strides(runner, config)


@pytest.mark.parametrize("group", [1, 5, 12, 16])
def test_store(runner, group):
    checks.store(runner, like(with_heads(group)), group)


@kernels(INT2, INT4)
def test_combine(config):
    checks.combine(BlackwellRunner(ctas=4), config)


@kernels(INT2, INT2_FP16, INT4, INT4_FP16, *LAYOUTS, *MIXED)
def test_whole(runner, config):
    checks.whole(runner, config, batch=6, longest=400)


@pytest.mark.parametrize("options", [{"schedule": "late"}, {"seed": 1}, {"seed": 2}, {"seed": 3}], ids=str)
@kernels(INT2, LAYOUTS[0], MIXED[0])
def test_other_schedules(options, config):
    """Asynchronous operations complete as late as they may, or in a random order."""
    checks.whole(BlackwellRunner(ctas=2, **options), config, batch=6, longest=400)


def test_other_architecture():
    checks.whole(BlackwellRunner(arch="sm_103a"), INT2, batch=4, longest=300)


@pytest.mark.parametrize("where", ["k", "v", "q"])
def test_nan(runner, where):
    checks.nan_stays(runner, INT2, where)


def test_extremes(runner):
    checks.magnitudes(runner, INT2_FP16)
    checks.peaked(runner, INT2)
    checks.shared_pages(runner, MIXED[0])


def test_long_contexts(runner):
    checks.flat(runner, INT2_FP16, 8192, v_mean=0.0)
    checks.flat(runner, INT2_FP16, 8192)
    checks.sink(runner, INT2_FP16, 8192)


@pytest.mark.parametrize(
    "config, length",
    [(INT4_FP16, 8192), (MIXED[1], 1100), (INT4, 8192)],
    ids=lambda x: str(x) if isinstance(x, int) else name_of(x),
)
def test_sink_before_4_bit_keys(runner, config, length):
    """One large logit: the LSE is as exact as Q is, and a float16 has more bits than two e4m3 terms."""
    checks.sink(runner, config, length)
