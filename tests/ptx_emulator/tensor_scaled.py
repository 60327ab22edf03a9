"""tcgen05.mma with block scales, kind::mxf4 (PTX ISA 9.7.16.10.7): e2m1 operands, two to a byte, K = 64.

Every 32 elements of a row of A and of B have a scale, a byte ue8m0 (2^(byte - 127), 255: NaN).  The scales of row ``r``
lie in lane ``r % 32`` of column ``r // 32``, and again in the other three quarters of the lanes, in the half of the
word that the descriptor's ID chooses: byte ``ID + block``.  Products are added like unscaled ones, at the exponents of
the scaled operands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import matrix as mx
from .decode import Builder, Mods
from .errors import MemoryFault
from .sync import lanes_of
from .syntax import Addr
from .tensor_core import ADDER, _queue, _Queued, descriptor
from .tensor_operands import group_of_one, tensor_address
from .tmem import split

M, K, BLOCK = 128, 64, 32
WIDTH = K // 8  # columns of A of one instruction


class ScaledDescriptor:
    """Instruction descriptor of kind::mxf4 (9.7.16.4.2)."""

    def __init__(self, value: int, where: str):
        self.n, m = (value >> 17 & 63) * 8, (value >> 27 & 3) * 128
        self.negate = -1 if (value >> 13 & 1) != (value >> 14 & 1) else 1
        self.a_id, self.b_id = value >> 29 & 3, value >> 4 & 3
        reserved = 0b1 << 31 | 0b111 << 24 | 0b11 << 15 | 0b1 << 12 | 0b1 << 6 | 0b1111
        types = value >> 7 & 7 == 1 and value >> 10 & 3 == 1 and value >> 23 & 1
        if value & reserved or not types or m != M or not 8 <= self.n <= 256 or self.a_id & 1 or self.b_id & 1:
            raise MemoryFault(
                f"{where}: instruction descriptor {value:#010x} (M {m}, N {self.n}, scales {self.a_id}, {self.b_id}) "
                "is not valid for kind::mxf4"
            )


def multiply(b: Builder, m: Mods, kind: str) -> None:
    group_of_one(b, m)
    m.expect("kind::mxf4")
    m.one_of("scale_vec::2X", "block32", required=True)
    m.one_of(*(f"collector::a::{x}" for x in ("fill", "use", "lastuse", "discard")))
    m.done()
    d, a, b_, i, scale_a, scale_b, use = b.operands(7)
    d_address, scales = tensor_address(b, d), [tensor_address(b, x) for x in (scale_a, scale_b)]
    a_address = tensor_address(b, a) if isinstance(a, Addr) else None
    a_slot = None if a_address else b.src(a, "b64")
    b_slot, i_slot, (use_d, negated) = b.src(b_, "b64"), b.src(i, "u32"), b.predicate(use)
    line = b.ins.line

    def run(w, R, mask):
        where = f"{w.name}, line {line}"
        for lane in lanes_of(mask):
            call = _Multiply(
                shape=ScaledDescriptor(int(R[i_slot][lane]), where),
                d=split(d_address(R, lane)),
                a=split(a_address(R, lane)) if a_address else descriptor(int(R[a_slot][lane])),
                b=descriptor(int(R[b_slot][lane])),
                scales=tuple(split(x(R, lane)) for x in scales),
                accumulate=bool(R[use_d][lane]) != negated,
                where=where,
            )
            queued = _Queued(w, line)
            call.check(queued)
            _queue(w, line, "tcgen05.mma", lambda queued=queued, call=call: call.perform(queued))

    b.emit(run)


@dataclass
class _Multiply:
    """One instruction as issued.  ``d``, ``scales`` and ``a`` (or a Descriptor): lane and column."""

    shape: ScaledDescriptor
    d: tuple[int, int]
    a: object
    b: mx.Descriptor
    scales: tuple[tuple[int, int], tuple[int, int]]
    accumulate: bool
    where: str

    def rooms(self) -> list[tuple[tuple[int, int], int]]:
        """(address, columns) of all that lies in tensor memory."""
        found = [(self.d, self.shape.n), (self.scales[0], M // 32), (self.scales[1], -(-self.shape.n // 32))]
        return [*found, (self.a, WIDTH)] if isinstance(self.a, tuple) else found

    def check(self, queued: _Queued) -> None:
        for (lane, column), columns in self.rooms():
            queued.memory.check(lane, M - lane, column, columns, self.where)
            if lane:
                raise MemoryFault(f"{self.where}: lane {lane} of tensor memory where 0 is needed")

    def perform(self, queued: _Queued) -> None:
        queued.start()
        n, cells = self.shape.n, queued.memory.cells
        lanes = np.arange(M)
        if queued.races:
            for (_, column), columns in self.rooms()[1:]:
                queued.touch(queued.memory.granules(lanes, column, columns))
        raw_b = queued.shared_matrix(self.b, True, n, K // 2, "u8")
        if isinstance(self.a, tuple):
            raw_a = np.ascontiguousarray(cells[:, self.a[1] : self.a[1] + WIDTH]).view(np.uint8)
        else:
            raw_a = queued.shared_matrix(self.a, True, M, K // 2, "u8")
        a_exponents = self._exponents(cells, self.scales[0][1], M, self.shape.a_id)
        b_exponents = self._exponents(cells, self.scales[1][1], n, self.shape.b_id)
        if queued.races:
            queued.touch(queued.memory.granules(lanes, self.d[1], n), write=True)
        room = cells[:, self.d[1] : self.d[1] + n]
        old = np.ascontiguousarray(room).view(np.float32).astype(np.float64) if self.accumulate else None
        a, b = self.shape.negate * np.ldexp(_values(raw_a), a_exponents), np.ldexp(_values(raw_b), b_exponents)
        for x, exponents in ((a, a_exponents), (b, b_exponents)):
            x[exponents == 128] = np.nan
        room[...] = mx.multiply_lowest(a, b, old, (a_exponents, b_exponents), ADDER).view(np.uint32)
        queued.cta.launch.counters.matrix("tcgen05", M * n * K)

    def _exponents(self, cells: np.ndarray, column: int, rows: int, first: int) -> np.ndarray:
        """Of every element's scale, [rows, K]; 128: NaN."""
        row = np.arange(rows)
        copies = np.stack([cells[32 * quarter + row % 32, column + row // 32] for quarter in range(4)])
        raw = np.ascontiguousarray(copies).view(np.uint8).reshape(4, rows, 4)[..., first : first + K // BLOCK]
        if (raw != raw[0]).any():
            raise MemoryFault(f"{self.where}: the scales of the four quarters of tensor memory differ")
        return np.repeat(raw[0].astype(np.int64) - 127, BLOCK, 1)


def _values(raw: np.ndarray) -> np.ndarray:
    """Pairs of e2m1 codes, the low half of a byte first, as numbers."""
    raw = raw.astype(np.uint8)
    return mx.values(np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), K), "e2m1")
