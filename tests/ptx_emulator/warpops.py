"""Warp-wide instructions: shfl, vote, redux, elect, match, ldmatrix, stmatrix (PTX ISA 9.7.9.6, 9.7.13.8 to .11)."""

from __future__ import annotations

import numpy as np

from .decode import Builder, Mods, opcode
from .syncops import shared_address
from .syntax import Pair, Sink

LANES = np.arange(32)
_BIT = np.uint64(1) << LANES.astype(np.uint64)


def _members(b: Builder, x) -> int:
    """The member mask: lanes are brought together first (see Warp._converged)."""
    slot = b.src(x, "b32")
    b.converge(slot)
    return slot


@opcode("shfl")
def _shfl(b: Builder, m: Mods):
    """shfl.sync: lane j of the segment; a source lane that is not running gives the lane's own value here."""
    m.last_type("b32")
    m.expect("sync")
    mode = m.one_of("idx", "bfly", "up", "down", required=True)
    m.done()
    ops = b.operands(5)
    d, p = (ops[0].first, ops[0].second) if isinstance(ops[0], Pair) else (ops[0], None)
    _members(b, ops[4])
    d, p = b.dst_or_sink(d, "b32"), None if p is None else b.dst_or_sink(p, "pred")
    a, lane, c = b.src(ops[1], "b32"), b.src(ops[2], "b32"), b.src(ops[3], "b32")

    def source(lanes, clamp_mask):
        clamp, segment = clamp_mask & 31, clamp_mask >> 8 & 31
        low = LANES & segment
        top = low | (clamp & ~segment & 31)
        lanes = lanes & 31
        j = {
            "idx": lambda: low | (lanes & ~segment),
            "bfly": lambda: LANES ^ lanes,
            "up": lambda: LANES - lanes,
            "down": lambda: LANES + lanes,
        }[mode]()
        valid = j >= top if mode == "up" else j <= top
        return np.where(valid, j, LANES), valid

    def run(w, R, mask):
        j, valid = source(R[lane].astype(np.int64), R[c].astype(np.int64))
        if mask is not None and not mask[j[mask]].all():
            from .errors import SyncError

            raise SyncError(f"{w.name}, line {line}: shfl.sync reads a lane that does not take part")
        where = True if mask is None else mask
        if d is not None:
            np.copyto(R[d], R[a][j], where=where)
        if p is not None:
            np.copyto(R[p], valid, where=where)

    line = b.ins.line
    b.emit(run)


@opcode("vote")
def _vote(b: Builder, m: Mods):
    t = m.last_type("pred", "b32")
    m.expect("sync")
    mode = m.one_of("all", "any", "uni", "ballot", required=True)
    m.done()
    if (mode == "ballot") != (t == "b32"):
        b.fail("vote type")
    ops = b.operands(3)
    _members(b, ops[2])
    d = b.dst(ops[0], t)
    s, negated = b.predicate(ops[1])

    def run(w, R, mask):
        p = ~R[s] if negated else R[s]
        active = p if mask is None else p[mask]
        if mode == "ballot":
            value = np.uint32(int(_BIT[p if mask is None else p & mask].sum()))
        else:
            value = {"all": active.all(), "any": active.any(), "uni": active.all() or not active.any()}[mode]
        np.copyto(R[d], value, where=True if mask is None else mask)

    b.emit(run)


@opcode("redux")
def _redux(b: Builder, m: Mods):
    t = m.last_type("u32", "s32", "b32", "f32")
    m.expect("sync")
    name = m.one_of("add", "min", "max", "and", "or", "xor", required=True)
    absolute, nan = m.flag("abs"), m.flag("NaN")
    m.done()
    if (name in ("and", "or", "xor")) != (t == "b32") or (t == "f32" and name == "add"):
        b.fail("redux type")
    ops = b.operands(3)
    _members(b, ops[2])
    d, s = b.dst(ops[0], t), b.src(ops[1], t)
    f = {
        "add": np.add,
        "min": np.minimum if nan or t != "f32" else np.fmin,
        "max": np.maximum if nan or t != "f32" else np.fmax,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[name]

    def run(w, R, mask):
        v = R[s] if mask is None else R[s][mask]
        v = np.abs(v) if absolute else v
        np.copyto(R[d], f.reduce(v, dtype=v.dtype), where=True if mask is None else mask)

    b.emit(run)


@opcode("elect")
def _elect(b: Builder, m: Mods):
    """elect.sync: the lowest running lane is elected (which one is up to the implementation)."""
    m.expect("sync")
    m.done()
    pair, members = b.operands(2)
    if not isinstance(pair, Pair):
        b.fail("elect.sync d|p, mask")
    _members(b, members)
    d, p = b.dst_or_sink(pair.first, "b32"), b.dst_or_sink(pair.second, "pred")

    def run(w, R, mask):
        leader = 0 if mask is None else int(np.argmax(mask))
        where = True if mask is None else mask
        if d is not None:
            np.copyto(R[d], np.uint32(leader), where=where)
        if p is not None:
            np.copyto(R[p], LANES == leader, where=where)

    b.emit(run)


@opcode("activemask")
def _activemask(b: Builder, m: Mods):
    m.last_type("b32")
    m.done()
    d = b.dst(b.operands(1)[0], "b32")

    def run(w, R, mask):
        value = np.uint32(0xFFFFFFFF if mask is None else int(_BIT[mask].sum()))
        np.copyto(R[d], value, where=True if mask is None else mask)

    b.emit(run)


@opcode("match")
def _match(b: Builder, m: Mods):
    """match.any.sync: the lanes that hold the same value."""
    t = m.last_type("b32", "b64")
    m.expect("any", "sync")
    m.done()
    ops = b.operands(3)
    _members(b, ops[2])
    d, s = b.dst(ops[0], "b32"), b.src(ops[1], t)

    def run(w, R, mask):
        same = R[s][:, None] == R[s][None, :]
        if mask is not None:
            same &= mask[None, :]
        np.copyto(R[d], (same * _BIT).sum(1).astype(np.uint32), where=True if mask is None else mask)

    b.emit(run)


# ---- 8x8 matrices of 16-bit elements -----------------------------------------------------------------------------
def _matrix_op(b: Builder, m: Mods, load: bool):
    """ldmatrix / stmatrix, m8n8 b16: lanes 8i..8i+7 give the row addresses of matrix i (9.7.14.5.15, .16)."""
    m.last_type("b16")
    m.expect("sync", "aligned", "m8n8")
    count = int(m.one_of("x1", "x2", "x4", required=True)[1:])
    trans = m.flag("trans")
    m.one_of("shared", "shared::cta")
    m.done()
    ops = b.operands(2)
    registers, operand = (ops[0], ops[1]) if load else (ops[1], ops[0])
    registers = b.vector(registers)
    if len(registers) != count:
        b.fail("register count")
    b.converge(b.program.const(0xFFFFFFFF, "u4"))
    address = shared_address(b, operand, "shared")
    slots = [None if isinstance(r, Sink) else b.dst(r, "b32") for r in registers]
    row, column = LANES // 4, 2 * (LANES % 4)
    line = b.ins.line

    def run(w, R, mask):
        a = address(R)[: 8 * count]
        w.cta.shared.check(a, 16)
        races = w.cta.races
        if races:
            where, clock = races.granules(a, 16), w.clock[0]
            if load:
                races.read(w.agent, clock, int(clock[w.agent]), where, line)
            else:
                races.write(w.agent, clock, clock, int(clock[w.agent]), where, line)
        w.launch.counters.shared_access(w, a, 16, "load" if load else "store")
        rows = w.cta.shared.rows[16].view(np.uint16)
        for i, slot in enumerate(slots):
            index = a[8 * i : 8 * i + 8] >> 4
            if load:
                matrix = rows[index].T if trans else rows[index]
                if slot is not None:
                    R[slot][...] = matrix[row, column] | matrix[row, column + 1].astype(np.uint32) << np.uint32(16)
            else:
                matrix = np.empty((8, 8), np.uint16)
                matrix[row, column] = R[slot] & np.uint32(0xFFFF)
                matrix[row, column + 1] = R[slot] >> np.uint32(16)
                rows[index] = matrix.T if trans else matrix

    b.emit(run)


@opcode("ldmatrix")
def _ldmatrix(b: Builder, m: Mods):
    _matrix_op(b, m, load=True)


@opcode("stmatrix")
def _stmatrix(b: Builder, m: Mods):
    _matrix_op(b, m, load=False)
