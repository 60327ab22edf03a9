"""What the decoders of tcgen05 share."""

from __future__ import annotations

from .decode import Builder, Mods
from .syntax import Addr, Reg


def group_of_one(b: Builder, m: Mods) -> None:
    if m.flag("cta_group::2"):
        b.fail("pairs of CTAs are not modelled")
    m.expect("cta_group::1")


def whole_warp(b: Builder, m: Mods) -> None:
    m.expect("sync", "aligned")
    if b.ins.guard is not None:
        b.fail("a guarded .sync.aligned instruction")
    b.converge(b.program.const(0xFFFFFFFF, "u4"))


def tensor_address(b: Builder, x):
    if not isinstance(x, Addr) or x.extra or not isinstance(x.base, Reg):
        b.fail("tensor-memory address expected")
    slot, offset = b.src(x.base, "u32"), x.offset
    return lambda R, lane: int(R[slot][lane]) + offset
