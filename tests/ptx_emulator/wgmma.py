"""wgmma: warpgroup matrix multiply, asynchronous (PTX ISA 9.7.15).

The four warps of a warpgroup each contribute their part; once all four have issued an instruction it may complete, in
order within the warpgroup. It reads A and B and writes D when it completes. Until wgmma.wait_group has covered it, its
registers belong to it (any other access is a Hazard). Registers touched since the last wgmma.fence must not be used by
a new one (9.7.15.7.1); as the code generator itself moves register writes past a fence, this is reported only when no
fence at all was executed since the last commit.
"""

from __future__ import annotations

import re

import numpy as np

from . import matrix as mx
from .async_engine import AsyncOp
from .decode import Builder, Mods, opcode
from .errors import Hazard, SyncError
from .syntax import Vec
from .warpops import LANES

_TYPES = {
    ("f16", "f16"): 16,
    ("bf16", "bf16"): 16,
    ("tf32", "tf32"): 8,
    **{(x, y): 32 for x in ("e4m3", "e5m2") for y in ("e4m3", "e5m2")},
    **{(x, y): 32 for x in ("u8", "s8") for y in ("u8", "s8")},
}


@opcode("wgmma")
def _wgmma(b: Builder, m: Mods):
    kind = m.one_of("fence", "commit_group", "wait_group", "mma_async", required=True)
    m.expect("sync", "aligned")
    if b.ins.guard is not None:
        b.fail("a guarded wgmma")
    b.converge(b.program.const(0xFFFFFFFF, "u4"))
    if kind == "mma_async":
        return _mma_async(b, m)
    m.done()
    line = b.ins.line
    keep = b.integer(b.operands(1)[0]) if kind == "wait_group" else b.operands(0) and None

    def fence(w, g):
        w.unfenced, w.state["wgmma fenced"] = 0, True
        return True

    def commit(w, g):
        unit = unit_of(w)
        w.state["wgmma fenced"] = False
        unit.groups[w.index % 4].append(unit.open[w.index % 4])
        unit.open[w.index % 4] = []
        return True

    def wait(w, g):
        return unit_of(w).wait(w, g, keep, line)

    b.control({"fence": fence, "commit_group": commit, "wait_group": wait}[kind])


class _Shape:
    """Static facts of one wgmma instruction."""

    def __init__(self, b: Builder, m: Mods):
        shape = m.left.pop(0) if m.left else ""
        match = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
        self.saturate = m.flag("satfinite")
        if not match or len(m.left) != 3:
            b.fail("wgmma shape and types")
        self.n, self.k = int(match.group(1)), int(match.group(2))
        self.d, self.a, self.b = m.left
        m.left.clear()
        if _TYPES.get((self.a, self.b)) != self.k or not 8 <= self.n <= 256 or self.n % 8:
            b.fail("wgmma shape does not fit the types")
        self.integer = self.a in ("u8", "s8")
        if self.integer and self.n > 32 and self.n % 16:
            b.fail("N of an integer wgmma")
        if self.d not in (("s32",) if self.integer else ("f32", "f16")) or (self.saturate and not self.integer):
            b.fail("wgmma accumulator type")
        if self.d == "f16" and self.a in ("bf16", "tf32"):
            b.fail("f16 accumulators of bf16 or tf32 operands")
        self.line, self.text = b.ins.line, b.ins.text


class _Operands:
    """One warp's operands of one issued wgmma."""

    __slots__ = ("warp", "d", "a", "registers")

    def __init__(self, warp, d, a, registers):
        self.warp, self.d, self.a, self.registers = warp, d, a, registers


class _Issued:
    """One wgmma of a warpgroup, with the parts of the warps that have issued it so far."""

    def __init__(self, unit: Unit, shape: _Shape, run):
        self.unit, self.shape, self.parts = unit, shape, [None] * 4
        self.d_mask = self.a_mask = 0
        self.a_descriptor = self.b_descriptor = self.accumulate = None
        self.limits = [None] * 4  # what the race detector lets each warp's part rely on
        self.ticks = [0] * 4
        self.waiters: list = []
        self.op = AsyncOp(("wgmma", unit.number), "wgmma", shape.line, lambda: run(self), self.complete_parts)

    def complete_parts(self) -> bool:
        return all(p is not None for p in self.parts)


class Unit:
    """The wgmma queue of one warpgroup."""

    def __init__(self, cta, number: int):
        self.cta, self.number = cta, number
        self.issued: list[_Issued] = []
        self.count = [0] * 4  # instructions issued, per warp
        self.open: list[list] = [[] for _ in range(4)]
        self.groups: list[list] = [[] for _ in range(4)]
        # one agent per warp: a warp's wait covers its own part only, other warps may still be reading B
        self.agents = (
            [cta.races.agent(("wgmma", 4 * number + q), f"the wgmma of warp {4 * number + q}") for q in range(4)]
            if cta.races
            else []
        )

    def issue(self, w, shape: _Shape, part: _Operands, a_descriptor, b_descriptor, accumulate: bool, run) -> _Issued:
        q = w.index % 4
        if self.count[q] == len(self.issued):
            new = _Issued(self, shape, run)
            new.a_descriptor, new.b_descriptor, new.accumulate = a_descriptor, b_descriptor, accumulate
            self.issued.append(new)
            self.cta.engine.issue(new.op)
        entry = self.issued[self.count[q]]
        self.count[q] += 1
        if (
            entry.shape is not shape
            or entry.b_descriptor != b_descriptor
            or entry.accumulate != accumulate
            or entry.a_descriptor != a_descriptor
        ):
            raise SyncError(
                f"{w.name}, line {shape.line}: the warps of warpgroup {self.number} disagree on a wgmma "
                f"(line {entry.shape.line}, descriptor {entry.b_descriptor:#x}, here {b_descriptor:#x})"
            )
        entry.parts[q] = part
        if self.cta.races:
            entry.limits[q] = self.cta.races.async_limit(w.clock)
        self.open[q].append(entry)
        w.registers_in_flight |= part.registers
        if entry.complete_parts():
            for other, group in entry.waiters:
                other.wake(group)
            entry.waiters.clear()
        return entry

    def wait(self, w, g, keep: int, line: int) -> bool:
        """Completes all but the newest `keep` groups; sleeps while another warp has not issued its part."""
        q = w.index % 4
        groups = self.groups[q]
        for group in groups[: max(len(groups) - keep, 0)]:
            for entry in group:
                if not self.cta.engine.force(entry.op):
                    stuck = next(e for e in self.issued if not e.op.done)
                    stuck.waiters.append((w, g))
                    g.pc -= 1
                    return w.sleep(g, _Partners(self.number, stuck))
                if self.cta.races:
                    agent = self.agents[q]
                    w.clock[0, agent] = max(w.clock[0, agent], entry.ticks[q])
        del groups[: max(len(groups) - keep, 0)]
        w.registers_in_flight = 0
        for entry in [*(e for group in groups for e in group), *self.open[q]]:
            w.registers_in_flight |= entry.parts[q].registers
        return True

    def in_flight(self, q: int):
        return [*(e for group in self.groups[q] for e in group), *self.open[q]]

    def check_end(self) -> None:
        for q in range(4):
            if self.open[q]:
                raise Hazard(f"a wgmma (line {self.open[q][0].shape.line}) was never committed")


class _Partners:
    def __init__(self, number: int, entry: _Issued):
        self.number, self.entry = number, entry

    def describe(self) -> str:
        have = [i for i, p in enumerate(self.entry.parts) if p is not None]
        return (
            f"wgmma.wait_group: the wgmma of line {self.entry.shape.line} was issued only by warps {have} of "
            f"warpgroup {self.number}"
        )


def unit_of(w) -> Unit:
    number = w.index // 4
    unit = w.cta.units.get(("wgmma", number))
    if unit is None:
        if len(w.cta.warps) < 4 * number + 4:
            raise SyncError(f"{w.name}: wgmma needs four whole warps")
        unit = w.cta.units["wgmma", number] = Unit(w.cta, number)
    return unit


# ---- fragments (9.7.15.5.1: register fragments of A and D) -------------------------------------------------------
_ROW = LANES // 4


def a_fragment(parts: list, kind: str) -> np.ndarray:
    """Four warps' A registers -> [64, K]. Register i holds row lane/4 + 8 (i%2) and 16 bytes' worth from (i/2)*16."""
    per = 4 // mx.ELEMENT_BYTES[kind]
    raw = np.empty((4, 2, 8, 2, 4, per), f"u{mx.ELEMENT_BYTES[kind]}")  # warp, row half, row, column half, lane%4
    for q, p in enumerate(parts):
        for i, r in enumerate(p.a):
            raw[q, i % 2, :, i // 2] = r.view(raw.dtype).reshape(8, 4, per)
    return mx.values(raw.reshape(64, 8 * per), kind)


def read_d(parts: list, n: int, d_type: str) -> np.ndarray:
    out = np.empty((4, 2, 8, n // 8, 4, 2), {"f32": "f4", "s32": "i4", "f16": "f2"}[d_type])
    for q, p in enumerate(parts):
        for i, r in enumerate(p.d):
            if d_type == "f16":
                out[q, i % 2, :, i // 2] = r.view(np.float16).reshape(8, 4, 2)
            else:
                out[q, i // 2 % 2, :, i // 4, :, i % 2] = r.reshape(8, 4)
    return out.reshape(64, n)


def write_d(parts: list, n: int, d_type: str, result: np.ndarray) -> None:
    tiles = result.reshape(4, 2, 8, n // 8, 4, 2)
    for q, p in enumerate(parts):
        for i, r in enumerate(p.d):
            if d_type == "f16":
                half = np.ascontiguousarray(tiles[q, i % 2, :, i // 2].astype(np.float16))
                r[...] = half.view(np.uint32).reshape(32)
            else:
                r[...] = tiles[q, i // 2 % 2, :, i // 4, :, i % 2].reshape(32)


# ---- mma_async ---------------------------------------------------------------------------------------------------
def _mma_async(b: Builder, m: Mods) -> None:
    shape = _Shape(b, m)
    m.done()
    ops = b.ins.operands
    from_registers = len(ops) > 1 and isinstance(ops[1], Vec)
    wide = shape.a in ("f16", "bf16")
    scales = 0 if shape.integer else 2
    transposes = 0 if not wide else 1 if from_registers else 2
    if len(ops) != 4 + scales + transposes or not isinstance(ops[0], Vec):
        b.fail("operand count")
    d_regs, a_regs = list(ops[0].items), list(ops[1].items) if from_registers else []
    if len(d_regs) != shape.n // (4 if shape.d == "f16" else 2) or len(a_regs) != (4 if from_registers else 0):
        b.fail("number of registers in a fragment")
    d_type = "b32" if shape.d == "f16" else shape.d
    d = [b.dst(r, d_type) for r in d_regs]
    d_mask, b.touch = b.touch, 0
    a = [b.src(r, "b32") for r in a_regs]
    a_mask, b.touch = b.touch, 0
    a_descriptor = None if from_registers else b.src(ops[1], "b64")
    b_descriptor, scale_d = b.src(ops[2], "b64"), b.src(ops[3], "pred")
    negate = [b.integer(x) for x in ops[4 : 4 + scales]]
    if any(x not in (1, -1) for x in negate):
        b.fail("imm-scale must be 1 or -1")
    trans = [bool(b.integer(x)) for x in ops[4 + scales :]]
    trans_a, trans_b = ([False] + trans if from_registers else trans) if wide else (False, False)
    sign = negate[0] * negate[1] if negate else 1

    def perform(entry: _Issued) -> None:
        cta = entry.parts[0].warp.cta
        shared, races = cta.shared, cta.races
        layout_b = (mx.wgmma_descriptor(entry.b_descriptor), not trans_b, shape.n, shape.k)
        matrix_b = mx.gather(shared, *layout_b, shape.b)
        if from_registers:
            matrix_a = a_fragment(entry.parts, shape.a)
        else:
            layout_a = (mx.wgmma_descriptor(entry.a_descriptor), not trans_a, 64, shape.k)
            matrix_a = mx.gather(shared, *layout_a, shape.a)
        if races:
            used = mx.touched_granules(*layout_b, mx.ELEMENT_BYTES[shape.b], races.shift)
            if not from_registers:
                used_a = mx.touched_granules(*layout_a, mx.ELEMENT_BYTES[shape.a], races.shift)
                used = np.union1d(used, used_a)
            for q, agent in enumerate(entry.unit.agents):
                entry.ticks[q] = entry.limits[q][agent] = races.tick(agent)
                races.read(agent, entry.limits[q], entry.ticks[q], used, shape.line)
        c = read_d(entry.parts, shape.n, shape.d) if entry.accumulate else None
        if shape.integer:
            result = mx.multiply_integer(matrix_a, matrix_b, c, shape.saturate)
        else:
            c = None if c is None else c.astype(np.float64)
            signed = sign * matrix_a if sign < 0 else matrix_a
            result = mx.multiply_float(signed, matrix_b, c, (shape.a, shape.b), mx.hopper_adder(shape.a))
        write_d(entry.parts, shape.n, shape.d, result)
        cta.launch.counters.matrix("wgmma", 64 * shape.n * shape.k)

    def run(w, g):
        unit = unit_of(w)
        R = w.R
        if w.unfenced & (d_mask | a_mask) and not w.state.get("wgmma fenced"):
            raise Hazard(
                f"{w.name}, line {shape.line}: wgmma.fence is missing: registers were accessed since the last "
                f"one: {shape.text}"
            )
        for entry in unit.in_flight(w.index % 4):
            other = entry.parts[w.index % 4]
            same = entry.shape.n == shape.n and other.d[0] is R[d[0]]
            if (other.registers & d_mask and not same) or (entry.d_mask & a_mask) or (entry.a_mask & d_mask):
                raise Hazard(
                    f"{w.name}, line {shape.line}: uses registers of the wgmma of line {entry.shape.line}, "
                    "which is still in flight"
                )
        part = _Operands(w, [R[s] for s in d], [R[s] for s in a], d_mask | a_mask)
        entry = unit.issue(
            w,
            shape,
            part,
            None if a_descriptor is None else int(R[a_descriptor][0]),
            int(R[b_descriptor][0]),
            bool(R[scale_d][0]),
            perform,
        )
        entry.d_mask, entry.a_mask = d_mask, a_mask
        return True

    b.control(run)
    b.touch = 0
