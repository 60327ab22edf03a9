"""The Blackwell kernel with parameters per channel, in the emulator; what it does not take is refused."""

from __future__ import annotations

import dataclasses
import re

import pytest
from support import decode_checks as checks
from support.blackwell import K_CHANNEL, V_CHANNEL, BlackwellRunner, name_of
from support.inputs import random_values

from foscar.blackwell.config import ConfigError, DecodeConfig
from foscar.common import jit
from foscar.common.errors import FormatError
from foscar.common.formats import KVFormat

NO_DSL = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
V_TILE, V_PARTS = V_CHANNEL[:2]
KIVI, INT4_K, BOTH, INT4_BOTH = K_CHANNEL[:4]


def kernels(*configs):
    return pytest.mark.parametrize("config", configs, ids=name_of)


@NO_DSL
@kernels(*V_CHANNEL, *K_CHANNEL)
def test_whole(config):
    """Ragged lengths over poisoned slack; tiles that end within a unit of tokens."""
    checks.whole(BlackwellRunner(), config, batch=5, longest=300)


@NO_DSL
@pytest.mark.parametrize("options", [{"schedule": "late"}, {"seed": 1}, {"seed": 2}], ids=str)
@kernels(V_TILE, V_PARTS, KIVI, BOTH)
def test_other_schedules(options, config):
    """Units wholly beyond the length, an empty request between, an item of more steps than there are buffers."""
    case = checks.case_for(config, [700, 0, 33, 129], kv_heads=1, seed=3)
    checks.poison_slack(case)
    checks.check(BlackwellRunner(ctas=2, **options), config, case)


@NO_DSL
@kernels(V_TILE, KIVI)
@pytest.mark.parametrize("where", ["k", "v", "q"])
def test_nan(config, where):
    checks.nan_stays(BlackwellRunner(), config, where)


@NO_DSL
@kernels(V_TILE, V_CHANNEL[2], KIVI, INT4_BOTH)
def test_magnitudes(config):
    runner = BlackwellRunner()
    checks.peaked(runner, config)
    checks.flat(runner, config, 1100, v_mean=0.0)
    checks.sink(runner, config, 1100)


@NO_DSL
@kernels(V_PARTS, INT4_BOTH)
def test_other_architecture(config):
    checks.whole(BlackwellRunner(arch="sm_103a"), config, batch=3, longest=200)


@NO_DSL
@kernels(*K_CHANNEL[:4])
def test_scores(config):
    checks.scores(BlackwellRunner(), config, requests=2)
    checks.uniform_weights(BlackwellRunner(), config, (1, 127, 129))


@NO_DSL
@kernels(KIVI, INT4_K)
def test_outlier_channels(config):
    """A few channels of K 100 times the others, where q is small: rounding Q' to one scale for all would lose q."""
    length, d = 300, config.head_dim
    k, v = random_values((length, 2, d), 5), random_values((length, 2, d), 6)
    k[:, :, 3::32] *= 100
    case = checks.case_for(config, [length], k=k, v=v, seed=8)
    q = case.q.clone()
    q[..., 3::32] /= 100
    checks.check(BlackwellRunner(), config, dataclasses.replace(case, q=q))


REFUSED = {
    "takes K per channel in groups of 32 tokens or multiples of it, not 16": ("k2c16v2", 64, 4, FormatError),
    "takes V per channel in groups of 32 tokens or multiples of it, not 48": ("k2v2c48", 16, 4, FormatError),
    "takes K quantized per token with one group of head_dim channels, not axis 'token' with groups of 64":
        ("k2t64v2", 64, 4, FormatError),
    "takes V quantized per token with one group of head_dim channels, not axis 'token' with groups of 32":
        ("k2v2t32", 64, 4, FormatError),
    "has 512 columns of tensor memory; k2v2c32 with 4 heads and head_dim 128 takes 524":
        ("k2v2c32", 64, 4, ConfigError),
    "has 512 columns of tensor memory; k4c64v2 with 16 heads and head_dim 128 takes 640":
        ("k4c64v2", 64, 16, ConfigError),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    name, page_size, heads, error = REFUSED[what]
    with pytest.raises(error, match=f"^the Blackwell kernel {re.escape(what)}[^\n]*$"):
        DecodeConfig(KVFormat.parse(name), 128, page_size, heads)
