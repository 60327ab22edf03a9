"""Options in the Blackwell kernel, in the emulator: test_options_kernel.py's cases, random ones, planted faults."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from support import option_checks as checks
from support import window_checks
from support.blackwell import BlackwellRunner
from support.compare import assert_equal
from support.option_checks import OptionCase, option_case, random_option_case
from support.option_table import ALL, CASES, INT2
from support.runners import SCHEDULES

from foscar import AttentionOptions, FormatError, KVFormat, WindowConfig
from foscar.blackwell.config import DecodeConfig
from foscar.blackwell.decode import kernels
from foscar.common import jit
from foscar.common.plan import KernelOptions

needs_dsl = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
# Not in the Blackwell kernel: 256 channels; a window with parameters that tokens or channel groups share.
REFUSED = ["window K per channel", "window K per channel 128", "window V per channel", "window both per channel",
           "window both per channel 128", "window K in groups", "drafts, window and channels"]  # fmt: skip
HERE = [name for name, (shape, *_) in CASES.items() if shape["head_dim"] <= 128 and name not in REFUSED]
# Per channel: logits come from other steps (K), and tokens that do not count are excluded elsewhere (V).
CHANNEL = {"fmt": KVFormat.parse("k4c64v4c64"), "page_size": 32, "head_dim": 64, "group_heads": 4}
CAPPED = {"options": AttentionOptions(soft_cap=3.0, out_scale=0.5), "sinks": True}
EXAMPLES = Path(__file__).parents[1] / "examples"


def case_of(name: str) -> tuple[OptionCase, dict]:
    shape, lengths, q_lens, given, call = CASES[name]
    return option_case(lengths, q_lens, **shape, **given), call


def run(x: OptionCase, ctas: int = 1, mutate=None, **options):
    return BlackwellRunner(ctas=ctas, mutate=mutate, **options).run(checks.call_into_nan, x)


@needs_dsl
@pytest.mark.parametrize("name", HERE)
def test_contract(name):
    """Two workers; the edges of windows lie within tiles, and a worker's range begins within an item's."""
    x, call = case_of(name)
    checks.kernel_meets_contract(BlackwellRunner(ctas=2), x, **call)


@pytest.mark.parametrize("name", REFUSED)
def test_window_refused(name):
    with pytest.raises(FormatError, match="Blackwell"):
        run(case_of(name)[0])


@needs_dsl
@pytest.mark.parametrize("name", ["window int2", "drafts and window", "all int4", "24 heads"])
def test_split_over_many_workers(name):
    """Most items are merged by the combine."""
    x, call = case_of(name)
    checks.kernel_meets_contract(BlackwellRunner(ctas=7), x, **call)


@needs_dsl
@pytest.mark.parametrize("seed", range(8))
def test_random_draws(seed):
    x = random_option_case(seed + 300, (KVFormat.int2(), KVFormat.int4(), KVFormat.make(2, 4)), longest=400)
    checks.poison_slack(x.case)
    checks.assert_option_contract(*run(x, ctas=3), x)


@needs_dsl
@pytest.mark.parametrize(
    "q_lens, given",
    [(None, CAPPED), ([5, 2, 1, 4], {}), ([5, 2, 1, 4], CAPPED)],
    ids=["capped", "drafts", "capped drafts"],
)
def test_parameters_per_channel(q_lens, given):
    """16 rows do not fit tensor memory here: drafts get a kernel of fewer, and more passes."""
    x = option_case([300, 0, 1, 129], q_lens, **CHANNEL, **given)
    checks.poison_slack(x.case)
    checks.assert_option_contract(*run(x, ctas=2), x)


@needs_dsl
@pytest.mark.parametrize("name", ["window int2", "all int2"])
def test_every_schedule(name):
    x, _ = case_of(name)
    as_it_is(name)
    checks.assert_option_contract(*run(x, arch="sm_103a"), x)


@needs_dsl
@pytest.mark.parametrize("name", ["window int2", "drafts and window", "all int4"])
def test_nothing_before_the_windows_is_read(name):
    x, call = case_of(name)
    checks.unseen_pages_are_not_read(BlackwellRunner(ctas=2), x, **call)


@needs_dsl
def test_nan_stays_in_its_request():
    x = option_case([40, 150, 20], [3, 2, 4], options=ALL, sinks=True, **INT2)
    want, want_lse = run(x)
    x.case.cache.data[x.case.block_table[1, :10].long()] = 0xFF
    out, lse = run(x)
    bad = torch.tensor([row in (3, 4) for row in range(9)])
    assert bool(out[bad].isnan().all()) and bool(lse[bad].isnan().all())
    assert_equal(out[~bad], want[~bad], ("row", "head", "channel"))
    assert_equal(lse[~bad], want_lse[~bad], ("row", "head"))


@needs_dsl
def test_windows_in_16_bits_take_options_too():
    """decode_windowed: the history by this kernel, the rest in torch, merged; drafts are rows of their own."""
    x = window_checks.WindowCase(
        KVFormat.int2(), WindowConfig(16, 64), (300, 0, 40, 133), (3, 1, 2, 1),
        AttentionOptions(soft_cap=4.0, out_scale=0.5), sinks=True, dtype=torch.float16,
    )  # fmt: skip

    def body():
        given = window_checks.make_inputs(x)
        return *given.decode(backend="cuda"), given

    out, lse, given = BlackwellRunner(ctas=2).run(body)
    window_checks.assert_contract(out, lse, given)


# ---------------------------------------------------------------------------------------------- planted faults
UNSEEN = r"selp\.f32\s+(%r\d+), (%r\d+), 0fFF800000, %p\d+;"  # the score of a token that a row does not see
NEXT = r"ld\.param\.b32\s+(%r\d+), \[\S*_param_23\];"  # the first parameter of an option
# Fault -> (case, what to look for in the PTX, what to put there, places that are tried one at a time; 1: all at once).
FAULTS = {
    "no output scale": ("out_scale int2", NEXT, r"mov.b32 \1, 0f3F800000;", 1),
    "another soft-cap": ("soft-cap int2", NEXT, r"mov.b32 \1, 0f3F800000;", 1),
    "sinks in base 2": ("sinks int2", "0f3FB8AA3B", "0f3F800000", 1),
    "a window of one more": ("window int2", NEXT, r"mov.b32 \1, 41;", 1),
    "a row sees later ones": ("drafts int2", UNSEEN, r"mov.f32 \1, \2;", 6),
    "a window of one more among drafts": ("drafts and window", NEXT.replace("23", "24"), r"mov.b32 \1, 151;", 1),
    "one query token each": ("drafts int2", NEXT.replace("32", "64").replace("%r", "%rd"), r"mov.b64 \1, 0;", 1),
}  # fmt: skip


@functools.cache
def as_it_is(name: str):
    """(case, its bits, alike under every schedule and within the contract)."""
    x, _ = case_of(name)
    results = [run(x, **s) for s in SCHEDULES.values()]
    for found in results:
        for got, want in zip(found, results[0], strict=True):
            assert_equal(got, want, ("row", "head", "channel"))
    checks.assert_option_contract(*results[0], x)
    return x, results[0]


def changed(ptx: str, pattern: str, replacement: str, place: int, places: int, seen: list) -> str:
    found = list(re.finditer(pattern, ptx))
    assert len(found) >= places, f"the kernel has no {pattern!r}: the fault must be written anew"
    if places == 1:
        seen.append(pattern)
        return re.sub(pattern, replacement, ptx)
    match = found[place * (len(found) - 1) // max(1, places - 1)]
    seen.append(match.group())
    return ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]


@needs_dsl
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(fault):
    from ptx_emulator import EmulatorError

    name, pattern, replacement, places = FAULTS[fault]
    x, want = as_it_is(name)
    for place in range(places):
        seen = []
        try:
            got = run(x, mutate=lambda ptx: changed(ptx, pattern, replacement, place, places, seen))  # noqa: B023
        except EmulatorError:
            continue
        assert seen and not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), f"unnoticed: {seen}"


# ---------------------------------------------------------------------------------------------- what it costs, refusals
@needs_dsl
@pytest.mark.parametrize("heads", [4, 8, 16])
def test_nothing_spills(heads, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    shared = importlib.import_module("count_instructions")
    try:
        shared.find_nvdisasm()
    except shared.MissingTool as e:
        pytest.skip(str(e))
    options = KernelOptions.parse("window,soft_cap,wide_cap,sinks,out_scale,rows")
    name, part, builder, _ = kernels(DecodeConfig(KVFormat.int2(), 128, 64, heads, options=options))[0]
    sass = shared.disassemble(jit.load_or_compile(name, part, "sm_100a", builder).cubin)
    assert not re.findall(r"\b(?:LDL|STL)\b.*", sass)
    sys.modules.pop("count_instructions", None)


def test_what_there_is_not_is_refused():
    with pytest.raises(FormatError, match=r"^the Blackwell kernel has the options .*, not exact$"):
        DecodeConfig(KVFormat.int2(), 128, 64, 4, options=KernelOptions(exact=True))
    with pytest.raises(FormatError, match=r"^the Blackwell kernel takes a window with K per token in one group and V "):
        DecodeConfig(KVFormat.parse("k2c128v2"), 128, 64, 4, options=KernelOptions(window=True))
    with pytest.raises(TypeError, match="options must be KernelOptions, not str"):
        DecodeConfig(KVFormat.int2(), 128, 64, 4, options="window")
