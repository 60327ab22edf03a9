"""Faults planted in the compiled decode kernel, one place at a time: every one must be noticed (support/planted.py)."""

from __future__ import annotations

import re

import pytest
from support.gpu_kernels import TILES
from support.planted import Planted
from support.runners import EmulatorRunner

from foscar.common import jit
from foscar.hopper.config import ARCH, TILE_TOKENS
from foscar.hopper.decode import kernels

pytestmark = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")

# INT2, eight heads, two workers of three stages: few tiles go round a ring.
CONFIG = TILES[1]
# 5 + 1 + 2 + 2 tiles for two workers: an item in two parts, an empty one, slack in a page and in a tile.
LENGTHS = [5 * TILE_TOKENS - 70, 0, TILE_TOKENS + 1, 2 * TILE_TOKENS]
PLACES = 4  # at most so many of a fault's places are tried, spread over the kernel

MASKS = {0x03030303: "50529027", 0x0C0C0C0C: "202116108"}
_AND = r"(and\.b32\s+%r\d+, %r\d+, )"
# What to look for, and what to put there (as of re.sub).  No faults, as was found here: to drop the warp's barrier
# before a slot is released, or three of its four releases (the barrier for the maxima comes after all reads of a slot);
# to drop the wait before V is unpacked, or the commit between the halves of Q K^T (the wait after P V covers both).
FAULTS: dict[str, tuple[str, str]] = {
    "no wait for a slot": (r"bra\.uni\s+LAB_WAIT;", ""),
    "no proxy fence": (r"fence\.proxy\.async\S*;", ""),
    "no barrier of the warpgroup": (r"bar\.sync\s+%r\d+, 128;", ""),
    "no barrier of the CTA": (r"bar\.sync\s+0;", ""),
    "no fence after mbarrier.init": (r"fence\.mbarrier_init\S*;", ""),
    "16 bytes too many expected": (r"(mbarrier\.arrive\.expect_tx.*, )(%r\d+);", r"add.u32 \2, \2, 16; \1\2;"),
    "16 bytes too few expected": (r"(mbarrier\.arrive\.expect_tx.*, )(%r\d+);", r"sub.u32 \2, \2, 16; \1\2;"),
    "a slot never released": (r"@p mbarrier\.arrive\.shared\S* _, \[%r\d+\];", ""),
    "a slot released by every lane": (r"@p (mbarrier\.arrive\.shared)", r"\1"),
    "a slot released by the first warp": (r"(mov\.b32\s+%r\d+, )4(;\s+mbarrier\.init)", r"\g<1>1\2"),
    "the next slot released instead": (r"(@p mbarrier\.arrive\.shared\S* _, \[%r\d+)\]", r"\1+8]"),
    "no wait for a matrix product": (r"(commit_group\S*;\s+)wgmma\.wait_group\S*\s+0;", r"\1"),
    "no fence before a matrix product": (r"wgmma\.fence\S*;", ""),
    "no commit of a matrix product": (r"wgmma\.commit_group\S*;(\s+wgmma\.wait_group)", r"\1"),
    "a mask of position 1 for position 0": (_AND + MASKS[0x03030303] + ";", r"\g<1>" + MASKS[0x0C0C0C0C] + ";"),
    "a mask of position 0 for position 1": (_AND + MASKS[0x0C0C0C0C] + ";", r"\g<1>" + MASKS[0x03030303] + ";"),
    "a mask of position 3 for position 2": (_AND + "808464432;", r"\g<1>-1061109568;"),
    "page ids of the wrong lanes": (r"(shfl\.sync\.idx\.b32\s+%r\d+, %r\d+, )(%r\d+)(, 31, -1;\s+setp\.lt\.s32)",
                                    r"\g<1>0\3"),
}  # fmt: skip


@pytest.fixture(scope="module")
def planted():
    return Planted(EmulatorRunner, CONFIG, ARCH, kernels, LENGTHS)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(planted, fault):
    planted.check(fault, *FAULTS[fault], PLACES)


def released_when_full(ptx: str) -> str:
    """The math warps release a slot as soon as they have waited for it, and not after they have read it."""
    full, empty = (int(x) for x in re.findall(r"mbarrier\.init\.shared\.b64\s+\[%r\d+\+(\d+)\]", ptx)[:2])
    load, mark, math = ptx.partition("setmaxnreg.inc")
    math = re.sub(r"@p mbarrier\.arrive\.shared\S* _, \[%r\d+\];", "", math)
    arrive = rf"""
    {{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0;
    @p mbarrier.arrive.shared::cta.b64 _, [\2+{empty - full}]; }}"""
    math, waits = re.subn(r"(mbarrier\.try_wait\S* P1, \[(%r\d+)\][^}]*\})", rf"\1{arrive}", math)
    assert mark and waits, "the kernel waits in another way: the fault must be written anew"
    return load + mark + math


def test_a_slot_released_before_it_is_read_is_noticed(planted):
    found = planted.outcome(released_when_full)
    assert found, "unnoticed"
    assert found.endswith("race")
