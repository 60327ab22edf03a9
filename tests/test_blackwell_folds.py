"""The Blackwell kernel with parameters per channel, in the emulator; what it does not take is refused."""

from __future__ import annotations

import re

import pytest
from support import decode_checks as checks
from support.blackwell import V_CHANNEL, BlackwellRunner, name_of

from foscar.blackwell.config import ConfigError, DecodeConfig
from foscar.common import jit
from foscar.common.formats import FormatError, KVFormat

NO_DSL = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
V_TILE, V_PARTS = V_CHANNEL[0], V_CHANNEL[1]


def kernels(*configs):
    return pytest.mark.parametrize("config", configs, ids=name_of)


@NO_DSL
@kernels(*V_CHANNEL)
def test_whole(config):
    """Ragged lengths over poisoned slack; tiles that end within a unit of tokens."""
    checks.whole(BlackwellRunner(), config, batch=5, longest=300)


@NO_DSL
@pytest.mark.parametrize("options", [{"schedule": "late"}, {"seed": 1}, {"seed": 2}], ids=str)
@kernels(V_TILE, V_PARTS)
def test_other_schedules(options, config):
    """Units wholly beyond the length, an empty request between, an item of more steps than there are buffers."""
    case = checks.case_for(config, [700, 0, 33, 129], kv_heads=1, seed=3)
    checks.poison_slack(case)
    checks.check(BlackwellRunner(ctas=2, **options), config, case)


@NO_DSL
@kernels(V_TILE)
@pytest.mark.parametrize("where", ["k", "v", "q"])
def test_nan(config, where):
    checks.nan_stays(BlackwellRunner(), config, where)


@NO_DSL
@kernels(V_TILE, V_CHANNEL[2])
def test_magnitudes(config):
    runner = BlackwellRunner()
    checks.peaked(runner, config)
    checks.flat(runner, config, 1100, v_mean=0.0)
    checks.sink(runner, config, 1100)


@NO_DSL
@kernels(V_PARTS)
def test_other_architecture(config):
    checks.whole(BlackwellRunner(arch="sm_103a"), config, batch=3, longest=200)


REFUSED = {
    "V per channel in groups of 32 tokens or multiples of it, not 16": ("k2v2c16", 128, 64, 4, FormatError),
    "V per channel in groups of 32 tokens or multiples of it, not 48": ("k2v2c48", 128, 16, 4, FormatError),
    "V quantized per token with one group of head_dim channels, not axis 'token' with groups of 32": (
        "k2v2t32", 128, 64, 4, FormatError,
    ),
    "K quantized per token with one group of head_dim channels, not axis 'channel' with groups of 128": (
        "k2c128v2", 128, 64, 4, FormatError,
    ),
    "512 columns of tensor memory; k2v2c32 with 4 heads and head_dim 128 takes 524": (
        "k2v2c32", 128, 64, 4, ConfigError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    name, head_dim, page_size, heads, error = REFUSED[what]
    with pytest.raises(error, match=f"^the Blackwell kernel (takes|has) {re.escape(what)}[^\n]*$"):
        DecodeConfig(KVFormat.parse(name), head_dim, page_size, heads)
