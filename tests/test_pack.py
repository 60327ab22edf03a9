"""Codes, row bytes, records: against the layout's own functions, one byte at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inputs import all_formats, fits, random_values

from foscar.common.formats import KVFormat
from foscar.common.pack import (
    pack_codes,
    pack_record,
    param_bytes,
    params_from_bytes,
    record_tables,
    unpack_codes,
    unpack_record,
)
from foscar.common.quantize import dequantize, quantize

CPU = torch.device("cpu")
LAYOUTS = [
    pytest.param(f.layout(d, p), id=f"{f.name}-d{d}-p{p}")
    for f in all_formats(groups=(None, 32, 128), params=("float16", "bfloat16"))
    for d, p in ((64, 16), (128, 64))
    if fits(f, d, p)
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from((2, 4)), st.sampled_from((64, 128, 256)), st.integers(0, 2**32 - 1))
def test_planar_order(bits, head_dim, seed):
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (3, 2, head_dim), generator=gen, dtype=torch.uint8)
    rows = pack_codes(codes, bits)
    width = head_dim * bits // 8
    assert rows.shape == (3, 2, width) and torch.equal(unpack_codes(rows, bits), codes)
    for channel in range(head_dim):
        position, byte = divmod(channel, width)
        assert torch.equal((rows[..., byte] >> (bits * position)) & ((1 << bits) - 1), codes[..., channel])


@pytest.mark.parametrize("bits", [2, 4])
def test_one_hot_codes_touch_their_bits_only(bits):
    for channel in range(0, 64, 3):
        codes = torch.zeros(64, dtype=torch.uint8)
        codes[channel] = (1 << bits) - 1
        rows = pack_codes(codes, bits)
        position, byte = divmod(channel, 64 * bits // 8)
        assert rows.nonzero().tolist() == [[byte]] and int(rows[byte]) == ((1 << bits) - 1) << (bits * position)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pairs_are_scale_then_bias(dtype):
    scale, bias = torch.tensor([1.5, 2.0**-14]).to(dtype), torch.tensor([-3.0, float("nan")]).to(dtype)
    pairs = param_bytes(scale, bias)
    assert pairs.shape == (2, 4) and torch.equal(pairs[:, :2].contiguous().view(dtype)[:, 0], scale)
    back = params_from_bytes(pairs, dtype)
    assert torch.equal(back[0], scale) and torch.equal(back[1].view(torch.int16), bias.view(torch.int16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_records_follow_the_layout(layout):
    pages, heads, page = 4 if layout.k_group > layout.page_size else 2, 2, layout.page_size
    tensors = [random_values((pages * page, heads, layout.head_dim), s) for s in (1, 2)]
    formats, groups = (layout.format.k, layout.format.v), (layout.k_group, layout.v_group)
    k, v = (
        quantize(x, f, group=g, params=layout.format.params) for x, f, g in zip(tensors, formats, groups, strict=True)
    )
    records = pack_record(layout, k, v)
    assert records.shape == (pages, heads, layout.record_bytes)

    sides = ((k, layout.k_byte, layout.k_param), (v, layout.v_byte, layout.v_param))
    gen = torch.Generator().manual_seed(0)
    for (q, byte, param), f, group in zip(sides, formats, groups, strict=True):
        rows = pack_codes(q.codes, f.bits)
        for _ in range(150):
            token, head, channel = (
                int(torch.randint(0, n, (1,), generator=gen)) for n in (pages * page, heads, layout.head_dim)
            )
            p, slot = divmod(token, page)
            i = channel % rows.shape[-1]
            assert records[p, head, byte(slot, i)] == rows[token, head, i]
            pair = (token, head, channel // group) if f.axis == "token" else (token // group, head, channel)
            at = param(slot, channel)
            want = param_bytes(q.scale[pair], q.bias[pair])
            assert torch.equal(records[p, head, at : at + 4], want)

    tables = record_tables(layout, CPU)
    for x, packed, table in zip((k, v), unpack_record(layout, records), (tables.k, tables.v), strict=True):
        group = layout.k_group if x is k else layout.v_group
        assert torch.equal(packed.codes, x.codes)
        got = dequantize(packed, table.format, group=table.group)
        assert torch.equal(got, dequantize(x, table.format, group=group))


def test_tables_are_built_once_and_cover_the_record():
    layout = KVFormat.make(2, 4, k_axis="channel", k_group=16).layout(128, 64)
    tables = record_tables(layout, CPU)
    assert record_tables(layout, CPU) is tables
    offsets = torch.cat([t.flatten() for t in (tables.k.codes, tables.k.params, tables.v.codes, tables.v.params)])
    assert offsets.dtype == torch.int64
    assert torch.equal(offsets.sort().values, torch.arange(layout.record_bytes))


def test_unpacking_a_strided_view():
    layout = KVFormat.int2().layout(64, 16)
    x = random_values((32, 3, 64), 0)
    q = quantize(x, layout.format.k)
    records = pack_record(layout, q, q)
    wide = torch.full((2, 2, 3, layout.record_bytes), 255, dtype=torch.uint8)
    wide[:, 1] = records
    assert torch.equal(unpack_record(layout, wide[:, 1])[0].codes, q.codes)


def test_pack_record_errors():
    layout = KVFormat.int2().layout(64, 16)
    q = quantize(random_values((20, 1, 64), 0), layout.format.k)
    with pytest.raises(ValueError, match="pages"):
        pack_record(layout, q, q)
    q = quantize(random_values((16, 1, 64), 0), layout.format.k, params=torch.bfloat16)
    with pytest.raises(ValueError, match="float16"):
        pack_record(layout, q, q)
