"""Threads: warps with explicit groups of converged lanes, and CTAs (PTX ISA 3 Programming Model).

A warp runs one group of lanes at a time, the one with the lowest block number, so that diverged lanes meet again at the
first common block. A group that must wait holds the object it waits for in `wait`; a warp none of whose groups can run
sleeps until something wakes it.
"""

from __future__ import annotations

import numpy as np

from .decode import FULL, Program
from .errors import EmulatorError, Hazard, SyncError
from .memory import POISON, SharedMemory
from .races import RaceDetector, new_clock

LANES = np.arange(32)


class Group:
    """Lanes that share a program counter (a block number). `mask` is None when it is all 32."""

    __slots__ = ("pc", "mask", "wait", "timed_out", "last")

    def __init__(self, pc: int, mask):
        self.pc, self.mask, self.wait, self.timed_out = pc, mask, None, False
        self.last = pc  # the block it executed last: where it waits


class Converge:
    """Waiting for the other lanes of a `.sync` instruction's member mask."""

    def describe(self) -> str:
        return "waits for the other lanes of its member mask"


_CONVERGE = Converge()


class Warp:
    def __init__(self, cta: CTA, index: int):
        self.cta, self.index, self.launch = cta, index, cta.launch
        self.program: Program = cta.launch.program
        self.name = f"cta {cta.index} warp {index}"
        live = index * 32 + LANES < cta.launch.threads
        self.live = live
        self.groups = [Group(0, None if live.all() else live)]
        self.queued = False
        self.counts = [0] * len(self.program.blocks)
        self.instructions = 0
        self.agent, self.narrow = index, index + -(-cta.launch.threads // 32)  # several lanes, a single lane
        self.clock = new_clock()
        self.clock[0, [self.agent, self.narrow]] = 1
        self.synced = 0  # own clock at the last synchronization of the whole warp
        self.registers_in_flight = 0  # bit mask: registers an unfinished wgmma owns
        self.unfenced = 0  # bit mask: registers touched since the last wgmma.fence
        self.unfenced_barriers: list = []  # mbarriers initialised since the last fence
        self.state: dict = {}  # per-warp state of the asynchronous units
        self.local = np.zeros((32, self.program.local_bytes), np.uint8) if self.program.local_bytes else None
        self.R = self._views()

    # ---- registers ------------------------------------------------------------------------------------------------
    def _views(self) -> list:
        """The slots of this warp: views of one buffer of registers, constants and special registers. Buffers are passed
        on from CTA to CTA; a new CTA finds its registers poisoned like its shared memory."""
        spare = self.launch.spare_registers.get(self.index)
        if spare:
            buffer, predicates, R = spare.pop()
        else:
            buffer, predicates, R = self._allocate()
        buffer.fill(POISON)
        predicates.fill(False)
        for i, name, dtype in self.program.special_slots:
            R[i] = self._special(name).astype(dtype)
        self._backing = buffer, predicates, R
        return R

    def _allocate(self) -> tuple[np.ndarray, np.ndarray, list]:
        registers = self.program.kernel.registers
        starts = np.cumsum([0] + [0 if r.bits == 1 else 4 * r.bits for r in registers])
        buffer, predicates = np.empty(int(starts[-1]), np.uint8), np.empty((len(registers), 32), bool)
        R: list = []
        for kind, *rest in self.program.slots:
            if kind == "const":
                R.append(np.full(32, np.frombuffer(rest[1], rest[0])[0]))
            elif kind == "special":
                R.append(None)
            elif registers[rest[0]].bits == 1:
                R.append(predicates[rest[0]])
            else:
                whole = buffer[starts[rest[0]] : starts[rest[0] + 1]].view(rest[1])
                R.append(whole[:: len(whole) // 32])
        return buffer, predicates, R

    def retire(self) -> None:
        """Gives the register buffers to the next CTA."""
        self.launch.spare_registers.setdefault(self.index, []).append(self._backing)

    def register(self, name: str) -> np.ndarray:
        """The lanes of a register by its PTX name, as unsigned integers (for debugging)."""
        for i, (kind, *rest) in enumerate(self.program.slots):
            if kind == "reg" and self.program.kernel.registers[rest[0]].name == name:
                return self.R[i]
        raise KeyError(name)

    def _special(self, name: str) -> np.ndarray:
        """Special registers (10), fixed for the life of a warp; the clocks are read by mov."""
        launch, cta = self.launch, self.cta
        thread = self.index * 32 + LANES
        bx, by, _ = launch.block
        axes = {"x": 0, "y": 1, "z": 2}
        base, _, axis = name.partition(".")
        lane_masks = {
            "%lanemask_eq": 1 << LANES,
            "%lanemask_lt": (1 << LANES) - 1,
            "%lanemask_le": (2 << LANES) - 1,
            "%lanemask_gt": FULL ^ ((2 << LANES) - 1),
            "%lanemask_ge": FULL ^ ((1 << LANES) - 1),
        }
        if base in lane_masks:
            return lane_masks[base]
        if axis in axes:
            i = axes[axis]
            if base == "%tid":
                return (thread % bx, thread // bx % by, thread // (bx * by))[i]
            values = {
                "%ntid": launch.block,
                "%ctaid": cta.position,
                "%nctaid": launch.grid,
                "%clusterid": cta.position,
                "%nclusterid": launch.grid,
                "%cluster_ctaid": (0, 0, 0),
                "%cluster_nctaid": (1, 1, 1),
            }
            if base in values:
                return np.full(32, values[base][i])
        values = {
            "%laneid": LANES,
            "%warpid": self.index,
            "%nwarpid": len(cta.warps) or 1,
            "%smid": cta.index % 132,
            "%nsmid": 132,
            "%gridid": 0,
            "%cluster_ctarank": 0,
            "%cluster_nctarank": 1,
            "%dynamic_smem_size": launch.smem,
            "%total_smem_size": launch.smem + self.program.static_end,
            "%is_explicit_cluster": 0,
        }
        if name in values:
            return np.full(32, values[name])
        raise EmulatorError(f"special register {name} is not modelled")

    # ---- execution ------------------------------------------------------------------------------------------------
    @property
    def finished(self) -> bool:
        return not self.groups

    def sleep(self, group: Group, on) -> bool:
        group.wait = on
        return False

    def wake(self, group: Group) -> None:
        group.wait = None
        self.launch.scheduler.ready(self)

    def progress(self) -> None:
        self.launch.scheduler.progress += 1

    def pick(self) -> Group | None:
        """Merges groups that met; returns the runnable one with the lowest block."""
        groups = self.groups
        if len(groups) > 1:
            groups.sort(key=lambda g: g.pc)
            kept: list[Group] = []
            for g in groups:
                last = kept[-1] if kept else None
                if last is not None and last.pc == g.pc and last.wait is None and g.wait is None:
                    mask = last.mask | g.mask
                    last.mask = None if mask.all() else mask
                else:
                    kept.append(g)
            self.groups = groups = kept
        for g in groups:
            if g.wait is None:
                return g
        return None

    def run(self, budget: int) -> None:
        """Runs until the warp sleeps, ends, or has executed about `budget` instructions."""
        R, blocks, counts = self.R, self.program.blocks, self.counts
        careful = self.program.uses_wgmma or self.program.uses_tcgen05
        trace = self.launch.debug
        while budget > 0 and self.groups:
            g = self.groups[0] if len(self.groups) == 1 else self.pick()
            if g is None or g.wait is not None:
                return
            block = blocks[g.pc]
            m = g.mask
            if m is not None and block.needs is not None and not self._converged(g, block):
                continue
            if careful:
                if block.touch & self.registers_in_flight:
                    self._check_in_flight(block)
                self.unfenced |= block.touch
            if trace is None:
                for f in block.body:
                    f(self, R, m)
            else:
                trace.run_block(self, g, block)
            counts[g.pc] += 1
            budget -= block.cost
            self.instructions += block.cost
            g.pc += 1
            if block.control is not None:
                g.last = block.index
                if not block.control(self, g) and g.pc == g.last and g.wait is not None:
                    counts[g.pc] -= 1  # it will be executed again

    def _converged(self, g: Group, block) -> bool:
        """False, and the group waits, while lanes of the member mask are still elsewhere."""
        members = int(self.R[block.needs][int(np.argmax(g.mask))])
        wanted = ((members >> LANES) & 1).astype(bool) & self.live
        missing = wanted & ~g.mask
        if not missing.any():
            return True
        others = [x for x in self.groups if x is not g and (x.mask is None or (x.mask & missing).any())]
        if not others:
            raise SyncError(f"{self.name}: a .sync instruction waits for lanes that are not in the warp")
        for x in others:
            if x.wait is _CONVERGE and x.pc == g.pc:
                x.wait = None  # they meet here
                return False
        g.wait, g.last = _CONVERGE, g.pc
        return False

    def exit(self, group: Group, lanes) -> None:
        """Ends `lanes` (a mask, or None for all of the group)."""
        self.progress()
        if lanes is None or (group.mask is not None and not (group.mask & ~lanes).any()):
            self.live = self.live & ~(np.ones(32, bool) if group.mask is None else group.mask)
            self.groups.remove(group)
        else:
            self.live = self.live & ~lanes
            group.mask = ~lanes if group.mask is None else group.mask & ~lanes
        for g in self.groups:
            if g.wait is _CONVERGE:
                g.wait = None
        if not self.groups:
            self.cta.warp_ended(self)

    def _check_in_flight(self, block) -> None:
        for ins in block.all_instructions:
            touched = self.program.touched[id(ins)] & self.registers_in_flight
            if touched:
                name = self.program.kernel.registers[touched.bit_length() - 1].name
                raise Hazard(
                    f"{self.name}, line {ins.line}: register {name} belongs to a wgmma or tcgen05.ld still in "
                    f"flight; its wait is missing before: {ins.text}"
                )

    def describe(self) -> str:
        parts = []
        for g in self.groups:
            block = self.program.blocks[g.last if g.wait else g.pc]
            ins = (block.control_instruction if g.wait else None) or next(iter(block.all_instructions), None)
            lanes = "" if g.mask is None else f" lanes {int((g.mask << LANES).sum()):#010x}"
            where = f"line {ins.line}: {ins.text[:90]}" if ins else "the end"
            parts.append(f"  {self.name}{lanes} at {where} -- {g.wait.describe() if g.wait else 'can run'}")
        return "\n".join(parts)

    # ---- memory ordering ------------------------------------------------------------------------------------------
    def accessor(self, lanes: int) -> tuple[int, int]:
        """(agent, clock) of an access by this many lanes."""
        agent = self.agent if lanes > 1 else self.narrow
        return agent, int(self.clock[0, agent])

    def tick(self) -> None:
        self.clock[0, self.agent] += 1
        self.clock[0, self.narrow] += 1

    def sync_lanes(self) -> None:
        """The lanes of the warp have synchronized: each is ordered after what the others did."""
        self.synced = int(self.clock[0, self.agent])
        self.tick()

    def release(self, clock: np.ndarray) -> None:
        """By all lanes."""
        np.maximum(clock, self.clock, out=clock)
        self.sync_lanes()

    def release_by(self, mask, clock: np.ndarray) -> None:
        """By the lanes of a mask: if some are missing, what they did since the last synchronization is not covered."""
        released = self.clock
        if mask is not None and (self.live & ~mask).any():
            released = self.clock.copy()
            released[:, self.agent] = np.minimum(released[:, self.agent], self.synced)
        np.maximum(clock, released, out=clock)

    def acquire(self, clock: np.ndarray) -> None:
        np.maximum(self.clock, clock, out=self.clock)

    def proxy_fence(self) -> None:
        """All that is ordered before this point is visible to the asynchronous proxy from here on."""
        self.clock[1] = self.clock[0]
        self.tick()
        for barrier in self.unfenced_barriers:
            barrier.fenced = True
        self.unfenced_barriers.clear()


class CTA:
    def __init__(self, launch, index: int, position: tuple[int, int, int]):
        from .async_engine import AsyncEngine
        from .sync import Barriers

        self.launch, self.index, self.position = launch, index, position
        end = launch.program.static_end + launch.smem
        self.shared = SharedMemory(end)
        self.races = None
        self.warps: list[Warp] = []
        count = -(-launch.threads // 32)
        if launch.detect_races:
            cells = 128 * 512 if launch.program.uses_tcgen05 else 0
            self.races = RaceDetector(end, count, launch.program.race_granule, cells)
        self.engine = AsyncEngine(self)
        self.barriers = Barriers(self)
        self.units: dict = {}  # matrix units, created when first used
        self.warps = [Warp(self, i) for i in range(count)]
        self.ended = 0

    @property
    def finished(self) -> bool:
        return self.ended == len(self.warps)

    def warp_ended(self, warp: Warp) -> None:
        self.ended += 1
        self.engine.check_warp_end(warp)
        if self.finished:
            self.engine.check_end()
            self.barriers.check_end()
            for unit in self.units.values():
                unit.check_end()
