"""The kernels on a GPU: every stage by itself, whole decodes against the numeric contract, graphs, streams, devices.

The bodies are :mod:`support.decode_checks`; test_decode_emulated.py runs them without a GPU, at smaller sizes.  The
kernels are those of :mod:`support.gpu_kernels`, which also exports them for a machine without the DSL.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import decode_checks as checks
from support.compare import assert_equal
from support.decode_checks import case_for
from support.gpu_kernels import INT2, INT2_FP16, INT4, KERNELS, LAYOUTS, LONG, MIXED, TILES, name_of, with_heads
from support.inputs import Case, int32, make_case
from support.runners import GpuRunner, mirror, mirror_cache, why_no_gpu

import foscar
from foscar.common.cache import PagedKVCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_gpu() is not None, reason=why_no_gpu() or "")]


def kernels(*configs):
    return pytest.mark.parametrize("config", configs, ids=name_of)


@pytest.fixture
def runner():
    return GpuRunner()


def on_gpu(case: Case, device: str = "cuda") -> Case:
    """The case with everything but the exact values on a GPU."""
    device = torch.device(device)
    return dataclasses.replace(
        case, cache=mirror_cache(case.cache, device), q=mirror(case.q, device), block_table=case.block_table.to(device),
        seq_lens=case.seq_lens.to(device),
    )  # fmt: skip


def decode(case: Case, **options):
    return foscar.decode_attention(case.q, *case.tables, return_lse=True, **options)


def plan(case: Case, wrapper=None, **options):
    wrapper = wrapper or foscar.BatchDecodeWithPagedKVCacheWrapper()
    cache = case.cache
    wrapper.plan(
        block_table=case.block_table, seq_lens=case.seq_lens, num_qo_heads=case.q.shape[1],
        num_kv_heads=cache.num_kv_heads, head_dim=cache.head_dim, page_size=cache.page_size, format=cache.format,
        q_data_type=case.q.dtype, **options,
    )  # fmt: skip
    return wrapper


def assert_same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert_equal(a.cpu(), b.cpu())


# ---------------------------------------------------------------------------------------------- stage by stage
@kernels(*LAYOUTS, *MIXED, *TILES)
def test_k_unpack(runner, config):
    checks.k_unpack(runner, config)


@kernels(*LAYOUTS, *MIXED, *TILES)
def test_v_unpack(runner, config):
    checks.v_unpack(runner, config)


@kernels(*KERNELS)
def test_scores(runner, config):
    checks.scores(runner, config)


@kernels(*KERNELS)
def test_softmax(runner, config):
    checks.uniform_weights(runner, config)


@kernels(*LAYOUTS, *MIXED)
def test_pv(runner, config):
    """P uniform over many tiles, V random."""
    checks.uniform_weights(runner, config, (1000, 4096, 20_001))


@pytest.mark.parametrize("group", range(1, 17))
def test_store(runner, group):
    """Public report 1."""
    checks.store(runner, with_heads(group), group)


@kernels(*LAYOUTS, *MIXED)
def test_combine(runner, config):
    """Public report 12."""
    checks.combine(runner, config, tiles=40)


def test_combine_over_all_workers(runner):
    checks.combine(runner, INT2)


# ---------------------------------------------------------------------------------------------- whole decodes
@kernels(*KERNELS)
def test_ragged_batches(runner, config):
    """Public reports 4, 7, 11 and 15."""
    checks.whole(runner, config)


@kernels(*KERNELS)
def test_peaked(runner, config):
    checks.peaked(runner, config)


@kernels(INT2, INT4, INT2_FP16)
def test_more_requests_than_workers(runner, config):
    checks.whole(runner, config, batch=1000, longest=600, group=1 if config is INT2 else None)


def test_one_long_request_among_short_ones(runner):
    """Public report 15."""
    lengths = [100_000, *[500] * 31]
    checks.check(runner, INT2, case_for(INT2, lengths, group=2, seed=5))


@kernels(*LONG)
@pytest.mark.parametrize("v_mean", [1.0, 0.0])
def test_flat_attention_over_128k_tokens(runner, config, v_mean):
    checks.flat(runner, config, 131072, v_mean)


@kernels(*LONG)
def test_a_sink_before_100k_light_tokens(runner, config):
    checks.sink(runner, config, 100_001)


@kernels(*LAYOUTS, *MIXED)
def test_magnitudes(runner, config):
    """Public reports 17 and 18."""
    checks.magnitudes(runner, config)


@kernels(INT2, *MIXED[:2], *TILES, LAYOUTS[0])
@pytest.mark.parametrize("where", ["k", "v", "q"])
def test_nan_stays_where_it_is(runner, config, where):
    """Public report 34."""
    checks.nan_stays(runner, config, where)


@kernels(*LAYOUTS)
def test_strides(runner, config):
    """Public report 21."""
    checks.strides(runner, config)


@kernels(INT2, *MIXED)
def test_shared_pages(runner, config):
    """Public report 30."""
    checks.shared_pages(runner, config)


@pytest.mark.parametrize("far", ["pages", "heads"])
def test_offsets_beyond_31_bits(far):
    """Public report 9: the same records, apart in memory by more than 2^31 bytes."""
    small = on_gpu(case_for(INT2, [5 * 64 + 3], kv_heads=2, seed=6, extra_pages=0))
    pages, heads, record = small.cache.data.shape
    strides = {"pages": (2**30 + 2**20, 8192), "heads": (8192, 5 * 2**29)}[far]
    extent = (pages - 1) * strides[0] + (heads - 1) * strides[1] + record
    assert extent > 2**31
    if torch.cuda.mem_get_info()[0] < extent + 2**30:
        pytest.skip(f"needs {extent >> 30} GiB of GPU memory")
    data = torch.empty(extent, dtype=torch.uint8, device="cuda").as_strided((pages, heads, record), strides + (1,))
    data.copy_(small.cache.data)
    large = dataclasses.replace(small, cache=PagedKVCache(pages, 64, heads, 128, INT2.format, data=data))
    assert_same(decode(large), decode(small))


def test_repeats_give_the_same_bits():
    """A race would show sooner or later."""
    for config in (INT2, INT4, INT2_FP16):
        case = on_gpu(case_for(config, checks.ragged_lengths(60, 4000, 8), seed=7))
        want = decode(case)
        for _ in range(50):
            for a, b in zip(decode(case), want, strict=True):
                assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------------- the API around them
def test_the_backends_agree_and_bad_tables_are_found():
    case = on_gpu(case_for(INT2, [300, 0, 77], seed=9))
    for backend in ("auto", "cuda", "torch"):
        out, lse = decode(case, backend=backend, check=True)
        host = dataclasses.replace(case, cache=mirror_cache(case.cache, torch.device("cpu")), q=case.q.cpu(),
                                   block_table=case.block_table.cpu(), seq_lens=case.seq_lens.cpu())  # fmt: skip
        checks.assert_contract(out.cpu(), lse.cpu(), host)
    for change in ({"seq_lens": int32([300, 0, 9999], "cuda")}, {"block_table": case.block_table * 0 + 999}):
        with pytest.raises(ValueError, match="request . (has|uses)"):
            decode(dataclasses.replace(case, **change), check=True)


def test_refusals_on_a_gpu():
    """Public reports 28 and 29."""
    case = on_gpu(case_for(INT2, [30], seed=10))
    with pytest.raises(ValueError, match="q is on cpu, the cache on cuda:0"):
        foscar.decode_attention(case.q.cpu(), *case.tables)
    with pytest.raises(ValueError, match="seq_lens is on cpu, not on cuda:0"):
        foscar.decode_attention(case.q, case.cache, case.block_table, case.seq_lens.cpu())


def test_batch_zero():
    case = on_gpu(case_for(INT2, [], seed=10))
    out, lse = decode(case)
    assert out.shape == (0, 8, 128) and lse.shape == (0, 8)


def test_outputs_of_any_stride():
    case = on_gpu(case_for(INT2, [300, 77], seed=11))
    want, want_lse = decode(case)
    out = torch.full((2, 128, 8), float("nan"), dtype=case.q.dtype, device="cuda").transpose(1, 2)
    lse = torch.full((2, 16), float("nan"), device="cuda")[:, ::2]
    assert plan(case).run(case.q, case.cache, out=out, lse=lse) is out
    assert_same((out, lse), (want, want_lse))


@pytest.mark.parametrize("head_dim", [80, 96, 112])
def test_padded_head_dims(head_dim):
    """q padded and the output cut around a kernel of head_dim 128, also into an output of strides of its own."""
    shape = {"page_size": INT2.page_size, "head_dim": head_dim, "group_heads": INT2.heads}
    case = on_gpu(make_case([300, 1, 0, 64], fmt=INT2.format, seed=17, **shape))
    out, lse = foscar.decode_attention(case.q, *case.tables, return_lse=True, backend="cuda")
    checks.assert_contract(out, lse, case)
    wide = torch.full((*out.shape[:2], 2 * head_dim), torch.nan, dtype=out.dtype, device="cuda")[..., ::2]
    assert_equal(foscar.decode_attention(case.q, *case.tables, out=wide, backend="cuda"), out)


def test_no_call_waits_for_the_device():
    case = on_gpu(case_for(INT2, [300, 77, 0], seed=12))
    tables = checks.compressed(on_gpu_tables_to_host(case))
    indptr, indices = tables.indptr.cuda(), tables.pages.cuda()
    last = int32([300 - 4 * 64, 77 - 64, 0], "cuda")
    want = decode(case)
    wrapper = foscar.BatchDecodeWithPagedKVCacheWrapper("cuda")
    sizes = (8, 2, 128, 64)
    wrapper.plan(indptr, indices, last, *sizes, format=INT2.format)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = decode(case)
        wrapper.plan(indptr, indices, last, *sizes, format=INT2.format)
        planned = wrapper.run(case.q, case.cache, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(got, want)
    assert_same(planned, want)


def on_gpu_tables_to_host(case: Case) -> Case:
    return dataclasses.replace(case, block_table=case.block_table.cpu(), seq_lens=case.seq_lens.cpu())


# ---------------------------------------------------------------------------------------------- graphs
def capture(call):
    """A graph of ``call`` and what it returned; the kernels are loaded outside."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@kernels(INT2, INT4)
@pytest.mark.parametrize("through", ["decode_attention", "wrapper"])
def test_a_graph_follows_lengths_and_batch(config, through):
    """Public report 13: captured at length 1, replayed at 4097, at a smaller effective batch and at none."""
    case = on_gpu(case_for(config, [4097, 300, 128, 2000], seed=13))
    full = case.seq_lens.clone()
    case.seq_lens.fill_(1)
    if through == "wrapper":
        wrapper = plan(case, foscar.BatchDecodeWithPagedKVCacheWrapper())
        graph, result = capture(lambda: wrapper.run(case.q, case.cache, return_lse=True))
    else:
        graph, result = capture(lambda: decode(case))
    for lengths in ([1, 1, 1, 1], full.tolist(), [0, 300, 0, 0], [129, 0, 1, 1999], [0, 0, 0, 0], full.tolist()):
        case.seq_lens.copy_(int32(lengths))
        case.q.copy_(case.q.roll(1, 0))
        for x in result:
            x.fill_(float("nan"))
        graph.replay()
        assert_same(result, decode(case))


def test_a_graph_follows_a_later_plan_of_compressed_tables():
    case = on_gpu(case_for(INT2, [4097, 300, 128, 2000], seed=14))
    host = on_gpu_tables_to_host(case)
    full = checks.compressed(host)
    indptr, indices = torch.zeros(5, dtype=torch.int32, device="cuda"), torch.zeros_like(full.pages, device="cuda")
    wrapper = foscar.BatchDecodeWithPagedKVCacheWrapper("cuda")

    def replan(lengths: list[int]) -> None:
        """New contents in the same tensors, then plan."""
        tables = checks.compressed(dataclasses.replace(host, seq_lens=int32(lengths)))
        indptr.copy_(tables.indptr)
        indices[: len(tables.pages)].copy_(tables.pages)
        last = tables.lengths - (tables.indptr.diff() - 1) * 64
        wrapper.plan(indptr, indices, last.cuda(), 8, 2, 128, 64, format=INT2.format)

    replan([1, 1, 1, 1])
    graph, result = capture(lambda: wrapper.run(case.q, case.cache, return_lse=True))
    for lengths in ([4097, 300, 128, 2000], [0, 300, 0, 64], [1, 1, 1, 1]):
        replan(lengths)
        graph.replay()
        assert_same(result, decode(dataclasses.replace(case, seq_lens=int32(lengths, "cuda"))))


# ---------------------------------------------------------------------------------------------- streams and devices
def test_the_current_stream_is_used():
    """The inputs are written late on the stream of the call: a launch elsewhere would read what was there before."""
    case = on_gpu(case_for(INT2, [3000, 77], seed=15))
    want = decode(case)
    late = dataclasses.replace(case, q=torch.zeros_like(case.q), seq_lens=torch.zeros_like(case.seq_lens))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.q.copy_(case.q)
        late.seq_lens.copy_(case.seq_lens)
        got = decode(late)
    stream.synchronize()
    assert_same(got, want)


def test_two_streams_at_once():
    cases = [on_gpu(case_for(INT2, [3000 + 500 * i, 77, 1], seed=16 + i)) for i in range(2)]
    want = [decode(c) for c in cases]
    wrappers, streams = [plan(c) for c in cases], [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(20):
        for case, wrapper, stream, found in zip(cases, wrappers, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(wrapper.run(case.q, case.cache, return_lse=True))
    torch.cuda.synchronize()
    for found, expected in zip(results, want, strict=True):
        for got in found:
            assert_same(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_gpu():
    """Public report 22: cuda:1 while the current device is 0."""
    case = case_for(INT2, [3000, 77, 0], seed=18)
    want = decode(on_gpu(case, "cuda:0"))
    there = on_gpu(case, "cuda:1")
    assert torch.cuda.current_device() == 0
    got = decode(there)
    assert got[0].device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert_same(got, want)
    assert_same(plan(there).run(there.q, there.cache, return_lse=True), want)
