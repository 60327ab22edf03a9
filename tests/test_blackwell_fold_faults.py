"""Faults planted in the compiled Blackwell kernel with parameters per channel: waits, releases and fences of the ring's
additional readers and of Q in steps, in the emulator.  What is noticed means, see test_blackwell_faults.py.
"""

from __future__ import annotations

import functools
import re

import pytest
from support import decode_checks as checks
from support.blackwell import BlackwellRunner, DecodeConfig, TileConfig
from support.runners import SCHEDULES

from foscar.blackwell.decode import kernels
from foscar.common import jit
from foscar.common.formats import KVFormat

pytestmark = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
CONFIG = DecodeConfig(KVFormat.parse("k2c128v2c128"), 64, 64, 4, tile=TileConfig(kv_stages=3))
# More steps than stages, an empty item, tiles without tokens; poisoned slack.
LENGTHS = [8 * 128 - 70, 0, 130, 1]
WAIT = r"mbarrier\.try_wait\S* P1, [^;]*;\s+@P1 bra\.uni DONE;\s+bra\.uni\s+LAB_WAIT;"
ARRIVAL = r"@p mbarrier\.arrive\.shared::cta\S* _, \[%r\d+\];"
# Waits that are not missed: the softmax's for Q's numbers, because the scores that it has waited for took Q; and the
# first of the two for commits at the end (the emulator's tensor core completes in order).
FAULTS = {"wait": (WAIT, 2), "arrival": (ARRIVAL, 0), "proxy fence": (r"fence\.proxy\.async\S*;", 0)}


@functools.cache
def as_it_is():
    """(case, PTX, the bits of the kernel as it is)."""
    case = checks.case_for(CONFIG, LENGTHS, kv_heads=1, seed=60)
    checks.poison_slack(case)
    results = [checks.decode(BlackwellRunner(**options), CONFIG, case) for options in SCHEDULES.values()]
    assert all(a.equal(b) for found in results for a, b in zip(found, results[0], strict=True))
    checks.assert_contract(*results[0], case)
    name, _, builder, _ = kernels(CONFIG)[0]
    return case, jit.load_or_compile(name, CONFIG, "sm_100a", builder).ptx, results[0]


def outcome(changed: str) -> str:
    """What noticed the fault; '' if nothing did."""
    from ptx_emulator import EmulatorError

    case, _, want = as_it_is()
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
def test_fault_is_noticed(fault):
    """At every place of the kernel."""
    pattern, missed = FAULTS[fault]
    ptx = as_it_is()[1]
    places = list(re.finditer(pattern, ptx))
    assert places, f"the kernel has no {pattern!r}: the fault must be written anew"
    unnoticed = []
    for place in places:
        found = outcome(ptx[: place.start()] + ptx[place.end() :])
        line = ptx.count("\n", 0, place.start()) + 1
        print(f"{fault}, PTX line {line}: {found or 'unnoticed'}")
        if not found:
            unnoticed.append(line)
    assert len(unnoticed) == missed, f"unnoticed: PTX lines {unnoticed}"
