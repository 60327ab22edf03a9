"""Which warp runs, and when asynchronous operations complete.

Schedules: "inorder" runs warps round robin and completes operations in the order issued, one per turn; "late"
completes nothing until every warp waits, and try_wait times out every other time; "random" draws all of it from the
seed: turns of random length, operations in any order the ISA allows, bulk copies in random pieces, try_wait timing out
now and then. A seed alone selects "random". The same seed gives the same run.
"""

from __future__ import annotations

import random
from collections import deque

from .errors import Deadlock, EmulatorError

SCHEDULES = ("inorder", "late", "random")
_TURN = 2000  # instructions


class Scheduler:
    def __init__(self, launch, schedule: str, seed: int | None):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r}, expected one of {SCHEDULES}")
        self.launch, self.schedule = launch, schedule
        self.rng = random.Random(seed) if schedule == "random" else None
        self.queue: deque = deque()
        self.paused: list = []
        self.waits: list = []  # groups sleeping in try_wait: they may time out
        self.progress = 0
        self.timed_out_at = -1
        self._gave_up = False
        self.executed = 0
        self.ctas: list = []

    # ---- what the machine calls -----------------------------------------------------------------------------------
    def ready(self, warp) -> None:
        if not warp.queued:
            warp.queued = True
            self.queue.append(warp)

    def pause(self, warp, group) -> None:
        """nanosleep: the group is runnable again on the next turn."""
        group.wait = _PAUSED
        self.paused.append((warp, group))

    def note_wait(self, warp, group) -> None:
        self.waits.append((warp, group, group.wait))

    def spurious_timeout(self) -> bool:
        """try_wait may give up at a time limit the ISA leaves open: now and then, or, if "late", every other time."""
        if self.schedule == "late":
            self._gave_up = not self._gave_up
            return self._gave_up
        return self.rng is not None and self.rng.random() < 0.15

    def pieces(self, size: int) -> list[tuple[int, int]]:
        """How a bulk copy arrives: whole, or in a few multiples of 16 bytes."""
        if self.rng is None or size <= 16:
            return [(0, size)]
        cuts = sorted({16 * self.rng.randrange(1, size // 16) for _ in range(self.rng.randrange(3))})
        edges = [0, *cuts, size]
        return list(zip(edges[:-1], edges[1:], strict=True))

    # ---- the main loop --------------------------------------------------------------------------------------------
    def run(self, ctas: list) -> None:
        """Runs these CTAs, together, to their end."""
        self.ctas, self.waits, self.paused = ctas, [], []
        for cta in ctas:
            for warp in cta.warps:
                self.ready(warp)
        while True:
            if self.paused:
                paused, self.paused = self.paused, []
                for warp, group in paused:
                    warp.wake(group)
            if not self.queue:
                if all(c.finished for c in ctas):
                    return
                if not self._complete_something() and not self.queue:
                    self._time_out()
                continue
            warp = self._next()
            before = warp.instructions
            warp.run(_TURN if self.rng is None else self.rng.choice((3, 10, 40, 200, 1000)))
            self.executed += warp.instructions - before
            if self.executed > self.launch.max_instructions:
                raise EmulatorError(
                    f"more than {self.launch.max_instructions} warp instructions (an endless loop?)\n" + self.report()
                )
            if any(g.wait is None for g in warp.groups):
                self.ready(warp)
            if self.schedule == "inorder":
                self._complete_something()
            elif self.rng is not None:
                for _ in range(self.rng.randrange(3)):
                    self._complete_something()

    def _next(self):
        if self.rng is not None and len(self.queue) > 1:
            self.queue.rotate(-self.rng.randrange(len(self.queue)))
        warp = self.queue.popleft()
        warp.queued = False
        return warp

    def _complete_something(self) -> bool:
        ctas = self.ctas
        if self.rng is not None and len(ctas) > 1:
            ctas = self.rng.sample(ctas, len(ctas))
        return any(c.engine.step(self.rng) for c in ctas)

    def _time_out(self) -> None:
        """Nothing runs and nothing is in flight: let try_wait time out once; if that changes nothing, give up."""
        waiting = {id(g): (w, g) for w, g, barrier in self.waits if g.wait is barrier}
        self.waits = []
        if not waiting or self.progress == self.timed_out_at:
            raise Deadlock("no warp can run and nothing is in flight:\n" + self.report())
        self.timed_out_at = self.progress
        for w, g in waiting.values():
            g.wait.waiters = [x for x in g.wait.waiters if x[1] is not g]
            g.timed_out = True
            w.wake(g)

    def report(self) -> str:
        lines = []
        for cta in self.ctas:
            lines += [w.describe() for w in cta.warps if w.groups]
            pending = cta.engine.describe()
            lines += [pending] if pending else []
            barriers = [b for b in cta.barriers.mbarriers.values() if b.tx or b.waiters]
            barriers += [b for b in cta.barriers.named.values() if b.arrived]
            lines += [f"  cta {cta.index}: {b.describe()}" for b in barriers]
        return "\n".join(lines)


class _Paused:
    def describe(self) -> str:
        return "sleeps"


_PAUSED = _Paused()
