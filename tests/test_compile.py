"""Compiled functions against the same ones run eagerly."""

from __future__ import annotations

import shutil

import pytest
import torch
from support.compare import assert_equal
from support.inputs import POISON, int32, random_values, shuffled_table
from support.op_cases import HEAD_DIM, HEADS, KV_HEADS, PAGE, case_of, empty_cache, new_tokens
from support.window_checks import KIVI, WindowCase, make_inputs

import foscar
from foscar import AttentionOptions, KVFormat, PagedKVCache, WindowConfig
from foscar import ops as ops_module

BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")),
]


@pytest.fixture(autouse=True)
def no_compiled_functions():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Layer(torch.nn.Module):
    """A projection, the append, the decode: what a layer of a model does, with weights that want gradients."""

    def __init__(self, cache: PagedKVCache):
        super().__init__()
        self.cache = cache
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(32, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=generator) / 4)

    def forward(self, x, block_table, seq_lens):
        qkv = torch.einsum("bi,ihc->bhc", x, self.weight).to(torch.bfloat16)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        self.cache.append(k, v, block_table, seq_lens)
        seq_lens += 1
        out, lse = foscar.decode_attention(q, self.cache, block_table, seq_lens, return_lse=True, lse_base="e")
        return out.flatten(1) * 2, lse


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_layer(backend, monkeypatch):
    """The same bits as eagerly, step after step and for a smaller batch; inductor writes the cache itself, no copy."""
    touched = []
    make = ops_module._cache
    monkeypatch.setattr(ops_module, "_cache", lambda data, *rest: touched.append(data.data_ptr()) or make(data, *rest))
    ours, theirs = Layer(empty_cache()), Layer(empty_cache())
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    table = shuffled_table([60, 60, 60], PAGE, 20, seed=4)
    lengths, expected_lengths = int32([0, 15, 31]), int32([0, 15, 31])
    first = random_values((31 + 15, KV_HEADS, HEAD_DIM), 7)
    for layer in (ours, theirs):
        layer.cache.append(first, first + 1, table, int32([0, 0, 0]), int32([0, 0, 15, 46]))
    touched.clear()
    for step in range(3):
        x = random_values((3, 32), 10 + step)
        got, want = compiled(x, table, lengths), theirs(x, table, expected_lengths)
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b)
        assert_equal(lengths, expected_lengths)
        assert_equal(ours.cache.data, theirs.cache.data)
    assert len(touched) == 6 and (backend == "aot_eager" or set(touched) == {ours.cache.data.data_ptr()})
    for batch in () if backend == "inductor" else (2, 1):  # each costs a run of the C++ compiler
        x = random_values((batch, 32), 20)
        got = compiled(x, table[:batch], lengths[:batch].clone())
        want = theirs(x, table[:batch], expected_lengths[:batch].clone())
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b)


def test_every_option_reaches_the_compiled_call():
    case = case_of([40, 33, 17], q=random_values((6, HEADS, HEAD_DIM), 9, torch.bfloat16))
    sinks, q_indptr = random_values((1, HEADS), 5)[0], int32([0, 1, 4, 6])
    out = torch.empty(6, HEADS, 2 * HEAD_DIM, dtype=torch.bfloat16)[..., ::2]

    def call(q, block_table, seq_lens, sinks, q_indptr, out):
        return foscar.decode_attention(
            q, case.cache, block_table, seq_lens, sm_scale=0.2, options=AttentionOptions(5, 30.0, 0.5), sinks=sinks,
            q_indptr=q_indptr, max_q_len=3, out=out, return_lse=True, backend="torch", check=True,
        )  # fmt: skip

    arguments = (case.q, case.block_table, case.seq_lens, sinks, q_indptr)
    want = call(*arguments, torch.empty_like(case.q))
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*arguments, out)
    for a, b in zip(got, want, strict=True):
        assert_equal(a, b)
    assert_equal(out, want[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_decode_over_windows(backend):
    """The eager call's bits, for other lengths too; into ``out``, whose rows of no request stay as they are."""
    drafts = {"lengths": (70, 6, 17), "q_lens": (4, 0, 2)}
    given = make_inputs(WindowCase(KIVI, WindowConfig(5, 20), **drafts, sinks=True))

    def call(q, table, lengths, slots, sinks, q_indptr, out):
        got, lse = foscar.decode_windowed(
            q * 2, given.cache, table, lengths, slots, sm_scale=0.2, options=AttentionOptions(soft_cap=30.0), out=out,
            sinks=sinks, q_indptr=q_indptr, max_q_len=4, return_lse=True, lse_base="e", backend="torch",
        )  # fmt: skip
        return got + 1, lse

    def make():
        return torch.full_like(given.q, POISON)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for lengths, bounds in ((given.lengths, given.q_indptr), (int32([60, 6, 9]), int32([0, 1, 2, 3]))):
        arguments = (given.q, given.table, lengths, given.slots, given.sinks, bounds)
        out, expected, rows = make(), make(), int(bounds[-1])
        got, want = compiled(*arguments, out), call(*arguments, expected)
        assert_equal(out, expected)
        assert bool((out[rows:] == POISON).all())
        for a, b in zip(got, want, strict=True):
            assert_equal(a[:rows], b[:rows])
        assert_equal(compiled(*arguments, None)[0][:rows], want[0][:rows])


def test_chunks_are_appended_in_a_compiled_function():
    ours, theirs = (
        empty_cache(fmt=KVFormat.make(4, k_axis="channel")),
        empty_cache(fmt=KVFormat.make(4, k_axis="channel")),
    )
    table, lengths, indptr = shuffled_table([60, 60], PAGE, 20, seed=1), int32([16, 0]), int32([0, 3, 20])
    k, v = new_tokens(20, 6)
    compiled = torch.compile(lambda *x: ours.append(*x, check=True), fullgraph=True, backend="aot_eager")
    compiled(k, v, table, lengths, indptr)
    theirs.append(k, v, table, lengths, indptr)
    assert_equal(ours.data, theirs.data)


def test_errors_come_when_the_compiled_call_runs():
    case = case_of([40])

    def call(block_table):
        return foscar.decode_attention(case.q, case.cache, block_table, case.seq_lens)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"^request 0 uses page \[99\]; the cache has pages"):
        compiled(torch.full_like(case.block_table, 99))
    assert_equal(compiled(case.block_table), call(case.block_table))


def test_a_tile_is_refused_while_compiling():
    case = case_of([40])
    compiled = torch.compile(
        lambda q: foscar.decode_attention(q, *case.tables, tile=foscar.TileConfig()), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match="tile is not supported under torch.compile"):
        compiled(case.q)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strided", [False, True])
def test_rows_beyond_the_requests_stay_as_they_are(backend, strided):
    """As eagerly: `out` is written up to q_indptr[-1], and what lies between the elements of a view never."""
    case = case_of([40, 20], q=random_values((7, HEADS, HEAD_DIM), 9, torch.float16))
    q_indptr = int32([0, 4, 5])

    def call(q, out):
        got = foscar.decode_attention(q, *case.tables, q_indptr=q_indptr, out=out, return_lse=True)
        return got[0] + 1, got[1][:5]

    def make():
        whole = torch.full((7, HEADS, HEAD_DIM * (1 + strided)), POISON, dtype=torch.float16)
        return whole, whole[..., :: 1 + strided]

    (ours, out), (theirs, expected) = make(), make()
    got, want = torch.compile(call, fullgraph=True, backend=backend)(case.q, out), call(case.q, expected)
    assert_equal(ours, theirs)
    assert_equal(got[0][:5], want[0][:5])
    assert_equal(got[1], want[1])
    assert bool((out[5:] == POISON).all()) and bool((out[:5] != POISON).any())


@pytest.mark.parametrize("out, kind, message", [
    (torch.empty(2, HEADS, HEAD_DIM), ValueError, "^out must be torch.bfloat16"),
    (torch.empty(1, HEADS, HEAD_DIM, dtype=torch.bfloat16), ValueError, "^out must be torch.bfloat16"),
    (torch.empty(2, 1, HEAD_DIM, dtype=torch.bfloat16).expand(2, HEADS, HEAD_DIM), ValueError, "^out has elements"),
])  # fmt: skip
def test_out_is_checked_when_the_compiled_call_runs(out, kind, message):
    case = case_of([40, 20])
    compiled = torch.compile(
        lambda q, out: foscar.decode_attention(q, *case.tables, out=out), fullgraph=True, backend="eager"
    )
    with pytest.raises(kind, match=message) as error:
        compiled(case.q, out)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_options_that_vary_between_compiled_calls(backend, dynamic):
    case = case_of([40, 0, 17])

    def call(q, window, soft_cap, out_scale, sm_scale):
        options = AttentionOptions(window, soft_cap, out_scale)
        return foscar.decode_attention(q, *case.tables, options=options, sm_scale=sm_scale)

    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    for i in range(3):
        arguments = case.q, 5 + i, 20.0 + i, 0.5 + 0.1 * i, 0.1 + 0.01 * i
        assert_equal(compiled(*arguments), call(*arguments))
    for i in range(12):  # whole numbers alone: no compilation for each
        arguments = case.q, 8 + i, 22.0, 0.7, 0.12
        assert_equal(compiled(*arguments), call(*arguments))


def test_bases_of_a_compiled_call():
    case = case_of([40])
    compiled = torch.compile(
        lambda q, base: foscar.decode_attention(q, *case.tables, return_lse=True, lse_base=base)[1],
        fullgraph=True,
        backend="eager",
    )
    for base in (2, 2.0, "e"):
        want = foscar.decode_attention(case.q, *case.tables, return_lse=True, lse_base=base)[1]
        assert_equal(compiled(case.q, base), want)
    for base in ("10", 10):
        with pytest.raises(Exception, match="lse_base must be '?2'? or 'e'"):
            compiled(case.q, base)


@pytest.mark.parametrize("change, message", [
    ({"options": 3}, "options must be foscar.AttentionOptions or None, not int"),
    ({"out": 3}, "out must be a torch.Tensor, not int"),
    ({"sinks": [0.0]}, "sinks must be a torch.Tensor, not list"),
    ({"sm_scale": -1.0}, "sm_scale must be positive and finite"),
    ({"max_q_len": 0}, "max_q_len must be 1 or more"),
])  # fmt: skip
def test_arguments_of_another_kind_in_a_compiled_call(change, message):
    case = case_of([40])
    compiled = torch.compile(lambda q: foscar.decode_attention(q, *case.tables, **change), backend="eager")
    with pytest.raises((TypeError, ValueError), match=message):
        compiled(case.q)
