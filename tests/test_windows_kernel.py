"""Windows in the kernels: history, sink and recent tokens in one launch, in the emulator and on a GPU.

Lengths: none, one token, below and at the sink's end, below and at the end of the recent window, a history of one
token, of a tile, of several; the bodies are in :mod:`support.window_checks`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import window_checks as checks
from support.compare import assert_equal
from support.runners import EmulatorRunner, GpuRunner, ScheduledRunner, why_no_gpu
from support.window_checks import KIVI, WindowCase, make_inputs

import foscar
from foscar import AttentionOptions, KVFormat, WindowConfig
from foscar.common import jit

needs_dsl = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(why_no_gpu() is not None, reason=why_no_gpu() or "")]
SMALL, SMALL_F16 = WindowConfig(5, 20), WindowConfig(3, 33, "float16")
INT2, INT4 = KVFormat.int2(), KVFormat.int4()
LENGTHS = (300, 0, 1, 4, 5, 6, 25, 26, 153, 154, 40)
MORE = {"options": AttentionOptions(soft_cap=4.0, out_scale=0.5), "sinks": True}
# Rows in the history alone, in the sink, before position 0; a draft longer than the recent window's tokens.
DRAFTS = {"lengths": (170, 7, 1, 60, 0, 33), "q_lens": (16, 7, 3, 1, 0, 12)}
CASES = {
    "int2": WindowCase(INT2, SMALL, LENGTHS, steps=30),
    "bf16 query, fp16 windows": WindowCase(INT2, SMALL_F16, LENGTHS),
    "fp16 query, bf16 windows": WindowCase(INT4, SMALL, LENGTHS, dtype=torch.float16),
    "mixed bits": WindowCase(KVFormat.make(4, 2), SMALL_F16, LENGTHS, dtype=torch.float16, group=7),
    "kivi": WindowCase(KIVI, WindowConfig.kivi(), (300, 129, 31, 160), dtype=torch.float16),
    "oscar": WindowCase(INT2, WindowConfig.oscar(), (460, 63, 321), head_dim=128, page_size=64, group=4),
    "80 channels": WindowCase(INT2, SMALL, (160, 3), head_dim=80, page_size=64, group=4),
    "256 channels": WindowCase(INT4, SMALL, (160, 3), head_dim=256, group=12, kv_heads=1),
    "no windows": WindowCase(INT2, WindowConfig.none(), (130, 0, 5)),
    "options": WindowCase(INT2, SMALL, LENGTHS, sm_scale=0.3, **MORE),
    "drafts": WindowCase(INT2, SMALL, **DRAFTS),
    "a draft longer than the window": WindowCase(INT2, WindowConfig(3, 4), **DRAFTS),
    "drafts and options": WindowCase(INT4, SMALL_F16, dtype=torch.float16, group=1, **DRAFTS, **MORE),
}


@pytest.fixture(params=[pytest.param("emulator", marks=needs_dsl), pytest.param("gpu", marks=needs_gpu)])
def runner(request):
    return EmulatorRunner(ctas=1) if request.param == "emulator" else GpuRunner()


@pytest.mark.parametrize("name", CASES)
def test_contract(runner, name):
    checks.assert_contract(*runner.run(checks.kernel_results, CASES[name]))


@pytest.mark.parametrize("name", ["int2", "drafts and options"])
def test_contract_with_split_items(runner, name):
    """Several SMs: the combine joins the tokens in 16 bits."""
    if isinstance(runner, EmulatorRunner):
        runner = EmulatorRunner(ctas=5)
    checks.assert_contract(*runner.run(checks.kernel_results, CASES[name]))


@needs_dsl
@pytest.mark.parametrize("name", ["int2", "drafts"])
def test_every_schedule(name):
    x = dataclasses.replace(CASES[name], lengths=(150, 7), q_lens=(3, 2) if CASES[name].q_lens else None, steps=0)
    given = make_inputs(x)
    checks.assert_contract(*ScheduledRunner(ctas=1).run(given.decode), given)


@pytest.mark.parametrize("name", CASES)
def test_the_torch_backend(name):
    given = make_inputs(CASES[name])
    checks.assert_contract(*given.decode(backend="torch", lse_base="e"), given, "e")


def test_nan_stays_in_its_request(runner):
    """Public reports 7 and 34: NaN in the windows of one request."""

    def body(device="cpu"):
        out, _, given = checks.kernel_results(CASES["int2"], device)
        slot = int(given.slots[0])
        for x in (given.cache.sink_k, given.cache.recent_v):
            x[slot] = torch.nan
        return out, given.decode()[0].cpu()

    before, after = runner.run(body)
    assert bool(after[0].isnan().all())
    assert_equal(after[1:], before[1:], ("request", "head", "channel"))


PLANNED = ("int2", "kivi", "drafts and options")


def planned_results(name, device="cpu", **more):
    """(out, lse) of a plan's two layers, by run into given tensors and into new ones, and of a call for each."""
    given = make_inputs(CASES[name], device)
    other = dataclasses.replace(make_inputs(CASES[name], device, seed=1000), q=given.q)
    checks.config(CASES[name], given)
    wrapper, found, want = given.planned(**more), [], []
    for layer in (given, other, given):
        out, lse = torch.full_like(layer.q, torch.nan), torch.full(layer.q.shape[:2], torch.nan, device=device)
        for into in ({"out": out, "lse": lse}, {}):
            results = wrapper.run(layer.q, layer.cache, sinks=given.sinks, return_lse=True, **into)
            found.append([x.cpu() for x in results])
            called = layer.decode(**{**more, "sinks": given.sinks})
            want.append([x.cpu() for x in called])
    return found, want


def same_results(found, want) -> None:
    for got, expected in zip(found, want, strict=True):
        for a, b, axes in zip(got, expected, (("row", "head", "channel"), ("row", "head")), strict=True):
            assert_equal(a, b, axes)
    assert not torch.equal(found[0][0], found[2][0]), "the layers are one"


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_has_the_bits_of_a_call(runner, name):
    same_results(*runner.run(planned_results, name))


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_on_the_torch_backend(name):
    same_results(*planned_results(name, backend="torch"))


def replays(graph, given, tables: tuple, results: tuple, expected: tuple) -> None:
    """A graph captured of no tokens gives zeros, and with the lengths and slots of ``tables`` what is expected."""
    graph.replay()
    assert not bool(results[0].any())
    for target, values in zip((given.lengths, given.slots), tables, strict=True):
        target.copy_(values)
    graph.replay()
    for got, want, names in zip(results, expected, (("row", "head", "channel"), ("row", "head")), strict=True):
        assert_equal(got.cpu(), want.cpu(), names)


@pytest.mark.gpu
@pytest.mark.skipif(why_no_gpu() is not None, reason=why_no_gpu() or "")
def test_a_captured_plan_reads_lengths_and_slots():
    """Captured from a repeated launch, and planned again since: the graph's workspace stays."""
    given = make_inputs(CASES["int2"], "cuda")
    want, want_lse = given.decode()
    lengths, slots = given.lengths.clone(), given.slots.clone()
    wrapper = given.planned()
    out, lse = torch.full_like(given.q, torch.nan), torch.full(given.q.shape[:2], torch.nan, device="cuda")
    wrapper.run(given.q, given.cache, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(given.q, given.cache, out=out, lse=lse)
    given.lengths.zero_()
    given.slots.fill_(-1)
    replays(graph, given, (lengths, slots), (out, lse), (want, want_lse))


def test_a_sliding_window_is_refused():
    given = make_inputs(dataclasses.replace(CASES["int2"], lengths=(3, 1), options=AttentionOptions(window=9)))
    for refused in (given.decode, given.planned):
        with pytest.raises(ValueError, match="^decode_windowed takes no sliding window .options.window is 9.") as error:
            refused()
        assert "\n" not in str(error.value)


@pytest.mark.gpu
@pytest.mark.skipif(why_no_gpu() is not None, reason=why_no_gpu() or "")
@pytest.mark.parametrize("name", ["int2", "drafts and options"])
def test_a_captured_graph_reads_lengths_and_slots(name):
    """Captured once, replayed with other lengths and slots, without the host waiting for the device."""
    given = make_inputs(CASES[name], "cuda")
    want, want_lse = given.decode()
    lengths, slots = given.lengths.clone(), given.slots.clone()
    given.lengths.zero_()
    given.slots.fill_(-1)
    given.decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = given.decode()
    replays(graph, given, (lengths, slots), (out, lse), (want, want_lse))


def test_no_requests():
    given = make_inputs(dataclasses.replace(CASES["int2"], lengths=(3, 1)))
    none = (given.table[:0], given.lengths[:0], given.slots[:0])
    assert foscar.decode_windowed(given.q[:0], given.cache, *none).shape == (0, 6, 64)
