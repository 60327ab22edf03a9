"""Launching a kernel on the emulator: PTX text, grid, block, arguments -> counters."""

from __future__ import annotations

import struct
import time

import numpy as np

from .counters import Counters
from .decode import decode
from .errors import EmulatorError
from .machine import CTA
from .memory import Memory, Ptr
from .scheduler import Scheduler

_PACK = {
    "u8": "B",
    "s8": "b",
    "b8": "B",
    "u16": "H",
    "s16": "h",
    "b16": "H",
    "u32": "I",
    "s32": "i",
    "b32": "I",
    "f32": "f",
    "u64": "Q",
    "s64": "q",
    "b64": "Q",
    "f64": "d",
}


class Launch:
    """One kernel launch.

    ptx     PTX text, an object with `.ptx`, or a compiled CuTe DSL function (its `.artifacts.PTX`)
    grid, block     one to three integers
    args    one value per kernel parameter: an array or tensor (a pointer to it), `Ptr(array, byte_offset)`, an integer
            (also an address made by Memory.address), a float, or bytes for a struct
    smem    dynamic shared memory in bytes
    seed, schedule      see scheduler.py; `seed=3` alone means schedule="random"
    memory  a Memory shared by several launches (one is made if left out)
    entry   kernel name when the module holds several
    races   check shared memory for races
    conflicts       count bank conflicts (slower)
    resident        how many CTAs run at the same time (all of them when kernels wait for one another)
    debug   a Debugger
    """

    def __init__(
        self,
        ptx,
        grid,
        block,
        args=(),
        *,
        smem: int = 0,
        seed: int | None = None,
        schedule: str | None = None,
        memory: Memory | None = None,
        entry: str | None = None,
        races: bool = True,
        conflicts: bool = False,
        resident: int | None = None,
        max_instructions: int = 50_000_000,
        debug=None,
    ):
        text = ptx if isinstance(ptx, str) else ptx.ptx if hasattr(ptx, "ptx") else ptx.artifacts.PTX
        self.program = decode(text, entry)
        self.grid, self.block = _three(grid), _three(block)
        self.threads = self.block[0] * self.block[1] * self.block[2]
        self.smem = smem
        self.memory = memory or Memory()
        self.param_bytes = self._pack(args)
        self.detect_races = races
        self.counters = Counters(conflicts=conflicts)
        schedule = schedule or ("inorder" if seed is None else "random")
        self.scheduler = Scheduler(self, schedule, seed)
        self.resident = resident or (1 if schedule != "random" else 3)
        self.max_instructions = max_instructions
        self.debug = debug
        self.spare_registers: dict[int, list] = {}
        self._check()

    def _check(self) -> None:
        if not 1 <= self.threads <= 1024:
            raise EmulatorError(f"{self.threads} threads in a block")
        required = self.program.kernel.directives.get("reqntid")
        if required:
            want = [int(x) for x in required.split(",")] + [1, 1]
            if tuple(want[:3]) != self.block:
                raise EmulatorError(f"block {self.block}, but the kernel has .reqntid {required}")
        if self.program.static_end + self.smem > 1024 + 227 * 1024:
            raise EmulatorError(f"{self.smem} bytes of dynamic shared memory: more than 227 KB in all")

    def _pack(self, args) -> bytes:
        params = self.program.kernel.params
        if len(args) != len(params):
            raise EmulatorError(f"{len(args)} arguments for {len(params)} parameters of {self.program.name}")
        out = bytearray(self.program.kernel.param_bytes)
        for p, value in zip(params, args, strict=True):
            out[p.offset : p.offset + p.size] = self._one(p, value)
        return bytes(out)

    def _one(self, p, value) -> bytes:
        if isinstance(value, bytes):
            if len(value) != p.size:
                raise EmulatorError(f"{len(value)} bytes for the {p.size} bytes of {p.name}")
            return value
        if isinstance(value, Ptr):
            value = self.memory.address(value.array, value.offset)
        elif hasattr(value, "detach") or (isinstance(value, np.ndarray) and value.ndim):
            value = self.memory.address(value)
        if p.size != struct.calcsize(_PACK[p.type]):
            raise EmulatorError(f"{p.name} is a struct of {p.size} bytes: pass bytes")
        if p.type[0] == "f":
            return struct.pack("<" + _PACK[p.type], float(value))
        value = int(value)
        bits = 8 * p.size
        if not -(1 << (bits - 1)) <= value < 1 << bits:
            raise EmulatorError(f"{value} does not fit the {bits} bits of {p.name}")
        return (value & ((1 << bits) - 1)).to_bytes(p.size, "little")

    def clock(self) -> int:
        """%clock and %globaltimer: executed instructions."""
        return self.scheduler.executed

    def run(self) -> Counters:
        """Runs the whole grid; returns the counters. Raises an EmulatorError on the first thing that is wrong."""
        start = time.perf_counter()
        gx, gy, gz = self.grid
        executed = np.zeros((-(-self.threads // 32), len(self.program.blocks)), np.int64)
        order = list(range(gx * gy * gz))
        if self.scheduler.rng is not None:
            self.scheduler.rng.shuffle(order)
        with np.errstate(all="ignore"):
            for first in range(0, len(order), self.resident):
                ctas = [
                    CTA(self, i, (i % gx, i // gx % gy, i // (gx * gy))) for i in order[first : first + self.resident]
                ]
                self.scheduler.run(ctas)
                for warp in (w for cta in ctas for w in cta.warps):
                    executed[warp.index] += warp.counts
                    warp.retire()
        for index, times in enumerate(executed.tolist()):
            self.counters.add_blocks(self.program.blocks, index, times)
        self.counters.ctas = len(order)
        self.counters.seconds = time.perf_counter() - start
        return self.counters


def _three(x) -> tuple[int, int, int]:
    x = (x,) if isinstance(x, int) else tuple(x)
    if not 1 <= len(x) <= 3 or any(v < 1 for v in x):
        raise EmulatorError(f"grid or block {x}")
    return (*x, *(1,) * (3 - len(x)))
