"""Options in the Blackwell kernel, in the emulator: the cases of test_options_kernel.py, random ones, planted faults."""

from __future__ import annotations

import functools
import re

import pytest
from support import option_checks as checks
from support.blackwell import BlackwellRunner
from support.compare import assert_equal
from support.option_checks import OptionCase, option_case
from support.option_table import CASES, INT2, SINGLE
from support.runners import SCHEDULES

from foscar import AttentionOptions, FormatError, KVFormat
from foscar.blackwell.config import DecodeConfig
from foscar.common import jit
from foscar.common.plan import KernelOptions

needs_dsl = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
TAKEN = (
    "soft-cap int2", "soft-cap int4", "soft-cap wide", "sinks int2", "sinks int4", "out_scale int2", "out_scale int4",
)  # fmt: skip
# Per channel: logits come from other steps (K), and tokens that do not count are excluded elsewhere (V).
CHANNEL = {"fmt": KVFormat.parse("k2c64v4c64"), "page_size": 32, "head_dim": 64, "group_heads": 4}


def case_of(name: str) -> tuple[OptionCase, dict]:
    shape, lengths, q_lens, given, call = CASES[name]
    return option_case(lengths, q_lens, **shape, **given), call


@needs_dsl
@pytest.mark.parametrize("ctas", [2, 5])
@pytest.mark.parametrize("name", TAKEN)
def test_contract(name, ctas):
    """Two workers, and as many as split most items."""
    x, call = case_of(name)
    checks.kernel_meets_contract(BlackwellRunner(ctas=ctas), x, **call)


@needs_dsl
@pytest.mark.parametrize("given", [{"options": AttentionOptions(soft_cap=3.0, out_scale=0.5), "sinks": True}], ids=str)
def test_parameters_per_channel(given):
    x = option_case([300, 0, 1, 129], None, **CHANNEL, **given)
    checks.poison_slack(x.case)
    out, lse = BlackwellRunner(ctas=2).run(checks.call_into_nan, x)
    checks.assert_option_contract(out, lse, x)


# Option -> (case, what its code is in the PTX, what to put there).
NEXT = r"ld\.param\.b32\s+(%r\d+), \[\S*_param_23\];"  # the first parameter of an option
FAULTS = {
    "no output scale": ("out_scale int2", NEXT, r"mov.b32 \1, 0f3F800000;"),
    "another soft-cap": ("soft-cap int2", NEXT, r"mov.b32 \1, 0f3F800000;"),
    "sinks in base 2": ("sinks int2", "0f3FB8AA3B", "0f3F800000"),
}  # fmt: skip


@functools.cache
def as_it_is(name: str):
    """(case, call, bits of the kernel as it is, alike under every schedule)."""
    x, call = case_of(name)
    results = [BlackwellRunner(**s).run(checks.call_into_nan, x, **call) for s in SCHEDULES.values()]
    for found in results:
        for got, want in zip(found, results[0], strict=True):
            assert_equal(got, want, ("row", "head", "channel"))
    checks.assert_option_contract(*results[0], x)
    return x, call


@needs_dsl
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(fault):
    name, pattern, replacement = FAULTS[fault]
    x, call = as_it_is(name)
    made = []

    def mutate(ptx: str) -> str:
        changed, count = re.subn(pattern, replacement, ptx)
        made.append(count)
        return changed

    out, lse = BlackwellRunner(mutate=mutate).run(checks.call_into_nan, x, **call)
    assert made and made[0], f"the kernel has no {pattern!r}: the fault must be written anew"
    with pytest.raises(AssertionError, match="request|error"):
        checks.assert_option_contract(out, lse, x)


def test_what_there_is_not_is_refused():
    with pytest.raises(FormatError, match=r"^the Blackwell kernel has the options .*, not exact$"):
        DecodeConfig(KVFormat.int2(), 128, 64, 4, options=KernelOptions(exact=True))
    with pytest.raises(TypeError, match="options must be KernelOptions, not str"):
        DecodeConfig(KVFormat.int2(), 128, 64, 4, options="window")
