"""The float64 truth against torch, and the folded CPU backend against the numeric contract."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_equal, assert_meets_contract, error_report
from support.inputs import Case, all_formats, fits, int32, make_case, poison_slack, random_values

from foscar.common.formats import PAGE_SIZES, KVFormat
from foscar.common.reference import attention_bf16, attention_reference, decode_folded, relative_error

FORMATS = [
    pytest.param(f, p, id=f"{f.name}-p{p}")
    for f in all_formats(groups=(None, 32, 64))
    for p in (16, 64)
    if fits(f, 64, p)
]
CHANNEL = KVFormat.make(2, k_axis="channel", v_axis="channel")
BACKENDS = (attention_reference, attention_bf16, decode_folded)


def check(case: Case, sm_scale=None, **kwargs) -> tuple[float, float]:
    out, lse = decode_folded(case.q, *case.tables, sm_scale, **kwargs)
    assert out.dtype == lse.dtype == torch.float32 and out.shape == case.q.shape and lse.shape == case.q.shape[:2]
    return assert_meets_contract(out, lse, case.q, *case.tables, sm_scale)


@pytest.mark.parametrize("sm_scale", [None, 0.2])
@pytest.mark.parametrize("fmt", [KVFormat.int2(), KVFormat.make(4, 2, k_axis="channel", v_axis="channel")])
def test_reference_is_attention_over_the_dequantized_cache(fmt, sm_scale):
    case = make_case([37, 1, 64], fmt=fmt, page_size=32, group_heads=3)
    out, lse = attention_reference(case.q, *case.tables, sm_scale)
    assert out.dtype == lse.dtype == torch.float64
    for b, length in enumerate((37, 1, 64)):
        k, v = case.cache.dequantize_request(case.block_table[b], length)
        k, v = (x.transpose(0, 1).repeat_interleave(3, 0)[None] for x in (k, v))
        want = F.scaled_dot_product_attention(case.q[b].double()[None, :, None], k, v, scale=sm_scale)
        torch.testing.assert_close(out[b], want[0, :, 0], rtol=1e-12, atol=1e-12)
        scores = (k[0] @ case.q[b].double()[..., None])[..., 0] * (sm_scale or 1 / math.sqrt(128))
        torch.testing.assert_close(lse[b], scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fmt, page_size", FORMATS)
def test_every_format_meets_the_contract(fmt, page_size):
    case = make_case([page_size * 2 + 5, 1, 0, 63], fmt=fmt, page_size=page_size, head_dim=64, group_heads=5)
    poison_slack(case)
    check(case)
    check(case, sm_scale=1.0, block_tokens=page_size)  # many blocks, a peaked softmax


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("k_bits, v_bits, axis", [(2, 2, "token"), (4, 4, "token"), (2, 4, "channel")])
def test_every_size_meets_the_contract(head_dim, page_size, k_bits, v_bits, axis):
    fmt = KVFormat.make(k_bits, v_bits, k_axis=axis)
    check(make_case([300, 17], fmt=fmt, page_size=page_size, head_dim=head_dim), block_tokens=128)


@pytest.mark.parametrize("group_heads", [*range(1, 17), 20, 24, 64])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_any_number_of_query_heads_per_kv_head(group_heads, kv_heads):
    """Public report 1."""
    check(make_case([70, 9], kv_heads=kv_heads, group_heads=group_heads, page_size=32, head_dim=64))


@pytest.mark.parametrize("fmt", [KVFormat.int2(), CHANNEL], ids=lambda f: f.name)
def test_query_heads_read_their_own_kv_head(fmt):
    shape = {"fmt": fmt, "kv_heads": 3, "group_heads": 2, "page_size": 16}
    case = make_case([40], **shape)
    before = decode_folded(case.q, *case.tables)[0]
    k, v = case.k.clone(), case.v.clone()
    k[:, 1], v[:, 1] = k[:, 1] + 1 + torch.arange(40)[:, None] % 3, v[:, 1] - 5
    after = decode_folded(case.q, *make_case([40], **shape, k=k, v=v).tables)[0]
    same = (before == after).all(-1)[0]
    assert same.tolist() == [True, True, False, False, True, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_requests(backend):
    """Public report 4."""
    case = make_case([0, 5, 0], page_size=16)
    case.block_table[0] = case.block_table[2] = -1
    out, lse = backend(case.q, *case.tables)
    assert bool((out[0] == 0).all()) and bool((out[2] == 0).all()) and bool((lse[[0, 2]] == -math.inf).all())
    alone, alone_lse = backend(case.q[1:2], case.cache, case.block_table[1:2], int32([5]))
    assert torch.equal(out[1:2], alone) and torch.equal(lse[1:2], alone_lse)
    none = torch.zeros(0, 8, 128)
    out, lse = backend(none, case.cache, torch.zeros(0, 3, dtype=torch.int32), int32([]))
    assert out.shape == none.shape and lse.shape == (0, 8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_zero_query_gives_the_mean_of_the_valid_values(backend, axis):
    """Public report 6: what pads a tile must not enter the denominator."""
    lengths = (1, 255, 257)
    fmt = KVFormat.make(4, k_axis=axis, v_axis=axis)
    case = make_case(lengths, fmt=fmt, page_size=64, q=torch.zeros(3, 8, 128))
    poison_slack(case)
    out, lse = backend(case.q, *case.tables)
    for b, length in enumerate(lengths):
        _, v = case.cache.dequantize_request(case.block_table[b], length)
        want = v.mean(0).repeat_interleave(4, 0)
        assert relative_error(out[b], want) < (0.01 if backend is attention_bf16 else 1e-6), error_report(out[b], want)
        torch.testing.assert_close(lse[b].double(), torch.full((8,), math.log(length), dtype=torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_poisoned_slack_changes_no_bit(backend, axis):
    """Public reports 7 and 11: NaN in slack scales, ones in slack codes, -1 behind the length."""
    group = 16 if axis == "channel" else 32
    fmt = KVFormat.make(2, k_axis=axis, v_axis=axis, k_group=group, v_group=group)
    case = make_case([13, 16, 50], fmt=fmt, page_size=32)
    poison_slack(case, 0)
    clean = backend(case.q, *case.tables)
    poison_slack(case)
    for got, want in zip(backend(case.q, *case.tables), clean, strict=True):
        assert bool(got.isfinite().all())
        assert_equal(got, want)


@pytest.mark.parametrize("fmt", all_formats(bits=(2,), groups=(None,), params=("float16",)), ids=lambda f: f.name)
@pytest.mark.parametrize("where", ["k", "v"])
def test_nan_stays_in_its_sequence(fmt, where):
    """Public report 34: one NaN row of one KV head of one request."""
    lengths = [30, 40, 20]
    clean = make_case(lengths, fmt=fmt, page_size=16, seed=3)
    values = {"k": clean.k.clone(), "v": clean.v.clone()}
    values[where][45, 1, 7] = float("nan")
    k, v = values["k"], values["v"]
    clean.cache.append(k, v, clean.block_table, int32([0, 0, 0]), int32([0, 30, 70, 90]), check=False)
    out, lse = decode_folded(clean.q, *clean.tables)
    want, want_lse = decode_folded(clean.q, *make_case(lengths, fmt=fmt, page_size=16, seed=3).tables)
    bad = torch.zeros_like(out, dtype=torch.bool)
    bad[1, 4:] = True
    if where == "v":
        assert_equal(lse, want_lse)
        if fmt.v.axis == "channel":
            bad[1, 4:] = False
            bad[1, 4:, 7] = True
    else:
        assert bool(lse[1, 4:].isnan().all())
    assert torch.equal(out.isnan(), bad)
    assert_equal(out[~bad], want[~bad], ("element",))


@pytest.mark.parametrize("fmt", [KVFormat.int2(), KVFormat.int4(), CHANNEL], ids=lambda f: f.name)
@pytest.mark.parametrize("kind", ["flat", "sink"])
def test_long_contexts(fmt, kind):
    """Flat attention, and a sink with 0.9 of the mass before many light tokens; values of one sign."""
    n = 40_000
    k = random_values((n, 1, 64), 1) * (0.02 if kind == "flat" else 0.05)
    v = random_values((n, 1, 64), 2).abs() + 0.5
    q = random_values((1, 2, 64), 3, mean=0.5)
    if kind == "sink":
        direction = q[0].mean(0) / q[0].mean(0).norm()
        k[0, 0] = 0
        scale = 1 / math.sqrt(64)
        rest = ((k[1:, 0] @ q[0].T) * scale).logsumexp(0).mean()
        k[0, 0] = direction * ((math.log(9) + rest) / scale / (q[0] @ direction).mean())
    case = make_case([n], fmt=fmt, kv_heads=1, group_heads=2, head_dim=64, k=k, v=v, q=q)
    got, allowed = check(case)
    assert got < allowed / 10
    if kind == "sink" and fmt.k.axis == "token":
        keys, _ = case.cache.dequantize_request(case.block_table[0], n)
        share = torch.softmax(keys[:, 0] @ q[0].double().T / 8, 0)[0]
        assert 0.5 < float(share.mean()) < 0.99


def test_blocks_do_not_change_the_result():
    case = make_case([1000], fmt=KVFormat.make(2, k_axis="channel", k_group=128, v_group=32), page_size=32)
    whole, whole_lse = decode_folded(case.q, *case.tables, block_tokens=1 << 20)
    for block in (1, 100, 256):
        out, lse = decode_folded(case.q, *case.tables, block_tokens=block)
        assert relative_error(out, whole) < 1e-6 and relative_error(lse, whole_lse) < 1e-6


def test_large_magnitudes_and_constant_rows():
    """Public reports 17 and 18: constant keys weigh all tokens alike; values of 6e4 stay finite."""
    k = torch.full((100, 2, 128), 100.0)
    v = random_values((100, 2, 128), 2) * 3e4
    case = make_case([100], fmt=KVFormat.int4(), k=k, v=v.clamp(-6e4, 6e4))
    check(case)
    out, _ = decode_folded(case.q, *case.tables)
    _, values = case.cache.dequantize_request(case.block_table[0], 100)
    assert relative_error(out[0], values.mean(0).repeat_interleave(4, 0)) < 1e-4
    zeros = make_case([20], k=torch.zeros(20, 2, 128), v=torch.zeros(20, 2, 128))
    out, lse = decode_folded(zeros.q, *zeros.tables)
    assert bool((out == 0).all()) and torch.allclose(lse, torch.tensor(math.log(20.0)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_strided_queries(dtype):
    """Public report 21: q as a slice of a fused qkv."""
    case = make_case([33, 20], page_size=16)
    fused = random_values((2, 12, 256), 8).to(dtype)
    q = fused[:, 2:10, 64:192]
    assert not q.is_contiguous()
    for backend in BACKENDS:
        for a, b in zip(backend(q, *case.tables), backend(q.contiguous(), *case.tables), strict=True):
            assert torch.equal(a, b)


def test_shared_prefix():
    """Two requests over the same first pages (public report 30)."""
    case = make_case([64, 64], page_size=16, extra_pages=4)
    table = case.block_table.clone()
    table[1, :2] = table[0, :2]
    k, v = (x.clone() for x in (case.k, case.v))
    k[64:96], v[64:96] = k[:32], v[:32]
    want, _ = decode_folded(case.q, *make_case([64, 64], page_size=16, k=k, v=v).tables)
    got, _ = decode_folded(case.q, case.cache, table, case.seq_lens)
    assert_equal(got, want)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"q": torch.zeros(2, 8, 64)}, "multiple of 2, 128"),
        ({"q": torch.zeros(2, 7, 128)}, "multiple of 2"),
        ({"q": torch.zeros(3, 8, 128)}, r"\[2, "),
        ({"q": torch.zeros(2, 8, 128, device="meta")}, "meta"),
        ({"seq_lens": int32([5])}, "requests"),
        ({"seq_lens": int32([5, 500])}, "do not fit"),
        ({"seq_lens": torch.tensor([5, 5])}, "int32"),
        ({"block_table": int32([[0], [99]])}, "page id"),
    ],
)
def test_errors(change, word):
    case = make_case([5, 9], page_size=16)
    arguments = {"q": case.q, "block_table": case.block_table, "seq_lens": case.seq_lens, **change}
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=word):
            backend(arguments["q"], case.cache, arguments["block_table"], arguments["seq_lens"])


def test_relative_error_and_report():
    a = torch.ones(2, 3, 4)
    b = a.clone()
    assert relative_error(a, b) == 0 and relative_error(a * 0, b * 0) == 0 and relative_error(a, b * 0) == math.inf
    b[1, 2, 3] = 3
    assert relative_error(b, a) == pytest.approx(2 / math.sqrt(24))
    assert "request 1, head 2, channel 3: got 3, want 1" in error_report(b, a)
    b[0, 1, 2] = float("nan")
    assert math.isnan(relative_error(b, a)) and "NaN in 1 elements" in error_report(b, a)
    assert "request 0, head 1, channel 2" in error_report(b, a)
    with pytest.raises(AssertionError, match="channel 2"):
        assert_equal(b, a)
