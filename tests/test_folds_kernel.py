"""The Hopper kernel under every fold of common/fold.py: in the emulator, and with the same bodies on a GPU.

test_decode_gpu.py runs these kernels too, through its checks of all kernels.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import decode_checks as checks
from support.gpu_kernels import FOLDS, name_of
from support.inputs import random_values
from support.runners import EmulatorRunner, GpuRunner, ScheduledRunner, why_no_gpu

from foscar.common import jit
from foscar.hopper import folds

NO_DSL = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
NO_GPU = pytest.mark.skipif(why_no_gpu() is not None, reason=why_no_gpu() or "")
PLACES = [
    pytest.param(EmulatorRunner, id="emulator", marks=NO_DSL),
    pytest.param(GpuRunner, id="gpu", marks=[pytest.mark.gpu, NO_GPU]),
]


@pytest.fixture(params=PLACES)
def runner(request):
    return request.param()


def kernels(*configs):
    return pytest.mark.parametrize("config", configs, ids=name_of)


def of(name: str, head_dim: int = 128):
    return next(c for c in FOLDS if c.format.name == name and c.head_dim == head_dim)


KIVI, V_CHANNEL, HALF_STEPS = of("k2c128v2"), of("k2v2c128"), of("k4c16v2c16", 64)
GROUPED, MANY_TOKENS = of("k2t32v2t32"), of("k2c48v2c48")


def test_the_table_has_every_fold():
    """Each kind of K with each kind of V, and every unit of tokens on both sides."""
    sides = [(folds.k_side(c), folds.v_side(c)) for c in FOLDS]
    kinds = {tuple("channel" if s.channel else "token" if s.plain else "parts" for s in pair) for pair in sides}
    every = {(a, b) for a in ("channel", "parts", "token") for b in ("channel", "parts", "token")}
    assert kinds >= every - {("parts", "token"), ("token", "parts")}
    for side in range(2):
        assert {pair[side].unit for pair in sides if pair[side].channel} == {16, 32, 64, 128}
    assert {(c.head_dim, folds.v_side(c).plain) for c in FOLDS if c.head_dim == 256} == {(256, True), (256, False)}


@kernels(*FOLDS)
def test_whole(runner, config):
    """Ragged lengths over poisoned slack, dense and compressed tables; tiles that end within a unit of tokens."""
    slow = isinstance(runner, EmulatorRunner)
    checks.whole(runner, config, **({"batch": 5, "longest": 277} if slow else {}))


@NO_DSL
@kernels(KIVI, V_CHANNEL, HALF_STEPS, GROUPED, of("k2c64v2t32"), of("k4v4", 256))
def test_in_any_order(config):
    """Asynchronous operations late and in random order, units wholly beyond the length, an empty request between."""
    checks.check(ScheduledRunner(), config, checks.case_for(config, [385, 0, 33], kv_heads=1, seed=3))


@kernels(*(c for c in FOLDS if c.format.k.axis == "token"))
def test_unpack(runner, config):
    """One-hot queries give codes bit for bit, whatever the channel group."""
    step = config.head_dim // 8 - 1
    checks.k_unpack(runner, config, tokens=(0, 58, 127), channels=range(0, config.head_dim, step), kv_heads=1)
    checks.v_unpack(runner, config, tokens=(1, 42, 95, 127), kv_heads=1)


@kernels(*FOLDS)
def test_scores(runner, config):
    checks.scores(runner, config, requests=2 if isinstance(runner, EmulatorRunner) else 40)
    checks.uniform_weights(runner, config, (1, 127, 129))


@kernels(KIVI, V_CHANNEL, GROUPED, MANY_TOKENS)
@pytest.mark.parametrize("where", ["k", "v", "q"])
def test_nan(runner, config, where):
    checks.nan_stays(runner, config, where)


@kernels(KIVI, V_CHANNEL, HALF_STEPS, GROUPED)
def test_magnitudes(runner, config):
    checks.peaked(runner, config)
    checks.flat(runner, config, 1100, v_mean=0.0)
    checks.sink(runner, config, 1100)


@kernels(KIVI, HALF_STEPS, GROUPED)
def test_outlier_channels(runner, config):
    """A few channels of K 100 times the others, where q is small: rounding Q' to one scale for all would lose q.

    V's token scales range over six orders of magnitude.
    """
    length, d = 300, config.head_dim
    k, v = random_values((length, 2, d), 5), random_values((length, 2, d), 6)
    k[:, :, 3::32] *= 100
    v *= torch.logspace(-3, 3, length)[torch.randperm(length, generator=torch.Generator().manual_seed(7)), None, None]
    case = checks.case_for(config, [length], k=k, v=v, seed=8)
    q = case.q.clone()
    q[..., 3::32] /= 100
    checks.check(runner, config, dataclasses.replace(case, q=q))
