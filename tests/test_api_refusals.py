"""Everything that decode_attention and the plan/run wrapper refuse, in one line each."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support.api_cases import flashinfer_tables, planned, refuse
from support.compare import assert_equal
from support.inputs import Case, int32, make_case

from foscar import (
    BatchDecodeWithPagedKVCacheWrapper,
    KVFormat,
    decode_attention,
)
from foscar.common.errors import FormatError

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
