"""Appends to token groups (axis "channel") that are filled bit by bit."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_equal
from support.inputs import POISON, indptr_of, int32, make_case, random_values, shuffled_table

from foscar.common.cache import PagedKVCache
from foscar.common.formats import KVFormat

NAMES = ("token", "head", "channel")
CHANNEL = [
    pytest.param(KVFormat.make(b, k_axis="channel", v_axis="channel", k_group=g, v_group=g), p, id=f"{b}bits-g{g}-p{p}")
    for b, g, p in ((2, None, 16), (4, 16, 64), (2, 64, 16), (4, 128, 32))
]


@pytest.mark.parametrize("fmt, page_size", CHANNEL)
def test_channel_axis_whole_groups_give_the_same_bytes(fmt, page_size):
    group = fmt.k.group or page_size
    lengths = [3 * group + 5, group]
    whole = make_case(lengths, fmt=fmt, page_size=page_size, head_dim=64)
    cache = PagedKVCache(whole.cache.num_pages, page_size, 2, 64, fmt)
    cache.data.fill_(POISON)
    begins = indptr_of(lengths).tolist()
    for done, sizes in (([0, 0], [group, 0]), ([group, 0], [2 * group, group]), ([3 * group, group], [5, 0])):
        rows = torch.cat([torch.arange(begins[b] + done[b], begins[b] + done[b] + n) for b, n in enumerate(sizes)])
        cache.append(whole.k[rows], whole.v[rows], whole.block_table, int32(done), indptr_of(sizes))
    assert torch.equal(cache.data, whole.cache.data)


@pytest.mark.parametrize("fmt, page_size", CHANNEL)
def test_values_within_the_range_keep_parameters_and_codes(fmt, page_size):
    """Half a group with its extremes, then values within them, over page boundaries where the group is larger."""
    group = fmt.k.group or page_size
    cache = PagedKVCache(20, page_size, 2, 64, fmt)
    cache.data.fill_(POISON)
    table = shuffled_table([2 * group], page_size, 20, 1)
    old = random_values((group + group // 2, 2, 64), 0)
    cache.append(old, -old, table, int32([0]), int32([0, len(old)]))
    before = cache.dequantize_request(table[0], len(old))
    between = torch.rand(group // 2, 2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    lo, hi = ([x[group:].aminmax(dim=0)[i] for x in before] for i in (0, 1))
    new = [a + (b - a) * between for a, b in zip(lo, hi, strict=True)]
    cache.append(new[0][:-1], new[1][:-1], table, int32([len(old)]), int32([0, len(between) - 1]))
    cache.append(new[0][-1:], new[1][-1:], table, int32([2 * group - 1]))
    after = cache.dequantize_request(table[0], 2 * group)
    for i in (0, 1):
        assert_equal(after[i][: len(old)], before[i], NAMES)
        step = (hi[i] - lo[i]) / fmt.k.max_code
        assert bool(((after[i][len(old) :] - new[i]).abs() <= step * 0.501).all())
    scale = cache.read_tokens(table[0], 0, 2 * group)[0].scale
    per_group = max(1, group // page_size)  # stored copies of one pair
    copies = scale.view(2, per_group, 2, 64) if group >= page_size else scale[:, None]
    assert bool((copies == copies[:, :1]).all())


def test_old_codes_stay_where_float32_cannot_tell_them_apart():
    """Steps of 2**-24 above 1: the old tokens' values, read back in float32, would round to other codes."""
    cache = PagedKVCache(2, 16, 1, 64, KVFormat.make(2, k_axis="channel", v_axis="channel"))
    old = (1 + torch.arange(4, dtype=torch.float64) * 2.0**-24)[:, None, None].expand(4, 1, 64)
    cache.append(old, old, int32([[1]]), int32([0]), int32([0, 4]))
    one = torch.ones(1, 1, 64)
    cache.append(one, one, int32([[1]]), int32([4]))
    for x in cache.dequantize_request(int32([1]), 5):
        assert_equal(x, torch.cat([old, one.double()]), NAMES)


@pytest.mark.parametrize("fmt, page_size", CHANNEL)
def test_values_beyond_the_range_requantize_their_channel_only(fmt, page_size):
    group = fmt.k.group or page_size
    n = group // 2 + 1
    cache = PagedKVCache(20, page_size, 2, 64, fmt)
    cache.data.fill_(POISON)
    table = shuffled_table([group], page_size, 20, 2)
    old = random_values((n, 2, 64), 0, torch.float64)
    cache.append(old, old, table, int32([0]), int32([0, n]))
    before = cache.dequantize_request(table[0], n)[0]
    new = before[:1].clone()
    new[0, 1, 9] = before[:, 1, 9].max() + 20
    cache.append(new, new, table, int32([n]))
    q, _ = cache.read_tokens(table[0], 0, n + 1)
    after = cache.dequantize_request(table[0], n + 1)[0]
    others = torch.ones(2, 64, dtype=torch.bool)
    others[1, 9] = False
    assert_equal(after[:n][:, others], before[:, others], ("token", "channel"))
    step = q.scale[0, 1, 9].double()
    assert bool(((after[:n, 1, 9] - before[:, 1, 9]).abs() <= step * 0.501).all())
    assert (after[n, 1, 9] - new[0, 1, 9]).abs() <= step * 0.501


@pytest.mark.parametrize("fmt, page_size", CHANNEL)
def test_token_by_token_through_channel_groups(fmt, page_size):
    """Each requantization costs at most half a step of the final scale; a constant start costs nothing."""
    group = fmt.k.group or page_size
    total = group + group // 2
    cache = PagedKVCache(20, page_size, 2, 64, fmt)
    cache.data.fill_(POISON)
    table = shuffled_table([total], page_size, 20, 3)
    x = random_values((total, 2, 64), 5) * 0.1
    x[:3] = x[0]  # equal at first: the range of one value must not count as 0 .. max_code
    changes = torch.zeros(2, 2, 64)
    last = None
    for i in range(total):
        cache.append(x[i : i + 1], x[i : i + 1], table, int32([i]))
        q, _ = cache.read_tokens(table[0], 0, i + 1)
        scale = q.scale[-1].float()
        if i % group:
            changes[i // group] += scale != last
        last = scale
    got, _ = cache.dequantize_request(table[0], total)
    q, _ = cache.read_tokens(table[0], 0, total)
    per_token = q.scale.double().repeat_interleave(min(group, page_size), 0)[:total]
    allowed = per_token * 0.5 * (1 + changes.repeat_interleave(group, 0)[:total]) * 1.01
    assert bool(((got - x).abs() <= allowed).all())
    assert float(per_token.max()) < 0.6  # a scale of 1, left by a constant start, would be worse


def test_value_by_value_drifts_as_documented():
    """PagedKVCache.append: every value widens the range, and 0.95 of it is lost in the end; whole groups lose half a
    step."""
    fmt = KVFormat.make(2, k_axis="channel", v_axis="channel")
    x = torch.linspace(0, 1, 128)[:, None, None].repeat(1, 1, 64)
    errors = []
    for step in (1, 128):
        cache = PagedKVCache(1, 128, 1, 64, fmt)
        for i in range(0, 128, step):
            part = x[i : i + step]
            cache.append(part, part, int32([[0]]), int32([i]), int32([0, step]))
        errors.append(float((cache.dequantize_request(int32([0]), 128)[0] - x).abs().max()))
    assert 0.9 < errors[0] <= 1 and errors[1] < 0.17


def test_appends_to_a_group_that_holds_nan():
    cache = PagedKVCache(2, 16, 2, 64, KVFormat.make(2, k_axis="channel"))
    bad = torch.ones(3, 2, 64)
    bad[1, 1, 7] = torch.nan
    cache.append(bad, bad.nan_to_num(), int32([[1]]), int32([0]), int32([0, 3]), check=False)
    before, one = cache.data.clone(), torch.ones(1, 2, 64)
    where = r"k\[request 0, positions 3:4, head 1, channel 7\]: the tokens before it, from position 0, hold NaN"
    with pytest.raises(ValueError, match=where) as error:
        cache.append(one, one, int32([[1]]), int32([3]))
    assert "\n" not in str(error.value) and torch.equal(cache.data, before)
    cache.append(one, one, int32([[1]]), int32([3]), check=False)
    assert int(cache.dequantize_request(int32([1]), 4)[0].isnan().sum()) == 4


def test_old_pages_of_a_channel_group_are_checked():
    cache = PagedKVCache(4, 16, 2, 64, KVFormat.make(2, k_axis="channel", k_group=64))
    with pytest.raises(ValueError, match="page id -1"):
        cache.append(torch.zeros(1, 2, 64), torch.zeros(1, 2, 64), int32([[-1, 1]]), int32([16]))


def cut_prefix(length: int):
    """Two requests with the same first page, of groups of 64 tokens in pages of 16; the second has its own others."""
    cache = PagedKVCache(20, 16, 1, 64, KVFormat.make(2, k_axis="channel", k_group=64, v_axis="token"))
    table = torch.arange(16, dtype=torch.int32).view(2, 8)
    table[1, :1] = table[0, :1]
    x = random_values((length, 1, 64), 3)
    return cache, table, x


@pytest.mark.parametrize("length, shared", [(20, 1), (63, 1), (80, 4), (80, 5)])
def test_a_group_that_a_shared_prefix_cuts_is_not_appended_to(length, shared):
    """Its parameters lie in a page below the length, which another request of the batch has, too."""
    cache, table, x = cut_prefix(length)
    cache.append(x, x, table[:1], int32([0]), int32([0, length]))
    table[1, :shared] = table[0, :shared]
    before = cache.data.clone()
    one = x[:2]
    if length // 64 * 64 // 16 >= shared:  # the group's pages are the request's own
        cache.append(one, one, table, int32([length, length]))
        return
    for tables, starts, indptr in ((table, [length] * 2, None), (table, [length, length], [0, 0, 2])):
        with pytest.raises(ValueError, match=r"page \d+ is of requests \[0, 1\], and request . appends") as error:
            cache.append(one, one, tables, int32(starts), None if indptr is None else int32(indptr))
        assert "\n" not in str(error.value) and torch.equal(cache.data, before)
    copies = table.clone()  # of the pages of the group
    for i in range(length // 64 * 4, shared):
        copies[1, i] = 16 + i % 4
        cache.data[16 + i % 4] = cache.data[int(table[0, i])]
    cache.append(one, one, copies, int32([length, length]))


def test_whole_groups_may_be_shared():
    cache, table, x = cut_prefix(64)
    cache.append(x, x, table[:1], int32([0]), int32([0, 64]))
    table[1, :4] = table[0, :4]
    before = cache.data[:4].clone()
    cache.append(x[:2], x[:2], table, int32([64, 64]))
    assert torch.equal(cache.data[:4], before)
