"""Caches of other projects, packed here from random codes as those projects lay them out, converted and decoded.

The expected values are each project's own formula.
"""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_equal
from support.foreign import NAMES, check, kivi_words, qserve_blocks, random_codes, random_params
from support.inputs import random_values

import foscar
from foscar import FormatError, KVFormat
from foscar.common.quantize import CONSTANT_SCALE, dequantize, quantize
from foscar.common.reference import relative_error
from foscar.convert import Dense, add_kivi_residual, from_kivi, from_oscar, from_qserve, from_quantized

ROUNDING = 2.0**-11  # of a parameter to float16


# ---------------------------------------------------------------------------------------------------------- KIVI
@pytest.mark.parametrize("k_bits, v_bits", [(2, 2), (4, 4), (2, 4), (4, 2)])
@pytest.mark.parametrize("group, page_size", [(32, 64), (64, 16), (128, 64)])
def test_kivi(k_bits, v_bits, group, page_size):
    """K is further than V by a part of a residual, as it is in the project's cache most of the time."""
    batch, heads, head_dim, k_tokens, v_tokens = 2, 2, 128, 256, 203
    k, v = (
        random_codes((batch, heads, head_dim, k_tokens), k_bits, 0),
        random_codes((batch, heads, v_tokens, head_dim), v_bits, 1),
    )
    k_scale, k_min = random_params((batch, heads, head_dim, k_tokens // group), 2)
    v_scale, v_min = random_params((batch, heads, v_tokens, head_dim // group), 3)
    converted = from_kivi(
        kivi_words(k, k_bits, 3), k_scale, k_min, kivi_words(v, v_bits, 3), v_scale, v_min,
        k_bits=k_bits, v_bits=v_bits, page_size=page_size,
    )  # fmt: skip
    keys = k.double() * k_scale.double().repeat_interleave(group, 3) + k_min.double().repeat_interleave(group, 3)
    values = v.double() * v_scale.double().repeat_interleave(group, 3) + v_min.double().repeat_interleave(group, 3)
    check(converted, [(keys[b].permute(2, 0, 1)[:v_tokens], values[b].transpose(0, 1)) for b in range(batch)])


def test_kivi_with_its_residual():
    """203 + 128 tokens: K is quantized up to 256 and V up to 203, the rest is in fp16; decoded, and 40 tokens later."""
    batch, heads, head_dim, group, total = 2, 2, 64, 32, 331
    k, v = random_codes((batch, heads, head_dim, 256), 2, 0), random_codes((batch, heads, 203, head_dim), 2, 1)
    k_scale, k_min = random_params((batch, heads, head_dim, 256 // group), 2)
    v_scale, v_min = random_params((batch, heads, 203, head_dim // group), 3)
    k_full, v_full = (random_values((batch, heads, n, head_dim), s, torch.float16) for n, s in ((75, 4), (128, 5)))
    keys = (k * k_scale.repeat_interleave(group, 3) + k_min.repeat_interleave(group, 3)).half().transpose(2, 3)
    part = from_kivi(kivi_words(k, 2, 3), k_scale, k_min, kivi_words(v, 2, 3), v_scale, v_min)
    whole = add_kivi_residual(part, torch.cat([keys[:, :, 203:], k_full], 2), v_full)
    assert whole.seq_lens.tolist() == [total] * batch
    exact_k = k.double() * k_scale.double().repeat_interleave(group, 3) + k_min.double().repeat_interleave(group, 3)
    exact_v = v.double() * v_scale.double().repeat_interleave(group, 3) + v_min.double().repeat_interleave(group, 3)
    want_k = torch.cat([exact_k.transpose(2, 3)[:, :, :203], keys[:, :, 203:].double(), k_full.double()], 2)
    want_v = torch.cat([exact_v, v_full.double()], 2)
    q = random_values((batch, 3 * heads, head_dim), 9, torch.float16, mean=0.5)
    out = foscar.decode_windowed(q, whole.cache, whole.block_table, whole.seq_lens, whole.slot_ids, sm_scale=0.05)
    for b in range(batch):
        got = whole.cache.read_request(whole.block_table[b], total, b)
        assert_equal(got[0], want_k[b].transpose(0, 1), NAMES)
        assert_equal(got[1], want_v[b].transpose(0, 1), NAMES)
        s = torch.einsum("hgc,hnc->hgn", q[b].double().unflatten(0, (heads, -1)), want_k[b]) * 0.05
        want = torch.einsum("hgn,hnc->hgc", s.softmax(-1), want_v[b]).flatten(0, 1)
        assert relative_error(out[b], want) <= 2 * relative_error(want.half(), want)
    fmt = part.cache.format
    new = random_values((batch * 21, heads, head_dim), 6)  # 21 more complete K's group of tokens 192 .. 223
    indptr = torch.tensor([0, 21, 42], dtype=torch.int32)
    whole.cache.append(new, new, whole.block_table, whole.seq_lens, whole.slot_ids, indptr)
    for b in range(batch):
        k_then, v_then = whole.cache.read_request(whole.block_table[b], total + 21, b)
        assert int(whole.cache.packed_lens[b]) == 224
        torch.testing.assert_close(k_then[:total], want_k[b].transpose(0, 1), rtol=2e-3, atol=2e-3)
        left = v_full[b].transpose(0, 1)[:21]
        left = dequantize(quantize(left, fmt.v, group=group), fmt.v, group=group, dtype=torch.float64)
        assert_equal(v_then[:224], torch.cat([exact_v[b].transpose(0, 1), left]), NAMES)


def test_kivi_groups_of_one_value():
    """Public report 18: the project divides by the range, 0, so that codes mean nothing; the scale is 0."""
    k, v = random_codes((1, 1, 64, 32), 2, 0), random_codes((1, 1, 32, 64), 2, 1)
    k_scale, k_min = random_params((1, 1, 64, 1), 2)
    v_scale, v_min = random_params((1, 1, 32, 2), 3)
    k_scale[0, 0, 5], v_scale[0, 0, 7, 1] = 0, 0
    converted = from_kivi(kivi_words(k, 2, 3), k_scale, k_min, kivi_words(v, 2, 3), v_scale, v_min)
    keys = (k.double() * k_scale.double() + k_min.double())[0].permute(2, 0, 1)
    values = (v.double() * v_scale.double().repeat_interleave(32, 3) + v_min.double().repeat_interleave(32, 3))[0]
    check(converted, [(keys, values.transpose(0, 1))])
    read_k, read_v = converted.cache.read_tokens(converted.block_table[0], 0, 32)
    assert bool((read_k.scale[:, 0, 5] == CONSTANT_SCALE).all()) and not bool(read_k.codes[:, 0, 5].any())
    assert read_v.scale[7, 0, 1] == CONSTANT_SCALE and not bool(read_v.codes[7, 0, 32:].any())


def test_kivi_errors():
    def arguments(**change):
        words = torch.zeros(1, 2, 64, 2, dtype=torch.int32), torch.zeros(1, 2, 32, 4, dtype=torch.int32)
        one = {"k_codes": words[0], "k_scale": torch.ones(1, 2, 64, 1), "k_min": torch.ones(1, 2, 64, 1),
               "v_codes": words[1], "v_scale": torch.ones(1, 2, 32, 2), "v_min": torch.ones(1, 2, 32, 2)}  # fmt: skip
        return one | change

    from_kivi(**arguments())
    for change, kind, message in (
        ({"v_bits": 4}, ValueError, "with 2 and 4 bits the codes are"),
        (
            {"k_codes": torch.zeros(1, 2, 64, 2)},
            ValueError,
            "k_codes must be integers of 32 bits",
        ),
        ({"v_scale": torch.ones(1, 2, 32, 3), "v_min": torch.ones(1, 2, 32, 3)}, ValueError, "V: 3 parameter pairs do"),
        ({"v_min": torch.ones(1, 2, 32, 1)}, ValueError, r"v_min must be \[1, 2, 32, 2\], not \[1, 2, 32, 1\]"),
        ({"v_scale": torch.ones(1, 2, 32, 4), "v_min": torch.ones(1, 2, 32, 4)}, FormatError, "multiple of 32, not 16"),
        ({"k_scale": torch.full((1, 2, 64, 1), torch.nan)}, ValueError, "K: scale nan and bias 1 at"),
        ({"k_min": torch.full((1, 2, 64, 1), 7e4)}, ValueError, "no parameters of type float16"),
        ({"k_scale": -torch.ones(1, 2, 64, 1)}, ValueError, "K: scale -1 and"),
    ):
        with pytest.raises(kind, match=message) as error:
            from_kivi(**arguments(**change))
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------------------- OSCAR
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim, groups", [(128, 1), (128, 4), (64, 2), (96, 1)])
def test_oscar(head_dim, groups, dtype):
    slots, heads, lengths = 120, 2, [33, 0, 64, 1]
    perm = torch.randperm(slots, generator=torch.Generator().manual_seed(0))
    indptr = torch.tensor([0, 33, 33, 97, 98], dtype=torch.int32)
    sides, requests = [], []
    for seed in (0, 10):
        codes = random_codes((slots, heads, head_dim), 2, seed)
        quarter = head_dim // 4
        packed = torch.zeros(slots, heads, quarter, dtype=torch.uint8)
        for d in range(head_dim):
            packed[..., d % quarter] += (codes[..., d] << (2 * (d // quarter))).to(torch.uint8)
        scale, zero = random_params((slots, heads, groups), seed + 1, dtype)
        both = torch.zeros(slots, heads, 2 * groups, dtype=dtype)
        for g in range(groups):
            both[..., 2 * g], both[..., 2 * g + 1] = scale[..., g], zero[..., g]
        sides += [packed, both]
        bias = (-zero.double() * scale.double()).half()
        exact, kept = ([p.double().repeat_interleave(head_dim // groups, 2) for p in pair]
                       for pair in ((scale, zero), (scale.half(), bias)))  # fmt: skip
        project = (codes.double() - exact[1]) * exact[0]
        requests.append(codes.double() * kept[0] + kept[1])
        moved = ROUNDING * (codes.double() * exact[0] + (exact[0] * exact[1]).abs())
        assert bool(((requests[-1] - project).abs() <= moved).all())
    converted = from_oscar(sides[0], sides[1], sides[2], sides[3], indptr, perm.int(), page_size=32)
    want = [
        tuple(x[perm[a:b]] for x in requests) for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)
    ]
    assert [len(k) for k, _ in want] == lengths
    assert converted.cache.format == KVFormat.make(2, k_group=None if groups == 1 else head_dim // groups,
                                                   v_group=None if groups == 1 else head_dim // groups)  # fmt: skip
    check(converted, want)


def test_oscar_a_row_of_one_value():
    """Its scale is 1e-8 / 3, which float16 does not hold: the value is -zero * scale."""
    codes, scale = torch.full((1, 1, 16), 0b01010101, dtype=torch.uint8), 1e-8 / 3
    pairs = torch.tensor([scale, -0.75 / scale]).view(1, 1, 2)
    at = torch.tensor([0, 1]), torch.tensor([0])
    converted = from_oscar(codes, pairs, codes, pairs, *at)
    check(converted, [(torch.full((1, 1, 64), 0.75).double(),) * 2])


def test_oscar_errors():
    codes, pairs = torch.zeros(4, 2, 16, dtype=torch.uint8), torch.ones(4, 2, 2)
    at = torch.tensor([0, 2]), torch.tensor([3, 1])
    for arguments, kind, message in (
        ((codes.int(), pairs, codes, pairs), ValueError, "k_codes must be uint8"),
        ((codes, pairs, codes, pairs[:3]), ValueError, r"v_scales_zeros must be \[4, 2, 2\], not \[3, 2, 2\]"),
        ((codes, torch.ones(4, 2, 8), codes, pairs), FormatError, "multiple of 32, not 16"),
    ):
        with pytest.raises(kind, match=message):
            from_oscar(*arguments, *at)


# ---------------------------------------------------------------------------------------------------------- QServe
@pytest.mark.parametrize(
    "head_dim, block_size, page_size, more", [(128, 64, None, 0), (64, 16, 32, 256), (112, 32, None, 0)]
)
def test_qserve(head_dim, block_size, page_size, more):
    blocks, heads, lengths = 9, 2, [block_size * 2 + 5, 0, 3, block_size]
    table = torch.full((4, 5), -1, dtype=torch.int32)
    table[0, :3], table[2, :1], table[3, :1] = torch.tensor([7, 0, 4]), 8, 2
    sides, requests = [], []
    for seed in (0, 10):
        codes = random_codes((blocks, block_size, heads, head_dim), 4, seed)
        scale, zero = random_params((blocks, block_size, heads), seed + 1)
        zero = (zero * 3).round()
        sides.append(qserve_blocks(codes, scale, zero, more))
        bias = (-scale.float() * zero.float()).half()  # the kernel's own rounding
        requests.append(codes.double() * scale.double()[..., None] + bias.double()[..., None])
    converted = from_qserve(*sides, table, torch.tensor(lengths, dtype=torch.int32), num_kv_heads=heads,
                            head_dim=head_dim, block_size=block_size, page_size=page_size)  # fmt: skip
    assert converted.cache.page_size == (page_size or block_size) and converted.cache.format == KVFormat.int4()
    want = [
        tuple(x[table[b, : -(-n // block_size)].long()].flatten(0, 1)[:n] for x in requests)
        for b, n in enumerate(lengths)
    ]
    check(converted, want)


def test_qserve_errors():
    k = torch.zeros(3, 2 * 16 * 32 + 4 * 2 * 16, dtype=torch.int8)
    table, lengths = torch.tensor([[0, 3]], dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
    shape = {"num_kv_heads": 2, "head_dim": 64, "block_size": 16}
    from_qserve(k, k, table, lengths, **shape)
    for arguments, message in (
        ((k[:, :-1], k, table, lengths), "k_blocks must be bytes"),
        ((k, k.half(), table, lengths), "v_blocks must be bytes"),
        ((k, k, table, lengths + 1), "block_table holds .3.; the blocks are 0 .. 2"),
        ((k, k, table[:, :1], lengths + 1), "does not hold the blocks of"),
    ):
        with pytest.raises(ValueError, match=message):
            from_qserve(*arguments, **shape)


# ---------------------------------------------------------------------------------------------------------- any
@pytest.mark.parametrize("params", ["float16", "bfloat16"])
def test_ragged_channel_groups(params):
    """Groups count from each request's token 0, larger than a page, the last one partial."""
    fmt, lengths = KVFormat.make(4, 2, k_axis="channel", k_group=64, v_group=32, params=params), [70, 0, 64, 1]
    k = random_codes((135, 2, 64), 4, 0).to(torch.uint8), *random_params((4, 2, 64), 1, getattr(torch, params))
    v = random_codes((135, 2, 64), 2, 2).to(torch.uint8), *random_params((135, 2, 2), 3, getattr(torch, params))
    converted = from_quantized(Dense(*k), Dense(*v), lengths, fmt, page_size=16)
    group = torch.tensor([0] * 64 + [1] * 6 + [2] * 64 + [3])
    keys = k[0].double() * k[1].double()[group] + k[2].double()[group]
    values = v[0].double() * v[1].double().repeat_interleave(32, 2) + v[2].double().repeat_interleave(32, 2)
    check(converted, list(zip(keys.split(lengths), values.split(lengths), strict=True)))


def test_a_converted_cache_goes_on():
    """Tokens are appended behind the converted ones, in their last page, whose slack holds no garbage."""
    k = random_codes((20, 1, 64), 2, 0).to(torch.uint8), *random_params((20, 1, 1), 1)
    converted = from_quantized(Dense(*k), Dense(*k), [20], KVFormat.int2(), page_size=32)
    new = random_values((5, 1, 64), 4)
    before = converted.cache.dequantize_request(converted.block_table[0], 20)
    converted.cache.append(new, new, converted.block_table, converted.seq_lens, torch.tensor([0, 5], dtype=torch.int32))
    after = converted.cache.dequantize_request(converted.block_table[0], 25)
    for got, want in zip(after, before, strict=True):
        assert_equal(got[:20], want, NAMES)
        assert (got[20:] - new).abs().max() < 2


def test_dense_errors():
    codes, pair = torch.zeros(4, 1, 64, dtype=torch.uint8), torch.ones(4, 1, 1)
    with pytest.raises(ValueError, match=r"codes must be \[5, kv heads, head_dim\]"):
        from_quantized(Dense(codes, pair, pair), Dense(codes, pair, pair), [2, 3], KVFormat.int2())
    with pytest.raises(ValueError, match=r"V: scale must be \[4, 1, 1\], not \[3, 1, 1\]"):
        from_quantized(Dense(codes, pair, pair), Dense(codes, pair[:3], pair), [4], KVFormat.int2())


@pytest.mark.parametrize(
    "code, dtype, match",
    [
        (4, torch.uint8, "a code is 4; 2 bits hold 0 .. 3"),
        (1, torch.int64, "codes must be uint8 .tokens, kv heads, head_dim., not torch.int64"),
    ],
)
def test_codes_that_the_format_does_not_hold(code, dtype, match):
    """A code of too many bits would end up in the channels beside it."""
    from foscar.convert import Dense, from_quantized

    codes = torch.zeros(16, 1, 64, dtype=torch.uint8)
    x = Dense(codes, torch.ones(16, 1, 1), torch.zeros(16, 1, 1))
    bad = codes.to(dtype)
    bad[3, 0, 5] = code
    with pytest.raises(ValueError, match=match):
        from_quantized(Dense(bad, x.scale, x.bias), x, [16], KVFormat.int2(), 16)
