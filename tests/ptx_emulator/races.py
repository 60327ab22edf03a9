"""Shared-memory race detection with vector clocks (PTX ISA 8, Memory Consistency Model, simplified).

Agents are the warps of a CTA (each twice: accesses of several lanes, and of a single one) and, added on demand, the
asynchronous units (one per mbarrier that bulk copies complete on, one per warp's part of wgmma, one per warp's bulk
stores and so on). Clocks are arrays of shape (2, MAX_AGENTS): row 0 is "happened before me", row 1 is "happened before
me and crossed a proxy fence": an asynchronous operation sees generic writes only through row 1 (fence.proxy.async,
9.7.13.4 membar/fence), everything else through row 0.

Every granule of shared memory, and every cell of tensor memory, remembers its last writer and, per agent, its last
read, with the clock and the source line. Conflicts inside a warp are not reported, but when some of its lanes arrive on
an mbarrier, that releases what several lanes did only up to the last bar.warp.sync (or barrier of the whole warp).
Atomics are not recorded.
"""

from __future__ import annotations

import numpy as np

from .errors import Race

MAX_AGENTS = 256
_CLOCK = (1 << 32) - 1
_LINE = (1 << 20) - 1


def new_clock() -> np.ndarray:
    return np.zeros((2, MAX_AGENTS), np.int64)


class RaceDetector:
    def __init__(self, size: int, warps: int, granule: int, tensor_cells: int = 0):
        self.shift = {1: 0, 2: 1, 4: 2}[granule]
        self.granule, self.generic = granule, 2 * warps  # agents below `generic` are warps
        self.tensor_base = (size >> self.shift) + 1  # cells of tensor memory follow the granules of shared memory
        self.writes = np.zeros(self.tensor_base + tensor_cells, np.int64)  # agent << 52 | line << 32 | clock
        self.reads: dict[int, np.ndarray] = {}  # agent -> line << 32 | clock
        self.last_read: dict[int, int] = {}
        self.names = [f"warp {i}" for i in range(warps)] + [f"a lane of warp {i}" for i in range(warps)]
        self.agents: dict[object, int] = {}
        self.ticks = [0] * MAX_AGENTS

    # ---- agents and clocks ----------------------------------------------------------------------------------------
    def agent(self, key, name: str) -> int:
        if key not in self.agents:
            number = self.generic + len(self.agents) % (MAX_AGENTS - self.generic)
            self.agents[key] = number
            if number == len(self.names):
                self.names.append(name)
        return self.agents[key]

    def tick(self, agent: int) -> int:
        self.ticks[agent] += 1
        return self.ticks[agent]

    def async_limit(self, clock: np.ndarray) -> np.ndarray:
        """What an asynchronous operation issued at `clock` may rely on: generic accesses only once fenced."""
        limit = clock[0].copy()
        limit[: self.generic] = clock[1, : self.generic]
        return limit

    # ---- accesses -------------------------------------------------------------------------------------------------
    def granules(self, addresses: np.ndarray, size: int):
        """Indices of all granules that accesses of `size` bytes at these addresses touch."""
        first = addresses >> self.shift
        n = size >> self.shift
        return first if n <= 1 else (first[:, None] + np.arange(n, dtype=first.dtype)).ravel()

    def range(self, address: int, size: int) -> slice:
        return slice(address >> self.shift, -(-(address + size) >> self.shift))

    def read(self, agent: int, limit: np.ndarray, clock: int, where, line: int) -> None:
        e = self.writes[where]
        late = (e & _CLOCK) > limit[e >> 52]
        if late.any():
            self._report("read", agent, line, where, late, e, "written")
        if agent not in self.reads:
            self.reads[agent] = np.zeros(len(self.writes), np.int64)
        self.reads[agent][where] = line << 32 | clock
        self.last_read[agent] = clock

    def write(self, agent: int, write_limit: np.ndarray, read_limit: np.ndarray, clock: int, where, line: int) -> None:
        e = self.writes[where]
        late = (e & _CLOCK) > write_limit[e >> 52]
        if late.any():
            self._report("written", agent, line, where, late, e, "written")
        for other, last in self.last_read.items():
            if other != agent and last > read_limit[other]:
                r = self.reads[other][where]
                late = (r & _CLOCK) > read_limit[other]
                if late.any():
                    self._report("written", agent, line, where, late, r | other << 52, "read")
        self.writes[where] = agent << 52 | line << 32 | clock

    def _report(self, what: str, agent: int, line: int, where, late: np.ndarray, epochs: np.ndarray, before: str):
        i = int(np.argmax(late))
        granule = where.start + i if isinstance(where, slice) else int(where[i])
        e = int(epochs[i])
        other, other_line = e >> 52, e >> 32 & _LINE
        hint = ""
        if agent >= self.generic and other < self.generic and before == "written":
            hint = " (no barrier, or no fence.proxy.async between the generic write and the asynchronous access)"
        cell = granule - self.tensor_base
        place = f"shared address {granule << self.shift:#x}"
        if cell >= 0:
            place = f"tensor memory lane {cell // 512} column {cell % 512}"
        raise Race(
            f"{place} {what} by {self.names[agent]} at line {line} and {before} earlier by {self.names[other]} at "
            f"line {other_line}, with nothing ordering the two{hint}"
        )
