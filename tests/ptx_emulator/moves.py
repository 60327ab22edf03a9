"""mov, selp, setp (PTX ISA 9.7.9.3, 9.7.6)."""

from __future__ import annotations

import numpy as np

from . import lowfloat as lf
from .alu_float import F32, ftz
from .closures import ufunc
from .decode import DTYPE, Builder, Mods, bits_of, opcode
from .syntax import Pair, Special, Vec

INTS = ("u16", "u32", "u64", "s16", "s32", "s64")


@opcode("mov")
def _mov(b: Builder, m: Mods):
    t = m.last_type("pred", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64", "f16")
    m.done()
    d, s = b.operands(2)
    if isinstance(d, Vec) or isinstance(s, Vec):
        return _mov_vector(b, d, s, bits_of(t))
    if isinstance(s, Special) and s.name in ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo"):
        slot = b.dst(d, t)

        def clock(w, R, mask):
            np.copyto(
                R[slot], DTYPE[t].type(w.launch.clock() & (2 ** bits_of(t) - 1)), where=True if mask is None else mask
            )

        return b.emit(clock)
    x, y = b.dst(d, t), b.src(s, t)

    def run(w, R, mask):
        if mask is None:
            R[x][...] = R[y]
        else:
            np.copyto(R[x], R[y], where=mask)

    b.emit(run)


def _mov_vector(b: Builder, d, s, total: int) -> None:
    """Packing and unpacking moves (9.7.9.3 mov, vector form)."""
    parts = (d if isinstance(d, Vec) else s).items
    bits = total // len(parts)
    if bits * len(parts) != total or bits not in (8, 16, 32):
        b.fail(f"{len(parts)} parts of a {total}-bit value")
    part, whole = f"b{bits}", f"b{total}"
    unsigned = DTYPE[whole].type
    if isinstance(d, Vec):
        x = b.src(s, whole)
        slots = [b.dst_or_sink(p, part) for p in parts]

        def unpack(w, R, mask):
            pieces = R[x].view(DTYPE[part]).reshape(32, -1).copy()
            for i, slot in enumerate(slots):
                if slot is not None:
                    np.copyto(R[slot], pieces[:, i], where=True if mask is None else mask)

        return b.emit(unpack)
    x, slots = b.dst(d, whole), [b.src(p, part) for p in parts]

    def pack(w, R, mask):
        out = R[slots[0]].astype(unsigned)
        for i, slot in enumerate(slots[1:], 1):
            out |= R[slot].astype(unsigned) << unsigned(bits * i)
        np.copyto(R[x], out, where=True if mask is None else mask)

    b.emit(pack)


@opcode("selp")
def _selp(b: Builder, m: Mods):
    t = m.last_type("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
    m.done()
    ops = b.operands(4)
    d, x, y = b.dst(ops[0], t), b.src(ops[1], t), b.src(ops[2], t)
    p, negated = b.predicate(ops[3])
    x, y = (y, x) if negated else (x, y)

    def run(w, R, mask):
        np.copyto(R[d], np.where(R[p], R[x], R[y]), where=True if mask is None else mask)

    b.emit(run)


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu")


def _comparison(name: str, is_float: bool):
    if not is_float:
        return _COMPARE[name]
    either_nan = lambda x, y: np.isnan(x) | np.isnan(y)  # noqa: E731
    if name == "nan":
        return either_nan
    if name == "num":
        return lambda x, y: ~either_nan(x, y)
    if name in _UNORDERED:
        f = _COMPARE[name[:-1]]
        return lambda x, y: f(x, y) | either_nan(x, y)
    if name == "ne":
        return lambda x, y: (x != y) & ~either_nan(x, y)
    return _COMPARE[name]


@opcode("setp")
def _setp(b: Builder, m: Mods):
    """Compare, optionally combined with a predicate, into one or two predicates (9.7.6.2)."""
    t = m.last_type("b16", "b32", "b64", *INTS, *F32, "f16", "bf16")
    is_float = t in F32 or t in ("f16", "bf16")
    names = ["eq", "ne", "lt", "le", "gt", "ge"]
    names = (
        ["eq", "ne"]
        if t[0] == "b" and t != "bf16"
        else names + ([*_UNORDERED, "num", "nan"] if is_float else ["lo", "ls", "hi", "hs"] if t[0] == "u" else [])
    )
    compare = _comparison(m.one_of(*names, required=True), is_float)
    combine = m.one_of("and", "or", "xor")
    flush = m.flag("ftz")
    m.done()
    ops = b.operands(4 if combine else 3)
    x, y = b.src(ops[1], t), b.src(ops[2], t)
    p, q = (ops[0].first, ops[0].second) if isinstance(ops[0], Pair) else (ops[0], None)
    p, q = b.dst_or_sink(p, "pred"), None if q is None else b.dst_or_sink(q, "pred")
    if not combine and q is None and p is not None and not flush and t != "bf16" and isinstance(compare, np.ufunc):
        return b.emit(ufunc(compare, p, x, y))
    c, negated = b.predicate(ops[3]) if combine else (None, False)
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, None: None}[combine]
    view = lf.bf16_to_f32 if t == "bf16" else ftz if flush else (lambda v: v)

    def run(w, R, mask):
        r = compare(view(R[x]), view(R[y]))
        other = ~r
        if join is not None:
            k = ~R[c] if negated else R[c].copy()
            r, other = join(r, k), join(other, k)
        where = True if mask is None else mask
        if p is not None:
            np.copyto(R[p], r, where=where)
        if q is not None:
            np.copyto(R[q], other, where=where)

    b.emit(run)
