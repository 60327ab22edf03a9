"""What surrounds a call does not change its result: modes and defaults of torch, aliases, copies, threads, forks."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import pickle
import threading

import pytest
import torch
from support.compare import assert_equal
from support.inputs import int32, make_case, random_values

import foscar
from foscar import BatchDecodeWithPagedKVCacheWrapper, KVFormat, WindowConfig, WindowedKVCache
from foscar.common.reference import attention_bf16

FORMATS = [KVFormat.int2(), KVFormat.make(4, 2, k_axis="channel", v_axis="channel", k_group=16)]
LENGTHS = [33, 0, 17]
WINDOW = {"token": "bfloat16", "channel": "float16"}


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN, too
    yield
    torch.use_deterministic_algorithms(False)


MODES = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
    "float64 by default": lambda: default_dtype(torch.float64),
    "float16 by default": lambda: default_dtype(torch.float16),
    "another device by default": lambda: torch.device("meta"),
    "deterministic": deterministic,
}


def inputs(fmt: KVFormat) -> tuple:
    tables = torch.arange(12, dtype=torch.int32).view(3, 4), torch.arange(12, dtype=torch.int32).view(2, 6)
    lengths = int32([33, 0, 17]), int32([34, 1, 18]), int32([0, 0]), int32([70, 20])
    k = [random_values((n, 2, 64), seed) for n, seed in ((50, 1), (3, 2), (90, 3))]
    q = random_values((3, 6, 64), 4, torch.bfloat16)
    return fmt, q, *tables, *k, *lengths, int32([0, 33, 33, 50]), int32([0, 70, 90]), int32([1, 0])


def work(fmt, q, table, table2, prompt, new, k, before, after, empty, long, indptr, indptr2, slots):
    """Bytes and results of appends, a decode and a windowed decode."""
    cache = foscar.PagedKVCache(12, 16, 2, 64, fmt)
    cache.append(prompt, prompt + 1, table, torch.zeros_like(before), indptr)
    cache.append(new, -new, table, before)
    got = foscar.decode_attention(q, cache, table, after, return_lse=True)
    windowed = WindowedKVCache(12, 16, 2, 64, fmt, max_batch=2, window=WindowConfig(4, 20, WINDOW[fmt.v.axis]))
    windowed.append(k, k + 1, table2, empty, slots, indptr2)
    both = foscar.decode_windowed(q[:2], windowed, table2, long, slots, return_lse=True)
    merged = foscar.merge_states(got[0][:2], got[1][:2], *both)
    read = windowed.read_request(table2[0], 70, 1)
    return (cache.data, windowed.packed.data, *got, *both, *merged, *read)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("mode", MODES)
def test_modes_and_defaults(mode, fmt):
    given = inputs(fmt)
    want = work(*given)
    with MODES[mode]():
        found = work(*given)
    for got, expected in zip(found, want, strict=True):
        assert_equal(got.clone(), expected)
        assert not got.requires_grad


def test_the_baseline_under_autocast():
    case = make_case(LENGTHS, page_size=16)
    want = attention_bf16(case.q, *case.tables)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention_bf16(case.q, *case.tables)
    for got, expected in zip(found, want, strict=True):
        assert_equal(got, expected)


def test_out_may_share_memory_with_q():
    case = make_case(LENGTHS, page_size=16)
    want = foscar.decode_attention(case.q, *case.tables)
    for offset in (0, 1):
        both = torch.zeros(3 + offset, *case.q.shape[1:], dtype=case.q.dtype)
        both[:3] = case.q
        assert_equal(foscar.decode_attention(both[:3], *case.tables, out=both[offset:]), want)


def test_views_that_are_not_what_memory_holds():
    case = make_case(LENGTHS, page_size=16)
    want = foscar.decode_attention(-case.q, *case.tables)
    assert torch._neg_view(case.q).is_neg()
    assert_equal(foscar.decode_attention(torch._neg_view(case.q), *case.tables), want)
    one = foscar.decode_attention(case.q[:1, :1].expand(3, 8, 128).contiguous(), *case.tables)
    assert_equal(foscar.decode_attention(case.q[:1, :1].expand(3, 8, 128), *case.tables), one)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("change", [lambda x: x.to_sparse(), lambda x: torch.nested.nested_tensor(list(x))])
def test_other_layouts(change):
    case = make_case(LENGTHS, page_size=16)
    with pytest.raises(ValueError, match="q must be dense and strided"):
        foscar.decode_attention(change(case.q), *case.tables)
    with pytest.raises(ValueError, match="k must be dense and strided"):
        case.cache.append(change(case.k[:3]), case.v[:3], case.block_table, case.seq_lens)


@pytest.mark.parametrize("device", ["nowhere", 1.5, "cuda:x"])
def test_no_device(device):
    for make in (
        lambda: foscar.PagedKVCache(1, 16, 1, 64, device=device),
        lambda: WindowedKVCache(1, 16, 1, 64, max_batch=1, device=device),
        lambda: BatchDecodeWithPagedKVCacheWrapper(device),
    ):
        with pytest.raises(ValueError, match="^device must be a torch.device or its name, such as 'cuda:0', not "):
            make()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_what_cannot_be_read_or_stored(fmt):
    windowed = WindowedKVCache(4, 16, 2, 64, fmt, max_batch=2, window=WindowConfig(4, 20))
    cache, row, x = windowed.packed, int32([0, 1, 2, 3]), torch.ones(1, 2, 64)
    for call, kind, message in (
        (lambda: cache.dequantize_request([0, 1], 3), TypeError, "block_table_row must be a torch.Tensor, not list"),
        (lambda: cache.dequantize_request(row[None], 3), ValueError, r"block_table_row must be .max_pages."),
        (lambda: cache.dequantize_request(row, 3.0), TypeError, "stop must be a whole number, not 3.0"),
        (lambda: cache.dequantize_request(row, 65), ValueError, "do not fit 4 pages of 16"),
        (lambda: cache.read_tokens(row, 0, 3, "kq"), ValueError, "sides of 'k' and 'v', not .4. and 'kq'"),
        (lambda: windowed.read_request(row, -1, 0), ValueError, "length must be 0 or more"),
        (lambda: windowed.read_request(row, 1, -1), ValueError, "slot 0 .. 1, not 1 and -1"),
        (lambda: windowed.read_request(row, 1, 2), ValueError, "slot 0 .. 1, not 1 and 2"),
        (lambda: cache.append(x.to(torch.float8_e5m2), x, row[None], int32([0])), ValueError, "of 16 bits or more"),
        (lambda: foscar.PagedKVCache(4, 16, 2, 64, fmt, data=cache.data.to_sparse()), ValueError, "dense and strided"),
        (lambda: foscar.merge_states(x.to_sparse(), x[..., 0], x, x[..., 0]), ValueError, "dense and strided"),
    ):
        with pytest.raises(kind, match=message) as error:
            call()
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------- copies
COPIES = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copied_cache_goes_on_by_itself(duplicate):
    case = make_case([33, 5, 17], page_size=16)
    twin, before = duplicate(case.cache), case.cache.data.clone()
    new = random_values((3, 2, 128), 5)
    twin.append(new, new, case.block_table, case.seq_lens - 1)
    assert_equal(case.cache.data, before)
    case.cache.append(new, new, case.block_table, case.seq_lens - 1)
    assert_equal(twin.data, case.cache.data)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(block_table=case.block_table, seq_lens=case.seq_lens, num_qo_heads=8, num_kv_heads=2, head_dim=128,
                 page_size=16)  # fmt: skip
    assert_equal(duplicate(wrapper).run(case.q, twin), wrapper.run(case.q, case.cache))


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_a_copied_windowed_cache_goes_on_by_itself(duplicate, fmt):
    """Its tensors are views of a memory that has one page and one slot more."""
    cache = WindowedKVCache(12, 16, 2, 64, fmt, max_batch=2, window=WindowConfig(4, 20))
    table, slots, k = torch.arange(12, dtype=torch.int32).view(2, 6), int32([1, 0]), random_values((140, 2, 64), 6)
    cache.append(k[:90], k[:90] + 1, table, int32([0, 0]), slots, int32([0, 70, 90]))
    twin = duplicate(cache)
    names = ("sink_k", "sink_v", "recent_k", "recent_v", "packed_lens")
    before = [getattr(cache, name).clone() for name in names] + [cache.packed.data.clone()]
    for c in (twin, cache):
        c.append(k[90:], k[90:] - 1, table, int32([70, 20]), slots, int32([0, 10, 50]))
        if c is twin:
            for name, want in zip(names, before, strict=False):
                assert_equal(getattr(cache, name), want)
            assert_equal(cache.packed.data, before[-1])
    for name in names:
        assert_equal(getattr(twin, name), getattr(cache, name))
    assert_equal(twin.packed.data, cache.packed.data)
    assert twin.packed.data.data_ptr() == twin._records.data_ptr()
    assert "WindowedKVCache" in repr(twin)
    q = random_values((2, 6, 64), 7, torch.bfloat16)
    out = [foscar.decode_windowed(q, c, table, int32([80, 60]), slots) for c in (cache, twin)]
    assert_equal(*out)


# ---------------------------------------------------------------------------------------------- threads and processes
def test_threads():
    cases = [make_case([33, 5, 17], page_size=16, seed=i) for i in range(4)]
    want = [foscar.decode_attention(c.q, *c.tables) for c in cases]
    wrong = []

    def go(i: int) -> None:
        for _ in range(5):
            if not torch.equal(foscar.decode_attention(cases[i].q, *cases[i].tables), want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=go, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def _decode(case, results) -> None:
    results.put(foscar.decode_attention(case.q, *case.tables).float().numpy())


def test_a_forked_process():
    """A cache is there in a child that was forked after torch, and the tables of formats, were used."""
    case = make_case([33, 5, 17], page_size=16)
    want = foscar.decode_attention(case.q, *case.tables)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_decode, args=(case, results))
    child.start()
    got = torch.from_numpy(results.get(timeout=60))
    child.join(timeout=60)
    assert child.exitcode == 0
    assert_equal(got, want.float())
