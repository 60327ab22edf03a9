"""Faults planted in the compiled Blackwell kernel, one place at a time: every one must be noticed in the emulator.

Noticed means: a report (race, hazard, deadlock, misuse) or other bits than the kernel as it is, under some schedule.
The emulator does not model ``tcgen05.fence``, so its absence is not among them.
"""

from __future__ import annotations

import re

import pytest
from support import decode_checks as checks
from support.blackwell import BlackwellRunner, config
from support.runners import SCHEDULES

from foscar.blackwell.decode import kernels
from foscar.common import jit

pytestmark = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
PLACES = 3  # at most so many of a fault's places are tried, spread over the kernel
# An item of more tiles than there are buffers, then an empty one and short ones: everything comes round.
CONFIG = config(2, 2, 128, 64, 4, "bfloat16", kv_stages=6)
LENGTHS = [8 * 128 - 70, 0, 130, 1, 1, 1, 260]
# Waits that are not missed: before the first use of a buffer's turn that no item begins at, and all but the last of
# the waits for commits at the end (the emulator's tensor core completes in order).

# What to look for, and what to put there (as of re.sub).
FAULTS: dict[str, tuple[str, str]] = {
    "no wait for an mbarrier": (r"mbarrier\.try_wait\S* P1, [^;]*;\s+@P1 bra\.uni DONE;\s+bra\.uni\s+LAB_WAIT;", ""),
    "no proxy fence": (r"fence\.proxy\.async\S*;", ""),
    "no barrier of the softmax warps": (r"bar\.sync\s+1, 128;", ""),
    "no wait for stores to tensor memory": (r"tcgen05\.wait::st\S*;", ""),
    "no wait for loads of tensor memory": (r"tcgen05\.wait::ld\S*;", ""),
    "no commit": (r"tcgen05\.commit\S* \[%r\d+\];", ""),
    "no arrival": (r"@p mbarrier\.arrive\.shared::cta\S* _, \[%r\d+\];", ""),
    "too few arrivals awaited": (r"(mov\.b32\s+%r\d+, )[458](;\s+mbarrier\.init)", r"\g<1>1\2"),
    "the old sum added": (r"(mov\.b32\s+(%r\d+), )0(;\s+//.*\s+.*setp\.ne\.b32 p, \2, 0; tcgen05)", r"\g<1>1\3"),
    "lane of another half": (r"(tcgen05\.st\S* \[%r\d+)\]", r"\1+32]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def case():
    found = checks.case_for(CONFIG, LENGTHS, kv_heads=1, seed=60)
    checks.poison_slack(found)
    return found


@pytest.fixture(scope="module")
def want(case):
    """The bits of the kernel as it is, under every schedule."""
    results = [checks.decode(BlackwellRunner(**options), CONFIG, case) for options in SCHEDULES.values()]
    assert all(a.equal(b) for found in results for a, b in zip(found, results[0], strict=True))
    checks.assert_contract(*results[0], case)
    return results[0]


@pytest.fixture(scope="module")
def ptx():
    name, config, builder, _ = kernels(CONFIG)[0]
    return jit.load_or_compile(name, config, "sm_100a", builder).ptx


def outcome(case, want, changed: str) -> str:
    """What noticed the fault; '' if nothing did."""
    from ptx_emulator import EmulatorError

    for name, options in SCHEDULES.items():
        runner = BlackwellRunner(mutate=lambda _: changed, max_instructions=400_000, **options)
        try:
            got = checks.decode(runner, CONFIG, case)
        except EmulatorError as e:
            return f"{name}: {e.kind}"
        if not all(a.equal(b) for a, b in zip(got, want, strict=True)):
            return f"{name}: wrong"
    return ""


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(case, want, ptx, fault):
    pattern, replacement = FAULTS[fault]
    places = list(re.finditer(pattern, ptx))
    assert places, f"the kernel has no {pattern!r}: the fault must be written anew"
    for place in places[:: max(1, (len(places) - 1) // (PLACES - 1))] if len(places) > PLACES else places:
        changed = ptx[: place.start()] + place.expand(replacement) + ptx[place.end() :]
        found = outcome(case, want, changed)
        line = ptx.count("\n", 0, place.start()) + 1
        print(f"{fault}, PTX line {line}: {found or 'unnoticed'}")
        assert found, f"unnoticed: PTX line {line}: {place.group()}"
