"""decode_attention and the plan/run wrapper: results on the CPU backend."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support.api_cases import planned
from support.compare import assert_equal
from support.decode_checks import assert_contract
from support.inputs import all_formats, int32, make_case, poison_slack

from foscar import (
    BatchDecodeWithPagedKVCacheWrapper,
    decode_attention,
)

FORMATS = all_formats(groups=(None,))
SHAPES = [(64, 16), (128, 64), (128, 32), (256, 128), (64, 128), (128, 16), (256, 64)]  # head_dim, page size


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
