"""The checks of test_decode_gpu.py on the CPU backend, at small sizes: they accept what is right and see faults."""

from __future__ import annotations

import math

import pytest
import torch
from support import decode_checks as checks
from support.gpu_kernels import FOLDS, INT2, INT2_FP16, KERNELS, LAYOUTS, MIXED, TILES, config_of, name_of, with_heads
from support.inputs import make_case
from support.runners import TorchRunner, mirror

SOME = (INT2, *MIXED[:2], LAYOUTS[0], LAYOUTS[11])


def kernels(configs):
    return pytest.mark.parametrize("config", configs, ids=name_of)


@pytest.fixture
def runner():
    return TorchRunner()


def test_the_table_of_kernels():
    assert len(KERNELS) <= 25 + len(FOLDS)
    layouts = {(c.format.k.bits, c.format.v.bits, c.head_dim, c.page_size) for c in LAYOUTS}
    assert layouts == {(b, b, d, p) for b in (2, 4) for d in (64, 128) for p in (16, 32, 64, 128)}
    for values in ({c.heads for c in LAYOUTS}, {c.heads for c in KERNELS if c.head_dim == 128}):
        assert values == {4, 8, 12, 16}
    assert {(c.q_dtype, c.format.params) for c in KERNELS} == {
        (q, p) for q in ("bfloat16", "float16") for p in ("bfloat16", "float16")
    }
    assert [with_heads(group).heads for group in (1, 4, 5, 9, 16)] == [4, 4, 8, 12, 16]
    assert len({c.tile for c in TILES}) == len(TILES)
    assert len({name_of(c) for c in KERNELS}) == len(KERNELS)
    case = make_case([5], page_size=16, group_heads=6)
    with pytest.raises(LookupError, match="k2v2-d128-p16-h8-bfloat16 is not in"):
        config_of(case.q, case.cache)


@kernels(LAYOUTS + MIXED)
def test_unpack(runner, config):
    checks.k_unpack(runner, config, tokens=range(0, 128, 9), channels=range(0, config.head_dim, 3), kv_heads=1)
    checks.v_unpack(runner, config, tokens=range(0, 128, 3))


@kernels(SOME)
def test_stages(runner, config):
    checks.scores(runner, config)
    checks.uniform_weights(runner, config)
    checks.strides(runner, config)
    checks.combine(runner, config, tiles=3)


@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 12, 16])
def test_store(runner, group):
    checks.store(runner, with_heads(group), group)


@kernels(SOME)
def test_whole(runner, config):
    checks.whole(runner, config, batch=8, longest=300)
    checks.peaked(runner, config)
    checks.magnitudes(runner, config)
    checks.shared_pages(runner, config)


@pytest.mark.parametrize("where", ["k", "v", "q"])
def test_nan(runner, where):
    checks.nan_stays(runner, INT2, where)


@pytest.mark.parametrize("v_mean", [1.0, 0.0])
def test_long(runner, v_mean):
    checks.flat(runner, INT2_FP16, 10_000, v_mean)
    checks.sink(runner, INT2_FP16, 10_000)


class Wrong(TorchRunner):
    """The CPU backend with a fault."""

    def __init__(self, fault):
        self.fault = fault

    def decode(self, q, cache, tables, *, out=None, **options):
        result, lse = super().decode(*self.before(q, cache, tables), **options)
        result, lse = self.after(result, lse)
        return (result if out is None else out.copy_(result)), lse

    def before(self, q, cache, tables):
        if self.fault == "two query channels swapped":
            q = q.clone()
            q[..., [3, 4]] = q[..., [4, 3]]
        elif self.fault == "one token too many":
            tables = type(tables)(tables.pages.clamp(min=0), tables.lengths + (tables.lengths > 0), tables.indptr)
        elif self.fault == "all heads read KV head 0":
            cache = mirror_head(cache)
        return q, cache, tables

    def after(self, out, lse):
        if self.fault == "two output channels swapped":
            out = out[..., [0, 2, 1, *range(3, out.shape[2])]].contiguous()
        elif self.fault == "an error of one part in 200":
            out = out + out * 0.005 * torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype)
        elif self.fault == "LSE too small by a thousandth":
            lse = lse - 1e-3
        elif self.fault == "natural LSE":
            lse = lse * math.log(2.0)
        elif self.fault == "NaN for an empty request":
            out = torch.where(lse[..., None] == -math.inf, math.nan, out)
        return out, lse


def mirror_head(cache):
    data = mirror(cache.data, torch.device("cpu"))
    data[:, 1:] = data[:, :1]
    return type(cache)(cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim, cache.format, data=data)


@pytest.mark.parametrize(
    "fault, check",
    [
        ("two query channels swapped", checks.k_unpack),
        ("two output channels swapped", checks.v_unpack),
        ("one token too many", checks.uniform_weights),
        ("one token too many", checks.whole),
        ("all heads read KV head 0", checks.k_unpack),
        ("all heads read KV head 0", checks.v_unpack),
        ("all heads read KV head 0", checks.whole),
        ("an error of one part in 200", checks.whole),
        ("LSE too small by a thousandth", checks.uniform_weights),
        ("natural LSE", lambda r, c: checks.store(r, c, 4)),
        ("NaN for an empty request", lambda r, c: checks.store(r, c, 4)),
    ],
)
def test_faults_are_seen(fault, check):
    options = {"tokens": range(0, 128, 9), "kv_heads": 2} if check in (checks.k_unpack, checks.v_unpack) else {}
    if check is checks.whole:
        options = {"batch": 8, "longest": 300}
    with pytest.raises(AssertionError):
        check(Wrong(fault), INT2, **options)
