"""The edges between roles as data: who arrives how often at which barrier, who waits.

An edge has ``depth`` mbarriers, used in turn; the i-th use (step, item or ring slot) waits for the phase that follows
from its count.  Of an edge of two, a use is the pair (buffer, phase), advanced by :func:`after`.  ``Barriers`` checks
at trace time that only the declared ends of an edge arrive and wait, and after all roles that each of them did: what
would be a deadlock is an exception while compiling.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common import device
from .config import BUFFERS, ROLES, ConfigError


@dataclass(frozen=True)
class Edge:
    """``by``: what arrives: "warps" (each warp of the sources once), "bytes" (one expect_tx) or "commit" (tcgen05)."""

    name: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    depth: int = BUFFERS
    by: str = "warps"

    @property
    def arrivals(self) -> int:
        return sum(ROLES[role] for role in self.sources) if self.by == "warps" else 1


def edges(stages: int, readers: tuple[str, ...] = ()) -> tuple[Edge, ...]:
    """``readers``: more roles that read the ring (DecodeConfig.ring_readers)."""
    return (
        Edge("full", ("load",), ("unpack", "softmax", *readers), stages, "bytes"),  # pages in the ring
        Edge("empty", ("unpack", "softmax", *readers), ("load",), stages),  # codes and parameters read
        Edge("codes_full", ("unpack",), ("mma",)),  # K and V of a step in tensor memory
        Edge("codes_empty", ("mma",), ("unpack",), by="commit"),  # both products done
        Edge("q_full", ("query",), ("mma", "softmax")),  # Q^T and its factors, per item
        Edge("q_empty", ("softmax", "mma"), ("query",)),
        Edge("s_full", ("mma",), ("softmax",), by="commit"),  # scores
        Edge("p_full", ("softmax",), ("mma", "correct")),  # P^T and maxima; scores read
        Edge("o_full", ("mma",), ("correct",), by="commit"),  # a step of O; P^T is used
        Edge("o_empty", ("correct",), ("softmax",)),  # step of O and maxima read; p_full passes it on to mma
        Edge("sums_full", ("softmax",), ("correct",)),  # denominators, per item
        Edge("sums_empty", ("correct",), ("softmax",)),
    )


class Barriers:
    """The mbarriers of all edges from one address on, and which ends were seen while tracing."""

    def __init__(self, pointer: cute.Pointer, stages: int, readers: tuple[str, ...] = ()):
        self.pointer, self.table, self.first = pointer, {}, {}
        self.arrived, self.waited = set(), set()
        count = 0
        for edge in edges(stages, readers):
            self.table[edge.name], self.first[edge.name] = edge, count
            count += edge.depth


# Functions, not methods: the DSL takes an object whose method is called in a run-time loop for a value that changes.
def at(b: Barriers, name: str, index=0) -> cute.Pointer:
    return b.pointer + (index + b.first[name])


def init(b: Barriers) -> None:
    """By one thread."""
    for edge in b.table.values():
        for i in range(edge.depth):
            cute.arch.mbarrier_init(at(b, edge.name, i), edge.arrivals)
    cute.arch.mbarrier_init_fence()


def _note(b: Barriers, name: str, role: str, ends: tuple[str, ...], seen: set) -> None:
    if role not in ends:
        raise ConfigError(f"{role} is no end of edge {name}: {b.table[name]}")
    seen.add((name, role))


def source(b: Barriers, name: str, role: str, index) -> cute.Pointer:
    """The barrier at which ``role`` arrives by itself (bytes, commits)."""
    _note(b, name, role, b.table[name].sources, b.arrived)
    return at(b, name, index)


def target(b: Barriers, name: str, role: str) -> cute.Pointer:
    """The first barrier of an edge for which ``role`` waits by itself."""
    _note(b, name, role, b.table[name].targets, b.waited)
    return at(b, name)


def arrive(b: Barriers, name: str, role: str, index, lane) -> None:
    """By a whole warp that has read or written what the edge hands over."""
    cute.arch.sync_warp()
    device.arrive_where(lane == 0, source(b, name, role, index).toint())


def wait(b: Barriers, name: str, role: str, index, phase) -> None:
    _note(b, name, role, b.table[name].targets, b.waited)
    cute.arch.mbarrier_wait(at(b, name, index), phase)


def wait_full(b: Barriers, name: str, role: str, use: tuple) -> None:
    """For what a use of a double-buffered edge hands over."""
    wait(b, name, role, *use)


def wait_empty(b: Barriers, name: str, role: str, use: tuple) -> None:
    """Until a use may begin: the one BUFFERS before it is over."""
    buffer, phase = use
    wait(b, name, role, buffer, phase ^ 1)


def after(use: tuple) -> tuple:
    """The use that follows (buffer, phase); the first is (0, 0)."""
    buffer, phase = use
    return buffer ^ 1, phase ^ buffer


@cute.jit
def next_slot(slot: Int32, phase: Int32, stages: cutlass.Constexpr):
    """The ring slot that follows, and its phase."""
    slot = slot + 1
    if slot == stages:
        slot = Int32(0)
        phase = phase ^ 1
    return slot, phase


def check(b: Barriers) -> None:
    """After all roles are traced."""
    for edge in b.table.values():
        for ends, seen, what in ((edge.sources, b.arrived, "arrives"), (edge.targets, b.waited, "waits")):
            for role in ends:
                if (edge.name, role) not in seen:
                    raise ConfigError(f"nobody of {role} {what} at edge {edge}")


assert BUFFERS == 2  # of what after() says
