"""Asynchronous copies: cp.async (PTX ISA 9.7.9.25.3) and cp.async.bulk without tensor maps (9.7.9.25.4)."""

from __future__ import annotations

import numpy as np

from .async_engine import AsyncOp
from .decode import Builder, Mods, opcode
from .errors import Hazard, MemoryFault, SyncError
from .memops import wide_address
from .sync import lanes_of
from .syncops import shared_address

_MB = "mbarrier::complete_tx::bytes"


@opcode("cp")
def _cp(b: Builder, m: Mods):
    m.expect("async")
    if not m.flag("bulk"):
        return _cp_async(b, m)
    if m.flag("commit_group"):
        m.done()
        return b.emit(lambda w, R, mask: _commit(w, "bulk", lanes_of(mask)))
    if m.flag("wait_group"):
        read = m.flag("read")
        m.done()
        return b.emit(_wait(b.ins.line, "bulk", b.integer(b.operands(1)[0]), read))
    if m.flag("prefetch"):
        m.matching("L2", "global")
        m.done()
        return b.emit(lambda w, R, mask: None)
    if m.flag("tensor"):
        b.fail("tensor-map copies are not modelled")
    spaces = [m.left.pop(0), m.left.pop(0)] if len(m.left) >= 2 else b.fail("state spaces")
    if spaces[0] in ("shared::cluster", "shared::cta") and spaces[1] == "global":
        return _bulk_load(b, m)
    if spaces == ["global", "shared::cta"]:
        return _bulk_store(b, m)
    b.fail(f"bulk copy from .{spaces[1]} to .{spaces[0]}")


# ---- bulk copies -------------------------------------------------------------------------------------------------
def _check_bulk(w, line: int, destination: int, source: int, size: int) -> None:
    for what, value in (("destination", destination), ("source", source), ("size", size)):
        if value % 16:
            raise MemoryFault(f"{w.name}, line {line}: bulk copy {what} {value:#x} is not a multiple of 16")


def _bulk_load(b: Builder, m: Mods) -> None:
    """global -> shared; the bytes arrive in pieces, each reported to the mbarrier with complete_tx."""
    m.expect(_MB)
    hint = m.flag("L2::cache_hint")
    m.done()
    ops = b.operands(5 if hint else 4)
    to, source = shared_address(b, ops[0], "shared"), wide_address(b, ops[1])
    barrier = shared_address(b, ops[3], "shared")
    count, line = b.src(ops[2], "u32"), b.ins.line
    if hint:
        b.src(ops[4], "b64")

    def run(w, R, mask):
        for lane in lanes_of(mask):
            start_load(w, line, int(to(R)[lane]), int(source(R)[lane]), int(R[count][lane]), int(barrier(R)[lane]))

    b.emit(run)


def start_load(w, line: int, to: int, source: int, size: int, barrier_address: int) -> None:
    cta, races = w.cta, w.cta.races
    _check_bulk(w, line, to, source, size)
    try:
        data = w.launch.memory.slice(source, size)
        target = cta.shared.slice(to, size)
    except MemoryFault as e:
        raise MemoryFault(f"{w.name}, line {line}: {e}") from None
    barrier = cta.barriers.at(barrier_address, line)
    if not barrier.fenced:
        raise SyncError(
            f"{w.name}, line {line}: bulk copy on the mbarrier at {barrier_address:#x}, whose initialisation (line "
            f"{barrier.line}) was not followed by fence.mbarrier_init or fence.proxy.async"
        )
    if races:
        barrier.check_visible(w)
        agent = races.agent(("bulk", barrier_address), f"the bulk copies on mbarrier {barrier_address:#x}")
        limit, reads = races.async_limit(w.clock), w.clock[0].copy()
    w.launch.counters.global_access(w, size, "bulk load")

    def piece(start: int, end: int):
        def complete():
            if races:
                # WAW and WAR against everything the issuing thread is not ordered after
                limit[agent] = reads[agent] = races.ticks[agent] + 1
                tick = races.tick(agent)
                races.write(agent, limit, reads, tick, races.range(to + start, end - start), line)
                barrier.clock[0, agent] = max(barrier.clock[0, agent], tick)
            target[start:end] = data[start:end]
            barrier.complete(end - start)

        return complete

    for start, end in w.launch.scheduler.pieces(size):
        cta.engine.issue(AsyncOp(cta.engine.unordered(), "bulk load", line, piece(start, end)))


def _bulk_store(b: Builder, m: Mods) -> None:
    """shared -> global, tracked by bulk groups. The source is read first, the destination written later."""
    m.expect("bulk_group")
    hint = m.flag("L2::cache_hint")
    m.done()
    ops = b.operands(4 if hint else 3)
    to, source = wide_address(b, ops[0]), shared_address(b, ops[1], "shared")
    count, line = b.src(ops[2], "u32"), b.ins.line
    if hint:
        b.src(ops[3], "b64")

    def run(w, R, mask):
        for lane in lanes_of(mask):
            _start_store(w, lane, line, int(to(R)[lane]), int(source(R)[lane]), int(R[count][lane]))

    b.emit(run)


def _start_store(w, lane: int, line: int, to: int, source: int, size: int) -> None:
    cta, races = w.cta, w.cta.races
    _check_bulk(w, line, to, source, size)
    try:
        target = w.launch.memory.slice(to, size)
        data = cta.shared.slice(source, size)
    except MemoryFault as e:
        raise MemoryFault(f"{w.name}, line {line}: {e}") from None
    held: list = []
    if races:
        agent = races.agent(("bulk store", w.index), f"the bulk stores of warp {w.index}")
        limit = races.async_limit(w.clock)
    w.launch.counters.global_access(w, size, "bulk store")
    key = cta.engine.unordered()

    def read():
        if races:
            limit[agent] = races.ticks[agent] + 1
            tick = races.tick(agent)
            races.read(agent, limit, tick, races.range(source, size), line)
            op_read.clock = (agent, tick)
        held.append(data.copy())

    def write():
        target[...] = held.pop()

    op_read = _StoreRead(key, "bulk store's read of shared memory", line, read)
    op_write = AsyncOp(key, "global write", line, write)
    cta.engine.issue(op_read)
    cta.engine.issue(op_write)
    _group(w, "bulk", lane)[-1].append((op_read, op_write))


class _StoreRead(AsyncOp):
    __slots__ = ("clock",)


# ---- groups, per thread ------------------------------------------------------------------------------------------
def _group(w, kind: str, lane: int) -> list:
    """All groups of a thread, oldest first; the last one is open."""
    return w.state.setdefault((kind, lane), [[]])


def _commit(w, kind: str, lanes: list[int]) -> None:
    for lane in lanes:
        _group(w, kind, lane).append([])


def _wait(line: int, kind: str, keep: int, read: bool):
    """Completes all but the newest `keep` committed groups of each thread."""

    def run(w, R, mask):
        races = w.cta.races
        for lane in lanes_of(mask):
            groups = _group(w, kind, lane)
            closed = len(groups) - 1
            for group in groups[: max(closed - keep, 0)]:
                for first, last in group:
                    if not w.cta.engine.force(first if read else last):
                        raise Hazard(f"{w.name}, line {line}: cannot complete a copy")
                    if races and getattr(first, "clock", None):
                        agent, tick = first.clock
                        w.clock[0, agent] = max(w.clock[0, agent], tick)
            if not read:
                del groups[: max(closed - keep, 0)]

    return run


# ---- cp.async ----------------------------------------------------------------------------------------------------
def _cp_async(b: Builder, m: Mods) -> None:
    """Per-thread copies of 4, 8 or 16 bytes; generic proxy, so no proxy fence is needed after the wait."""
    if m.flag("commit_group"):
        m.done()
        return b.emit(lambda w, R, mask: _commit(w, "cp", lanes_of(mask)))
    if m.flag("wait_group"):
        m.done()
        return b.emit(_wait(b.ins.line, "cp", b.integer(b.operands(1)[0]), False))
    if m.flag("wait_all"):
        m.done()

        wait = _wait(b.ins.line, "cp", 0, False)

        def everything(w, R, mask):
            _commit(w, "cp", lanes_of(mask))
            wait(w, R, mask)

        return b.emit(everything)
    if m.flag("mbarrier"):
        return _cp_async_arrive(b, m)
    m.one_of("ca", "cg", required=True)
    m.one_of("shared", "shared::cta", required=True)
    m.expect("global")
    m.matching("L2::")
    m.done()
    ops = b.operands(3, 4)
    to, source, size, line = shared_address(b, ops[0], "shared"), wide_address(b, ops[1]), b.integer(ops[2]), b.ins.line
    if size not in (4, 8, 16):
        b.fail("cp.async copies 4, 8 or 16 bytes")
    used = b.src(ops[3], "u32") if len(ops) == 4 else b.program.const(size, "u4")

    def run(w, R, mask):
        t, s = to(R), source(R)
        for lane in lanes_of(mask):
            _start_cp(w, lane, line, int(t[lane]), int(s[lane]), size, int(R[used][lane]))

    b.emit(run)


def _cp_async_arrive(b: Builder, m: Mods) -> None:
    """Arrives on an mbarrier once this thread's earlier cp.async are done (9.7.13.15.14). Without .noinc the pending
    count is raised first, so that the arrival does not count."""
    m.expect("arrive")
    raised = not m.flag("noinc")
    space = m.one_of("shared", "shared::cta")
    m.last_type("b64")
    m.done()
    address, line = shared_address(b, b.operands(1)[0], space), b.ins.line

    def run(w, R, mask):
        a = address(R)
        for lane in lanes_of(mask):
            barrier = w.cta.barriers.at(int(a[lane]), line)
            earlier = [op for group in _group(w, "cp", lane) for op, _ in group]
            if raised:
                barrier.pending += 1
            if w.cta.races:
                barrier.check_visible(w)

            def arrive(barrier=barrier, earlier=earlier):
                for agent, tick in (op.clock for op in earlier if op.clock):
                    barrier.clock[0, agent] = max(barrier.clock[0, agent], tick)
                barrier.arrive(1)

            ready = lambda earlier=earlier: all(op.done for op in earlier)  # noqa: E731
            w.cta.engine.issue(AsyncOp(w.cta.engine.unordered(), "cp.async arrival", line, arrive, ready))

    b.emit(run)


def _start_cp(w, lane: int, line: int, to: int, source: int, size: int, used: int) -> None:
    if to % size or source % size or not 0 <= used <= size:
        raise MemoryFault(f"{w.name}, line {line}: cp.async of {used}/{size} bytes, {source:#x} -> {to:#x}")
    races = w.cta.races
    target = w.cta.shared.slice(to, size)
    data = w.launch.memory.slice(source, used) if used else np.zeros(0, np.uint8)
    if races:
        agent = races.agent(("cp.async", w.index, lane), f"the cp.async copies of warp {w.index} lane {lane}")
        limit = w.clock[0].copy()
    w.launch.counters.global_access(w, used, "cp.async")

    def complete():
        if races:
            limit[agent] = races.ticks[agent] + 1
            tick = races.tick(agent)
            races.write(agent, limit, limit, tick, races.range(to, size), line)
            op.clock = (agent, tick)
        target[:used] = data
        target[used:] = 0

    op = _StoreRead(w.cta.engine.unordered(), "cp.async", line, complete)
    op.clock = None
    w.cta.engine.issue(op)
    _group(w, "cp", lane)[-1].append((op, op))
