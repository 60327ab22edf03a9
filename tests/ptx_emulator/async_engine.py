"""Asynchronous operations of one CTA, completed late and in an order the ISA allows.

An operation is queued under an order key: operations with the same key complete in the order issued (wgmma of a
warpgroup, tcgen05.mma of a CTA), different keys are unordered (every bulk copy has a key of its own). It reads its
operands and writes its results when it completes, not when it is issued, so a missing wait shows as stale data, a race
report or a hazard. The scheduler decides when to complete something; waits force what they need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .errors import Hazard


class AsyncOp:
    """One step of an asynchronous operation: `run` performs it, `ready` says if all participants have issued it."""

    __slots__ = ("key", "what", "line", "run", "ready", "done")

    def __init__(self, key, what: str, line: int, run: Callable[[], None], ready: Callable[[], bool] | None = None):
        self.key, self.what, self.line, self.run, self.ready, self.done = key, what, line, run, ready, False


class AsyncEngine:
    def __init__(self, cta):
        self.cta = cta
        self.queues: dict[object, deque[AsyncOp]] = {}
        self._serial = 0

    def unordered(self) -> tuple:
        """A key that orders nothing."""
        self._serial += 1
        return ("op", self._serial)

    def issue(self, op: AsyncOp) -> AsyncOp:
        self.queues.setdefault(op.key, deque()).append(op)
        return op

    def _head_ready(self, queue: deque) -> bool:
        return queue[0].ready is None or queue[0].ready()

    def step(self, rng=None) -> bool:
        """Completes one operation: the oldest, or one chosen by `rng`. False if none can complete."""
        keys = [k for k, q in self.queues.items() if self._head_ready(q)]
        if not keys:
            return False
        self._complete(keys[0] if rng is None else keys[rng.randrange(len(keys))])
        return True

    def _complete(self, key) -> None:
        queue = self.queues[key]
        op = queue.popleft()
        if not queue:
            del self.queues[key]
        op.done = True
        self.cta.launch.scheduler.progress += 1
        op.run()

    def force(self, op: AsyncOp) -> bool:
        """Completes `op` and whatever is ordered before it. False if a participant has not issued its part yet."""
        while not op.done:
            if not self._head_ready(self.queues[op.key]):
                return False
            self._complete(op.key)
        return True

    def check_warp_end(self, warp) -> None:
        if warp.registers_in_flight:
            raise Hazard(f"{warp.name} ended with a wgmma or tcgen05.ld in flight (no wait)")

    def check_end(self) -> None:
        """The CTA has ended: nothing may still read or write its shared memory."""
        for queue in self.queues.values():
            for op in queue:
                if op.what != "global write":
                    raise Hazard(
                        f"the CTA ended before the {op.what} of line {op.line} had completed: nothing waited for it"
                    )
        while self.step():
            pass

    def describe(self) -> str:
        return "\n".join(f"  in flight: {op.what} of line {op.line}" for q in self.queues.values() for op in q)
