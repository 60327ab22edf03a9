"""Repeated runs of a plan: which calls skip the checks, and what is launched then."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.compare import assert_equal
from support.gpu_kernels import INT2
from support.inputs import random_values
from support.runners import why_no_gpu

import foscar
from foscar.hopper.decode import ADDRESSES, Bound
from foscar.replay import Replay

SHAPE = (2, 8, 128)


def cache_of(page_size=64, kv_heads=2, bits=2, data=None) -> foscar.PagedKVCache:
    return foscar.PagedKVCache(4, page_size, kv_heads, 128, foscar.KVFormat.make(bits), data=data)


class Recorder:
    """In the place of a prepared launch."""

    def __init__(self):
        self.calls = []

    def update(self, values):
        self.values = list(values)

    def __call__(self, grid, stream):
        self.calls.append((self.values, grid, stream))


def test_a_bound_launch_changes_addresses_only():
    names = (["batch", "out", "lse", "q", "cache"], ["lse", "workers", "out", "sinks"])
    launches = [(Recorder(), n) for n in names]
    owner = SimpleNamespace(launches=launches, device=torch.device("cpu"), lock=threading.Lock())
    first = [torch.zeros(4) for _ in range(5)]
    values = dict(zip(ADDRESSES, first, strict=True)) | {"batch": 7, "workers": 396, "by_item": 1}
    bound = Bound(owner, values, (132, 16))
    with mock.patch.object(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=55)):
        for tensors in ([torch.zeros(4) for _ in range(5)], [*(torch.zeros(4) for _ in range(3)), None, None]):
            bound(*tensors)
            q, cache, out, lse, sinks = (0 if x is None else x.data_ptr() for x in tensors)
            assert launches[0][0].calls[-1] == ([7, out, lse, q, cache], 132, 55)
            assert launches[1][0].calls[-1] == ([lse, 396, out, sinks], 16, 55)


def replay_of(q, cache, out=None, lse=None, sinks=None, wants_lse=False):
    seen = []
    log_sum = torch.empty(SHAPE[:2]) if wants_lse else None
    return Replay(q, cache, out, lse, sinks, log_sum, lambda *addresses: seen.append(addresses)), seen


def query(**changes) -> torch.Tensor:
    return torch.zeros(SHAPE, dtype=torch.bfloat16, **changes)


@pytest.mark.parametrize("wants_lse", [False, True])
def test_a_like_call_is_repeated(wants_lse):
    replay, seen = replay_of(query(), cache_of(), wants_lse=wants_lse)
    q, cache = query(), cache_of()
    assert replay.fits(q, cache, None, None, None, wants_lse)
    out, lse = replay(q, cache, None, None, None)
    assert len(seen) == 1 and all(a is b for a, b in zip(seen[0], (q, cache.data, out, lse, None, ()), strict=True))
    assert out.shape == q.shape and out.dtype == q.dtype and out.data_ptr() != q.data_ptr()
    assert (lse is None) != wants_lse and (lse is None or (lse.shape == SHAPE[:2] and lse.dtype == torch.float32))


def test_another_call_is_not():
    """Every property that a check depends on."""
    out, lse, sinks = query(), torch.empty(SHAPE[:2]), torch.zeros(8)
    replay, _ = replay_of(query(), cache_of(), out, lse, sinks, True)
    same = {"q": query(), "cache": cache_of(), "out": out, "lse": lse, "sinks": sinks, "wants_lse": True}
    assert replay.fits(**same)
    record = cache_of().layout.record_bytes
    strided = torch.zeros(4, 2, record + 16, dtype=torch.uint8)[..., :record]
    misaligned = torch.zeros(2 * 8 * 128 + 1, dtype=torch.bfloat16)[1:].view(SHAPE)
    for change in (
        {"q": query().half()}, {"q": torch.zeros(3, 8, 128, dtype=torch.bfloat16)}, {"q": misaligned},
        {"q": torch.zeros(2, 8, 256, dtype=torch.bfloat16)[..., :128]}, {"q": None}, {"q": [1]},
        {"q": torch.nn.Parameter(query(), requires_grad=False)}, {"q": query(device="meta")},
        {"cache": cache_of(page_size=32)}, {"cache": cache_of(kv_heads=4)}, {"cache": cache_of(bits=4)},
        {"cache": cache_of(data=strided)}, {"cache": None},
        {"out": None}, {"out": query().float()}, {"out": torch.zeros(2, 8, 256).bfloat16()[..., :128]},
        {"lse": None}, {"lse": lse.double()}, {"wants_lse": False}, {"sinks": None}, {"sinks": sinks[:4]},
    ):  # fmt: skip
        assert not replay.fits(**(same | change)), change


def test_windows_are_the_calls_own():
    """The launch gets the windows of the cache that it is called with, if they are like the first ones."""

    def windowed(n_sink=4, slots=3, dtype="bfloat16", **changes):
        window = foscar.WindowConfig(n_sink, 20, dtype)
        return foscar.WindowedKVCache(4, 64, 2, 128, max_batch=slots, window=window, **changes)

    replay, seen = replay_of(query(), windowed())
    q, cache = query(), windowed()
    assert replay.fits(q, cache, None, None, None, False)
    out, _ = replay(q, cache, None, None, None)
    given = (q, cache.packed.data, out, None, None, cache.window_tensors)
    assert all(a is b for a, b in zip(seen[0][:5], given[:5], strict=True))
    assert [x.data_ptr() for x in seen[0][5]] == [x.data_ptr() for x in given[5]]
    for other in (cache.packed, windowed(5), windowed(slots=4), windowed(dtype="float16"), windowed(device="meta")):
        assert not replay.fits(q, other, None, None, None, False), other


@pytest.mark.gpu
@pytest.mark.skipif(why_no_gpu() is not None, reason=str(why_no_gpu()))
@pytest.mark.parametrize("wants_lse", [False, True])
def test_layers_of_a_plan(wants_lse):
    """Many layers by one plan equal one call each; a call that does not fit goes the long way."""
    lengths = [130, 5]
    caches, queries = [], []
    for seed in range(4):
        cache = foscar.PagedKVCache(8, 64, 2, 128, INT2.format, device="cuda")
        k, v = (random_values((sum(lengths), 2, 128), 10 * seed + i).cuda() for i in range(2))
        table = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)
        starts = torch.tensor([0, 130, 135], dtype=torch.int32, device="cuda")
        cache.append(k, v, table, torch.zeros(2, dtype=torch.int32, device="cuda"), starts)
        caches.append(cache)
        queries.append(random_values((2, 8, 128), 10 * seed + 2).bfloat16().cuda())
    queries[2] = queries[2].repeat(1, 2, 1)[:, ::2].contiguous().as_strided((2, 8, 128), (1024, 128, 1))
    queries[3] = torch.cat([queries[3]] * 2, 1)[:, :8]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    wrapper = foscar.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(num_qo_heads=8, num_kv_heads=2, head_dim=128, page_size=64, block_table=table, seq_lens=seq_lens)
    for q, cache in zip(queries, caches, strict=True):
        got = wrapper.run(q, cache, return_lse=wants_lse)
        want = foscar.decode_attention(q, cache, table, seq_lens, return_lse=wants_lse)
        for a, b in zip(*((x if wants_lse else (x,)) for x in (got, want)), strict=True):
            assert_equal(a.cpu(), b.cpu())
