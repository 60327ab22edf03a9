"""The torch operators: schemas and fake kernels, and compiled functions against the same ones run eagerly."""

from __future__ import annotations

import shutil

import pytest
import torch
from support.compare import assert_equal
from support.decode_checks import assert_contract
from support.inputs import POISON, Case, indptr_of, int32, make_case, random_values, shuffled_table

import foscar
from foscar import AttentionOptions, KVFormat, PagedKVCache
from foscar import ops as ops_module

HEAD_DIM, PAGE, KV_HEADS, HEADS = 64, 16, 2, 6
ops = torch.ops.foscar
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


def case_of(lengths, fmt: KVFormat | None = None, **options) -> Case:
    options = {"fmt": fmt, "page_size": PAGE, "kv_heads": KV_HEADS, "group_heads": 3, "head_dim": HEAD_DIM, **options}
    return make_case(lengths, **options)


def shape_of(cache: PagedKVCache) -> tuple[str, int, int]:
    return cache.format.name, cache.page_size, cache.head_dim


def tensors_of(case: Case) -> tuple:
    return case.q, case.cache.data, case.block_table, case.seq_lens, *shape_of(case.cache)


def empty_cache(pages: int = 20, fmt: KVFormat | None = None, heads: int = KV_HEADS) -> PagedKVCache:
    cache = PagedKVCache(pages, PAGE, heads, HEAD_DIM, fmt)
    cache.data.fill_(POISON)
    return cache


def new_tokens(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(random_values((n, KV_HEADS, HEAD_DIM), seed + i, torch.bfloat16) for i in range(2))


# ---------------------------------------------------------------------------------------------- the operators
DECODES = {
    "plain": {},
    "base e": {"lse_base": "e", "sm_scale": 0.3},
    "options": {"window": 7, "soft_cap": 20.0, "out_scale": 0.5},
    "sinks": {"sinks": torch.linspace(-1, 2, HEADS)},
    "checked": {"check": True, "backend": "torch"},
}


@pytest.mark.parametrize("named", DECODES.values(), ids=DECODES)
def test_opcheck_of_decode(named):
    case = case_of([40, 0, 17], KVFormat.make(4, 2, k_axis="channel"))
    torch.library.opcheck(ops.decode_attention.default, tensors_of(case), named)


def test_opcheck_of_decode_of_drafts():
    case = case_of([40, 20], q=random_values((5, HEADS, HEAD_DIM), 9, torch.float16))
    torch.library.opcheck(
        ops.decode_attention.default, tensors_of(case), {"q_indptr": int32([0, 4, 5]), "max_q_len": 4}
    )


@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("fmt", ["int2", "k4c16v2-bf16"])
def test_opcheck_of_append(chunk, fmt):
    cache = empty_cache(fmt=KVFormat.parse(fmt))
    lengths = int32([0, 16, 32])
    table = shuffled_table([60, 60, 60], PAGE, 20, seed=1)
    rows = [16, 0, 17] if chunk else [1, 1, 1]
    indptr = indptr_of(rows) if chunk else None
    k, v = new_tokens(sum(rows), 2)
    torch.library.opcheck(ops.append.default, (cache.data, k, v, table, lengths, indptr, *shape_of(cache)))


def test_the_operators_are_the_functions():
    case = case_of([40, 0, 17], KVFormat.parse("k2v4-bf16"), dtype=torch.float16)
    out, lse = ops.decode_attention(*tensors_of(case))
    assert_contract(out, lse, case)
    options = AttentionOptions(window=7, soft_cap=20.0, out_scale=0.5)
    sinks = random_values((1, HEADS), 5)[0]
    want = foscar.decode_attention(
        case.q, *case.tables, options=options, sinks=sinks, sm_scale=0.2, return_lse=True, lse_base="e"
    )
    got = foscar.ops.decode_attention(
        *tensors_of(case), sinks=sinks, sm_scale=0.2, lse_base="e", window=7, soft_cap=20.0, out_scale=0.5
    )
    for a, b in zip(got, want, strict=True):
        assert_equal(a, b)
    ours, theirs = empty_cache(), empty_cache()
    table, (k, v) = shuffled_table([60, 60], PAGE, 20, seed=1), new_tokens(2, 6)
    foscar.ops.append(ours.data, k, v, table, int32([5, 0]), None, *shape_of(ours))
    theirs.append(k, v, table, int32([5, 0]))
    assert_equal(ours.data, theirs.data)
    assert (ours.data != POISON).any()


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({4: "int3"}, foscar.FormatError, "^bits must be one of"),
        ({5: 8}, foscar.FormatError, "^page_size must be one of"),
        ({6: 128}, ValueError, "^data must be uint8"),
        ({1: torch.zeros(4, dtype=torch.uint8)}, ValueError, "^cache_data must be uint8"),
        ({2: torch.zeros(3, 4)}, ValueError, "^block_table must be int32"),
    ],
)
def test_refusals(change, error, match):
    arguments = list(tensors_of(case_of([40, 0, 17])))
    for i, value in change.items():
        arguments[i] = value
    with pytest.raises(error, match=match):
        ops.decode_attention(*arguments)


def test_refused_lse_base():
    with pytest.raises(ValueError, match="^lse_base must be '2' or 'e', not '10'$"):
        ops.decode_attention(*tensors_of(case_of([4])), lse_base="10")


# ---------------------------------------------------------------------------------------------- torch.compile
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
