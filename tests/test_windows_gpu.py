"""Windows on a GPU: the CPU's contents, and no waiting for the device where none is promised."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_equal
from support.gpu_kernels import INT2
from support.inputs import indptr_of, int32, random_values, shuffled_table

import foscar
from foscar import KVFormat, WindowConfig, WindowedKVCache
from foscar.common.reference import relative_error
from foscar.common.window_attention import windowed_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PAGE = INT2.page_size
KIVI = KVFormat.make(2, k_axis="channel", k_group=32, v_group=32)


def fill(fmt, window, device, *, head_dim=128, check_sync=False):
    """Prompts of 0, 90 and 41 tokens, then 30 single tokens; slots 2, 0, 3."""
    k, v = (random_values((131 + 90, 2, head_dim), s, torch.bfloat16).to(device) for s in (0, 1))
    cache = WindowedKVCache(9, PAGE, 2, head_dim, fmt, max_batch=4, window=window, device=device)
    table, slots = shuffled_table([130] * 3, PAGE, 9, 2).to(device), int32([2, 0, 3], device)
    zero, indptr = int32([0, 0, 0], device), indptr_of([0, 90, 41], device)
    lengths = indptr[1:] - indptr[:-1]
    if check_sync:
        torch.cuda.set_sync_debug_mode("error")
    try:
        cache.append(k[:131], v[:131], table, zero, slots, indptr)
        for i in range(131, 221, 3):
            cache.append(k[i : i + 3], v[i : i + 3], table, lengths, slots)
            lengths = lengths + 1
    finally:
        if check_sync:
            torch.cuda.set_sync_debug_mode("default")
    return cache, table, lengths, slots


@pytest.mark.parametrize("window", [WindowConfig(5, 20), WindowConfig(0, 33, "float16"), WindowConfig.none()], ids=str)
@pytest.mark.parametrize("fmt", [KVFormat.int2(), KVFormat.make(4, 2, k_group=32), KIVI], ids=lambda f: f.name)
def test_same_contents_as_on_the_cpu(fmt, window):
    (here, table, lengths, slots), (there, *_) = (fill(fmt, window, device) for device in ("cpu", "cuda"))
    assert torch.equal(there.packed_lens.cpu(), here.packed_lens)
    for b in range(3):
        a, c = (x.read_request(table[b].to(x.device), int(lengths[b]), int(slots[b])) for x in (here, there))
        for got, want in zip(c, a, strict=True):
            assert_equal(got.cpu(), want, ("token", "head", "channel"))


def test_formats_per_token_do_not_wait_for_the_device():
    fill(KVFormat.int2(), WindowConfig(5, 20), "cuda", check_sync=True)


@pytest.mark.parametrize("backend, fmt", [("torch", KIVI), ("torch", KVFormat.int2()), ("cuda", KVFormat.int2())])
def test_decode(backend, fmt):
    cache, table, lengths, slots = fill(fmt, WindowConfig(5, 20), "cuda")
    q = random_values((3, 2 * INT2.heads, 128), 5, torch.bfloat16, mean=0.5).cuda()
    out, lse = foscar.decode_windowed(q, cache, table, lengths, slots, return_lse=True, lse_base="e", backend=backend)
    want, want_lse = windowed_reference(q, cache, table, lengths, slots)
    assert relative_error(out, want) <= 2 * relative_error(want.bfloat16(), want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-3)
