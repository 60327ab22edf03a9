"""Barrier objects: mbarrier (PTX ISA 9.7.13.15) and the sixteen named barriers (9.7.13.1)."""

from __future__ import annotations

import numpy as np

from .errors import MemoryFault, SyncError
from .races import new_clock

_MAX_COUNT = (1 << 20) - 1


class MBarrier:
    """Phase, pending arrivals and transaction count. A phase completes when both reach zero (9.7.13.15.2, .5)."""

    def __init__(self, cta, address: int, count: int, warp, line: int):
        if not 1 <= count <= _MAX_COUNT:
            raise SyncError(f"mbarrier at {address:#x} initialised with count {count} (line {line})")
        self.cta, self.address, self.count, self.line = cta, address, count, line
        self.pending, self.tx, self.phase, self.completed = count, 0, 0, 0
        self.waiters: list = []
        self.clock, self.done = new_clock(), new_clock()
        self.owner, self.made = warp.accessor(1)
        self.fenced = False

    def check_visible(self, warp) -> None:
        if warp.narrow != self.owner and warp.clock[0, self.owner] < self.made:
            raise SyncError(
                f"{warp.name} uses the mbarrier at {self.address:#x} with nothing ordering it after its "
                f"initialisation (line {self.line})"
            )

    def arrive(self, count: int) -> None:
        if count > self.pending:
            raise SyncError(f"{self.describe()}: {count} arrivals more than the phase expects")
        self.pending -= count
        self._check()

    def expect(self, bytes_: int) -> None:
        self.tx += bytes_
        if self.tx > _MAX_COUNT:
            raise SyncError(f"{self.describe()}: transaction count above 2^20 - 1")

    def complete(self, bytes_: int) -> None:
        self.tx -= bytes_
        if self.tx < -_MAX_COUNT:
            raise SyncError(f"{self.describe()}: transaction count below -(2^20 - 1)")
        self._check()

    def _check(self) -> None:
        self.cta.launch.scheduler.progress += 1
        if self.pending == 0 and self.tx == 0:
            self.phase ^= 1
            self.completed += 1
            self.pending = self.count
            self.done[...] = self.clock
            waiters, self.waiters = self.waiters, []
            for warp, group in waiters:
                warp.wake(group)

    def passed(self, parity: int) -> bool:
        """Has the phase with this parity completed (test_wait.parity)?"""
        return self.phase != parity & 1

    def describe(self) -> str:
        return (
            f"mbarrier {self.address:#x} (init line {self.line}): phase {self.completed} (parity {self.phase}), "
            f"{self.pending} of {self.count} arrivals and {self.tx} bytes pending"
        )


class NamedBarrier:
    def __init__(self, number: int):
        self.number, self.expected, self.arrived = number, 0, 0
        self.waiters: list = []  # (warp, group, finish or None)
        self.clock = new_clock()
        self.reduction = None

    def describe(self) -> str:
        return f"barrier {self.number}: {self.arrived} of {self.expected} threads have arrived"


class Barriers:
    """All barriers of a CTA."""

    def __init__(self, cta):
        self.cta = cta
        self.named: dict[int, NamedBarrier] = {}
        self.mbarriers: dict[int, MBarrier] = {}

    def init(self, address: int, count: int, warp, line: int) -> None:
        self.cta.shared.slice(address, 8)
        if address & 7:
            raise MemoryFault(f"mbarrier at {address:#x} is not 8-byte aligned (line {line})")
        if address in self.mbarriers and self.mbarriers[address].waiters:
            raise SyncError(f"mbarrier.init of {address:#x} while a warp waits on it (line {line})")
        barrier = self.mbarriers[address] = MBarrier(self.cta, address, count, warp, line)
        warp.unfenced_barriers.append(barrier)

    def at(self, address: int, line: int) -> MBarrier:
        barrier = self.mbarriers.get(address)
        if barrier is None:
            raise SyncError(f"line {line}: there is no initialised mbarrier at shared address {address:#x}")
        return barrier

    def invalidate(self, address: int, line: int) -> None:
        self.at(address, line)
        del self.mbarriers[address]

    def arrive(self, warp, number: int, threads: int | None, line: int) -> NamedBarrier:
        """Counts one warp's arrival; the caller then completes or sleeps."""
        if not 0 <= number < 16:
            raise SyncError(f"line {line}: barrier number {number}")
        total = -(-self.cta.launch.threads // 32) * 32
        expected = total if threads is None else threads
        if expected % 32 or not 0 < expected <= total:
            raise SyncError(f"line {line}: barrier {number} with {expected} threads of {total}")
        barrier = self.named.setdefault(number, NamedBarrier(number))
        if barrier.arrived and barrier.expected != expected:
            raise SyncError(
                f"line {line}: barrier {number} used with {expected} threads while {barrier.expected} are expected"
            )
        barrier.expected = expected
        barrier.arrived += 32
        if self.cta.races:
            warp.release(barrier.clock)
        self.cta.launch.scheduler.progress += 1
        return barrier

    def cluster_arrive(self, warp) -> NamedBarrier:
        """barrier.cluster.arrive with a cluster of one CTA: all its warps take part."""
        barrier = self.named.setdefault(16, NamedBarrier(16))
        barrier.expected = 32 * len(self.cta.warps)
        barrier.arrived += 32
        if self.cta.races:
            warp.release(barrier.clock)
        self.cta.launch.scheduler.progress += 1
        self.complete(barrier)
        return barrier

    def complete(self, barrier: NamedBarrier) -> None:
        """Releases everyone once enough threads have arrived."""
        if barrier.arrived < barrier.expected:
            return
        waiters = barrier.waiters
        self.named[barrier.number] = NamedBarrier(barrier.number)
        for warp, group, finish in waiters:
            if self.cta.races:
                warp.acquire(barrier.clock)
            if finish is not None:
                finish(barrier.reduction)
            if group.wait is not None:
                warp.wake(group)

    def check_end(self) -> None:
        for b in self.mbarriers.values():
            if b.tx:
                raise SyncError(f"the CTA ended with unfinished transactions: {b.describe()}")


def lanes_of(mask) -> list[int]:
    return list(range(32)) if mask is None else np.nonzero(mask)[0].tolist()
