"""Faults planted in the compiled Blackwell kernel, one place at a time: every one must be noticed (support/planted.py).

The emulator does not model ``tcgen05.fence``, so its absence is not among them.
"""

from __future__ import annotations

import pytest
from support.blackwell import BlackwellRunner, config
from support.planted import Planted

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
def planted():
    return Planted(BlackwellRunner, CONFIG, "sm_100a", kernels, LENGTHS)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(planted, fault):
    planted.check(fault, *FAULTS[fault], PLACES)
