"""The torch operators on a GPU: torch.compile, CUDA graphs, streams and devices.  They use one kernel of the table."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from support.compare import assert_equal
from support.decode_checks import assert_contract
from support.gpu_kernels import INT2
from support.inputs import Case, int32, make_case, random_values
from support.op_cases import windowed_tensors
from support.runners import why_no_gpu
from support.window_checks import WindowCase, make_inputs

import foscar
from foscar import KVFormat, WindowConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_no_gpu() is not None, reason=why_no_gpu() or "")]
ops = torch.ops.foscar
LENGTHS = [4097, 300, 128, 2000]
MODES = [
    pytest.param({"backend": "aot_eager"}, id="aot_eager"),
    *(
        pytest.param(options, id=name, marks=pytest.mark.skipif(
            importlib.util.find_spec("triton") is None, reason="needs Triton"))
        for name, options in (("inductor", {}), ("reduce-overhead", {"mode": "reduce-overhead"}))
    ),
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_compiled_functions():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def gpu_case(lengths=LENGTHS, seed: int = 0, device: str = "cuda") -> Case:
    """Room for one token more per request."""
    case = make_case([n + 1 for n in lengths], fmt=INT2.format, page_size=INT2.page_size, head_dim=INT2.head_dim,
                     group_heads=INT2.heads, seed=seed, device=device)  # fmt: skip
    case.seq_lens.sub_(1)
    return case


def tensors_of(case: Case) -> tuple:
    cache = case.cache
    return case.q, cache.data, case.block_table, case.seq_lens, cache.format.name, cache.page_size, cache.head_dim


def eager(case: Case, lengths: torch.Tensor | None = None):
    lengths = case.seq_lens if lengths is None else lengths
    return foscar.decode_attention(case.q, case.cache, case.block_table, lengths, return_lse=True)


def assert_same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert_equal(a.cpu(), b.cpu())


def test_opcheck():
    case = gpu_case([130, 0, 1])
    torch.library.opcheck(ops.decode_attention.default, tensors_of(case))
    k, v = (random_values((3, 2, 128), i, torch.bfloat16).cuda() for i in range(2))
    arguments = (case.cache.data, k, v, case.block_table, case.seq_lens, None, *tensors_of(case)[4:])
    torch.library.opcheck(ops.append.default, arguments)


def test_opcheck_over_windows():
    given = make_inputs(WindowCase(KVFormat.int2(), WindowConfig(5, 20), (70, 0, 17)), "cuda")
    arguments = (*windowed_tensors(given), *given.cache.operator_shape)
    torch.library.opcheck(ops.decode_windowed.default, arguments)
    assert_same(ops.decode_windowed(*arguments, max_q_len=16), given.decode())


@pytest.mark.parametrize("options", MODES)
def test_a_compiled_step(options):
    """Append and decode, several steps, against the same on a second cache."""
    ours, theirs = gpu_case(), gpu_case()

    def step(case: Case, k, v, lengths):
        case.cache.append(k, v, case.block_table, lengths)
        return foscar.decode_attention(case.q * 1.5, case.cache, case.block_table, lengths + 1, return_lse=True)

    compiled = torch.compile(lambda *x: step(ours, *x), fullgraph=True, **options)
    for i, lengths in enumerate((LENGTHS, [1, 0, 127, 1999], LENGTHS)):
        k, v = (random_values((4, 2, 128), 10 * i + j, torch.bfloat16).cuda() for j in range(2))
        got = tuple(x.clone() for x in compiled(k, v, int32(lengths, "cuda")))
        assert_same(got, step(theirs, k, v, int32(lengths, "cuda")))
        assert_equal(ours.cache.data.cpu(), theirs.cache.data.cpu())
    ours.q = ours.q * 1.5
    ours.seq_lens += 1
    assert_contract(*(x.cpu() for x in got), on_cpu(ours))


def on_cpu(case: Case) -> Case:
    cache = case.cache
    shape = (cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim)
    there = foscar.PagedKVCache(*shape, cache.format, data=cache.data.cpu())
    return Case(there, case.q.cpu(), case.k, case.v, case.block_table.cpu(), case.seq_lens.cpu())


def test_a_graph_of_append_and_decode_follows_lengths_and_batch():
    """Captured at one length; replayed at others, in a batch that shrinks (lengths of 0) and with other pages."""
    case = gpu_case()
    lengths = int32([1, 1, 1, 1], "cuda")
    k, v = (random_values((4, 2, 128), i, torch.bfloat16).cuda() for i in range(2))
    foscar.decode_attention(case.q, case.cache, case.block_table, lengths)  # loads the kernel
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        case.cache.append(k, v, case.block_table, lengths - 1)
        result = ops.decode_attention(case.q, case.cache.data, case.block_table, lengths, *tensors_of(case)[4:])
    full = torch.tensor(LENGTHS) + 1
    for new in ([1, 1, 1, 1], full.tolist(), [129, 2, 1, 1999], full.tolist()):
        lengths.copy_(int32(new))
        case.q.copy_(case.q.roll(1, 0))
        for x in (k, v):
            x.copy_(x.roll(1, 0))
        case.block_table.copy_(case.block_table)
        for x in result:
            x.fill_(float("nan"))
        graph.replay()
        after = case.cache.data.clone()
        assert_same(result, eager(case, lengths))
        case.cache.append(k, v, case.block_table, lengths - 1)
        assert_equal(after.cpu(), case.cache.data.cpu())
    decode = torch.cuda.CUDAGraph()
    with torch.cuda.graph(decode, stream=side):
        result = ops.decode_attention(case.q, case.cache.data, case.block_table, lengths, *tensors_of(case)[4:])
    for new, rows in (([300, 0, 0, 7], [0, 1, 2, 3]), ([0, 4000, 0, 0], [3, 0, 1, 2]), (full.tolist(), [0, 1, 2, 3])):
        lengths.copy_(int32(new))
        case.block_table.copy_(case.block_table[torch.tensor(rows)])
        for x in result:
            x.fill_(float("nan"))
        decode.replay()
        assert_same(result, eager(case, lengths))
        assert bool((result[0][lengths == 0] == 0).all())


@pytest.mark.parametrize("compiled", [False, True])
def test_two_side_streams(compiled):
    """Two operators' and two wrappers' launches overlap without touching each other's workspace."""
    cases = [gpu_case([3000 + 500 * i, 77, 1, 0], seed=16 + i) for i in range(2)]
    want = [eager(c) for c in cases]
    wrappers = [foscar.BatchDecodeWithPagedKVCacheWrapper() for _ in cases]
    for case, wrapper in zip(cases, wrappers, strict=True):
        shape = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 64}
        wrapper.plan(block_table=case.block_table, seq_lens=case.seq_lens, format=INT2.format, **shape)

    def call(q, data, *tables):
        return ops.decode_attention(q, data, *tables)

    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
        for case in cases:
            call(*tensors_of(case))
    torch.cuda.synchronize()  # what the default stream wrote is there before the side streams read it
    streams, found = [torch.cuda.Stream() for _ in cases], [[], []]
    for _ in range(20):
        for case, wrapper, stream, results in zip(cases, wrappers, streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(wrapper.run(case.q, case.cache, return_lse=True))
                results.append(call(*tensors_of(case)))
    torch.cuda.synchronize()
    for results, expected in zip(found, want, strict=True):
        for got in results:
            assert_same(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("compiled", [False, True])
def test_two_devices(compiled):
    """The operator runs on its tensors' device, whichever is current."""

    def call(*tensors):
        return ops.decode_attention(*tensors)

    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    want = eager(gpu_case(device="cuda:0"))
    assert torch.cuda.current_device() == 0
    got = call(*tensors_of(gpu_case(device="cuda:1")))
    assert got[0].device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert_same(got, want)
    assert_same(call(*tensors_of(gpu_case(device="cuda:0"))), want)
