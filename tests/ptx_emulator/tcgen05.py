"""tcgen05 for one CTA: alloc, ld, st, cp, mma, commit, wait, fence (PTX ISA 9.7.17).

mma, cp and commit share one queue and complete in the order issued; commit arrives on its mbarrier when it comes up.
ld and st are asynchronous too: a loaded register may not be touched before wait::ld, stored data appears at wait::st at
the latest. Sums keep 25 bits like Hopper's 16-bit ones (nothing else is measured); shapes and forms whose layout is not
known for certain are refused. Of the forms implemented, 4-bit A in tensor memory (an element in bits 2..5 of each byte)
is from the manual's figure alone, never compared with anything.
"""

from __future__ import annotations

import numpy as np

from . import matrix as mx
from .async_engine import AsyncOp
from .decode import Builder, Mods, opcode
from .errors import Hazard, MemoryFault, SyncError
from .parser import Addr, Reg, Vec
from .sync import lanes_of
from .syncops import shared_address
from .tmem import split, tensor_memory
from .warpops import LANES

WINDOW = 25
_NUMBERS = tuple(f"x{1 << i}" for i in range(8))
_KEY = ("tcgen05",)


@opcode("tcgen05")
def _tcgen05(b: Builder, m: Mods):
    forms = {"alloc": _alloc, "dealloc": _dealloc, "relinquish_alloc_permit": _relinquish, "ld": _ld, "st": _st, "cp": _cp,
             "mma": _mma, "commit": _commit, "wait::ld": _wait, "wait::st": _wait, "fence::before_thread_sync": _fence,
             "fence::after_thread_sync": _fence}
    kind = m.one_of(*forms, required=True)
    forms[kind](b, m, kind)


def _group_of_one(b: Builder, m: Mods) -> None:
    if m.flag("cta_group::2"):
        b.fail("pairs of CTAs are not modelled")
    m.expect("cta_group::1")


def _whole_warp(b: Builder, m: Mods) -> None:
    m.expect("sync", "aligned")
    if b.ins.guard is not None:
        b.fail("a guarded .sync.aligned instruction")
    b.converge(b.program.const(0xFFFFFFFF, "u4"))


def _tensor_address(b: Builder, x):
    if not isinstance(x, Addr) or x.extra or not isinstance(x.base, Reg):
        b.fail("tensor-memory address expected")
    slot, offset = b.src(x.base, "u32"), x.offset
    return lambda R, lane: int(R[slot][lane]) + offset


# ---- allocation ------------------------------------------------------------------------------------------------------
def _alloc(b: Builder, m: Mods, kind: str) -> None:
    _group_of_one(b, m)
    m.one_of("shared::cta")
    m.last_type("b32")
    _whole_warp(b, m)
    m.done()
    to, columns = b.operands(2)
    address, count, line = shared_address(b, to, "shared"), b.src(columns, "u32"), b.ins.line

    def run(w, R, mask):
        at = address(R)[:1]
        start = tensor_memory(w.cta).allocate(int(R[count][0]))
        w.cta.shared.check(at, 4)
        races = w.cta.races
        if races:
            races.write(w.agent, w.clock[0], w.clock[0], int(w.clock[0, w.agent]), races.granules(at, 4), line)
        w.cta.shared.views[4][at >> 2] = start
    b.emit(run)


def _dealloc(b: Builder, m: Mods, kind: str) -> None:
    _group_of_one(b, m)
    m.last_type("b32")
    _whole_warp(b, m)
    m.done()
    address, columns = (b.src(x, "u32") for x in b.operands(2))
    b.emit(lambda w, R, mask: tensor_memory(w.cta).free(int(R[address][0]), int(R[columns][0])))


def _relinquish(b: Builder, m: Mods, kind: str) -> None:
    _group_of_one(b, m)
    _whole_warp(b, m)
    m.done()

    def run(w, R, mask):
        tensor_memory(w.cta).relinquished = True
    b.emit(run)


def _fence(b: Builder, m: Mods, kind: str) -> None:
    """Orders tcgen05 operations around thread synchronization; the synchronization itself is what is modelled."""
    m.done()
    b.emit(lambda w, R, mask: None)


# ---- ld and st -------------------------------------------------------------------------------------------------------
def _cells(shape: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(lane offset, column offset) of each register and thread, [count, 32] (figures of 9.7.17.2.3.1)."""
    i = np.arange(count)[:, None]
    if shape == "32x32b":
        return np.broadcast_to(LANES, (count, 32)), np.broadcast_to(i, (count, 32))
    repeat, q = i // 4, i % 4
    return LANES // 4 + 8 * (q // 2), 8 * repeat + 2 * (LANES % 4) + q % 2


def _ld_st(b: Builder, m: Mods, registers, operand):
    m.last_type("b32")
    _whole_warp(b, m)
    shape = m.one_of("32x32b", "16x256b", required=True)
    number = int(m.one_of(*_NUMBERS, required=True)[1:])
    m.done()
    registers = list(registers.items) if isinstance(registers, Vec) else [registers]
    if len(registers) != number * (1 if shape == "32x32b" else 4):
        b.fail("number of registers")
    lanes, columns = _cells(shape, len(registers))
    width, height = int(columns.max()) + 1, 32 if shape == "32x32b" else 16
    address, line = _tensor_address(b, operand), b.ins.line

    def locate(w):
        """Absolute lanes and columns; a warp reaches the 32 lanes of its number modulo 4 (9.7.17.2.3)."""
        lane, column = split(address(w.R, 0))
        if lane // 32 != w.index % 4 or (height == 32 and lane % 32) or (height == 16 and lane % 16):
            raise MemoryFault(f"{w.name}, line {line}: tensor-memory lane {lane} is not reachable from this warp")
        memory = tensor_memory(w.cta)
        memory.check(lane, height, column, width, f"{w.name}, line {line}")
        return memory, lanes + lane, columns + column, (np.arange(height) + lane, column, width)
    return registers, locate, line


def _ld(b: Builder, m: Mods, kind: str) -> None:
    ops = b.operands(2)
    registers, locate, line = _ld_st(b, m, ops[0], ops[1])
    touch, b.touch = b.touch, 0
    slots = [b.dst(r, "b32") for r in registers]
    owned, b.touch = b.touch, touch

    def run(w, R, mask):
        memory, rows, columns, block = locate(w)
        races = w.cta.races
        if races:
            agent = races.agent(("tensor ld", w.index), f"the tcgen05.ld of warp {w.index}")
            limit = w.clock[0].copy()

        def complete():
            if races:
                limit[agent] = tick = races.tick(agent)
                races.read(agent, limit, tick, memory.granules(*block), line)
                w.state["tensor tick", "ld"] = (agent, tick)
            for slot, r, c in zip(slots, rows, columns, strict=True):
                R[slot][...] = memory.cells[r, c]
        op = w.cta.engine.issue(AsyncOp(("tensor ld", w.index), "tcgen05.ld", line, complete))
        w.state.setdefault("tensor ld", []).append(op)
        w.registers_in_flight |= owned
    b.emit(run)
    b.end_block()


def _st(b: Builder, m: Mods, kind: str) -> None:
    ops = b.operands(2)
    registers, locate, line = _ld_st(b, m, ops[1], ops[0])
    slots = [b.src(r, "b32") for r in registers]

    def run(w, R, mask):
        memory, rows, columns, block = locate(w)
        data = np.stack([R[s] for s in slots])
        races = w.cta.races
        if races:
            agent = races.agent(("tensor st", w.index), f"the tcgen05.st of warp {w.index}")
            limit = w.clock[0].copy()

        def complete():
            if races:
                limit[agent] = tick = races.tick(agent)
                races.write(agent, limit, limit, tick, memory.granules(*block), line)
                w.state["tensor tick", "st"] = (agent, tick)
            memory.cells[rows, columns] = data
        op = w.cta.engine.issue(AsyncOp(("tensor st", w.index), "tcgen05.st", line, complete))
        w.state.setdefault("tensor st", []).append(op)
    b.emit(run)


def _wait(b: Builder, m: Mods, kind: str) -> None:
    which = kind[-2:]
    _whole_warp(b, m)
    m.done()
    line = b.ins.line

    def run(w, R, mask):
        for op in w.state.pop("tensor " + which, []):
            if not w.cta.engine.force(op):
                raise Hazard(f"{w.name}, line {line}: cannot complete tcgen05.{which}")
        agent, tick = w.state.get(("tensor tick", which), (None, 0))
        if agent is not None:
            w.clock[0, agent] = max(w.clock[0, agent], tick)
        if which == "ld":
            w.registers_in_flight = 0
    b.emit(run)
    b.end_block()


# ---- the tensor core's queue -----------------------------------------------------------------------------------------
def descriptor(value: int) -> mx.Descriptor:
    """9.7.17.4.1 Shared Memory Descriptor."""
    if value >> 46 & 7 != 1 or value >> 53 & 0xFF or value >> 30 & 3 or value >> 14 & 3:
        raise MemoryFault(f"tcgen05 matrix descriptor {value:#018x}: fixed or reserved bits are wrong")
    if value >> 49 & 7 or value >> 52 & 1:
        raise MemoryFault(f"tcgen05 matrix descriptor {value:#018x}: base offset and absolute leading dimension are not "
                          "modelled")
    swizzle = {0: 0, 2: 128, 4: 64, 6: 32}.get(value >> 61)
    if swizzle is None:
        raise MemoryFault(f"tcgen05 matrix descriptor {value:#018x}: swizzle mode {value >> 61} is not modelled")
    return mx.Descriptor((value & 0x3FFF) << 4, (value >> 16 & 0x3FFF) << 4, (value >> 32 & 0x3FFF) << 4, swizzle)


class _Queued:
    """What one operation of the tensor core may rely on, and its accesses."""

    def __init__(self, w, line: int):
        self.cta, self.line, self.memory = w.cta, line, tensor_memory(w.cta)
        self.races = w.cta.races
        if self.races:
            self.limit, self.reads = self.races.async_limit(w.clock), w.clock[0].copy()

    def start(self) -> None:
        if self.races:
            agent = self.memory.agent
            self.memory.tick = self.limit[agent] = self.reads[agent] = self.races.tick(agent)

    def touch(self, granules: np.ndarray, write: bool = False) -> None:
        if not self.races:
            return
        m = self.memory
        if write:
            self.races.write(m.agent, self.reads, self.reads, m.tick, granules, self.line)
        else:
            limit = self.reads if granules[0] >= self.races.tensor_base else self.limit
            self.races.read(m.agent, limit, m.tick, granules, self.line)

    def shared_matrix(self, d, k_major: bool, rows: int, k: int, kind: str) -> np.ndarray:
        if kind in ("e2m1", "e2m3", "e3m2"):
            return self._packed(d, k_major, rows, k, kind)
        if self.races:
            self.touch(mx.touched_granules(d, k_major, rows, k, mx.ELEMENT_BYTES[kind], self.races.shift))
        return mx.gather(self.cta.shared, d, k_major, rows, k, kind)

    def _packed(self, d, k_major: bool, rows: int, k: int, kind: str) -> np.ndarray:
        """Sixteen 4-bit elements in the first 8 of each 16 bytes (9.7.17.10.4.4)."""
        if kind != "e2m1" or not k_major:
            raise MemoryFault(f"line {self.line}: {kind} in shared memory is not modelled in this form")
        raw = self.shared_matrix(d, True, rows, k, "u8").astype(np.uint8).reshape(rows, k // 16, 16)[:, :, :8]
        codes = np.stack([raw & 15, raw >> 4], -1).reshape(rows, k)
        return mx.values(codes, "e2m1")


def _queue(w, line: int, what: str, run) -> None:
    w.cta.engine.issue(AsyncOp(_KEY, what, line, run))


def _commit(b: Builder, m: Mods, kind: str) -> None:
    _group_of_one(b, m)
    m.expect("mbarrier::arrive::one")
    m.last_type("b64")
    space = m.one_of("shared::cluster")
    m.done()
    address, line = shared_address(b, b.operands(1)[0], space), b.ins.line

    def run(w, R, mask):
        for lane in lanes_of(mask):
            barrier = w.cta.barriers.at(int(address(R)[lane]), line)
            memory = tensor_memory(w.cta)
            if not barrier.fenced:
                raise SyncError(f"{w.name}, line {line}: tcgen05.commit on an mbarrier whose initialisation was not fenced")

            def complete(barrier=barrier, memory=memory):
                if w.cta.races:
                    barrier.clock[0, memory.agent] = max(barrier.clock[0, memory.agent], memory.tick)
                barrier.arrive(1)
            _queue(w, line, "tcgen05.commit", complete)
    b.emit(run)


def _cp(b: Builder, m: Mods, kind: str) -> None:
    """Shared to tensor memory: rows of 16 or 32 bytes; .warpx4 repeats 32 rows for the four warps (9.7.17.9.1)."""
    _group_of_one(b, m)
    shape = m.one_of("128x256b", "128x128b", "32x128b", required=True)
    if shape == "32x128b":
        m.expect("warpx4")
    m.done()
    to, source = b.operands(2)
    address, desc, line = _tensor_address(b, to), b.src(source, "b64"), b.ins.line
    rows, size = int(shape.split("x")[0]), int(shape.split("x")[1][:-1]) // 8

    def run(w, R, mask):
        for lane in lanes_of(mask):
            row, column = split(address(R, lane))
            d, queued = descriptor(int(R[desc][lane])), _Queued(w, line)
            queued.memory.check(row, 128, column, size // 4, f"{w.name}, line {line}")

            def complete(queued=queued, d=d, column=column):
                queued.start()
                raw = queued.shared_matrix(d, True, rows, size, "u8").astype(np.uint8).view(np.uint32)
                queued.touch(queued.memory.granules(np.arange(128), column, size // 4) if queued.races else None, write=True)
                queued.memory.cells[:, column:column + size // 4] = np.tile(raw, (128 // rows, 1))
            _queue(w, line, "tcgen05.cp", complete)
    b.emit(run)


# ---- mma -------------------------------------------------------------------------------------------------------------
_TYPES = {"f16": {0: "f16", 1: "bf16"}, "tf32": {2: "tf32"}, "i8": {0: "u8", 1: "s8"},
          "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}}
_K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}


class InstructionDescriptor:
    """9.7.17.4.2: types, shape, majorness and signs of one tcgen05.mma."""

    def __init__(self, value: int, kind: str, where: str):
        types = _TYPES[kind]
        self.a, self.b = types.get(value >> 7 & 7), types.get(value >> 10 & 7)
        self.d = {("f16", 0): "f16", ("i8", 2): "s32"}.get((kind, value >> 4 & 3), "f32" if value >> 4 & 3 == 1 else None)
        self.saturate = bool(value >> 3 & 1)
        self.negate = -1 if (value >> 13 & 1) != (value >> 14 & 1) else 1
        self.a_k_major, self.b_k_major = not value >> 15 & 1, not value >> 16 & 1
        self.n, self.m = (value >> 17 & 63) * 8, (value >> 24 & 31) * 16
        wrong = None in (self.a, self.b, self.d) or value & 7 or value >> 6 & 1 or value >> 23 & 1 or value >> 29
        step = 8 if self.m == 64 else 16
        if kind == "i8":
            wrong = wrong or self.d != "s32" or (self.n not in (8, 24) and self.n % 16)
            step = 8
        if wrong or self.m not in (64, 128) or not step <= self.n <= 256 or self.n % step:
            raise MemoryFault(f"{where}: instruction descriptor {value:#010x} (M {self.m}, N {self.n}, {self.a} x {self.b} "
                              f"-> {self.d}) is not valid for kind::{kind}")


def _mma(b: Builder, m: Mods, kind_: str) -> None:
    _group_of_one(b, m)
    kind = m.one_of(*(f"kind::{k}" for k in _TYPES), required=True)[6:]
    m.one_of(*(f"collector::a::{x}" for x in ("fill", "use", "lastuse", "discard")))
    m.done()
    ops = list(b.ins.operands)
    if len(ops) != 5:
        b.fail("tcgen05.mma with disable-output-lane or scale-input-d is not modelled")
    d_address = _tensor_address(b, ops[0])
    from_tensor = isinstance(ops[1], Addr)
    a_address = _tensor_address(b, ops[1]) if from_tensor else None
    a_slot = None if from_tensor else b.src(ops[1], "b64")
    b_slot, i_slot, (use_d, negated) = b.src(ops[2], "b64"), b.src(ops[3], "u32"), b.predicate(ops[4])
    line = b.ins.line

    def run(w, R, mask):
        where = f"{w.name}, line {line}"
        for lane in lanes_of(mask):
            shape = InstructionDescriptor(int(R[i_slot][lane]), kind, where)
            a = a_address(R, lane) if from_tensor else descriptor(int(R[a_slot][lane]))
            args = (shape, split(d_address(R, lane)), a, descriptor(int(R[b_slot][lane])), bool(R[use_d][lane]) != negated)
            queued = _Queued(w, line)
            _check(queued, shape, args[1], split(a) if from_tensor else None, where)
            _queue(w, line, "tcgen05.mma", lambda queued=queued, args=args: _perform(queued, _K[kind], *args))
    b.emit(run)


def _check(queued: _Queued, shape, d, a, where: str) -> None:
    if d[0] not in ((0,) if shape.m == 128 else (0, 16)):
        raise MemoryFault(f"{where}: D at lane {d[0]} for M = {shape.m}")
    queued.memory.check(d[0], 128 - d[0], d[1], shape.n, where)
    if a is not None:
        if shape.m != 128 or a[0] or not shape.a_k_major:
            raise MemoryFault(f"{where}: A in tensor memory needs M = 128, lane 0 and K-major here")
        queued.memory.check(0, 128, a[1], 8, where)


def _tensor_a(queued: _Queued, address: int, kind: str, k: int) -> np.ndarray:
    """A from tensor memory: row = lane, elements packed into consecutive columns (9.7.17.10.4)."""
    _, column = split(address)
    width = k * mx.ELEMENT_BYTES[kind] // 4
    if queued.races:
        queued.touch(queued.memory.granules(np.arange(128), column, width))
    raw = np.ascontiguousarray(queued.memory.cells[:, column:column + width]).view(f"u{mx.ELEMENT_BYTES[kind]}")
    if kind == "e2m1":
        raw = raw >> 2
    elif kind in ("e2m3", "e3m2"):
        raise MemoryFault(f"line {queued.line}: {kind} in tensor memory is not modelled")
    return mx.values(raw, kind)


def _perform(queued: _Queued, k: int, shape, d, a, b, accumulate: bool) -> None:
    queued.start()
    memory = queued.memory
    matrix_b = queued.shared_matrix(b, shape.b_k_major, shape.n, k, shape.b)
    if isinstance(a, int):
        matrix_a = _tensor_a(queued, a, shape.a, k)
    else:
        matrix_a = queued.shared_matrix(a, shape.a_k_major, shape.m, k, shape.a)
    rows = np.arange(shape.m)
    rows = rows if shape.m == 128 else rows // 16 * 32 + rows % 16 + d[0]       # layouts of M = 128 and 64 (9.7.17.10.5)
    columns = slice(d[1], d[1] + shape.n)
    if queued.races:
        queued.touch(memory.granules(rows, d[1], shape.n), write=True)
    old = memory.cells[rows, columns]
    dtype = {"f32": np.float32, "s32": np.int32, "f16": np.float16}[shape.d]
    c = None
    if accumulate:
        c = (old & np.uint32(0xFFFF)).astype(np.uint16).view(dtype) if shape.d == "f16" else old.view(dtype)
    if shape.d == "s32":
        result = mx.multiply_integer(matrix_a, matrix_b, c, shape.saturate).view(np.uint32)
    else:
        c = None if c is None else c.astype(np.float64)
        result = mx.multiply_float(shape.negate * matrix_a, matrix_b, c, WINDOW)
        result = result.astype(np.float16).view(np.uint16).astype(np.uint32) if shape.d == "f16" else result.view(np.uint32)
    memory.cells[rows, columns] = result
    queued.cta.launch.counters.matrix("tcgen05", shape.m * shape.n * k)
