"""head_dim 80, 96 and 112: stored as 128, read back and decoded as themselves."""

from __future__ import annotations

import math

import pytest
import torch
from support.compare import assert_equal, assert_meets_contract
from support.inputs import POISON, all_formats, fits, indptr_of, int32, make_case, poison_slack, random_values

import foscar
from foscar.common.cache import PagedKVCache
from foscar.common.errors import FormatError
from foscar.common.formats import KVFormat
from foscar.common.pack import pack_record, record_tables, unpack_record
from foscar.common.quantize import CONSTANT_SCALE, dequantize, quantize
from foscar.common.reference import attention_bf16, attention_reference, decode_folded

DIMS = (80, 96, 112)
NAMES = ("token", "head", "channel")
FORMATS = [
    pytest.param(f, d, id=f"{f.name}-d{d}")
    for f in all_formats(groups=(None, 32, 64), params=("float16",))
    for d in DIMS
    if fits(f, d, 32)
]


def quantized_by_group(x, f, group, params):
    """Each channel group on its own, so that no padding can reach its parameters."""
    if f.axis == "channel":
        return dequantize(quantize(x, f, group=group, params=params), f, group=group, dtype=torch.float64)
    parts = x.split(group, dim=-1)
    parts = [
        dequantize(quantize(p, f, group=p.shape[-1], params=params), f, group=p.shape[-1], dtype=torch.float64)
        for p in parts
    ]
    return torch.cat(parts, dim=-1)


def check_values(cache, table_row, k, v):
    got = cache.dequantize_request(table_row, len(k))
    layout, fmt = cache.layout, cache.format
    for x, values, f, group in ((got[0], k, fmt.k, layout.k_group), (got[1], v, fmt.v, layout.v_group)):
        assert x.shape == values.shape
        assert_equal(x, quantized_by_group(values, f, group, fmt.params), NAMES)


@pytest.mark.parametrize("fmt, head_dim", FORMATS)
def test_values_read_back(fmt, head_dim):
    """Values far from 0: a padding channel of 0 in a group would move its minimum."""
    lengths = [64, 0, 37]
    k = random_values((101, 2, head_dim), 0, mean=1.0) + 50
    case = make_case(lengths, fmt=fmt, page_size=32, head_dim=head_dim, k=k, v=-k, dtype=torch.float32)
    assert case.cache.head_dim == head_dim and case.cache.layout.padded_head_dim == 128
    check_values(case.cache, case.block_table[0], k[:64], -k[:64])
    check_values(case.cache, case.block_table[2], k[64:], -k[64:])


@pytest.mark.parametrize("fmt, head_dim", FORMATS)
def test_padding_holds_codes_0_and_finite_pairs(fmt, head_dim):
    """What a kernel reads with a query of zeros must not be NaN."""
    case = make_case([32], fmt=fmt, page_size=32, head_dim=head_dim, extra_pages=0)
    for x, table in zip(case.cache.read_tokens(case.block_table[0], 0, 32), ("k", "v"), strict=True):
        f = getattr(fmt, table)
        assert x.codes.shape[-1] == 128 and not bool(x.codes[..., head_dim:].any())
        assert bool(x.scale.isfinite().all()) and bool(x.bias.isfinite().all())
        group = getattr(record_tables(case.cache.layout, case.cache.device), table).group
        used = -(-head_dim // group) if f.axis == "token" else head_dim
        assert bool((x.scale[..., used:] == CONSTANT_SCALE).all()) and not bool(x.bias[..., used:].any())


@pytest.mark.parametrize("fmt, head_dim", FORMATS)
def test_decode_meets_the_contract(fmt, head_dim):
    case = make_case([69, 1, 0, 32], fmt=fmt, page_size=32, head_dim=head_dim, group_heads=3)
    poison_slack(case)
    out, lse = decode_folded(case.q, *case.tables)
    assert_meets_contract(out, lse, case.q, *case.tables)
    for route in (attention_bf16, attention_reference):
        assert route(case.q, *case.tables)[0].shape == case.q.shape


@pytest.mark.parametrize("k_axis, group", [("channel", None), ("token", None), ("token", 64)])
@pytest.mark.parametrize("head_dim", DIMS)
def test_reference_is_attention_of_the_real_channels(head_dim, k_axis, group):
    """The scale too: 1 / sqrt(head_dim), not of the padded one.  Padding channels of a group share its bias."""
    fmt = KVFormat.make(4, k_axis=k_axis, k_group=group, v_group=group)
    case = make_case([45], page_size=16, head_dim=head_dim, fmt=fmt)
    k, v = (x.transpose(0, 1) for x in case.cache.dequantize_request(case.block_table[0], 45))
    q = case.q[0].double().unflatten(0, (2, -1))
    s = q @ k.transpose(1, 2) / math.sqrt(head_dim)
    out, lse = attention_reference(case.q, *case.tables)
    torch.testing.assert_close(out[0].unflatten(0, (2, -1)), s.softmax(-1) @ v, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse[0].unflatten(0, (2, -1)), s.logsumexp(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head_dim", DIMS)
def test_api(head_dim):
    case = make_case([45, 7], page_size=16, head_dim=head_dim)
    poison = torch.full_like(case.q, torch.nan)
    out, lse = foscar.decode_attention(case.q, *case.tables, out=poison, return_lse=True, lse_base="e")
    assert out is poison
    want, want_lse = decode_folded(case.q, *case.tables)
    assert_equal(out, want.to(out.dtype))
    assert_equal(lse, want_lse)
    attention = foscar.BatchDecodeWithPagedKVCacheWrapper()
    attention.plan(block_table=case.block_table, seq_lens=case.seq_lens, num_qo_heads=8, num_kv_heads=2,
                   head_dim=head_dim, page_size=16, format=case.cache.format)  # fmt: skip
    assert_equal(attention.run(case.q, case.cache), out)
    for wrong in (head_dim - 8, 128):
        with pytest.raises(ValueError, match=f"head_dim. = .2, ., {head_dim}."):
            foscar.decode_attention(case.q.new_zeros(2, 8, wrong), *case.tables)


@pytest.mark.parametrize("k_axis, v_axis, group", [("channel", "channel", 32), ("token", "token", 32)])
def test_pieces_give_the_bytes_of_the_whole(k_axis, v_axis, group):
    fmt = KVFormat.make(2, 4, k_axis=k_axis, v_axis=v_axis, k_group=group, v_group=group)
    whole = make_case([96, 50], fmt=fmt, page_size=16, head_dim=80)
    cache = PagedKVCache(whole.cache.num_pages, 16, 2, 80, fmt)
    cache.data.fill_(POISON)
    for done, sizes in (([0, 0], [32, 32]), ([32, 32], [64, 0]), ([96, 32], [0, 18])):
        rows = torch.cat([torch.arange(b * 96 + done[b], b * 96 + done[b] + n) for b, n in enumerate(sizes)])
        cache.append(whole.k[rows], whole.v[rows], whole.block_table, int32(done), indptr_of(sizes))
    assert torch.equal(cache.data, whole.cache.data)


def test_a_group_filled_bit_by_bit():
    """The old codes of a token group are read back without padding."""
    fmt = KVFormat.make(4, k_axis="channel", v_axis="channel")
    cache = PagedKVCache(1, 32, 2, 112, fmt)
    cache.data.fill_(POISON)
    x = random_values((20, 2, 112), 3)
    for i in range(20):
        cache.append(x[i : i + 1], x[i : i + 1], int32([[0]]), int32([i]))
    step = cache.read_tokens(int32([0]), 0, 20)[0].scale[..., :112].double()
    error = (cache.dequantize_request(int32([0]), 20)[0] - x).abs()
    assert bool((error <= 10 * step).all()) and bool((error.mean(0) < step).all())


@pytest.mark.parametrize("fmt", [KVFormat.int2(), KVFormat.make(4, 2, k_group=32, v_axis="channel")], ids=str)
def test_pack_record_pads(fmt):
    layout = fmt.layout(96, 16)
    group = [96 if f.axis == "token" and f.group is None else f.resolved_group(96, 16) for f in (fmt.k, fmt.v)]
    k, v = (quantize(random_values((32, 2, 96), i), f, group=group[i]) for i, f in enumerate((fmt.k, fmt.v)))
    for got, want in zip(unpack_record(layout, pack_record(layout, k, v)), (k, v), strict=True):
        pairs = want.scale.shape[-1]
        assert torch.equal(got.codes[..., :96], want.codes) and not bool(got.codes[..., 96:].any())
        assert torch.equal(got.scale[..., :pairs], want.scale) and torch.equal(got.bias[..., :pairs], want.bias)


@pytest.mark.parametrize("head_dim", DIMS)
def test_the_record_is_that_of_128_channels(head_dim):
    for fmt in (KVFormat.int2(), KVFormat.make(4, k_axis="channel")):
        padded, whole = fmt.layout(head_dim, 64), fmt.layout(128, 64)
        assert padded.record_bytes == whole.record_bytes and padded.kernel_format == fmt
        assert padded.k_byte(3, 5) == whole.k_byte(3, 5) and padded.v_param(3, 5) == whole.v_param(3, 5)


def test_a_group_of_all_channels_is_one_group():
    fmt = KVFormat.make(2, k_group=96)
    layout = fmt.layout(96, 16)
    assert layout.k_group == 128 and layout.kernel_format == KVFormat.int2() and fmt.layout(96, 16) == layout
    with pytest.raises(FormatError, match="a group of 96 channels does not divide head_dim 128"):
        fmt.layout(112, 16)


def test_a_nan_reaches_the_real_channels_of_its_group_only():
    """Public report 34."""
    k = random_values((5, 2, 80), 0)
    k[3, 1, 70] = torch.nan
    cache = PagedKVCache(1, 16, 2, 80, KVFormat.make(2, k_group=32))
    with pytest.raises(ValueError, match=r"k\[token 3, head 1, channels 64:"):
        cache.append(k, k.nan_to_num(), int32([[0]]), int32([0]), int32([0, 5]))
    cache.append(k, k.nan_to_num(), int32([[0]]), int32([0]), int32([0, 5]), check=False)
    bad = cache.dequantize_request(int32([0]), 5)[0].isnan()
    want = torch.zeros_like(bad)
    want[3, 1, 64:] = True
    assert torch.equal(bad, want)
