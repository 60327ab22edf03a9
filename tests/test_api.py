"""decode_attention and the plan/run wrapper: results on the CPU backend, every refusal, and what reaches a kernel."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from support.compare import assert_equal
from support.decode_checks import assert_contract, compressed
from support.inputs import Case, all_formats, int32, make_case, poison_slack, random_values

import foscar
from foscar import (
    AttentionOptions,
    BatchDecodeWithPagedKVCacheWrapper,
    KVFormat,
    PagedKVCache,
    TileConfig,
    decode_attention,
)
from foscar import api as api_module
from foscar.common.errors import FormatError, UnsupportedDeviceError
from foscar.common.plan import KernelOptions
from foscar.common.reference import decode_folded
from foscar.hopper import arguments
from foscar.hopper.config import ConfigError

FORMATS = all_formats(groups=(None,))
SHAPES = [(64, 16), (128, 64), (128, 32), (256, 128), (64, 128), (128, 16), (256, 64)]  # head_dim, page size


def planned(case: Case, heads: int | None = None, *, wrapper=None, dense: bool = False, **options):
    """A wrapper that has planned the case."""
    wrapper = wrapper or BatchDecodeWithPagedKVCacheWrapper()
    cache = case.cache
    options = {"format": cache.format, "q_data_type": case.q.dtype, **options}
    sizes = {"num_qo_heads": heads or case.q.shape[1], "num_kv_heads": cache.num_kv_heads, "head_dim": cache.head_dim,
             "page_size": cache.page_size}  # fmt: skip
    if dense:
        wrapper.plan(block_table=case.block_table, seq_lens=case.seq_lens, **sizes, **options)
    else:
        wrapper.plan(*flashinfer_tables(case), **sizes, **options)
    return wrapper


def flashinfer_tables(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """indptr, indices, last_page_len; nonsense where a request has no page."""
    tables = compressed(case)
    last = tables.lengths - (tables.indptr.diff() - 1) * case.cache.page_size
    return tables.indptr, tables.pages, torch.where(tables.lengths > 0, last, 99).to(torch.int32)


# ---------------------------------------------------------------------------------------------- results
@pytest.mark.parametrize("i, fmt", list(enumerate(FORMATS)), ids=[f.name for f in FORMATS])
def test_every_format(i, fmt):
    head_dim, page_size = SHAPES[i % len(SHAPES)]
    dtype = (torch.bfloat16, torch.float16)[i % 2]
    case = make_case([2 * page_size + 5, 0, 1, 200], fmt=fmt, page_size=page_size, head_dim=head_dim,
                     group_heads=i % 9 + 1, dtype=dtype, seed=i)  # fmt: skip
    poison_slack(case)
    base = (2, "e")[i // 2 % 2]
    out, lse = decode_attention(case.q, *case.tables, return_lse=True, lse_base=base)
    assert out.shape == case.q.shape and lse.shape == case.q.shape[:2]
    assert_contract(out, lse, case, lse_base=base)
    for dense in (False, True):
        got = planned(case, dense=dense, lse_base=base).run(case.q, case.cache, return_lse=True)
        for a, b in zip(got, (out, lse), strict=True):
            assert_equal(a, b)


@pytest.mark.parametrize(
    "heads, kv_heads",
    [(1, 1), (3, 1), (20, 4), (28, 4), (8, 1), (24, 4), (24, 2), (64, 4), (40, 2), (71, 1), (64, 1)],
)
def test_any_number_of_query_heads_per_kv_head(heads, kv_heads):
    """Public report 1."""
    case = make_case([70, 9], kv_heads=kv_heads, group_heads=heads // kv_heads, page_size=32, head_dim=64)
    out, lse = decode_attention(case.q, *case.tables, return_lse=True)
    assert_contract(out, lse, case)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_lengths_around_pages_and_tiles(page_size):
    lengths = sorted({n + d for n in (page_size, 2 * page_size, 128, 256) for d in (-1, 0, 1)})
    case = make_case(lengths, page_size=page_size, head_dim=64)
    poison_slack(case)
    out, lse = decode_attention(case.q, *case.tables, return_lse=True, sm_scale=0.3)
    assert_contract(out, lse, case, sm_scale=0.3)


def test_empty_requests_and_padding():
    """Public reports 4 and 11: zeros and -inf, neighbours untouched; whatever lies behind a length is not looked at."""
    case = make_case([0, 5, 0], page_size=16)
    case.block_table[[0, 2]] = 2**31 - 1
    case.block_table[1, 1:] = -(2**31)
    out, lse = decode_attention(case.q, *case.tables, return_lse=True, check=True)
    assert_contract(out, lse, case)
    alone = decode_attention(case.q[1:2], case.cache, case.block_table[1:2, :1], int32([5]))
    assert_equal(out[1:2], alone)


def test_a_block_table_without_columns():
    case = make_case([7], page_size=16)
    out, lse = decode_attention(
        case.q, case.cache, torch.empty(1, 0, dtype=torch.int32), int32([0]), return_lse=True, check=True
    )
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())


@pytest.mark.parametrize("dense", [False, True])
def test_batch_zero(dense):
    case = make_case([], page_size=16)
    out, lse = decode_attention(case.q, *case.tables, return_lse=True, check=True)
    assert out.shape == (0, 8, 128) and lse.shape == (0, 8) and out.dtype == torch.bfloat16
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    if dense:
        planned(case, wrapper=wrapper, dense=True)
    else:
        wrapper.plan(int32([0]), int32([]), int32([]), 8, 2, 128, 16)
    assert wrapper.run(case.q, case.cache).shape == (0, 8, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_strided_queries_and_tables(dtype):
    """Public report 21: a slice of a fused qkv, channels apart, a table and lengths with gaps."""
    case = make_case([33, 20], page_size=16, dtype=dtype)
    want = decode_attention(case.q, *case.tables, return_lse=True)
    fused = torch.full((2, 12, 200), math.nan, dtype=dtype)
    fused[:, 3:11, 65:193] = case.q
    apart = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert apart.stride(2) != 1
    table = torch.stack([case.block_table, case.block_table * 0 - 1], -1)[..., 0]
    lengths = torch.stack([case.seq_lens, case.seq_lens * 0 - 9], -1)[..., 0]
    assert table.stride(1) == lengths.stride(0) == 2
    for q in (fused[:, 3:11, 65:193], apart, case.q):
        for got, expected in zip(decode_attention(q, case.cache, table, lengths, return_lse=True), want, strict=True):
            assert_equal(got, expected)


@pytest.mark.parametrize("apart", [False, True], ids=["rows apart", "channels apart"])
def test_results_are_written_in_place(apart):
    case = make_case([33, 0, 20], page_size=16)
    want, want_lse = decode_attention(case.q, *case.tables, return_lse=True)
    room = torch.full((3, 12, 130), math.nan, dtype=case.q.dtype)
    out = room[:, 2:10, 1:129]
    if apart:
        room = torch.full((3, 128, 8), math.nan, dtype=case.q.dtype)
        out = room.transpose(1, 2)
    before = room.isnan().sum()
    assert decode_attention(case.q, *case.tables, out=out) is out
    assert_equal(out, want)
    assert room.isnan().sum() == before - out.numel()
    out.fill_(math.nan)
    lse = torch.full((3, 16), math.nan)[:, ::2]
    wrapper = planned(case)
    assert wrapper.run(case.q, case.cache, out=out, lse=lse) is out
    assert_equal(out, want)
    assert_equal(lse, want_lse)
    both = wrapper.run(case.q, case.cache, lse=lse, return_lse=True)
    assert both[1] is lse


def test_lse_bases_and_split_and_merge():
    """Public report 12: the two halves of every request, merged by their LSEs, are the whole."""
    page, lengths = 16, [100, 33, 64]
    case = make_case(lengths, page_size=page, dtype=torch.float16)
    whole, whole_lse = decode_attention(case.q, *case.tables, return_lse=True)
    natural = decode_attention(case.q, *case.tables, return_lse=True, lse_base="e")[1]
    torch.testing.assert_close(natural, whole_lse * math.log(2.0))
    first = [32, 16, 64]
    parts = []
    for rows, counts in (
        (case.block_table, first),
        (torch.stack([r[n // page :][:5] for r, n in zip(case.block_table, first, strict=True)]),
         [n - m for n, m in zip(lengths, first, strict=True)]),
    ):  # fmt: skip
        parts.append((rows, int32(counts)))
    for base, power in ((2, torch.exp2), ("e", torch.exp)):
        halves = [decode_attention(case.q, case.cache, *p, return_lse=True, lse_base=base) for p in parts]
        lse = torch.stack([h[1].double() for h in halves])
        top = lse.amax(0)
        weight = power(lse - top)
        share = weight / weight.sum(0)
        merged = sum(w[..., None] * h[0].double() for w, h in zip(share, halves, strict=True))
        log = torch.log2 if base == 2 else torch.log
        assert_contract(merged.half(), (top + log(weight.sum(0))).float(), case, lse_base=base)
        expected = whole_lse if base == 2 else natural
        torch.testing.assert_close((top + log(weight.sum(0))).float(), expected)
    torch.testing.assert_close(merged, whole.double(), rtol=2e-3, atol=2e-3)


def test_query_that_wants_gradients():
    case = make_case([9], page_size=16)
    out = decode_attention(case.q.requires_grad_(), *case.tables)
    assert not out.requires_grad


def test_torch_backend_by_name():
    case = make_case([9], page_size=16)
    assert_equal(decode_attention(case.q, *case.tables, backend="torch"), decode_attention(case.q, *case.tables))


def test_a_plan_serves_every_layer_and_follows_its_tables():
    case, other = (make_case([33, 20], page_size=16, seed=s) for s in (0, 1))
    other = dataclasses.replace(other, block_table=case.block_table)
    wrapper = planned(case, dense=True)
    for c in (case, other, case):
        assert_equal(wrapper.run(c.q, c.cache), decode_attention(c.q, *c.tables))
    case.seq_lens[1] = 7  # in place: read by the next run
    assert_equal(wrapper.run(case.q, case.cache), decode_attention(case.q, *case.tables))
    # Derived lengths keep their storage over plans of one batch size, as a captured graph needs.
    planned(case, wrapper=wrapper)
    lengths = wrapper._tables.lengths
    shorter = dataclasses.replace(case, seq_lens=int32([16, 1]))
    planned(shorter, wrapper=wrapper)
    assert wrapper._tables.lengths is lengths and lengths.tolist() == [16, 1]
    assert_equal(wrapper.run(case.q, case.cache), decode_attention(case.q, *shorter.tables))


# ---------------------------------------------------------------------------------------------- refusals
def refuse(error, match, call, *args, **kwargs):
    with pytest.raises(error, match=match) as info:
        call(*args, **kwargs)
    assert "\n" not in str(info.value), "one line"


CALL_ERRORS = {
    "fp32 query": ({"q": torch.zeros(2, 8, 128)}, ValueError, "q must be bfloat16 or float16, not torch.float32"),
    "not a tensor": ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, not list"),
    "no q": ({"q": None}, TypeError, "q must be a torch.Tensor, not NoneType"),
    "no table": ({"block_table": None}, TypeError, "block_table must be a torch.Tensor, not NoneType"),
    "no lengths": ({"seq_lens": None}, TypeError, "seq_lens must be a torch.Tensor, not NoneType"),
    "no cache": ({"cache": None}, TypeError, "cache must be a foscar.PagedKVCache, not NoneType"),
    "out as a list": ({"out": [1.0]}, TypeError, "out must be a torch.Tensor, not list"),
    "lengths as a list": ({"seq_lens": [5, 9]}, TypeError, "seq_lens must be a torch.Tensor, not list"),
    "int8 cache": ({"cache": torch.zeros(4, 2, 99, dtype=torch.int8)}, TypeError,
                   "cache must be a foscar.PagedKVCache, not Tensor"),
    "rank": ({"q": torch.zeros(2, 128).half()}, ValueError, r"q must be .* = \[2, \*, 128\], not \[2, 128\]"),
    "head_dim": ({"q": torch.zeros(2, 8, 64).half()}, ValueError, r"= \[2, \*, 128\], not \[2, 8, 64\]"),
    "batch": ({"q": torch.zeros(3, 8, 128).half()}, ValueError, r"= \[2, \*, 128\], not \[3, 8, 128\]"),
    "heads": ({"q": torch.zeros(2, 7, 128).half()}, ValueError, "7 query heads are not a multiple of 2 KV heads"),
    "no heads": ({"q": torch.zeros(2, 0, 128).half()}, ValueError, "0 query heads are not a multiple of 2 KV heads"),
    "q elsewhere": ({"q": torch.zeros(2, 8, 128, device="meta").half()}, ValueError, "q is on meta, the cache on cpu"),
    "int64 lengths": ({"seq_lens": torch.tensor([5, 9])}, ValueError, "seq_lens must be int32 .* not torch.int64"),
    "lengths of rank 2": ({"seq_lens": int32([[5, 9]])}, ValueError, r"seq_lens must be int32 with 1 dimension, "),
    "table of rank 1": ({"block_table": int32([0, 1])}, ValueError, r"block_table must be int32 with 2 dimensions, "),
    "table elsewhere": ({"block_table": int32([[0], [1]], "meta")}, ValueError, "block_table is on meta, not on cpu"),
    "table rows": ({"block_table": int32([[0]])}, ValueError, "block_table has 1 rows for 2 requests"),
    "out dtype": ({"out": torch.zeros(2, 8, 128)}, ValueError,
                  r"out must be torch.bfloat16 \[2, 8, 128\] on cpu, not torch.float32"),
    "out shape": ({"out": torch.zeros(2, 8, 1).bfloat16()}, ValueError, r"not torch.bfloat16 \[2, 8, 1\] on cpu"),
    "sm_scale 0": ({"sm_scale": 0.0}, ValueError, "sm_scale must be positive and finite, not 0.0"),
    "sm_scale NaN": ({"sm_scale": math.nan}, ValueError, "sm_scale must be positive and finite, not nan"),
    "sm_scale text": ({"sm_scale": "0.1"}, TypeError, "sm_scale must be a real number or None, not str"),
    "sm_scale tensor": ({"sm_scale": torch.tensor(0.1)}, TypeError, "sm_scale must be a real number or None, not Tens"),
    "sm_scale bool": ({"sm_scale": True}, TypeError, "sm_scale must be a real number or None, not bool"),
    "sm_scale tiny": ({"sm_scale": 1e-40}, ValueError, "sm_scale must be a normal number of float32, .* not 1e-40"),
    "sm_scale large": ({"sm_scale": 3e38}, ValueError, "sm_scale must be a normal number of float32, .* not 3e.38"),
    "sm_scale huge": ({"sm_scale": 10**400}, ValueError, "sm_scale must be positive and finite, not inf"),
    "lse_base tensor": ({"lse_base": torch.tensor(2)}, TypeError, "lse_base must be 2 or 'e', not a Tensor"),
    "lse_base None": ({"lse_base": None}, TypeError, "lse_base must be 2 or 'e', not a NoneType"),
    "tile": ({"tile": {"kv_stages": 3}, "backend": "torch"}, TypeError, "tile must be a foscar.TileConfig or None, "),
    "lse_base": ({"lse_base": 10}, ValueError, "lse_base must be 2 or 'e', not 10"),
    "backend": ({"backend": "triton"}, ValueError, "backend must be one of .*'auto', 'cuda', 'torch'.*, not 'triton'"),
    "cuda on the CPU": ({"backend": "cuda"}, ValueError, "backend 'cuda' needs a cache on a GPU, not on cpu"),
    "page id": ({"block_table": int32([[0], [99]])}, ValueError, r"request 1 uses page \[99\]; the cache has pages 0"),
    "page -1": ({"block_table": int32([[-1], [0]])}, ValueError, r"request 0 uses page \[-1\]"),
    "length": ({"seq_lens": int32([5, 900])}, ValueError, "request 1 has 900 tokens and 3 pages of 16"),
    "negative length": ({"seq_lens": int32([-1, 5])}, ValueError, "request 0 has -1 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALL_ERRORS)
@pytest.mark.parametrize("check", [False, True])
def test_refused_calls(name, check):
    """Public report 28 among others: one clear line, and nothing written."""
    change, error, match = CALL_ERRORS[name]
    case = make_case([5, 9], page_size=16)
    out = torch.full_like(case.q, math.nan)
    decode_attention(case.q, *case.tables, sm_scale=2.0**-126)
    arguments = {"q": case.q, "cache": case.cache, "block_table": case.block_table, "seq_lens": case.seq_lens,
                 "out": out, "check": check} | change  # fmt: skip
    refuse(error, match, decode_attention, **arguments)
    assert bool(out.isnan().all())


def plan_arguments(case: Case) -> dict:
    indptr, indices, last_page_len = flashinfer_tables(case)
    return {
        "indptr": indptr, "indices": indices, "last_page_len": last_page_len, "num_qo_heads": 8, "num_kv_heads": 2,
        "head_dim": 128, "page_size": 16,
    }  # fmt: skip


PLAN_ERRORS = {
    "no heads": ({"num_qo_heads": 0}, ValueError, r"num_qo_heads \(0\) must be a positive multiple"),
    "heads": ({"num_qo_heads": 7}, ValueError, r"num_qo_heads \(7\) must be a positive multiple of num_kv_heads \(2\)"),
    "heads as a float": ({"num_qo_heads": 8.0}, TypeError, "num_qo_heads must be a whole number, not 8.0"),
    "head_dim as a float": ({"head_dim": 128.0}, TypeError, "head_dim must be a whole number, not 128.0"),
    "format as text": ({"format": "int2"}, TypeError, r"such as foscar.KVFormat.int2\(\), not 'int2'"),
    "tile": ({"tile": 3}, TypeError, "tile must be a foscar.TileConfig or None, not int"),
    "lse_base None": ({"lse_base": None}, TypeError, "lse_base must be 2 or 'e', not a NoneType"),
    "sm_scale text": ({"sm_scale": "1"}, TypeError, "sm_scale must be a real number or None, not str"),
    "q type": ({"q_data_type": torch.float32}, ValueError, "q must be bfloat16 or float16, not torch.float32"),
    "lse_base": ({"lse_base": "2"}, ValueError, "lse_base must be 2 or 'e', not '2'"),
    "backend": ({"backend": "fa3"}, ValueError, "backend must be one of"),
    "no page size": ({"page_size": 0}, FormatError, r"page_size must be one of \(16, 32, 64, 128\), not 0"),
    "page size": ({"page_size": 48}, FormatError, "page_size must be one of"),
    "head_dim": ({"head_dim": 72}, FormatError, r"head_dim must be one of \(64, 80, 96, 112, 128, 256\), not 72"),
    "sm_scale": ({"sm_scale": -1.0}, ValueError, "sm_scale must be positive"),
    "both tables": ({"seq_lens": int32([1])}, ValueError, "plan takes either indptr, indices, last_page_len or "),
    "part of a table": ({"indices": None}, ValueError, "plan takes either indptr, indices, last_page_len or "),
    "no tables": (dict.fromkeys(("indptr", "indices", "last_page_len")), ValueError, "plan takes either"),
    "a list": ({"indptr": [0, 1, 2]}, TypeError, "indptr must be a torch.Tensor, not list"),
    "int64": ({"indices": torch.tensor([1, 2])}, ValueError, "indices must be int32"),
    "count": ({"indptr": int32([0, 1])}, ValueError, "indptr has 2 entries for 2 requests; it needs one more"),
    "strided": ({"last_page_len": int32([5, 0, 9, 0])[::2]}, ValueError, "plan keeps last_page_len: it must be contig"),
    "elsewhere": ({"indptr": int32([0, 1, 2], "meta")}, ValueError, "indptr is on meta, not on cpu"),
    "last page": ({"last_page_len": int32([5, 17])}, ValueError, r"last_page_len must be 1 .. 16, not \[17\]"),
    "last page empty": ({"last_page_len": int32([0, 9])}, ValueError, r"last_page_len must be 1 .. 16, not \[0\]"),
}


@pytest.mark.parametrize("name", PLAN_ERRORS)
def test_refused_plans_change_nothing(name):
    change, error, match = PLAN_ERRORS[name]
    case = make_case([5, 9], page_size=16)
    wrapper = planned(case)
    refuse(error, match, wrapper.plan, **plan_arguments(case) | change)
    assert_equal(wrapper.run(case.q, case.cache), decode_attention(case.q, *case.tables))


@pytest.mark.parametrize(
    "change, match",
    [
        ({"block_table": int32([[0]])}, "block_table has 1 rows for 2 requests"),
        ({"seq_lens": int32([5, 0, 9, 0])[::2]}, "plan keeps block_table and seq_lens"),
        ({"block_table": int32([[0, 1], [2, 3]]).T}, "plan keeps block_table and seq_lens"),
        ({"seq_lens": int32([5, 9], "meta")}, "seq_lens is on meta, not on cpu"),
    ],
)
def test_refused_dense_plans(change, match):
    case = make_case([5, 9], page_size=16)
    tables = {"block_table": case.block_table, "seq_lens": case.seq_lens} | change
    refuse(ValueError, match, BatchDecodeWithPagedKVCacheWrapper().plan, num_qo_heads=8, num_kv_heads=2, head_dim=128,
           page_size=16, **tables)  # fmt: skip


def test_a_one_column_table_of_any_stride():
    case = make_case([5, 9], page_size=16)
    column = torch.stack([case.block_table[:, 0]] * 3).T[:, :1]
    strange = case.block_table[:, 0].clone()[None].expand(1, 2).T
    for table in (column, strange, torch.as_strided(case.block_table.clone(), (2, 1), (case.block_table.stride(0), 5))):
        wrapper = planned(dataclasses.replace(case, block_table=table), dense=True)
        assert_equal(wrapper.run(case.q, case.cache), decode_attention(case.q, *case.tables))


@pytest.mark.parametrize(
    "indptr, match",
    [
        (int32([0, 2, 1]), "indptr must ascend within the 2 entries of indices"),
        (int32([-1, 1, 2]), "indptr must ascend"),
        (int32([1, 2, 3]), "indptr must ascend"),
    ],
)
def test_indptr_is_checked_by_the_torch_backend(indptr, match):
    case = make_case([5, 9], page_size=16)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(**plan_arguments(case) | {"indptr": indptr})
    refuse(ValueError, match, wrapper.run, case.q, case.cache)


def test_refused_runs():
    case = make_case([5, 9], page_size=16)
    fresh = BatchDecodeWithPagedKVCacheWrapper()
    refuse(ValueError, "call plan before run", fresh.run, case.q, case.cache)
    wrapper = planned(case)
    with_format = make_case([5, 9], page_size=16, fmt=KVFormat.int4())
    with_pages = make_case([5, 9], page_size=32)
    for q, cache, match in (
        (case.q[:1], case.cache, r"q must be .* \[2, \*, 128\], not \[1, 8, 128\]"),
        (case.q, with_format.cache, "the plan is for k2v2, 2 KV heads of 128, pages of 16; the cache is .*k4v4"),
        (case.q, with_pages.cache, "pages of 16; the cache is .* pages of 32"),
        (case.q.half(), case.cache, "the plan is for 8 query heads of torch.bfloat16, q has 8 of torch.float16"),
        (case.q[:, :4], case.cache, "the plan is for 8 query heads of torch.bfloat16, q has 4"),
        (case.q.to("meta"), case.cache, "q is on meta, the cache on cpu"),
    ):
        refuse(ValueError, match, wrapper.run, q, cache)
    refuse(TypeError, "cache must be a foscar.PagedKVCache, not Tensor", wrapper.run, case.q, case.cache.data)
    refuse(TypeError, "q must be a torch.Tensor, not NoneType", wrapper.run, None, case.cache)
    refuse(TypeError, "lse must be a torch.Tensor, not bool", wrapper.run, case.q, case.cache, lse=True)
    refuse(ValueError, r"lse must be torch.float32 \[2, 8\] on cpu", wrapper.run, case.q, case.cache,
           lse=torch.zeros(2, 8).half())  # fmt: skip
    refuse(ValueError, "backend 'cuda' needs a cache on a GPU", planned(case, backend="cuda").run, case.q, case.cache)


# ---------------------------------------------------------------------------------------------- towards a kernel
class FakeKernels:
    """In the place of HopperDecode: notes what it is given and insists on what the kernel insists on."""

    made: list

    def __init__(self, config, index):
        self.config, self.calls = config, []

    def buffers(self, group):
        return SimpleNamespace(group=group)

    def bind(self, *given):
        return lambda *addresses: self.launch(*given)

    def launch(self, q, cache, tables, out, lse, buffers, sm_scale, lse_base, variant):
        width = 4 * (q.shape[2] // 64)
        assert q.stride(2) == 1 and q.data_ptr() % width == 0
        assert all(2 * s % width == 0 for s, n in zip(q.stride()[:2], q.shape[:2], strict=True) if n > 1)
        assert out.stride(2) == 1 and (lse is None or lse.is_contiguous())
        assert tables.lengths.is_contiguous() and (tables.pages.shape[-1] <= 1 or tables.pages.stride(-1) == 1)
        assert buffers.group == q.shape[1] // cache.num_kv_heads
        self.calls.append((q, buffers))
        dense = api_module._dense(tables)
        more = {"options": variant.options, "sinks": variant.sinks, "q_indptr": variant.q_indptr}
        result, log_sum = decode_folded(q, cache, dense.pages, dense.lengths, sm_scale, **more)
        rows = q.shape[0] if variant.q_indptr is None else int(variant.q_indptr[-1])
        out[:rows].copy_(result[:rows])
        if lse is not None:
            lse[:rows].copy_((log_sum if lse_base == "e" else log_sum / math.log(2.0))[:rows])


@pytest.fixture
def kernels(monkeypatch):
    """The CUDA route on CPU tensors; the kernels made, by config."""
    made = {}
    monkeypatch.setattr(api_module, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(api_module, "_backend", lambda name, cache: "torch" if name == "torch" else "cuda")
    monkeypatch.setattr(api_module, "decoder", lambda c, i: made.setdefault(c, FakeKernels(c, i)))
    return made


def test_the_kernel_that_a_call_needs(kernels):
    tile = TileConfig(kv_stages=3)
    for group, heads in ((1, 4), (4, 4), (5, 8), (12, 12), (13, 16), (16, 16), (17, 12), (24, 12), (64, 16)):
        case = make_case([20], page_size=16, group_heads=group, head_dim=64, fmt=KVFormat.int4(), dtype=torch.float16)
        out, lse = decode_attention(case.q, *case.tables, tile=tile, return_lse=True)
        assert_contract(out, lse, case)
        config = list(kernels)[-1]
        assert (config.format, config.head_dim, config.page_size) == (KVFormat.int4(), 64, 16)
        assert (config.heads, config.q_dtype, config.tile) == (heads, "float16", tile)
        assert config.options == KernelOptions(rows=group > 16)
    assert len(kernels) == 6


def test_the_kernel_that_options_need(kernels):
    sinks, indptr = torch.zeros(8), int32([0, 1])
    for given, options, heads in (
        ({}, "", 4),
        ({"options": AttentionOptions()}, "", 4),
        ({"options": AttentionOptions(window=9)}, "window", 4),
        ({"options": AttentionOptions(soft_cap=256.0)}, "soft_cap", 4),
        ({"options": AttentionOptions(soft_cap=257.0, out_scale=2.0)}, "soft_cap,wide_cap,out_scale", 4),
        ({"sinks": sinks}, "sinks", 4),
        ({"q_indptr": indptr}, "rows", 4),  # as many as q has rows per request
        ({"q_indptr": indptr, "max_q_len": 16}, "rows", 16),
        ({"q_indptr": indptr, "max_q_len": 3}, "rows", 12),
        ({"q_indptr": indptr, "max_q_len": 5, "sinks": sinks}, "sinks,rows", 12),
    ):
        case = make_case([20], page_size=16)
        got = decode_attention(case.q, *case.tables, return_lse=True, **given)
        config = next(c for c, fake in kernels.items() if fake.calls and fake.calls[-1][0] is case.q)
        assert (config.options, config.heads) == (KernelOptions.parse(options), heads)
        decode, combine = (arguments.decode(config.options), arguments.combine(config.options))
        assert ("q_indptr" in decode, "sinks" in combine) == ("q_indptr" in given, "sinks" in given)
        for a, b in zip(got, decode_attention(case.q, *case.tables, return_lse=True, backend="torch", **given),
                        strict=True):  # fmt: skip
            assert_equal(a, b)


def test_rows_of_no_request_stay_as_they_are(kernels):
    """Also where the kernel writes to a copy of out."""
    case = make_case([20], page_size=16)
    q = case.q.expand(3, -1, -1).contiguous()
    out = torch.full((3, 128, 8), 7.0, dtype=q.dtype).transpose(1, 2)
    decode_attention(q, *case.tables, q_indptr=int32([0, 1]), out=out, max_q_len=1)
    assert bool((out[1:] == 7).all()) and not bool((out[0] == 7).all())


def test_every_layout_reaches_the_kernel_in_a_form_that_it_takes(kernels):
    case = make_case([33, 20], page_size=16)
    want = decode_attention(case.q, *case.tables, backend="torch", return_lse=True)
    odd = torch.cat([case.q.new_zeros(1), case.q.flatten()])[1:].view(case.q.shape)  # contiguous, misaligned
    assert odd.is_contiguous() and odd.data_ptr() % 8
    fused = torch.zeros(2, 8, 130, dtype=case.q.dtype)
    fused[..., 1:129] = case.q
    wide = torch.zeros(2, 9, 128, dtype=case.q.dtype)
    wide[:, 1:] = case.q
    queries = {"as it is": case.q, "a slice": wide[:, 1:], "misaligned": odd, "odd strides": fused[..., 1:129],
               "channels apart": case.q.transpose(1, 2).contiguous().transpose(1, 2)}  # fmt: skip
    table = torch.stack([case.block_table, case.block_table], -1)[..., 0]
    lengths = torch.stack([case.seq_lens, case.seq_lens], -1)[..., 0]
    out = torch.full((2, 128, 8), math.nan, dtype=case.q.dtype).transpose(1, 2)
    for name, q in queries.items():
        out.fill_(math.nan)
        got = decode_attention(q, case.cache, table, lengths, out=out, return_lse=True)
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b)
        (fake,) = kernels.values()
        assert (fake.calls[-1][0].data_ptr() == q.data_ptr()) == (name in ("as it is", "a slice")), "a needless copy"
    lse = torch.full((2, 16), math.nan)[:, ::2]
    assert planned(case).run(case.q, case.cache, lse=lse) is not None
    assert_equal(lse, want[1])


def overlapping(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    one, flat = torch.zeros(shape, dtype=dtype), torch.zeros(10**4, dtype=dtype)
    close = (one.stride(0) - 1, *one.stride()[1:])
    views = (close, (1,) * len(shape))
    return [one[:1].expand(shape), one[..., :1].expand(shape), *(flat.as_strided(shape, s) for s in views)]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_results_that_overlap_themselves_are_refused(kernels, backend):
    case = make_case([33, 20], page_size=16)
    wrapper = planned(case, backend=backend)
    for out in overlapping(case.q.dtype, 2, 8, 128):
        match = r"out has elements that overlap in memory: its strides are \["
        refuse(ValueError, match, decode_attention, case.q, *case.tables, out=out, backend=backend)
        refuse(ValueError, match, wrapper.run, case.q, case.cache, out=out)
    for lse in overlapping(torch.float32, 2, 8):
        refuse(ValueError, "lse has elements that overlap", wrapper.run, case.q, case.cache, lse=lse)
    apart = torch.empty(3, 8, 2, 300, dtype=case.q.dtype)[0].transpose(0, 1)[..., ::2][..., 3:131]
    assert_equal(wrapper.run(case.q, case.cache, out=apart), decode_attention(case.q, *case.tables))


def test_derived_lengths_stay_where_a_graph_reads_them(kernels):
    """Plans of other batches and dense plans in between change nothing for a captured graph of compressed tables."""
    case, longer = make_case([33, 20], page_size=16), make_case([33, 20, 5], page_size=16)
    indptr, indices, last = flashinfer_tables(case)
    sizes = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16}
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(indptr, indices, last, **sizes)
    captured = wrapper._tables.lengths
    planned(longer, wrapper=wrapper)
    planned(case, wrapper=wrapper, dense=True)
    assert wrapper._tables.lengths is case.seq_lens and captured.tolist() == [33, 20]
    last[1] += 1  # in place, and then the plan that the docstring asks for
    assert captured.tolist() == [33, 20]
    wrapper.plan(indptr, indices, last, **sizes)
    assert wrapper._tables.lengths is captured and captured.tolist() == [33, 21]


def test_the_wrapper_keeps_its_workspace(kernels):
    long, short = make_case([33, 20, 5], page_size=16), make_case([33], page_size=16)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    for case in (short, short, long, short):
        planned(case, wrapper=wrapper, dense=case is long).run(case.q, case.cache)
    (fake,) = kernels.values()
    first, *others = (buffers for _, buffers in fake.calls)
    assert all(buffers is first for buffers in others), "a captured graph writes to the first"
    planned(short).run(short.q, short.cache)
    decode_attention(short.q, *short.tables)
    assert len({id(buffers) for _, buffers in fake.calls}) == 3, "calls that may overlap share no workspace"


def test_batch_zero_launches_nothing(kernels):
    case = make_case([], page_size=16)
    out, lse = decode_attention(case.q, *case.tables, return_lse=True)
    assert out.shape == (0, 8, 128) and lse.shape == (0, 8) and not kernels


@pytest.mark.parametrize(
    "options, tile, error, match",
    [
        ({}, TileConfig(kv_stages=40), ConfigError, "shared memory: .* at most 232448 B fit"),
    ],
)
def test_what_has_no_kernel_is_refused_on_a_gpu(kernels, options, tile, error, match):
    """Public report 29: a clear line, and the torch backend takes it."""
    case = make_case([20], page_size=16, **options)
    refuse(error, match, decode_attention, case.q, *case.tables, tile=tile)
    assert not kernels
    out, lse = decode_attention(case.q, *case.tables, backend="torch", return_lse=True)
    assert_contract(out, lse, case)


def test_a_window_over_channels_is_refused_on_a_gpu(kernels):
    """Public report 29: one clear line; the torch backend takes it."""
    case = make_case([50], page_size=16, fmt=KVFormat.make(2, k_axis="channel"))
    window = foscar.AttentionOptions(window=20)
    refuse(FormatError, "takes a window with K per token in one group and V per token, not with k2cv2; backend='torch'",
           decode_attention, case.q, *case.tables, options=window)  # fmt: skip
    assert not kernels
    assert decode_attention(case.q, *case.tables, options=window, backend="torch").isfinite().all()


def test_other_gpus_are_refused(monkeypatch):
    """Public report 31: no silent fallback, and the line names what is supported."""
    case = make_case([20], page_size=16)
    monkeypatch.setattr(api_module, "_backend", lambda name, cache: "cuda")
    for arch in ("sm_89", "sm_120a"):
        monkeypatch.setattr(api_module, "device_arch", lambda device, arch=arch: arch)
        refuse(UnsupportedDeviceError, f"kernels for sm_90a .* sm_103a .* only, not for {arch}; backend='torch'",
               decode_attention, case.q, *case.tables)  # fmt: skip
    monkeypatch.undo()
    monkeypatch.setattr(api_module, "_backend", lambda name, cache: "cuda")
    monkeypatch.setattr(api_module, "device_arch", lambda device: foscar.common.launch.device_arch("cuda:0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    refuse(UnsupportedDeviceError, "NVIDIA L4 is sm_89; FOSCAR's kernels run on sm_90a .H100, H200", decode_attention,
           case.q, *case.tables)  # fmt: skip


def test_which_backend_is_automatic():
    def on(device):
        return SimpleNamespace(device=torch.device(device))

    assert api_module._backend("auto", on("cpu")) == "torch" and api_module._backend("auto", on("cuda:1")) == "cuda"
    assert api_module._backend("torch", on("cuda:1")) == "torch" and api_module._backend("cuda", on("cuda:0")) == "cuda"


def test_the_wrapper_names_its_device_as_tensors_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuse(UnsupportedDeviceError, "device 'cuda' needs a GPU, and torch sees none", BatchDecodeWithPagedKVCacheWrapper,
           "cuda")  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert BatchDecodeWithPagedKVCacheWrapper("cuda").device == torch.device("cuda:3")
    assert BatchDecodeWithPagedKVCacheWrapper("cuda:1").device == torch.device("cuda:1")
    assert BatchDecodeWithPagedKVCacheWrapper("cpu").device == torch.device("cpu")
    assert BatchDecodeWithPagedKVCacheWrapper().device is None


def test_what_the_package_exports():
    assert set(foscar.__all__) <= set(dir(foscar)) and foscar.PagedKVCache is PagedKVCache
    values = random_values((3, 2, 64), 0)
    cache = PagedKVCache(1, 16, 2, 64)
    cache.append(values, values, int32([[0]]), int32([0]), int32([0, 3]))
    assert decode_attention(values[:1].half(), cache, int32([[0]]), int32([3])).dtype == torch.float16
