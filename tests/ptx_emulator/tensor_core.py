"""tcgen05.mma, .cp and .commit: the queue of a CTA's tensor core (PTX ISA 9.7.16.9, 9.7.16.10)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import matrix as mx
from .async_engine import AsyncOp
from .decode import Builder, Mods
from .errors import MemoryFault, SyncError
from .sync import lanes_of
from .syncops import shared_address
from .syntax import Addr, Vec
from .tensor_operands import group_of_one, tensor_address
from .tmem import split, tensor_memory

ADDER = mx.WIDE  # assumed for every kind: no Blackwell GPU has been measured
_KEY = ("tcgen05",)


def descriptor(value: int) -> mx.Descriptor:
    """9.7.16.4.1 Shared Memory Descriptor."""
    if value >> 46 & 7 != 1 or value >> 53 & 0xFF or value >> 30 & 3 or value >> 14 & 3:
        raise MemoryFault(f"tcgen05 matrix descriptor {value:#018x}: fixed or reserved bits are wrong")
    if value >> 49 & 7 or value >> 52 & 1:
        raise MemoryFault(
            f"tcgen05 matrix descriptor {value:#018x}: base offset and absolute leading dimension are not modelled"
        )
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
        """Sixteen 4-bit elements in the first 8 of each 16 bytes (9.7.16.10.4.4)."""
        if kind != "e2m1" or not k_major:
            raise MemoryFault(f"line {self.line}: {kind} in shared memory is not modelled in this form")
        raw = self.shared_matrix(d, True, rows, k, "u8").astype(np.uint8).reshape(rows, k // 16, 16)[:, :, :8]
        codes = np.stack([raw & 15, raw >> 4], -1).reshape(rows, k)
        return mx.values(codes, "e2m1")


def _queue(w, line: int, what: str, run) -> None:
    w.cta.engine.issue(AsyncOp(_KEY, what, line, run))


def commit(b: Builder, m: Mods, kind: str) -> None:
    group_of_one(b, m)
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
                raise SyncError(
                    f"{w.name}, line {line}: tcgen05.commit on an mbarrier whose initialisation was not fenced"
                )

            def complete(barrier=barrier, memory=memory):
                if w.cta.races:
                    barrier.clock[0, memory.agent] = max(barrier.clock[0, memory.agent], memory.tick)
                barrier.arrive(1)

            _queue(w, line, "tcgen05.commit", complete)

    b.emit(run)


def copy(b: Builder, m: Mods, kind: str) -> None:
    """Shared to tensor memory: rows of 16 or 32 bytes; .warpx4 repeats 32 rows for the four warps (9.7.16.9.1)."""
    group_of_one(b, m)
    shape = m.one_of("128x256b", "128x128b", "32x128b", required=True)
    if shape == "32x128b":
        m.expect("warpx4")
    m.done()
    to, source = b.operands(2)
    address, desc, line = tensor_address(b, to), b.src(source, "b64"), b.ins.line
    rows, size = int(shape.split("x")[0]), int(shape.split("x")[1][:-1]) // 8

    def run(w, R, mask):
        for lane in lanes_of(mask):
            row, column = split(address(R, lane))
            d, queued = descriptor(int(R[desc][lane])), _Queued(w, line)
            queued.memory.check(row, 128, column, size // 4, f"{w.name}, line {line}")

            def complete(queued=queued, d=d, column=column):
                queued.start()
                raw = queued.shared_matrix(d, True, rows, size, "u8").astype(np.uint8).view(np.uint32)
                queued.touch(
                    queued.memory.granules(np.arange(128), column, size // 4) if queued.races else None, write=True
                )
                queued.memory.cells[:, column : column + size // 4] = np.tile(raw, (128 // rows, 1))

            _queue(w, line, "tcgen05.cp", complete)

    b.emit(run)


# ---- mma ---------------------------------------------------------------------------------------------------------
_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "i8": {0: "u8", 1: "s8"},
    "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
}
_K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}


class InstructionDescriptor:
    """9.7.16.4.2: types, shape, majorness and signs of one tcgen05.mma."""

    def __init__(self, value: int, kind: str, where: str):
        types = _TYPES[kind]
        self.a, self.b = types.get(value >> 7 & 7), types.get(value >> 10 & 7)
        self.d = {("f16", 0): "f16", ("i8", 2): "s32"}.get(
            (kind, value >> 4 & 3), "f32" if value >> 4 & 3 == 1 else None
        )
        self.saturate = bool(value >> 3 & 1)
        self.negate = -1 if (value >> 13 & 1) != (value >> 14 & 1) else 1
        self.a_k_major, self.b_k_major = not value >> 15 & 1, not value >> 16 & 1
        self.n, self.m = (value >> 17 & 63) * 8, (value >> 24 & 31) * 16
        wrong = None in (self.a, self.b, self.d) or value & 7 or value >> 6 & 1 or value >> 23 & 1 or value >> 29
        if kind == "i8":
            wrong = wrong or self.d != "s32" or (self.n not in (8, 24) and self.n % 16)
        if wrong or self.m not in (64, 128) or not 8 <= self.n <= 256:
            raise MemoryFault(
                f"{where}: instruction descriptor {value:#010x} (M {self.m}, N {self.n}, {self.a} x {self.b} "
                f"-> {self.d}) is not valid for kind::{kind}"
            )


def multiply(b: Builder, m: Mods, kind_: str) -> None:
    group_of_one(b, m)
    kind = m.one_of(*(f"kind::{k}" for k in _TYPES), required=True)[6:]
    m.one_of(*(f"collector::a::{x}" for x in ("fill", "use", "lastuse", "discard")))
    m.done()
    ops = list(b.ins.operands)
    disabled = ops.pop(4) if len(ops) > 5 and isinstance(ops[4], Vec) else None
    if len(ops) not in (5, 6) or (disabled is not None and len(disabled.items) != 4):
        b.fail("operands of tcgen05.mma")
    scale = 2.0 ** -b.integer(ops[5]) if len(ops) == 6 else 1.0
    if scale != 1 and kind not in ("f16", "tf32"):
        b.fail("scale-input-d is for kind::f16 and kind::tf32")
    d_address = tensor_address(b, ops[0])
    a_address = tensor_address(b, ops[1]) if isinstance(ops[1], Addr) else None
    a_slot = None if a_address else b.src(ops[1], "b64")
    b_slot, i_slot, (use_d, negated) = b.src(ops[2], "b64"), b.src(ops[3], "u32"), b.predicate(ops[4])
    off_slots = [b.src(x, "u32") for x in disabled.items] if disabled else []
    line = b.ins.line

    def run(w, R, mask):
        where = f"{w.name}, line {line}"
        for lane in lanes_of(mask):
            call = _Multiply(
                shape=InstructionDescriptor(int(R[i_slot][lane]), kind, where),
                k=_K[kind],
                d=split(d_address(R, lane)),
                a=a_address(R, lane) if a_address else descriptor(int(R[a_slot][lane])),
                b=descriptor(int(R[b_slot][lane])),
                scale=scale if bool(R[use_d][lane]) != negated else 0.0,
                disabled=sum(int(R[s][lane]) << 32 * i for i, s in enumerate(off_slots)),
            )
            queued = _Queued(w, line)
            call.check(queued, where)
            _queue(w, line, "tcgen05.mma", lambda queued=queued, call=call: call.perform(queued))

    b.emit(run)


@dataclass
class _Multiply:
    """One tcgen05.mma as issued: what it multiplies and where the result goes."""

    shape: InstructionDescriptor
    k: int
    d: tuple[int, int]  # lane, column
    a: object  # a tensor-memory address or a Descriptor
    b: mx.Descriptor
    scale: float  # of the old D; 0: ignore it
    disabled: int  # a bit per lane of D that is not written (disable-output-lane)

    def check(self, queued: _Queued, where: str) -> None:
        lane, column = self.d
        if lane not in ((0,) if self.shape.m == 128 else (0, 16)):
            raise MemoryFault(f"{where}: D at lane {lane} for M = {self.shape.m}")
        queued.memory.check(lane, 128 - lane, column, self.shape.n, where)
        if isinstance(self.a, int):
            a_lane, a_column = split(self.a)
            if self.shape.m != 128 or a_lane or not self.shape.a_k_major:
                raise MemoryFault(f"{where}: A in tensor memory needs M = 128, lane 0 and K-major here")
            queued.memory.check(0, 128, a_column, 8, where)

    def rows(self) -> np.ndarray:
        """The lane of each row of D (9.7.16.10.5, layouts of M = 128 and M = 64)."""
        rows = np.arange(self.shape.m)
        return rows if self.shape.m == 128 else rows // 16 * 32 + rows % 16 + self.d[0]

    def perform(self, queued: _Queued) -> None:
        queued.start()
        shape = self.shape
        matrix_b = queued.shared_matrix(self.b, shape.b_k_major, shape.n, self.k, shape.b)
        if isinstance(self.a, int):
            matrix_a = _tensor_a(queued, self.a, shape.a, self.k)
        else:
            matrix_a = queued.shared_matrix(self.a, shape.a_k_major, shape.m, self.k, shape.a)
        rows, column, cells = self.rows(), self.d[1], queued.memory.cells
        keep = np.array([not self.disabled >> int(r) & 1 for r in rows])
        rows, matrix_a = rows[keep], matrix_a[keep]
        if queued.races:
            queued.touch(queued.memory.granules(rows, column, shape.n), write=True)
        old = np.ascontiguousarray(cells[rows, column : column + shape.n])
        cells[rows, column : column + shape.n] = self._sum(matrix_a, matrix_b, old)
        queued.cta.launch.counters.matrix("tcgen05", shape.m * shape.n * self.k)

    def _sum(self, matrix_a: np.ndarray, matrix_b: np.ndarray, old: np.ndarray) -> np.ndarray:
        """New cells from old ones; an f16 result occupies the low half of its cell."""
        shape = self.shape
        if shape.d == "s32":
            c = old.view(np.int32) if self.scale else None
            return mx.multiply_integer(matrix_a, matrix_b, c, shape.saturate).view(np.uint32)
        half = shape.d == "f16"
        c = old.astype(np.uint16).view(np.float16) if half else old.view(np.float32)
        c = c.astype(np.float64) * self.scale if self.scale else None
        result = mx.multiply_float(shape.negate * matrix_a, matrix_b, c, (shape.a, shape.b), ADDER)
        return result.astype(np.float16).view(np.uint16).astype(np.uint32) if half else result.view(np.uint32)


def _tensor_a(queued: _Queued, address: int, kind: str, k: int) -> np.ndarray:
    """A from tensor memory: row = lane, elements packed into consecutive columns (9.7.16.10.4)."""
    _, column = split(address)
    width = k * mx.ELEMENT_BYTES[kind] // 4
    if queued.races:
        queued.touch(queued.memory.granules(np.arange(128), column, width))
    raw = np.ascontiguousarray(queued.memory.cells[:, column : column + width]).view(f"u{mx.ELEMENT_BYTES[kind]}")
    if kind == "e2m1":
        raw = raw >> 2
    elif kind in ("e2m3", "e3m2"):
        raise MemoryFault(f"line {queued.line}: {kind} in tensor memory is not modelled")
    return mx.values(raw, kind)
