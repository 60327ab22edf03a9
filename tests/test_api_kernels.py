"""What reaches a kernel: which one, in which form; and what has none."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from support.api_cases import flashinfer_tables, planned, refuse
from support.compare import assert_equal
from support.decode_checks import assert_contract
from support.inputs import int32, make_case, random_values

import foscar
from foscar import (
    AttentionOptions,
    BatchDecodeWithPagedKVCacheWrapper,
    KVFormat,
    PagedKVCache,
    TileConfig,
    decode_attention,
)
from foscar import api as api_module
from foscar.common.errors import UnsupportedDeviceError
from foscar.common.plan import KernelOptions
from foscar.common.reference import decode_folded
from foscar.hopper import arguments
from foscar.hopper.config import ConfigError


class FakeKernels:
    """In the place of HopperDecode: notes what it is given and insists on what the kernel insists on."""

    made: list

    def __init__(self, config, index):
        self.config, self.calls = config, []

    def buffers(self, group):
        return SimpleNamespace(group=group)

    def bind(self, *given):
        return lambda *addresses: self.launch(*given)

    def launch(self, q, cache, tables, out, lse, buffers, sm_scale, lse_base, variant):
        width = 4 * (q.shape[2] // 64)
        assert q.stride(2) == 1 and q.data_ptr() % width == 0
        assert all(2 * s % width == 0 for s, n in zip(q.stride()[:2], q.shape[:2], strict=True) if n > 1)
        assert out.stride(2) == 1 and (lse is None or lse.is_contiguous())
        assert tables.lengths.is_contiguous() and (tables.pages.shape[-1] <= 1 or tables.pages.stride(-1) == 1)
        assert buffers.group == q.shape[1] // cache.num_kv_heads
        self.calls.append((q, buffers))
        dense = api_module._dense(tables)
        more = {"options": variant.options, "sinks": variant.sinks, "q_indptr": variant.q_indptr}
        result, log_sum = decode_folded(q, cache, dense.pages, dense.lengths, sm_scale, **more)
        rows = q.shape[0] if variant.q_indptr is None else int(variant.q_indptr[-1])
        out[:rows].copy_(result[:rows])
        if lse is not None:
            lse[:rows].copy_((log_sum if lse_base == "e" else log_sum / math.log(2.0))[:rows])


@pytest.fixture
def kernels(monkeypatch):
    """The CUDA route on CPU tensors; the kernels made, by config."""
    made = {}
    monkeypatch.setattr(api_module, "device_arch", lambda device: "sm_90a")
    monkeypatch.setattr(api_module, "_backend", lambda name, cache: "torch" if name == "torch" else "cuda")
    monkeypatch.setattr(api_module, "decoder", lambda c, i: made.setdefault(c, FakeKernels(c, i)))
    return made


def test_the_kernel_that_a_call_needs(kernels):
    tile = TileConfig(kv_stages=3)
    for group, heads in ((1, 4), (4, 4), (5, 8), (12, 12), (13, 16), (16, 16), (17, 12), (24, 12), (64, 16)):
        case = make_case([20], page_size=16, group_heads=group, head_dim=64, fmt=KVFormat.int4(), dtype=torch.float16)
        out, lse = decode_attention(case.q, *case.tables, tile=tile, return_lse=True)
        assert_contract(out, lse, case)
        config = list(kernels)[-1]
        assert (config.format, config.head_dim, config.page_size) == (KVFormat.int4(), 64, 16)
        assert (config.heads, config.q_dtype, config.tile) == (heads, "float16", tile)
        assert config.options == KernelOptions(rows=group > 16)
    assert len(kernels) == 6


def test_the_kernel_that_options_need(kernels):
    sinks, indptr = torch.zeros(8), int32([0, 1])
    for given, options, heads in (
        ({}, "", 4),
        ({"options": AttentionOptions()}, "", 4),
        ({"options": AttentionOptions(window=9)}, "window", 4),
        ({"options": AttentionOptions(soft_cap=256.0)}, "soft_cap", 4),
        ({"options": AttentionOptions(soft_cap=257.0, out_scale=2.0)}, "soft_cap,wide_cap,out_scale", 4),
        ({"sinks": sinks}, "sinks", 4),
        ({"q_indptr": indptr}, "rows", 4),  # as many as q has rows per request
        ({"q_indptr": indptr, "max_q_len": 16}, "rows", 16),
        ({"q_indptr": indptr, "max_q_len": 3}, "rows", 12),
        ({"q_indptr": indptr, "max_q_len": 5, "sinks": sinks}, "sinks,rows", 12),
    ):
        case = make_case([20], page_size=16)
        got = decode_attention(case.q, *case.tables, return_lse=True, **given)
        config = next(c for c, fake in kernels.items() if fake.calls and fake.calls[-1][0] is case.q)
        assert (config.options, config.heads) == (KernelOptions.parse(options), heads)
        decode, combine = (arguments.decode(config.options), arguments.combine(config.options))
        assert ("q_indptr" in decode, "sinks" in combine) == ("q_indptr" in given, "sinks" in given)
        for a, b in zip(got, decode_attention(case.q, *case.tables, return_lse=True, backend="torch", **given),
                        strict=True):  # fmt: skip
            assert_equal(a, b)


def test_rows_of_no_request_stay_as_they_are(kernels):
    """Also where the kernel writes to a copy of out."""
    case = make_case([20], page_size=16)
    q = case.q.expand(3, -1, -1).contiguous()
    out = torch.full((3, 128, 8), 7.0, dtype=q.dtype).transpose(1, 2)
    decode_attention(q, *case.tables, q_indptr=int32([0, 1]), out=out, max_q_len=1)
    assert bool((out[1:] == 7).all()) and not bool((out[0] == 7).all())


def test_every_layout_reaches_the_kernel_in_a_form_that_it_takes(kernels):
    case = make_case([33, 20], page_size=16)
    want = decode_attention(case.q, *case.tables, backend="torch", return_lse=True)
    odd = torch.cat([case.q.new_zeros(1), case.q.flatten()])[1:].view(case.q.shape)  # contiguous, misaligned
    assert odd.is_contiguous() and odd.data_ptr() % 8
    fused = torch.zeros(2, 8, 130, dtype=case.q.dtype)
    fused[..., 1:129] = case.q
    wide = torch.zeros(2, 9, 128, dtype=case.q.dtype)
    wide[:, 1:] = case.q
    queries = {"as it is": case.q, "a slice": wide[:, 1:], "misaligned": odd, "odd strides": fused[..., 1:129],
               "channels apart": case.q.transpose(1, 2).contiguous().transpose(1, 2)}  # fmt: skip
    table = torch.stack([case.block_table, case.block_table], -1)[..., 0]
    lengths = torch.stack([case.seq_lens, case.seq_lens], -1)[..., 0]
    out = torch.full((2, 128, 8), math.nan, dtype=case.q.dtype).transpose(1, 2)
    for name, q in queries.items():
        out.fill_(math.nan)
        got = decode_attention(q, case.cache, table, lengths, out=out, return_lse=True)
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b)
        (fake,) = kernels.values()
        assert (fake.calls[-1][0].data_ptr() == q.data_ptr()) == (name in ("as it is", "a slice")), "a needless copy"
    lse = torch.full((2, 16), math.nan)[:, ::2]
    assert planned(case).run(case.q, case.cache, lse=lse) is not None
    assert_equal(lse, want[1])


def overlapping(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    one, flat = torch.zeros(shape, dtype=dtype), torch.zeros(10**4, dtype=dtype)
    close = (one.stride(0) - 1, *one.stride()[1:])
    views = (close, (1,) * len(shape))
    return [one[:1].expand(shape), one[..., :1].expand(shape), *(flat.as_strided(shape, s) for s in views)]


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_results_that_overlap_themselves_are_refused(kernels, backend):
    case = make_case([33, 20], page_size=16)
    wrapper = planned(case, backend=backend)
    for out in overlapping(case.q.dtype, 2, 8, 128):
        match = r"out has elements that overlap in memory: its strides are \["
        refuse(ValueError, match, decode_attention, case.q, *case.tables, out=out, backend=backend)
        refuse(ValueError, match, wrapper.run, case.q, case.cache, out=out)
    for lse in overlapping(torch.float32, 2, 8):
        refuse(ValueError, "lse has elements that overlap", wrapper.run, case.q, case.cache, lse=lse)
    apart = torch.empty(3, 8, 2, 300, dtype=case.q.dtype)[0].transpose(0, 1)[..., ::2][..., 3:131]
    assert_equal(wrapper.run(case.q, case.cache, out=apart), decode_attention(case.q, *case.tables))


def test_derived_lengths_stay_where_a_graph_reads_them(kernels):
    """Plans of other batches and dense plans in between change nothing for a captured graph of compressed tables."""
    case, longer = make_case([33, 20], page_size=16), make_case([33, 20, 5], page_size=16)
    indptr, indices, last = flashinfer_tables(case)
    sizes = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16}
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(indptr, indices, last, **sizes)
    captured = wrapper._tables.lengths
    planned(longer, wrapper=wrapper)
    planned(case, wrapper=wrapper, dense=True)
    assert wrapper._tables.lengths is case.seq_lens and captured.tolist() == [33, 20]
    last[1] += 1  # in place, and then the plan that the docstring asks for
    assert captured.tolist() == [33, 20]
    wrapper.plan(indptr, indices, last, **sizes)
    assert wrapper._tables.lengths is captured and captured.tolist() == [33, 21]


def test_the_wrapper_keeps_its_workspace(kernels):
    long, short = make_case([33, 20, 5], page_size=16), make_case([33], page_size=16)
    wrapper = BatchDecodeWithPagedKVCacheWrapper()
    for case in (short, short, long, short):
        planned(case, wrapper=wrapper, dense=case is long).run(case.q, case.cache)
    (fake,) = kernels.values()
    first, *others = (buffers for _, buffers in fake.calls)
    assert all(buffers is first for buffers in others), "a captured graph writes to the first"
    planned(short).run(short.q, short.cache)
    decode_attention(short.q, *short.tables)
    assert len({id(buffers) for _, buffers in fake.calls}) == 3, "calls that may overlap share no workspace"


def test_batch_zero_launches_nothing(kernels):
    case = make_case([], page_size=16)
    out, lse = decode_attention(case.q, *case.tables, return_lse=True)
    assert out.shape == (0, 8, 128) and lse.shape == (0, 8) and not kernels


@pytest.mark.parametrize(
    "options, tile, error, match",
    [
        ({}, TileConfig(kv_stages=40), ConfigError, "shared memory: .* at most 232448 B fit"),
    ],
)
def test_what_has_no_kernel_is_refused_on_a_gpu(kernels, options, tile, error, match):
    """Public report 29: a clear line, and the torch backend takes it."""
    case = make_case([20], page_size=16, **options)
    refuse(error, match, decode_attention, case.q, *case.tables, tile=tile)
    assert not kernels
    out, lse = decode_attention(case.q, *case.tables, backend="torch", return_lse=True)
    assert_contract(out, lse, case)


def test_a_window_over_channels_has_a_kernel(kernels):
    """Public report 29."""
    case = make_case([50], page_size=16, fmt=KVFormat.make(2, k_axis="channel"))
    window = foscar.AttentionOptions(window=20)
    got = decode_attention(case.q, *case.tables, options=window)
    assert [(c.format.k.axis, c.options.window) for c in kernels] == [("channel", True)]
    want = decode_attention(case.q, *case.tables, options=window, backend="torch")
    torch.testing.assert_close(got, want)


def test_other_gpus_are_refused(monkeypatch):
    """Public report 31: no silent fallback, and the line names what is supported."""
    case = make_case([20], page_size=16)
    monkeypatch.setattr(api_module, "_backend", lambda name, cache: "cuda")
    for arch in ("sm_89", "sm_120a"):
        monkeypatch.setattr(api_module, "device_arch", lambda device, arch=arch: arch)
        refuse(UnsupportedDeviceError, f"kernels for sm_90a .* sm_103a .* only, not for {arch}; backend='torch'",
               decode_attention, case.q, *case.tables)  # fmt: skip
    monkeypatch.undo()
    monkeypatch.setattr(api_module, "_backend", lambda name, cache: "cuda")
    monkeypatch.setattr(api_module, "device_arch", lambda device: foscar.common.launch.device_arch("cuda:0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    refuse(UnsupportedDeviceError, "NVIDIA L4 is sm_89; FOSCAR's kernels run on sm_90a .H100, H200", decode_attention,
           case.q, *case.tables)  # fmt: skip


def test_which_backend_is_automatic():
    def on(device):
        return SimpleNamespace(device=torch.device(device))

    assert api_module._backend("auto", on("cpu")) == "torch" and api_module._backend("auto", on("cuda:1")) == "cuda"
    assert api_module._backend("torch", on("cuda:1")) == "torch" and api_module._backend("cuda", on("cuda:0")) == "cuda"


def test_the_wrapper_names_its_device_as_tensors_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuse(UnsupportedDeviceError, "device 'cuda' needs a GPU, and torch sees none", BatchDecodeWithPagedKVCacheWrapper,
           "cuda")  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert BatchDecodeWithPagedKVCacheWrapper("cuda").device == torch.device("cuda:3")
    assert BatchDecodeWithPagedKVCacheWrapper("cuda:1").device == torch.device("cuda:1")
    assert BatchDecodeWithPagedKVCacheWrapper("cpu").device == torch.device("cpu")
    assert BatchDecodeWithPagedKVCacheWrapper().device is None


def test_what_the_package_exports():
    assert set(foscar.__all__) <= set(dir(foscar)) and foscar.PagedKVCache is PagedKVCache
    values = random_values((3, 2, 64), 0)
    cache = PagedKVCache(1, 16, 2, 64)
    cache.append(values, values, int32([[0]]), int32([0]), int32([0, 3]))
    assert decode_attention(values[:1].half(), cache, int32([[0]]), int32([3])).dtype == torch.float16
