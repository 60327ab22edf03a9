"""The paged cache: storage, appends of every kind, and that nothing else changes."""

from __future__ import annotations

import mmap

import pytest
import torch
from support.compare import assert_equal
from support.inputs import (
    POISON,
    all_formats,
    fits,
    indptr_of,
    int32,
    live_bytes,
    make_case,
    poison_slack,
    random_values,
    shuffled_table,
)

from foscar.common.cache import PagedKVCache
from foscar.common.errors import UnsupportedDeviceError
from foscar.common.formats import PAGE_SIZES, KVFormat
from foscar.common.quantize import dequantize, quantize

NAMES = ("token", "head", "channel")
FORMATS = [
    pytest.param(f, p, id=f"{f.name}-p{p}")
    for f in all_formats(groups=(None, 32, 64))
    for p in (16, 64)
    if fits(f, 64, p)
]


def quantized_values(x, f, group, params):
    return dequantize(quantize(x, f, group=group, params=params), f, group=group, dtype=torch.float64)


def expected(case, b):
    """(K, V) of request ``b`` quantized by itself."""
    lengths = case.seq_lens.tolist()
    first = sum(lengths[:b])
    layout, fmt = case.cache.layout, case.cache.format
    return tuple(
        quantized_values(x[first : first + lengths[b]], f, g, fmt.params)
        for x, f, g in ((case.k, fmt.k, layout.k_group), (case.v, fmt.v, layout.v_group))
    )


@pytest.mark.parametrize("fmt, page_size", FORMATS)
def test_prefill_then_read_back(fmt, page_size):
    lengths = [page_size, 0, 5, 2 * page_size + 3]
    case = make_case(lengths, fmt=fmt, page_size=page_size, head_dim=64, dtype=torch.float32)
    for b, length in enumerate(case.seq_lens.tolist()):
        got = case.cache.dequantize_request(case.block_table[b], length)
        for x, want in zip(got, expected(case, b), strict=True):
            assert x.dtype == torch.float64
            assert_equal(x, want, NAMES)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("k_bits, v_bits", [(2, 4), (4, 2)])
def test_sizes(head_dim, page_size, k_bits, v_bits):
    fmt = KVFormat.make(k_bits, v_bits, v_axis="channel")
    case = make_case([page_size + 1, 3], fmt=fmt, page_size=page_size, head_dim=head_dim)
    for b, length in enumerate(case.seq_lens.tolist()):
        got = case.cache.dequantize_request(case.block_table[b], length)
        for x, want in zip(got, expected(case, b), strict=True):
            assert_equal(x, want, NAMES)


@pytest.mark.parametrize("params", ["float16", "bfloat16"])
@pytest.mark.parametrize("group", [None, 32])
def test_token_axis_any_split_gives_the_same_bytes(group, params):
    """Prefill at once, in ragged chunks, and one token at a time: bit for bit one cache (page boundaries included)."""
    fmt = KVFormat.make(2, 4, k_group=group, v_group=group, params=params)
    lengths = [40, 17, 33]
    whole = make_case(lengths, fmt=fmt, page_size=16, head_dim=64)
    cache = PagedKVCache(whole.cache.num_pages, 16, 2, 64, fmt)
    cache.data.fill_(POISON)
    begins = indptr_of(lengths).tolist()
    done = [0, 0, 0]
    for sizes in ([7, 0, 16], [0, 1, 0], [1, 1, 1], [20, 3, 2], [11, 11, 13]):
        rows = torch.cat([torch.arange(begins[b] + done[b], begins[b] + done[b] + n) for b, n in enumerate(sizes)])
        cache.append(whole.k[rows], whole.v[rows], whole.block_table, int32(done), indptr_of(sizes))
        done = [a + n for a, n in zip(done, sizes, strict=True)]
    while done != lengths:
        live = [b for b in range(3) if done[b] < lengths[b]]
        rows = torch.tensor([begins[b] + done[b] for b in live])
        cache.append(whole.k[rows], whole.v[rows], whole.block_table[live], int32([done[b] for b in live]))
        for b in live:
            done[b] += 1
    assert torch.equal(cache.data, whole.cache.data)


@pytest.mark.parametrize("fmt, page_size", FORMATS)
def test_append_changes_no_other_byte(fmt, page_size):
    """One token into a page that has neighbours on both sides: only its own bytes (or its group's) change."""
    length = page_size + 5
    case = make_case([length, 7], fmt=fmt, page_size=page_size, head_dim=64)
    cache, before = case.cache, case.cache.data.clone()
    cache.append(case.k[:2] * 2, case.v[:2] * 2, case.block_table[:1], case.seq_lens[:1], int32([0, 2]))
    changed = (cache.data != before).any(1)  # [pages, record bytes]
    may = torch.zeros_like(changed)
    sides = ((fmt.k, cache.layout.k_group), (fmt.v, cache.layout.v_group))
    reach = max(g if f.axis == "channel" else 1 for f, g in sides)
    for position in range(length // reach * reach, length + 2):
        page, slot = divmod(position, page_size)
        may[case.block_table[0, page]] |= live_bytes(cache.layout, slot, slot + 1)
    assert bool(changed.any()) and not bool((changed & ~may).any())
    if fmt.k.axis == fmt.v.axis == "token":
        got = cache.dequantize_request(case.block_table[0], length)
        for x, want in zip(got, expected(case, 0), strict=True):
            assert_equal(x, want, NAMES)


@pytest.mark.parametrize("fmt", all_formats(groups=(None, 32), bits=(2,), params=("float16",)), ids=lambda f: f.name)
def test_unchecked_nan_reaches_its_group_only(fmt):
    lengths = [20, 37]
    clean = make_case(lengths, fmt=fmt, page_size=32, head_dim=64)
    k, v = clean.k.clone(), clean.v.clone()
    k[25, 1, 40], v[26, 0, 3] = float("nan"), float("inf")
    with pytest.raises(ValueError, match="NaN or inf"):
        make_case(lengths, fmt=fmt, page_size=32, head_dim=64, k=k, v=v)
    cache = PagedKVCache(clean.cache.num_pages, 32, 2, 64, fmt)
    cache.append(k, v, clean.block_table, int32([0, 0]), indptr_of(lengths), check=False)
    for b, n in enumerate(lengths):
        pairs = zip(
            cache.dequantize_request(clean.block_table[b], n),
            clean.cache.dequantize_request(clean.block_table[b], n),
            ((5, 1, 40, fmt.k), (6, 0, 3, fmt.v)),
            strict=True,
        )
        for got, want, (token, head, channel, f) in pairs:
            bad = torch.zeros_like(got, dtype=torch.bool)
            if b == 1 and f.axis == "token":
                g = f.group or 64
                bad[token, head, channel // g * g : channel // g * g + g] = True
            elif b == 1:
                bad[:32, head, channel] = True
            assert torch.equal(got.isnan(), bad)
            assert_equal(got[~bad], want[~bad], ("element",))


def test_a_refused_append_writes_nothing():
    for fmt in (KVFormat.make(2), KVFormat.make(2, v_axis="channel")):
        case = make_case([20], fmt=fmt, page_size=16, head_dim=64)
        before = case.cache.data.clone()
        v = case.v[:1].clone()
        v[0, 1, 7] = float("nan")
        with pytest.raises(ValueError, match=r"^v\["):
            case.cache.append(case.k[:1], v, case.block_table, case.seq_lens)
        assert torch.equal(case.cache.data, before)


@pytest.mark.parametrize("fmt", [KVFormat.int4(), KVFormat.make(2, k_axis="channel")], ids=lambda f: f.name)
def test_slack_is_never_read(fmt):
    """Public report 7 and 11: poison beyond the length, table padded with -1."""
    case = make_case([13, 16, 17], fmt=fmt, page_size=16, head_dim=64)
    before = [case.cache.dequantize_request(case.block_table[b], n) for b, n in enumerate((13, 16, 17))]
    poison_slack(case)
    for b, n in enumerate((13, 16, 17)):
        for x, want in zip(case.cache.dequantize_request(case.block_table[b], n), before[b], strict=True):
            assert bool(x.isfinite().all())
            assert_equal(x, want, NAMES)


def test_interleaved_layers_share_one_tensor():
    """Public report 21: layers interleaved in one allocation, K and V slices of a fused projection."""
    fmt = KVFormat.int2()
    layout = fmt.layout(64, 16)
    store = torch.full((6, 3, 2, layout.record_bytes), POISON, dtype=torch.uint8)
    fused = random_values((20, 8, 64), 0)
    q_k_v = fused.split((4, 2, 2), dim=1)
    layers = [PagedKVCache(6, 16, 2, 64, fmt, data=store[:, i]) for i in range(3)]
    table = shuffled_table([20], 16, 6, 0)
    layers[1].append(q_k_v[1], q_k_v[2], table, int32([0]), int32([0, 20]))
    assert bool((store[:, 0] == POISON).all()) and bool((store[:, 2] == POISON).all())
    plain = PagedKVCache(6, 16, 2, 64, fmt)
    plain.append(q_k_v[1].contiguous(), q_k_v[2].contiguous(), table, int32([0]), int32([0, 20]))
    for x, want in zip(layers[1].dequantize_request(table[0], 20), plain.dequantize_request(table[0], 20), strict=True):
        assert_equal(x, want, NAMES)
    wide = int32([[*table[0].tolist()], [0] * 4])[:, ::1].T.contiguous().T  # a strided block table
    assert wide.stride() != table.stride()
    layers[2].append(q_k_v[1], q_k_v[2], wide, int32([0, 0]), int32([0, 20, 20]))
    assert torch.equal(store[:, 2], store[:, 1])


def test_page_offsets_beyond_31_bits():
    """Public report 9.  Reserved, not committed: only the pages that are written take memory."""
    fmt = KVFormat.int4()
    record = fmt.layout(128, 64).record_bytes
    pages = 2**32 // record + 5
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, pages * record, flags=flags)
    except OSError as error:
        pytest.skip(f"cannot reserve 4 GiB of address space: {error}")
    data = torch.frombuffer(memory, dtype=torch.uint8).view(pages, 1, record)
    cache = PagedKVCache(pages, 64, 1, 128, fmt, data=data)
    assert cache.nbytes > 2**32
    ids = [pages - 1, 2**31 // record + 1, 0, 2**32 // record + 1]
    k, v = (random_values((250, 1, 128), s) for s in (0, 1))
    cache.append(k, v, int32([ids]), int32([0]), int32([0, 250]))
    small = PagedKVCache(4, 64, 1, 128, fmt)
    small.append(k, v, int32([[0, 1, 2, 3]]), int32([0]), int32([0, 250]))
    for slot, page in enumerate(ids):
        assert torch.equal(data[page], small.data[slot])
    for x, want in zip(
        cache.dequantize_request(int32(ids), 250), small.dequantize_request(int32([0, 1, 2, 3]), 250), strict=True
    ):
        assert_equal(x, want, NAMES)


def test_sizes_are_per_kv_head_not_per_query_head():
    """Public report 3: 32 query heads over 4 KV heads cost 4 heads."""
    cache = PagedKVCache(10, 64, 4, 128)
    assert cache.bytes_per_token == 4 * 72 and cache.nbytes == 10 * 4 * 4608 == cache.data.numel()
    assert "k2v2" in repr(cache) and "288 bytes per token" in repr(cache)
    with pytest.raises(ValueError, match="KV heads"):
        cache.append(torch.zeros(1, 32, 128), torch.zeros(1, 32, 128), int32([[0]]), int32([0]))


def test_storage_errors():
    fmt = KVFormat.int2()
    record = fmt.layout(64, 16).record_bytes
    good = torch.zeros(4, 2, record, dtype=torch.uint8)
    flat = torch.zeros(4 * 2 * (record + 8) + 64, dtype=torch.uint8)
    for data, word in (
        (good.to(torch.int8), "uint8"),
        (good[:3], "uint8"),
        (torch.zeros(4, 2, 2 * record, dtype=torch.uint8)[..., ::2], "contiguous"),
        (flat[: 8 * (record + 8)].view(4, 2, record + 8)[..., :record], "multiples of 16"),
        (flat[8 : 8 + 8 * record].view(4, 2, record), "multiples of 16"),
        (good[:1].expand(4, 2, record), "overlap"),
    ):
        with pytest.raises(ValueError, match=word) as error:
            PagedKVCache(4, 16, 2, 64, fmt, data=data)
        assert "\n" not in str(error.value)
    heads_first = torch.zeros(2, 4, record, dtype=torch.uint8).transpose(0, 1)
    assert PagedKVCache(4, 16, 2, 64, fmt, data=heads_first).data.stride(0) == record
    with pytest.raises(ValueError, match="num_kv_heads"):
        PagedKVCache(4, 16, 0, 64)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"num_pages": 4.0}, "num_pages must be a whole number, not 4.0"),
        ({"page_size": 16.0}, "page_size must be a whole number, not 16.0"),
        ({"num_kv_heads": "2"}, "num_kv_heads must be a whole number, not '2'"),
        ({"head_dim": 64.0}, "head_dim must be a whole number, not 64.0"),
        ({"num_kv_heads": True}, "num_kv_heads must be a whole number, not True"),
        ({"format": "int2"}, r"format must be a foscar.KVFormat such as foscar.KVFormat.int2\(\), not 'int2'"),
        ({"data": b"0"}, "data must be a torch.Tensor, not bytes"),
    ],
)
def test_types_of_a_cache(change, word):
    with pytest.raises(TypeError, match=word):
        PagedKVCache(**{"num_pages": 4, "page_size": 16, "num_kv_heads": 2, "head_dim": 64} | change)


ARGUMENTS = {
    "k": torch.zeros(2, 2, 64), "v": torch.zeros(2, 2, 64),
    "block_table": int32([[0, 1], [2, -1]]), "seq_lens": int32([3, 0]), "indptr": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "change, word",
    [
        ({"k": torch.zeros(2, 2, 64, dtype=torch.int32)}, "float"),
        ({"k": torch.zeros(2, 2, 128)}, "head_dim"),
        ({"v": torch.zeros(1, 2, 64)}, "tokens"),
        ({"k": torch.zeros(3, 2, 64), "v": torch.zeros(3, 2, 64)}, "without indptr"),
        ({"v": torch.zeros(2, 2, 64, device="meta")}, "meta"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "int32"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "int32"),
        ({"seq_lens": int32([0])}, "requests"),
        ({"seq_lens": int32([3, 16])}, "request|page id -1"),
        ({"seq_lens": int32([32, 0])}, "outside its block table"),
        ({"seq_lens": int32([-1, 0])}, "position -1"),
        ({"block_table": int32([[7, 1], [2, -1]])}, "page id 7"),
        ({"block_table": int32([[-2, 1], [2, -1]])}, "page id -2"),
        ({"indptr": int32([0, 1])}, "indptr"),
        ({"indptr": int32([0, 1, 3])}, "indptr"),
        ({"indptr": int32([0, 3, 2])}, "indptr"),
        ({"indptr": torch.tensor([0, 1, 2])}, "int32"),
    ],
)
def test_append_errors(change, word):
    cache = PagedKVCache(4, 16, 2, 64)
    cache.append(**ARGUMENTS)
    before = cache.data.clone()
    with pytest.raises(ValueError, match=word) as error:
        cache.append(**{**ARGUMENTS, **change})
    assert "\n" not in str(error.value) and torch.equal(cache.data, before)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_appends_of_no_tensors(name):
    cache = PagedKVCache(4, 16, 2, 64)
    for value in ([0, 1], None) if name != "indptr" else ([0, 1, 2],):
        with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, not {type(value).__name__}$"):
            cache.append(**ARGUMENTS | {name: value})


def test_empty_appends():
    cache = PagedKVCache(4, 16, 2, 64, KVFormat.make(2, v_axis="channel"))
    none = torch.zeros(0, 2, 64)
    cache.append(none, none, int32([[0], [1]]), int32([0, 3]), int32([0, 0, 0]))
    cache.append(none, none, torch.zeros(0, 2, dtype=torch.int32), int32([]))
    assert not bool(cache.data.any())
    k, v = cache.dequantize_request(int32([-1]), 0)
    assert k.shape == v.shape == (0, 2, 64)


def test_reading_outside_the_table():
    cache = PagedKVCache(4, 16, 2, 64)
    with pytest.raises(ValueError, match="do not fit"):
        cache.dequantize_request(int32([0]), 17)
    with pytest.raises(ValueError, match="page id"):
        cache.dequantize_request(int32([0, -1]), 17)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_gpu_that_is_not_there(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedDeviceError, match="^device 'cuda(:1)?' needs a GPU, and torch sees none") as e:
        PagedKVCache(2, 16, 2, 64, device=device)
    assert "\n" not in str(e.value)
