"""The cache on a GPU: the CPU's bytes, and no waiting for the device where none is promised."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_equal
from support.inputs import POISON, all_formats, indptr_of, int32, make_case

from foscar.common.cache import PagedKVCache
from foscar.common.formats import KVFormat
from foscar.common.options import AttentionOptions
from foscar.common.reference import attention_bf16, attention_reference, decode_folded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("fmt", all_formats(groups=(None, 64)), ids=lambda f: f.name)
def test_same_bytes_as_on_the_cpu(fmt):
    lengths, rows = [70, 0, 60, 13], [0, 2, 3]
    here, there = (make_case(lengths, fmt=fmt, device=device) for device in ("cpu", "cuda"))
    assert torch.equal(there.cache.data.cpu(), here.cache.data)
    for case in (here, there):
        case.cache.append(case.k[:3] * 2, case.v[:3] * 2, case.block_table[rows], case.seq_lens[rows])
    assert torch.equal(there.cache.data.cpu(), here.cache.data)
    for a, b in zip(
        there.cache.dequantize_request(there.block_table[0], 70),
        here.cache.dequantize_request(here.block_table[0], 70),
        strict=True,
    ):
        assert_equal(a.cpu(), b, ("token", "head", "channel"))


def test_token_axis_does_not_wait_for_the_device():
    case = make_case([20, 5], page_size=16, device="cuda")
    other = PagedKVCache(case.cache.num_pages, 16, 2, 128, KVFormat.int2(), "cuda")
    other.data.fill_(POISON)
    zero, indptr, one = int32([0, 0], "cuda"), indptr_of([20, 5], "cuda"), int32([20, 5], "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        other.append(case.k, case.v, case.block_table, zero, indptr)
        other.append(case.k[:2], case.v[:2], case.block_table, one)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    case.cache.append(case.k[:2], case.v[:2], case.block_table, one)
    assert torch.equal(other.data, case.cache.data)


def test_append_in_a_cuda_graph_reads_lengths_on_the_device():
    case = make_case([20, 5], page_size=16, device="cuda")
    lengths = case.seq_lens.clone()
    k, v = case.k[:2].clone(), case.v[:2].clone()
    cache, want = case.cache, make_case([20, 5], page_size=16, device="cuda").cache
    cache.append(k, v, case.block_table, lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(k, v, case.block_table, lengths)
    for step in range(4):
        lengths.copy_(case.seq_lens + step)
        k.copy_(case.k[step : step + 2])
        v.copy_(case.v[step : step + 2])
        graph.replay()
        want.append(k, v, case.block_table, lengths)
    assert torch.equal(cache.data, want.data)


@pytest.mark.parametrize("fmt", all_formats(groups=(None,), params=("float16",)), ids=lambda f: f.name)
@pytest.mark.parametrize("options", [None, AttentionOptions(window=20, soft_cap=5.0, out_scale=0.5)])
@pytest.mark.parametrize("backend", [attention_reference, attention_bf16, decode_folded])
def test_references_agree_with_the_cpu(backend, options, fmt):
    found = []
    for device in ("cuda", "cpu"):
        case = make_case([70, 0, 13], fmt=fmt, device=device)
        more = {"sinks": torch.arange(8.0, device=device), "q_indptr": int32([0, 2, 2, 3], device)} if options else {}
        found.append(backend(case.q, *case.tables, options=options, **more))
    for a, b in zip(*found, strict=True):
        tolerance = {attention_reference: 1e-12, attention_bf16: 1e-2, decode_folded: 1e-5}[backend]
        torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance)
