"""Loads, stores, atomics and address conversions (PTX ISA 9.7.9.8 ld, 9.7.9.11 st, 9.7.13.6 atom, 9.7.13.7 red)."""

from __future__ import annotations

import numpy as np

from .decode import DTYPE, LOCAL_WINDOW, SHARED_WINDOW, Builder, Mods, bits_of, opcode
from .errors import MemoryFault
from .sync import lanes_of
from .syncops import shared_address
from .syntax import Addr, Imm, Sink, Sym

TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
_CACHE_HINTS = ("L1::", "L2::", "evict")


def _space(m: Mods) -> str:
    for name in ("param", "global", "shared", "shared::cta", "shared::cluster", "local", "const"):
        if m.flag(name):
            return name.split("::")[0]
    return "generic"


def _modifiers(b: Builder, m: Mods) -> None:
    """Caching, ordering and scope: accepted, without effect in a machine that runs one warp at a time."""
    m.one_of("weak", "volatile", "relaxed", "acquire", "release", "mmio")
    m.one_of("cta", "cluster", "gpu", "sys")
    m.one_of("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")
    m.matching(*_CACHE_HINTS)


def wide_address(b: Builder, x):
    """R -> 64-bit addresses of a global, generic or local operand."""
    if not isinstance(x, Addr) or x.extra:
        b.fail(f"address expected, got {x}")
    if isinstance(x.base, Sym):
        value = np.full(32, b.symbol(x.base, generic=True) + x.offset, np.uint64)
        return lambda R: value
    if isinstance(x.base, Imm):
        b.fail("an absolute global address")
    slot, offset = b.src(x.base, "u64"), np.uint64(x.offset & (2**64 - 1))
    return (lambda R: R[slot] + offset) if offset else (lambda R: R[slot])


@opcode("ld", "ldu")
def _ld(b: Builder, m: Mods):
    t = m.last_type(*TYPES)
    space = _space(m)
    if space == "const":
        b.fail("constant memory is not modelled")
    count = int((m.one_of("v2", "v4", "v8") or "v1")[1:])
    _modifiers(b, m)
    m.done()
    d, address = b.operands(2)
    regs = b.vector(d)
    if len(regs) != count:
        b.fail(f"{len(regs)} destinations for .v{count}")
    size = bits_of(t) // 8
    sinks = [None if isinstance(r, Sink) else b.dst_natural(r, t[0] == "s") for r in regs]
    for s in sinks:
        if s is not None and s[1].itemsize < size:
            b.fail("destination narrower than the type")
    raw = np.dtype(("i" if t[0] == "s" else "u") + str(size))
    if space == "param":
        return _ld_param(b, address, sinks, size, raw)
    if size < b.program.race_granule and space in ("shared", "generic"):
        b.program.race_granule = size
    fetch = _fetcher(b, space, address, size, count)
    plain = count == 1 and sinks[0] is not None and sinks[0][1].itemsize == size
    if plain:
        slot = sinks[0][0]

        def one(w, R, mask):
            v = fetch(w, R, mask)
            if mask is None:
                R[slot].view(v.dtype)[...] = v
            else:
                R[slot].view(v.dtype)[mask] = v

        return b.emit(one)

    def many(w, R, mask):
        """fetch gives one value, or a row of `count` values, per active lane."""
        v = fetch(w, R, mask)
        for i, s in enumerate(sinks):
            if s is not None:
                x = (v if count == 1 else v[:, i]).view(raw).astype(s[1], copy=False)
                if mask is None:
                    R[s[0]][...] = x
                else:
                    R[s[0]][mask] = x

    b.emit(many)


def _ld_param(b: Builder, address, sinks, size: int, raw) -> None:
    if not isinstance(address.base, Sym) or address.base.name not in b.params:
        b.fail("ld.param needs a named parameter")
    start = b.params[address.base.name].offset + address.base.offset + address.offset

    def run(w, R, mask):
        data = w.launch.param_bytes
        for i, s in enumerate(sinks):
            if s is not None:
                v = np.frombuffer(data, raw, 1, start + i * size)[0]
                np.copyto(R[s[0]], s[1].type(v), where=True if mask is None else mask)

    b.emit(run)


def _fetcher(b: Builder, space: str, operand, size: int, count: int):
    """(warp, R, mask) -> values of the active lanes: [n] or [n, count], unsigned."""
    total = size * count
    line = b.ins.line

    def shared(w, a):
        s = w.cta.shared
        s.check(a, total)
        if w.cta.races:
            races = w.cta.races
            agent, clock = w.accessor(len(a))
            races.read(agent, w.clock[0], clock, races.granules(a, total), line)
        w.launch.counters.shared_access(w, a, total, "load")
        return s.views[size][a >> (size.bit_length() - 1)] if count == 1 else _rows(s.rows[total], a, total, size)

    def global_(w, a):
        array, off = w.launch.memory.offsets(a, total)
        w.launch.counters.global_access(w, len(a) * total, "load")
        if array is None:
            return np.concatenate([global_(w, a[i : i + 1]) for i in range(len(a))])
        if count == 1:
            return array.views[size][off >> np.uint64(size.bit_length() - 1)]
        return _rows(array.rows[total], off, total, size)

    def local(w, a):
        off = (a - np.uint64(LOCAL_WINDOW)).astype(np.int64)
        if (off < 0).any() or (off + total > w.local.shape[1]).any():
            raise MemoryFault(f"{w.name}, line {line}: local access out of bounds")
        lanes = w.state["lanes"]
        v = w.local[lanes[:, None], off[:, None] + np.arange(total)]
        v = np.ascontiguousarray(v).view(f"u{size}")
        return v[:, 0] if count == 1 else v

    return _by_space(b, space, operand, shared, global_, local)


def _rows(rows: np.ndarray, a: np.ndarray, total: int, size: int) -> np.ndarray:
    return rows[a >> a.dtype.type(total.bit_length() - 1)].view(f"u{size}")


def _by_space(b: Builder, space: str, operand, shared, global_, local):
    """Wraps the three accessors into f(warp, R, mask, *values) that picks active lanes and, if generic, the space."""
    line = b.ins.line
    if space == "shared":
        address = shared_address(b, operand, "shared")
        access = shared
    else:
        address = wide_address(b, operand)
        access = local if space == "local" else global_

    def lanes(w, R, mask):
        a = address(R)
        if space in ("local", "generic"):
            w.state["lanes"] = np.arange(32) if mask is None else np.nonzero(mask)[0]
        return a if mask is None else a[mask]

    def located(w, R, mask, *values):
        try:
            return access(w, lanes(w, R, mask), *values)
        except MemoryFault as e:
            raise MemoryFault(f"{w.name}, line {line}: {e}") from None

    def generic(w, R, mask, *values):
        a = lanes(w, R, mask)
        try:
            if a[0] >= np.uint64(2 * LOCAL_WINDOW) or a[0] < np.uint64(SHARED_WINDOW):
                return global_(w, a, *values)
            if a[0] >= np.uint64(LOCAL_WINDOW):
                return local(w, a, *values)
            return shared(w, (a - np.uint64(SHARED_WINDOW)).astype(np.uint32), *values)
        except MemoryFault as e:
            raise MemoryFault(f"{w.name}, line {line}: {e}") from None

    return generic if space == "generic" else located


@opcode("st")
def _st(b: Builder, m: Mods):
    t = m.last_type(*TYPES)
    space = _space(m)
    if space in ("const", "param"):
        b.fail(f"store to .{space}")
    count = int((m.one_of("v2", "v4", "v8") or "v1")[1:])
    _modifiers(b, m)
    m.done()
    address, value = b.operands(2)
    values = b.vector(value)
    if len(values) != count:
        b.fail(f"{len(values)} sources for .v{count}")
    size = bits_of(t) // 8
    if size < b.program.race_granule and space in ("shared", "generic"):
        b.program.race_granule = size
    raw = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}[size]
    slots = [b.src(v, t if isinstance(v, Imm) and v.float_bits else raw, wider=True) for v in values]
    put = _storer(b, space, address, size, count)

    def run(w, R, mask):
        if count == 1:
            v = R[slots[0]] if mask is None else R[slots[0]][mask]
        else:
            v = np.empty((32, count), DTYPE[raw])
            for i, s in enumerate(slots):
                v[:, i] = R[s]
            v = v if mask is None else v[mask]
        put(w, R, mask, v.view(DTYPE[raw]))

    b.emit(run)


def _storer(b: Builder, space: str, operand, size: int, count: int):
    total, line = size * count, b.ins.line
    shift = size.bit_length() - 1

    def shared(w, a, v):
        s = w.cta.shared
        s.check(a, total)
        if w.cta.races:
            races, limit = w.cta.races, w.clock[0]
            agent, clock = w.accessor(len(a))
            races.write(agent, limit, limit, clock, races.granules(a, total), line)
        w.launch.counters.shared_access(w, a, total, "store")
        if count == 1:
            s.views[size][a >> shift] = v
        else:
            s.rows[total].view(v.dtype)[a >> (total.bit_length() - 1)] = v

    def global_(w, a, v):
        array, off = w.launch.memory.offsets(a, total)
        w.launch.counters.global_access(w, len(a) * total, "store")
        if array is None:
            for i in range(len(a)):
                global_(w, a[i : i + 1], v[i : i + 1])
        elif count == 1:
            array.views[size][off >> np.uint64(shift)] = v
        else:
            array.rows[total].view(v.dtype)[off >> np.uint64(total.bit_length() - 1)] = v

    def local(w, a, v):
        off = (a - np.uint64(LOCAL_WINDOW)).astype(np.int64)
        if (off < 0).any() or (off + total > w.local.shape[1]).any():
            raise MemoryFault(f"{w.name}, line {line}: local access out of bounds")
        data = np.ascontiguousarray(v).view(np.uint8).reshape(len(a), total)
        w.local[w.state["lanes"][:, None], off[:, None] + np.arange(total)] = data

    return _by_space(b, space, operand, shared, global_, local)


# ---- atomics -----------------------------------------------------------------------------------------------------
def _wrap_inc(old, x):
    return 0 if old >= x else old + 1


def _wrap_dec(old, x):
    return x if old == 0 or old > x else old - 1


_ATOMICS = {
    "add": lambda o, x: o + x,
    "min": min,
    "max": max,
    "and": lambda o, x: o & x,
    "or": lambda o, x: o | x,
    "xor": lambda o, x: o ^ x,
    "exch": lambda o, x: x,
    "inc": _wrap_inc,
    "dec": _wrap_dec,
}


@opcode("atom", "red")
def _atomic(b: Builder, m: Mods):
    """Read-modify-write, lane by lane in lane order."""
    returns = b.ins.root == "atom"
    t = m.last_type("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")
    name = m.one_of(*_ATOMICS, "cas", required=True)
    space = _space(m)
    m.one_of("sem", "relaxed", "acquire", "release", "acq_rel")
    m.one_of("cta", "cluster", "gpu", "sys")
    if DTYPE[t].kind == "f" and name != "add":
        b.fail("floating-point atomics are .add only")
    m.one_of("ftz")
    m.done()
    ops = b.operands(*([4] if name == "cas" else [2 + returns]))
    d = None if not returns else b.dst_or_sink(ops[0], t)
    operand = ops[1] if returns else ops[0]
    slots = [b.src(x, t) for x in ops[2 if returns else 1 :]]
    dtype = DTYPE[t]
    update = _ATOMICS.get(name)
    size = dtype.itemsize
    mask_bits = (1 << 8 * size) - 1

    def wrap(v):
        return dtype.type(v) if dtype.kind == "f" else np.array([int(v) & mask_bits], f"u{size}").view(dtype)[0]

    def cell_update(cell, R, lane):
        old = cell[0]
        values = [R[s][lane] for s in slots]
        if name == "cas":
            new = values[1] if old == values[0] else old
        elif dtype.kind == "f":
            new = dtype.type(old + values[0])
        else:
            new = wrap(update(int(old), int(values[0])))
        cell[0] = new
        return old

    fetch_cells = _by_space(b, space, operand, *_cells(size, dtype))

    def run(w, R, mask):
        lanes = lanes_of(mask)
        cells = fetch_cells(w, R, mask)
        for lane, cell in zip(lanes, cells, strict=True):
            old = cell_update(cell, R, lane)
            if d is not None:
                R[d][lane] = old
        w.progress()

    b.emit(run)


def _cells(size: int, dtype):
    def shared(w, a):
        w.cta.shared.check(a, size)
        return [w.cta.shared.bytes[int(x) : int(x) + size].view(dtype) for x in a]

    def global_(w, a):
        w.launch.counters.global_access(w, len(a) * size, "atomic")
        out = []
        for x in a:
            if int(x) % size:
                raise MemoryFault(f"misaligned atomic at {int(x):#x}")
            out.append(w.launch.memory.slice(int(x), size).view(dtype))
        return out

    def local(w, a):
        raise MemoryFault("atomic on local memory")

    return shared, global_, local


# ---- address conversion ------------------------------------------------------------------------------------------
@opcode("cvta")
def _cvta(b: Builder, m: Mods):
    """Between a state space and generic addresses (9.7.9.20)."""
    t = m.last_type("u64", "u32")
    to = m.flag("to")
    space = _space(m)
    m.done()
    d, s = b.operands(2)
    window = np.uint64({"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0))
    if isinstance(s, Sym) and s.name in b.params:
        b.fail("the address of a parameter is not modelled")
    x, slot = b.src(s, t), b.dst(d, t)
    if t == "u32":
        b.fail("32-bit generic addresses")

    def run(w, R, mask):
        v = R[x] - window if to else R[x] + window
        np.copyto(R[slot], v, where=True if mask is None else mask)

    b.emit(run)


@opcode("isspacep")
def _isspacep(b: Builder, m: Mods):
    space = _space(m)
    m.done()
    d, s = b.operands(2)
    x, slot = b.src(s, "u64"), b.dst(d, "pred")
    low, high = {
        "shared": (SHARED_WINDOW, LOCAL_WINDOW),
        "local": (LOCAL_WINDOW, 2 * LOCAL_WINDOW),
        "global": (2 * LOCAL_WINDOW, 2**63),
    }[space]

    def run(w, R, mask):
        np.copyto(R[slot], (R[x] >= np.uint64(low)) & (R[x] < np.uint64(high)), where=True if mask is None else mask)

    b.emit(run)


@opcode("mapa")
def _mapa(b: Builder, m: Mods):
    """A shared address in another CTA of the cluster; only rank 0 exists here (9.7.9.23)."""
    t = m.last_type("u32", "u64")
    m.one_of("shared::cluster")
    m.done()
    d, s, rank = b.operands(3)
    x, slot, r = b.src(s, t), b.dst(d, t), b.src(rank, "u32")

    def run(w, R, mask):
        active = R[r] if mask is None else R[r][mask]
        if active.any():
            raise MemoryFault(f"{w.name}: mapa to a rank other than 0: clusters of one CTA only")
        np.copyto(R[slot], R[x], where=True if mask is None else mask)

    b.emit(run)
