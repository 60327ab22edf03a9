"""Window, soft-cap, sinks, output scale and several query tokens: against dense float64 attention."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from support.compare import assert_equal
from support.inputs import POISON, all_formats, int32, live_bytes, make_case, poison_slack
from support.option_checks import (
    OptionCase,
    assert_option_contract,
    call,
    dense_attention,
    option_case,
    random_option_case,
)

import foscar
from foscar import AttentionOptions, KVFormat, decode_attention
from foscar.common.mask import Span, spans
from foscar.common.reference import attention_reference, decode_folded

FORMATS = all_formats(groups=(None, 32), params=("float16",))
CHANNEL = KVFormat.make(2, 4, k_axis="channel", v_axis="channel", k_group=16, v_group=16)
ALL = AttentionOptions(window=30, soft_cap=4.0, out_scale=0.5)
LENGTHS = [70, 0, 1, 133, 16, 5, 90]
Q_LENS = [16, 3, 1, 7, 16, 9, 0]  # rows before position 0, an empty request, a request without rows
OPTIONS = {
    "plain": AttentionOptions(),
    "window 1": AttentionOptions(window=1),
    "window 20": AttentionOptions(window=20),
    "window 129": AttentionOptions(window=129),
    "wide window": AttentionOptions(window=10**6),
    "soft-cap": AttentionOptions(soft_cap=3.0),
    "out_scale": AttentionOptions(out_scale=0.37),
    "all": ALL,
}


# ---------------------------------------------------------------------------------------------- results
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("q_lens", [None, Q_LENS], ids=["decode", "drafts"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_reference_is_dense_attention(name, q_lens, sinks):
    x = option_case(LENGTHS, q_lens, options=OPTIONS[name], sinks=sinks, page_size=16, head_dim=64, group_heads=3)
    poison_slack(x.case)
    out, lse = attention_reference(x.case.q, *x.case.tables, x.sm_scale, **x.variant)
    want, want_lse, _ = dense_attention(x)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("q_lens", [None, Q_LENS], ids=["decode", "drafts"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_combination_meets_the_contract(name, q_lens, sinks):
    x = option_case(LENGTHS, q_lens, options=OPTIONS[name], sinks=sinks, page_size=16, head_dim=64, group_heads=3)
    poison_slack(x.case)
    for base in (2, "e"):
        found = call(x, lse_base=base)
        assert_option_contract(*found, x, lse_base=base)
        for tables in ("dense", "compressed"):
            for got, want in zip(call(x, wrapper=tables, lse_base=base), found, strict=True):
                assert_equal(got, want)


@pytest.mark.parametrize("fmt", FORMATS, ids=[f.name for f in FORMATS])
def test_every_format(fmt):
    x = option_case([100, 37], [5, 16], options=ALL, sinks=True, fmt=fmt, page_size=32, head_dim=64)
    assert_option_contract(*call(x), x)


@pytest.mark.parametrize("seed", range(60))
def test_random_draws(seed):
    x = random_option_case(seed, FORMATS)
    poison_slack(x.case)
    assert_option_contract(*call(x, check=True), x)


@pytest.mark.parametrize("fmt", [KVFormat.int2(), CHANNEL], ids=["token", "channel"])
def test_blocks_of_any_size_give_the_same(fmt):
    """Rows whose window lies behind a whole block, and rows that see nothing of the last one."""
    x = option_case([200, 90], [16, 9], options=ALL, sinks=True, fmt=fmt, page_size=16, head_dim=64)
    for variant in (x, dataclasses.replace(x, sinks=None), dataclasses.replace(x, options=AttentionOptions(window=3))):
        arguments = (x.case.q, *x.case.tables, None)
        whole = decode_folded(*arguments, **variant.variant)
        for tokens in (16, 32, 48):
            for got, want in zip(decode_folded(*arguments, **variant.variant, block_tokens=tokens), whole, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------------------------- window
def test_a_window_as_wide_as_the_length_changes_nothing():
    x = option_case([40, 17], page_size=16)
    want = call(x)
    for window, same in ((40, True), (39, False)):
        got = call(dataclasses.replace(x, options=AttentionOptions(window=window)))
        for a, b in zip(got, want, strict=True):
            assert_equal(a[1], b[1], ("head", "channel"))  # 17 tokens: inside
            assert torch.equal(a[0], b[0]) == same


def test_a_window_of_one_is_the_last_token():
    x = option_case([40, 17], page_size=16, options=AttentionOptions(window=1), dtype=torch.float16)
    out, lse = call(x, lse_base="e")
    for b, length in enumerate((40, 17)):
        k, v = x.case.cache.dequantize_request(x.case.block_table[b], length)
        k, v = (y[-1].repeat_interleave(4, 0) for y in (k, v))
        torch.testing.assert_close(out[b].double(), v, rtol=2**-11, atol=1e-6)
        torch.testing.assert_close(lse[b], ((x.case.q[b].double() * k).sum(-1) / math.sqrt(128)).float())


@pytest.mark.parametrize("fmt", [KVFormat.int2(), CHANNEL], ids=["token", "channel"])
@pytest.mark.parametrize("q_lens", [None, [4, 1, 16]], ids=["decode", "drafts"])
def test_nothing_before_the_windows_is_read(q_lens, fmt):
    """As engines do that free the pages behind a window; the groups before it in its first page hold NaN."""
    lengths, page, window, group = [105, 30, 90], 32, 25, 16 if fmt is CHANNEL else 1
    options = AttentionOptions(window=window)
    x = option_case(lengths, q_lens, options=options, sinks=True, fmt=fmt, page_size=page, head_dim=64)
    want = call(x, check=True)
    assert_option_contract(*want, x)
    case = x.case
    for b, length in enumerate(lengths):
        first = max(0, length - (q_lens[b] if q_lens else 1) + 1 - window)
        for i in range(first // page):
            case.cache.data[case.block_table[b, i]] = POISON
            case.block_table[b, i] = (-1, 2**31 - 1)[i % 2]
        if unseen := first % page // group * group:
            dead = live_bytes(case.cache.layout, 0, unseen)
            case.cache.data[case.block_table[b, first // page]] |= dead.to(torch.uint8) * POISON
    for wrapper in (None, "dense", "compressed"):
        for got, expected in zip(call(x, wrapper=wrapper), want, strict=True):
            assert_equal(got, expected)
    for route in (attention_reference, decode_folded):
        assert bool(route(case.q, *case.tables, **x.variant)[0].isfinite().all())
    case.block_table[0, 3] = -1  # within the window
    with pytest.raises(ValueError, match=r"request 0 uses page \[-1\]"):
        call(x)


# ---------------------------------------------------------------------------------------------- query tokens
@pytest.mark.parametrize("options", [AttentionOptions(), ALL], ids=["plain", "all"])
def test_drafts_are_the_decodes_one_by_one(options):
    lengths, q_lens = [50, 9], [16, 5]
    x = option_case(lengths, q_lens, options=options, sinks=True, page_size=16, dtype=torch.float16)
    out, lse = call(x)
    row = 0
    for b, n in enumerate(q_lens):
        for j in range(n):
            single = dataclasses.replace(
                x.case, q=x.case.q[row : row + 1], block_table=x.case.block_table[b : b + 1],
                seq_lens=int32([lengths[b] - n + j + 1]),
            )  # fmt: skip
            got = call(OptionCase(single, None, options, x.sinks))
            torch.testing.assert_close(out[row], got[0][0], rtol=2e-3, atol=1e-5)
            torch.testing.assert_close(lse[row], got[1][0])
            row += 1


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("base", [2, "e"])
def test_rows_that_see_nothing(base, sinks):
    x = option_case([3, 0, 20], [5, 2, 1], sinks=sinks, page_size=16)
    out, lse = call(x, lse_base=base)
    unit = math.log(2.0) if base == 2 else 1.0
    want = x.sinks / unit if sinks else torch.full((8,), -math.inf)
    for row in (0, 1, 5, 6):
        assert bool((out[row] == 0).all())
        torch.testing.assert_close(lse[row], want)
    assert_option_contract(out, lse, x, lse_base=base)


@pytest.mark.parametrize("wrapper", [None, "dense", "compressed"])
def test_rows_of_no_request_are_not_written(wrapper):
    x = option_case([20, 5], [3, 2, 4], page_size=16)
    x.q_lens = [3, 2]
    out = torch.full_like(x.case.q, math.nan)
    lse = torch.full(out.shape[:2], math.nan)
    got, got_lse = call(x, wrapper=wrapper, out=out, lse=lse)
    assert got is out and bool(out[5:].isnan().all()) and not out[:5].isnan().any()
    if wrapper:
        assert got_lse is lse and bool(lse[5:].isnan().all()) and not lse[:5].isnan().any()
    x.q_lens = [0, 0]
    out.fill_(math.nan)
    call(x, wrapper=wrapper, out=out)
    assert bool(out.isnan().all())


def test_one_row_each_is_a_plain_decode():
    case = make_case([33, 0, 1], page_size=16)
    want = decode_attention(case.q, *case.tables, return_lse=True)
    indptr = torch.stack([int32([0, 1, 2, 3]), int32([9] * 4)], -1)[:, 0]  # strided
    got = decode_attention(case.q, *case.tables, return_lse=True, q_indptr=indptr, max_q_len=1)
    for a, b in zip(got, want, strict=True):
        assert_equal(a, b)


def test_no_requests():
    case = make_case([], page_size=16)
    q = torch.ones(3, 8, 128, dtype=torch.bfloat16)
    out = torch.full_like(q, math.nan)
    assert decode_attention(q, *case.tables, q_indptr=int32([0]), out=out) is out and bool(out.isnan().all())


def test_a_plan_follows_its_query_rows():
    """In place, as a captured graph does: fewer drafts, another length."""
    x = option_case([40, 30], [4, 4], options=ALL, page_size=16)
    case, q_indptr = x.case, x.q_indptr
    wrapper = foscar.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(
        block_table=case.block_table, seq_lens=case.seq_lens, num_qo_heads=8, num_kv_heads=2, head_dim=128,
        page_size=16, options=ALL, q_indptr=q_indptr, max_q_len=4,
    )  # fmt: skip
    assert_equal(wrapper.run(case.q, case.cache), call(x)[0])
    q_indptr.copy_(int32([0, 1, 4]))
    case.seq_lens.copy_(int32([37, 25]))
    x.q_lens = [1, 3]
    assert_equal(wrapper.run(case.q, case.cache)[:4], call(x)[0][:4])


# ---------------------------------------------------------------------------------------------- logits, sinks, output
def test_a_soft_cap_bounds_the_logits():
    x = option_case([60], page_size=16, sm_scale=100.0, options=AttentionOptions(soft_cap=5.0))
    lse = call(x, lse_base="e")[1]
    assert bool(((lse - math.log(60)).abs() <= 5.0 + 1e-5).all())
    small = dataclasses.replace(x, sm_scale=1e-3, options=AttentionOptions(soft_cap=1e4))
    want = call(dataclasses.replace(small, options=AttentionOptions()))
    for got, expected in zip(call(small), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_the_output_scale_leaves_the_lse():
    x = option_case([60, 9], page_size=16)
    out, lse = call(x)
    scaled, same = call(dataclasses.replace(x, options=AttentionOptions(out_scale=0.25)))
    assert_equal(scaled, out * 0.25)
    assert_equal(same, lse)


def test_sinks_join_the_denominator_only():
    """q = 0: every token and a sink of 0 weigh 1."""
    x = option_case([9, 60], page_size=16, dtype=torch.float16)
    x.case.q.zero_()
    x.sinks = torch.tensor([0.0, math.log(2), -math.inf, 80.0] * 2)
    out, lse = call(x, lse_base="e")
    for b, length in enumerate((9, 60)):
        _, v = x.case.cache.dequantize_request(x.case.block_table[b], length)
        total = v.sum(0).repeat_interleave(4, 0)
        z = length + x.sinks.double().exp()
        torch.testing.assert_close(out[b].double(), total / z[:, None], rtol=2e-3, atol=1e-6)
        torch.testing.assert_close(lse[b].double(), z.log())
    x.sinks.fill_(-math.inf)
    for got, want in zip(call(x), call(dataclasses.replace(x, sinks=None)), strict=True):
        torch.testing.assert_close(got, want)


def test_nan_stays_in_its_request():
    """Public report 34, with options and drafts."""
    x = option_case([40, 50, 20], [3, 2, 4], options=ALL, sinks=True, page_size=16)
    want, want_lse = call(x)
    case = x.case
    case.cache.data[case.block_table[1, :4].long()] = POISON
    out, lse = call(x)
    bad = torch.tensor([row in (3, 4) for row in range(9)])
    assert bool(out[bad].isnan().all()) and bool(lse[bad].isnan().all())
    assert_equal(out[~bad], want[~bad])
    assert_equal(lse[~bad], want_lse[~bad])


# ---------------------------------------------------------------------------------------------- the masks
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_spans_and_masks(window):
    lengths, q_lens = [0, 1, 5, 12, 7], [2, 1, 8, 4, 0]
    bounds = [0, *itertools.accumulate(q_lens)]
    found = {span.request: span for span in spans(lengths, bounds, window)}
    for b, (length, n) in enumerate(zip(lengths, q_lens, strict=True)):
        seen = torch.zeros(n, length, dtype=torch.bool)
        for j in range(n):
            for t in range(length):
                position = length - n + j
                seen[j, t] = t <= position and (window is None or t > position - window)
        live = [j for j in range(n) if seen[j].any()]
        assert (b in found) == bool(live)
        if not live:
            continue
        span = found[b]
        assert range(span.row, span.row_stop) == range(bounds[b] + live[0], bounds[b] + live[-1] + 1)
        assert (span.first, span.stop) == (int(seen.any(0).nonzero()[0]), length) and span.rows == len(live)
        for start, stop in itertools.combinations(range(length + 1), 2):
            mask, want = span.visible(start, stop), seen[live[0] :, start:stop]
            assert bool(want.all()) if mask is None else torch.equal(mask, want) and not want.all()


def test_spans_of_single_rows():
    assert spans([4, 0, 9], window=3) == [Span(0, 0, 1, 1, 4, 3), Span(2, 2, 3, 6, 9, 3)]
