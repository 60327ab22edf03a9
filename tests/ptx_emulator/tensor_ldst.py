"""tcgen05.ld, .st and their waits: tensor memory from and to registers (PTX ISA 9.7.16.8)."""

from __future__ import annotations

import numpy as np

from .async_engine import AsyncOp
from .decode import Builder, Mods
from .errors import Hazard, MemoryFault
from .syntax import Vec
from .tensor_operands import tensor_address, whole_warp
from .tmem import split, tensor_memory
from .warpops import LANES

_NUMBERS = tuple(f"x{1 << i}" for i in range(8))
_REGISTERS = {"32x32b": 1, "16x128b": 2, "16x256b": 4}  # of a thread, per repetition


def _cells(shape: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(lane offset, column offset) of each register and thread, [count, 32] (figures of 9.7.16.2.3.1)."""
    i = np.arange(count)[:, None]
    if shape == "32x32b":
        return np.broadcast_to(LANES, (count, 32)), np.broadcast_to(i, (count, 32))
    if shape == "16x128b":
        return LANES // 4 + 8 * (i % 2), 4 * (i // 2) + LANES % 4
    repeat, q = i // 4, i % 4
    return LANES // 4 + 8 * (q // 2), 8 * repeat + 2 * (LANES % 4) + q % 2


def _ld_st(b: Builder, m: Mods, registers, operand):
    m.last_type("b32")
    whole_warp(b, m)
    shape = m.one_of(*_REGISTERS, required=True)
    number = int(m.one_of(*_NUMBERS, required=True)[1:])
    m.done()
    registers = list(registers.items) if isinstance(registers, Vec) else [registers]
    if len(registers) != number * _REGISTERS[shape]:
        b.fail("number of registers")
    lanes, columns = _cells(shape, len(registers))
    width, height = int(columns.max()) + 1, 32 if shape == "32x32b" else 16
    address, line = tensor_address(b, operand), b.ins.line

    def locate(w):
        """Absolute lanes and columns; a warp reaches the 32 lanes of its number modulo 4 (9.7.16.2.3)."""
        lane, column = split(address(w.R, 0))
        if lane // 32 != w.index % 4 or (height == 32 and lane % 32) or (height == 16 and lane % 16):
            raise MemoryFault(f"{w.name}, line {line}: tensor-memory lane {lane} is not reachable from this warp")
        memory = tensor_memory(w.cta)
        memory.check(lane, height, column, width, f"{w.name}, line {line}")
        return memory, lanes + lane, columns + column, (np.arange(height) + lane, column, width)

    return registers, locate, line


def load(b: Builder, m: Mods, kind: str) -> None:
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


def store(b: Builder, m: Mods, kind: str) -> None:
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


def wait(b: Builder, m: Mods, kind: str) -> None:
    which = kind[-2:]
    whole_warp(b, m)
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
