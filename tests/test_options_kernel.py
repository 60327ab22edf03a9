"""Window, soft-cap, sinks, output scale and several query tokens in the kernels: in the emulator, and on a GPU.

The bodies are in :mod:`support.option_checks`, the kernels in :mod:`support.gpu_kernels`.  Two emulated SMs have six
workers, so that most items here are split and merged by the combine; one SM has three.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from support import option_checks as checks
from support.compare import assert_equal
from support.inputs import int32
from support.option_checks import OptionCase, option_case
from support.option_table import ALL, CASES, INT2, SINGLE
from support.runners import EmulatorRunner, GpuRunner, ScheduledRunner, why_no_gpu

from foscar import AttentionOptions
from foscar.common import jit
from foscar.common.mask import spans
from foscar.common.plan import Cut, KernelOptions, rows_of_item, segments

needs_dsl = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(why_no_gpu() is not None, reason=why_no_gpu() or "")]


def case_of(name: str) -> tuple[OptionCase, dict]:
    shape, lengths, q_lens, given, call = CASES[name]
    return option_case(lengths, q_lens, **shape, **given), call


@pytest.fixture(params=[pytest.param("emulator", marks=needs_dsl), pytest.param("gpu", marks=needs_gpu)])
def runner(request):
    return EmulatorRunner(ctas=2) if request.param == "emulator" else GpuRunner()


@pytest.mark.parametrize("name", CASES)
def test_contract(runner, name):
    x, call = case_of(name)
    checks.kernel_meets_contract(runner, x, **call)


@needs_dsl
@pytest.mark.parametrize("name", ["window int2", "all int2", "window both per channel"])
def test_every_schedule(name):
    x, call = case_of(name)
    checks.assert_option_contract(*checks.decode(ScheduledRunner(ctas=1), x, **call), x)


@pytest.mark.parametrize("name", [
    "window int2", "drafts and window", "all int4", "window K per channel 128", "window both per channel 128",
    "window both per channel", "drafts, window and channels",
])  # fmt: skip
def test_nothing_before_the_windows_is_read(runner, name):
    x, call = case_of(name)
    checks.unseen_pages_are_not_read(runner, x, **call)


def test_one_row_each_has_the_bits_of_a_plain_window(runner):
    """Rows of one query token each by the kernel for drafts, and by the one without."""
    x = option_case(SINGLE, None, options=AttentionOptions(window=40), **INT2)
    want = checks.decode(runner, x)
    x = dataclasses.replace(x, q_lens=[1] * len(SINGLE))
    for got, expected in zip(checks.decode(runner, x), want, strict=True):
        assert_equal(got, expected, ("request", "head", "channel"))


def test_rows_of_no_request_are_not_written(runner):
    x = option_case([20, 140], [3, 6], **INT2)
    x.q_lens = [3, 2]
    out, _ = checks.decode(runner, x)
    assert bool(out[5:].isnan().all()) and not out[:5].isnan().any()


@needs_dsl
@pytest.mark.parametrize("kv_heads, lengths, q_lens", [(1, [300, 129], [4, 0]), (2, [270, 129, 3], [5, 0, 1])])
def test_more_rows_than_the_kernel_was_chosen_for(kv_heads, lengths, q_lens):
    """Without max_q_len the kernel is for 2 query tokens each; one request has more, in further passes.  Its parts are
    merged by item, with few of them, or by worker."""
    shape, _, _, given, _ = CASES["pairs"]
    x = option_case(lengths, q_lens, **shape | {"kv_heads": kv_heads}, **given)
    made = []
    runner = EmulatorRunner(ctas=2)
    decoder = runner._decoder
    runner._decoder = lambda config, index: made.append(config) or decoder(config, index)
    out, lse = runner.run(checks.call_into_nan, x, max_q_len=None)
    assert [c.heads for c in made] == [8]
    checks.assert_option_contract(out, lse, x)


def test_nan_stays_in_its_request(runner):
    """Public report 34, with options and drafts."""
    x = option_case([40, 150, 20], [3, 2, 4], options=ALL, sinks=True, **INT2)
    want, want_lse = checks.decode(runner, x)
    case = x.case
    case.cache.data[case.block_table[1, :10].long()] = 0xFF
    out, lse = checks.decode(runner, x)
    bad = torch.tensor([row in (3, 4) for row in range(9)])
    assert bool(out[bad].isnan().all()) and bool(lse[bad].isnan().all())
    assert_equal(out[~bad], want[~bad], ("row", "head", "channel"))
    assert_equal(lse[~bad], want_lse[~bad], ("row", "head"))


def test_sinks_of_every_size(runner):
    """None at all, far above and far below the tokens, in whole and in split items."""
    x = option_case([9, 0, 400], sinks=True, **INT2)
    x.sinks.copy_(torch.tensor([-math.inf, 80.0, -3e4, 0.0, 1e4, -100.0]))
    checks.assert_option_contract(*checks.decode(runner, x, lse_base="e"), x, lse_base="e")


@pytest.mark.gpu
@pytest.mark.skipif(why_no_gpu() is not None, reason=why_no_gpu() or "")
def test_a_graph_follows_lengths_and_rows():
    x = option_case([300, 129, 5], [4, 2, 3], options=ALL, sinks=True, **INT2)
    there = checks.on_device(x, "cuda")
    q_indptr = there.q_indptr
    out = torch.full_like(there.case.q, math.nan)

    def run():
        checks.foscar.decode_attention(
            there.case.q, *there.case.tables, options=x.options, sinks=there.sinks, q_indptr=q_indptr, max_q_len=16,
            out=out,
        )  # fmt: skip

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    q_indptr.copy_(int32([0, 1, 8, 9]))
    there.case.seq_lens.copy_(int32([290, 128, 1]))
    graph.replay()
    x.q_lens, x.case.seq_lens = [1, 7, 1], int32([290, 128, 1])
    want = checks.decode(GpuRunner(), x)[0]
    assert_equal(out.cpu(), want, ("row", "head", "channel"))


# ---------------------------------------------------------------------------------------------- the cut, on the host
@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 10**6])
def test_items_hold_what_their_rows_see(window):
    lengths, q_lens, group = [0, 1, 128, 129, 500, 5, 300], [2, 1, 16, 3, 4, 9, 0], 3
    bounds = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    seen = {span.request: span for span in spans(lengths, bounds, window)}
    cuts = [
        Cut.make(n, 128, rows=12, q_len=m, group=group, window=window) for n, m in zip(lengths, q_lens, strict=True)
    ]
    for b, cut in enumerate(cuts):
        assert cut.chunks == max(1, math.ceil(q_lens[b] * group / 12))
        if b in seen:
            assert cut.first == seen[b].first // 128 and cut.first + cut.tiles == math.ceil(seen[b].stop / 128)
        else:
            assert (cut.first, cut.tiles) == (0, 1)
    found = segments(lengths, 2, 5, 128, cuts)
    total = sum(2 * cut.chunks * cut.tiles for cut in cuts)
    assert sum(s.tiles for s in found) == total
    items = {(s.request, s.head, s.chunk) for s in found}
    assert len(items) == sum(2 * cut.chunks for cut in cuts)
    assert all(s.first == cuts[s.request].first for s in found)


def test_rows_of_an_item():
    for group in range(1, 65):
        for q_len in range(1, 17):
            rows = rows_of_item(group, q_len)
            passes = math.ceil(group * q_len / 16)
            assert rows in (4, 8, 12, 16) and rows * passes >= group * q_len > rows * passes - 4 * passes


def test_names_of_options():
    for options in (KernelOptions(), KernelOptions(window=True, rows=True), KernelOptions(*[True] * 6)):
        assert KernelOptions.parse(options.name) == options
    with pytest.raises(ValueError, match="options are window, .*, not 'causal'"):
        KernelOptions.parse("window, causal")
    with pytest.raises(TypeError, match="window must be True or False, not 3"):
        KernelOptions(window=3)
