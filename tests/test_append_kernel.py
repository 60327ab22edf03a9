"""The append kernel: the torch path's bytes and no others, in the emulator and on a GPU; what it leaves to torch."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.append_checks import EmulatedAppend, GpuAppend, cache_of, hard_rows, rows_of
from support.compare import assert_equal
from support.gpu_kernels import APPENDS, CHANNEL_APPENDS
from support.inputs import indptr_of, int32, shuffled_table
from support.runners import why_no_gpu

from foscar.common import append_launch, jit
from foscar.common.append_config import AppendConfig
from foscar.common.cache import PagedKVCache
from foscar.common.errors import FormatError
from foscar.common.formats import KVFormat
from foscar.hopper.config import ARCH

needs_gpu = pytest.mark.skipif(why_no_gpu() is not None, reason=why_no_gpu() or "")
WHERE = [
    pytest.param(
        EmulatedAppend(),
        id="emulator",
        marks=pytest.mark.skipif(jit.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl"),
    ),
    pytest.param(GpuAppend(), id="gpu", marks=[pytest.mark.gpu, needs_gpu]),
]
on_both = pytest.mark.parametrize("append", WHERE)
CHUNKS = [3, 0, 14, 1]  # rows of the requests of a prefill


def ids(config: AppendConfig) -> str:
    aligned = "" if config.vector else "-unaligned"
    return f"{config.format.name}-d{config.head_dim}-p{config.page_size}-{config.dtype}{aligned}"


def assert_same_records(got: PagedKVCache, want: PagedKVCache) -> None:
    assert_equal(got.data.int(), want.data.int(), ("page", "head", "byte"))


def starts_of(config: AppendConfig) -> list[int]:
    """Lengths so that chunks begin and end in, at and across pages."""
    return [0, 5, config.page_size - 7, 2 * config.page_size - 1]


def check_bytes(config: AppendConfig, append) -> None:
    """A prefill of ragged chunks, then a decode step, over random bytes."""
    starts = starts_of(config)
    table = shuffled_table([s + c + 1 for s, c in zip(starts, CHUNKS, strict=True)], config.page_size, 12, 3)
    got, want = cache_of(config, 12), cache_of(config, 12)
    lengths = int32(starts)
    k, v = rows_of(config, sum(CHUNKS), 2, seed=5)
    append(config, got, k, v, table, lengths, indptr_of(CHUNKS))
    want.append(k, v, table, lengths, indptr_of(CHUNKS), check=False)
    assert not torch.equal(want.data, cache_of(config, 12).data)
    assert_same_records(got, want)
    lengths += int32(CHUNKS)
    k, v = rows_of(config, 4, 2, seed=9)
    append(config, got, k, v, table, lengths)
    want.append(k, v, table, lengths, check=False)
    assert_same_records(got, want)


@on_both
@pytest.mark.parametrize("config", APPENDS, ids=ids)
def test_the_bytes_of_the_torch_path(config, append):
    check_bytes(config, append)


# ---------------------------------------------------------------------------------------------- token groups
def check_groups(config: AppendConfig, append) -> None:
    """Groups begun, gone on with inside and beyond their range, whole and over several pages; empty requests; then a
    decode step over each of them; rows that are hard to quantize, over random bytes."""
    layout, page = config.layout, config.page_size
    group = max(g for f, g in ((config.format.k, layout.k_group), (config.format.v, layout.v_group))
                if f.axis == "channel")  # fmt: skip
    steps = [[3, 0, group + 5, group - 1], [2, 1, 0, 1], [group, 7, group, 2], None, [18, 0, 0, 0], None]
    total = 3 * group + 40
    pages = 4 * -(-total // page)
    table = shuffled_table([total] * 4, page, pages, 3)
    got, want = cache_of(config, pages), cache_of(config, pages)
    lengths = int32([0] * 4)
    for i, sizes in enumerate(steps):
        n, indptr = (4, None) if sizes is None else (sum(sizes), indptr_of(sizes))
        k, v = (x[:n] for x in rows_of(config, max(n, 18), 2, seed=5 + i))
        if i % 2:  # within most channels' range, so that they keep their pairs
            k.clamp_(-1, 1), v.clamp_(-1, 1)  # in place: views with strides
        append(config, got, k, v, table, lengths, indptr)
        before = want.data.clone()
        want.append(k, v, table, lengths, indptr, check=False)
        assert not torch.equal(want.data, before)
        assert_same_records(got, want)
        lengths = lengths + (1 if sizes is None else int32(sizes))


@on_both
@pytest.mark.parametrize("config", CHANNEL_APPENDS, ids=ids)
def test_the_bytes_of_token_groups(config, append):
    check_groups(config, append)


@on_both
@pytest.mark.parametrize("config", CHANNEL_APPENDS[:2], ids=ids)
def test_token_groups_of_many_requests(config, append):
    """Every place in the search for a group's request, with empty requests in between."""
    sizes = [(b * 7) % 5 * 9 for b in range(23)]
    total = 36 + 60
    per = -(-total // config.page_size)
    table = torch.randperm(23 * per, generator=torch.Generator().manual_seed(2)).int().view(23, per)
    got, want = cache_of(config, 23 * per, 1), cache_of(config, 23 * per, 1)
    lengths = int32([0] * 23)
    for i in range(2):
        k, v = rows_of(config, sum(sizes), 1, seed=3 + i)
        append(config, got, k, v, table, lengths, indptr_of(sizes))
        want.append(k, v, table, lengths, indptr_of(sizes), check=False)
        assert_same_records(got, want)
        lengths = lengths + int32(sizes)
        sizes = sizes[::-1]


@on_both
def test_token_groups_without_a_place_are_skipped(append):
    """Of both sides; K's group of two pages with one of them outside the cache is skipped whole."""
    config = AppendConfig(KVFormat.parse("k4c32v2c32"), 64, 16)
    pages = 6
    table = int32([[0, 1], [2, -1], [pages, 3], [4, 5], [4, 5]])
    starts, sizes = [32, 0, 0, 0, -1], [2, 20, 20, 20, 3]
    k, v = rows_of(config, sum(sizes), 2, seed=1)
    got, want = cache_of(config, pages), cache_of(config, pages)
    append(config, got, k, v, table, int32(starts), indptr_of(sizes))
    want.append(k[42:62], v[42:62], table[3:4], int32([0]), int32([0, 20]), check=False)
    assert_same_records(got, want)


def planted(pattern: str, instead: str):
    """The PTX with a bug: ``instead`` of all that matches, which there must be."""

    def mutate(ptx: str) -> str:
        changed, count = re.subn(pattern, instead, ptx)
        assert count, "nothing to change"
        return changed

    return mutate


GROUP_BUGS = {
    "extremes without NaN": (r"(min|max)\.NaN", r"\1"),
    "no share of other lanes": (r"shfl\.sync\.bfly\.b32 \t(%r\d+), (%r\d+), 16,.*;", r"mov.b32 \1, \2;"),
    "another NaN": (r", 2113929216,", ", 2113994752,"),
    "scale of a constant channel": (r"selp\.b32 \t(%r\d+), 1,", r"selp.b32 \t\1, 2,"),
    "no byte": (r"st\.global\.b8.*;", ""),
    "values above the range": (r"setp\.le\.f32", "setp.ge.f32"),
}


@pytest.mark.skipif(jit.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("bug", GROUP_BUGS)
def test_planted_bugs_in_token_groups_are_seen(bug):
    with pytest.raises(AssertionError, match="byte"):
        check_groups(CHANNEL_APPENDS[2], EmulatedAppend(planted(*GROUP_BUGS[bug])))


# ---------------------------------------------------------------------------------------------- planted bugs
BUGS = {  # in the PTX: a pattern and what takes its place, everywhere
    "extremes without NaN": (r"(min|max)\.NaN", r"\1"),
    "a minimum of -0": (r"add(\.rn\.f32 %r\d+, %r\d+, %r\d+;\n(?:.*\n){2}.*cvt\.rn\.f16)", r"sub\1"),
    "parameters cut off": (r"cvt\.rn\.f16", "cvt.rz.f16"),
    "the next value of the other sign": (r"(setp\.)lt(\.u32 \t%p\d+, %r\d+, 32768;)", r"\1ge\2"),
    "another NaN": (r", 32256,", ", 32257,"),
    "scale of a constant row": (r"selp\.b32 \t(%r\d+), 1,", r"selp.b32 \t\1, 2,"),
    "half of a row": (r"shfl\.sync\.bfly\.b32 \t(%r\d+), (%r\d+), 4,.*;", r"mov.b32 \1, \2;"),
    "half a step": (r"mul\.rn(\.f32 %r\d+, %r\d+, %r\d+;\n(?:.*\n){1,6}.*setp\.gt\.f32)", r"add.rn\1"),
    "no byte of V": (r"st\.global\.b8.*;", ""),
    "a code beyond the last": (r"min\.f32 \t(%r\d+), (%r\d+), .*;", r"mov.b32 \1, \2;"),
}


@pytest.mark.skipif(jit.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug):
    with pytest.raises(AssertionError, match="byte"):
        check_bytes(APPENDS[3], EmulatedAppend(planted(*BUGS[bug])))


@on_both
@pytest.mark.parametrize("config", [APPENDS[3], APPENDS[6]], ids=ids)
def test_the_places_of_strided_tables_and_caches(config, append):
    """Every other column of a table, lengths and indptr with strides, layers interleaved in one pool."""
    starts = starts_of(config)
    table = shuffled_table([s + c for s, c in zip(starts, CHUNKS, strict=True)], config.page_size, 12, 3)
    wide = torch.full((4, 2 * table.shape[1]), 99, dtype=torch.int32)
    wide[:, ::2] = table
    spread = torch.stack([int32(starts), int32([7] * 4)], 1)
    ends = torch.stack([indptr_of(CHUNKS), int32([7] * 5)], 1)
    k, v = rows_of(config, sum(CHUNKS), 2, seed=6)
    caches = []
    for _ in range(2):
        plain = cache_of(config, 12)
        pool = torch.full((12, 3, *plain.data.shape[1:]), 0x5A, dtype=torch.uint8)
        pool[:, 1] = plain.data
        caches.append(PagedKVCache(12, config.page_size, 2, config.head_dim, config.format, data=pool[:, 1]))
    got, want = caches
    append(config, got, k, v, wide[:, ::2], spread[:, 0], ends[:, 0])
    want.append(k, v, table, int32(starts), indptr_of(CHUNKS), check=False)
    assert_same_records(got, want)
    assert torch.equal(got.data._base, want.data._base)


@on_both
@pytest.mark.parametrize("config", [APPENDS[3]], ids=ids)
def test_rows_without_a_place_are_skipped(config, append):
    pages, page_size = 6, config.page_size
    table = int32([[0, 1], [2, -1], [3, pages], [4, 2**31 - 1], [5, -(2**31)], [5, 5]])
    starts = [2 * page_size, page_size - 1, page_size - 1, page_size + 3, -1, 7]
    k, v = rows_of(config, 12, 2, seed=1)
    got, want = cache_of(config, pages), cache_of(config, pages)
    append(config, got, k, v, table, int32(starts), indptr_of([2] * 6))
    # the first rows of requests 1 and 2, both of request 5
    want.append(k[[2, 4]], v[[2, 4]], table[1:3], int32(starts[1:3]), check=False)
    want.append(k[10:], v[10:], table[5:], int32([7]), int32([0, 2]), check=False)
    assert_same_records(got, want)
    got = cache_of(config, pages)
    append(config, got, k, v, table, int32(starts), int32([0, 0, 0, 0, 0, 0, 2]))  # rows beyond the last end
    want = cache_of(config, pages)
    want.append(k[:2], v[:2], table[5:], int32([7]), int32([0, 2]), check=False)
    assert_same_records(got, want)


@on_both
def test_many_requests(append):
    """Every place in the search for a row's request, with empty requests in between."""
    config = APPENDS[0]
    sizes = [(b * 7) % 3 for b in range(45)]
    table = torch.randperm(45, generator=torch.Generator().manual_seed(2)).int()[:, None]
    k, v = rows_of(config, sum(sizes), 1, seed=3)
    got, want = cache_of(config, 45, 1), cache_of(config, 45, 1)
    lengths = int32([b % 14 for b in range(45)])
    append(config, got, k, v, table, lengths, indptr_of(sizes))
    want.append(k, v, table, lengths, indptr_of(sizes), check=False)
    assert_same_records(got, want)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("config", [APPENDS[3], APPENDS[5], APPENDS[12]], ids=ids)
def test_a_long_prefill(config):
    """Tens of thousands of groups of every size, in grids of many blocks."""
    sizes = [4000, 1, 0, 999]
    table = shuffled_table([n + 9 for n in sizes], config.page_size, 400, 3)
    got, want = cache_of(config, 400, 8), cache_of(config, 400, 8)
    k, v = rows_of(config, sum(sizes), 8, seed=4)
    GpuAppend()(config, got, k, v, table, int32([9] * 4), indptr_of(sizes))
    want.append(k, v, table, int32([9] * 4), indptr_of(sizes), check=False)
    assert_same_records(got, want)


# ---------------------------------------------------------------------------------------------- whose append it is
def test_the_hard_rows_are_hard():
    """What the other tests rely on: every kind of group is among them."""
    found = []
    for config in APPENDS[3:5]:
        k, v = rows_of(config, 18, 2, seed=5)
        cache = PagedKVCache(2, config.page_size, 2, config.head_dim, config.format)
        cache.append(k, v, int32([[0, 1]]), int32([0]), int32([0, 18]), check=False)
        found += cache.read_tokens(int32([0, 1]), 0, 18)
    bias = torch.cat([x.bias.flatten() for x in found])
    scale = torch.cat([x.scale.flatten() for x in found])
    assert 0 < int(bias.isnan().sum()) < len(bias) // 2
    assert int((scale == 2.0**-24).sum()) > int(bias.isnan().sum())  # constant ones too
    assert float(scale.max()) > 1e3 and float(scale[scale > 2.0**-24].min()) < 1e-4
    assert hard_rows(18, 2, 128, 5).isinf().any()


def test_what_is_left_to_torch():
    k = torch.zeros(2, 2, 128, dtype=torch.bfloat16)

    def config(fmt=None, k=k, v=k):
        return append_launch.config_of(PagedKVCache(2, 16, 2, 128, fmt), k, v)

    assert config() == AppendConfig(KVFormat.int2(), 128, 16)
    channel = KVFormat.make(2, k_axis="channel")
    assert config(channel) == AppendConfig(channel, 128, 16)
    assert config(v=k.half()) is None and config(k=k.double(), v=k.double()) is None
    last = torch.zeros(2, 2, 128, 2, dtype=torch.bfloat16)[..., 0]
    assert config(k=last) is None and config(v=last) is None
    odd = torch.zeros(2 * 2 * 128 + 1, dtype=torch.bfloat16)[1:].view(2, 2, 128)
    assert config(v=odd) == AppendConfig(KVFormat.int2(), 128, 16, vector=False)


def test_configs_that_there_is_no_kernel_for():
    for fmt, dim, page, dtype in (
        (KVFormat.make(2, k_axis="channel", k_group=48), 128, 64, "bfloat16"),
        (KVFormat.int2(), 72, 64, "bfloat16"),
        (KVFormat.int2(), 128, 48, "bfloat16"),
        (KVFormat.int2(), 128, 64, "float64"),
    ):
        with pytest.raises(FormatError):
            AppendConfig(fmt, dim, page, dtype)


class OnGpu:
    """A device that says "cuda" of tensors on the CPU."""

    type, index = "cuda", 0

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__


def test_appends_on_a_gpu_are_the_kernel_s_unless_checked(monkeypatch):
    """One launch of PagedKVCache.append and of the operator; with check=True none."""
    import foscar.ops  # noqa: F401 (registers the operators)

    launches = []
    monkeypatch.setattr(PagedKVCache, "device", OnGpu())
    monkeypatch.setattr(append_launch, "launch", lambda *args: launches.append(args) or True)
    cache = PagedKVCache(2, 16, 2, 128, data=torch.zeros(2, 2, 16 * 72, dtype=torch.uint8))
    k, table, lengths = torch.ones(1, 2, 128), int32([[0, 1]]), int32([3])
    cache.append(k, k, table, lengths)
    torch.ops.foscar.append(cache.data, k, k, table, lengths, None, "int2", 16, 128)
    assert len(launches) == 2 and not cache.data.any()
    with pytest.raises(ValueError, match="k must be a float tensor"):
        cache.append(k[..., :64], k, table, lengths)
    monkeypatch.setattr(PagedKVCache, "device", torch.device("cpu"))
    cache.append(k, k, table, lengths)
    cache.append(k, k, table, lengths, check=False)
    assert len(launches) == 2 and cache.data.any()


def test_a_missing_kernel_is_not_an_error(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("FOSCAR_JIT", "0")
    monkeypatch.setenv("FOSCAR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FOSCAR_KERNEL_PATH", raising=False)
    monkeypatch.setattr(append_launch, "device_arch", lambda device: ARCH)
    jit.forget()
    config = AppendConfig(KVFormat.int4(), 128, 64)
    with caplog.at_level(logging.WARNING, "foscar"):
        assert append_launch.kernel.__wrapped__(config, SimpleNamespace(index=0)) is None
    assert "appending by torch operations" in caplog.text and "FOSCAR_JIT=0" in caplog.text
    with mock.patch.object(append_launch, "kernel", lambda config, device: None):
        k = torch.ones(1, 2, 128)
        assert append_launch.launch(PagedKVCache(2, 16, 2, 128), k, k, int32([[0, 1]]), int32([3]), None) is False


def test_a_launch_s_arguments(monkeypatch):
    """The call to the driver: the parameters' order, the grid; and none at all without rows or pages."""
    calls = []
    prepared = mock.Mock(update=lambda numbers: calls.append(list(numbers)))
    prepared.side_effect = lambda grid, stream: calls.append((grid, stream))
    loaded = SimpleNamespace(prepare=lambda values: prepared)
    monkeypatch.setattr(append_launch, "load_kernel", lambda artifact, index: loaded)
    monkeypatch.setattr(append_launch, "device_arch", lambda device: ARCH)
    monkeypatch.setattr(append_launch.jit, "load_or_compile", lambda *job: job)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(append_launch, "kernel", append_launch.kernel.__wrapped__)
    cache = PagedKVCache(5, 16, 2, 128, KVFormat.make(2, 4))
    k, v = torch.ones(9, 2, 128), torch.ones(9, 3, 128)[:, 1:]
    table, lengths, indptr = int32([[0, 1, 2], [3, 4, 4]]), int32([3, 0]), int32([0, 4, 9])
    assert append_launch.launch(cache, k, v, table, lengths, indptr)
    addresses = [x.data_ptr() for x in (k, v, cache.data, table, lengths, indptr)]
    stride = cache.layout.record_bytes
    assert calls == [
        [addresses[0], 256, 128, addresses[1], 384, 128, addresses[2], 2 * stride, stride, addresses[3], 3]
        + [addresses[4], addresses[5], 9, 2, 3, 5],
        ((2, 2, 2), 77),  # 9 tokens of 16 threads at 4 bits
    ]
    assert append_launch.launch(cache, k[:0], v[:0], table, lengths, int32([0, 0, 0])) and len(calls) == 2
