"""Decoders of barriers, mbarriers, fences and branches (PTX ISA 9.7.12 control flow, 9.7.13 synchronization)."""

from __future__ import annotations

import numpy as np

from .decode import Builder, Mods, opcode
from .errors import Trap
from .sync import Barriers, lanes_of
from .syntax import Addr, Label, Reg


# ---- control flow ------------------------------------------------------------------------------------------------
@opcode("bra")
def _bra(b: Builder, m: Mods):
    m.flag("uni")
    m.done()
    (label,) = b.operands(1)
    if not isinstance(label, Label):
        b.fail("branch to something that is not a label")
    target = b.target(label.name)
    if b.ins.guard is None:

        def jump(w, g):
            g.pc = target.block
            return True

        return b.control(jump, alone=False)
    slot, negated = b.src(b.ins.guard, "pred"), b.ins.negated

    def branch(w, g):
        p = w.R[slot]
        taken = ~p if negated else p
        if g.mask is None:
            if taken.all():
                g.pc = target.block
            elif taken.any():
                w.groups.append(type(g)(target.block, taken.copy()))
                g.mask = ~taken
            return True
        taken = taken & g.mask
        if taken.any():
            rest = g.mask & ~taken
            if rest.any():
                w.groups.append(type(g)(target.block, taken))
                g.mask = rest
            else:
                g.pc = target.block
        return True

    b.control(branch, alone=False)


@opcode("ret", "exit")
def _exit(b: Builder, m: Mods):
    m.flag("uni")
    m.done()
    b.operands(0)
    lanes = b.guard_mask()
    guarded = b.ins.guard is not None

    def run(w, g):
        mask = lanes(w.R, g.mask) if guarded else None
        if mask is None or mask.any():
            w.exit(g, mask)
        return False

    b.control(run, alone=False)


@opcode("trap", "brkpt")
def _trap(b: Builder, m: Mods):
    m.done()
    ins = b.ins

    def run(w, R, mask):
        raise Trap(f"{w.name}, line {ins.line}: {ins.text}")

    b.emit(run)


# ---- named barriers ----------------------------------------------------------------------------------------------
def _barrier(b: Builder, m: Mods):
    """bar / barrier{.cta}: sync, arrive, red (9.7.13.1); bar.warp.sync (9.7.13.2)."""
    if m.flag("cluster"):
        return _cluster_barrier(b, m)
    if m.flag("warp"):
        m.expect("sync")
        m.done()
        (member,) = b.operands(1)
        b.converge(b.src(member, "b32"))
        return b.emit(lambda w, R, mask: w.sync_lanes() if mask is None or not (w.live & ~mask).any() else None)
    m.flag("cta")
    kind = m.one_of("sync", "arrive", "red", required=True)
    aligned = b.ins.root == "bar" or m.flag("aligned")
    m.flag("aligned")
    ops, reduction, finish = list(b.ins.operands), None, None
    if kind == "red":
        reduction = m.one_of("popc", "and", "or", required=True)
        result = "u32" if m.one_of("u32", "pred", required=True) == "u32" else "pred"
        d = b.dst(ops.pop(0), result)
        source, negated = b.predicate(ops.pop())
        finish = _reduction(reduction, d, source, negated)
    m.done()
    if len(ops) not in (1, 2) or (kind == "arrive" and len(ops) != 2):
        b.fail("operand count")
    number, count = b.src(ops[0], "b32"), b.src(ops[1], "b32") if len(ops) == 2 else None
    lanes, line = b.guard_mask(), b.ins.line
    if aligned:
        b.converge(b.program.const(0xFFFFFFFF, "u4"))

    def run(w, g):
        mask = lanes(w.R, g.mask)
        if mask is not None and not mask.any():
            return True
        first = lanes_of(mask)[0]
        bars: Barriers = w.cta.barriers
        bar = bars.arrive(w, int(w.R[number][first]), None if count is None else int(w.R[count][first]), line)
        if kind == "arrive":
            bars.complete(bar)
            return True
        on_done = finish(w, mask, bar) if finish else None
        bar.waiters.append((w, g, on_done))
        g.wait = bar
        bars.complete(bar)
        return g.wait is None

    b.control(run)


def _reduction(name: str, d: int, source: int, negated: bool):
    """Accumulates a warp's predicates at arrival; the returned function writes the result on completion."""

    def join(w, mask, bar):
        p = ~w.R[source] if negated else w.R[source]
        p = p if mask is None else p[mask]
        value = {"popc": int(p.sum()), "and": bool(p.all()), "or": bool(p.any())}[name]
        if bar.reduction is None:
            bar.reduction = value
        else:
            bar.reduction = {
                "popc": bar.reduction + value,
                "and": bar.reduction and value,
                "or": bar.reduction or value,
            }[name]
        return lambda result: np.copyto(w.R[d], w.R[d].dtype.type(result), where=True if mask is None else mask)

    return join


opcode("bar", "barrier")(_barrier)


def _cluster_barrier(b: Builder, m: Mods):
    """A cluster of one CTA: arrive counts the CTA's warps, wait waits for them all (9.7.13.3)."""
    kind = m.one_of("arrive", "wait", required=True)
    m.one_of("release", "relaxed", "acquire")
    m.flag("aligned")
    m.done()
    b.operands(0)
    if b.ins.guard is not None:
        b.fail("a guarded cluster barrier")

    def arrive(w, g):
        bars = w.cta.barriers
        bar = bars.cluster_arrive(w)
        w.state.setdefault("cluster", []).append(bar)
        return True

    def wait(w, g):
        bar = w.state["cluster"].pop(0)
        if bar.arrived < bar.expected:
            bar.waiters.append((w, g, None))
            return w.sleep(g, bar)
        if w.cta.races:
            w.acquire(bar.clock)
        return True

    b.control(arrive if kind == "arrive" else wait)


# ---- mbarrier ----------------------------------------------------------------------------------------------------
def shared_address(b: Builder, x, space: str | None):
    """A closure R -> shared addresses (uint32 lanes) of an address operand; `space` None means generic."""
    if not isinstance(x, Addr) or x.extra:
        b.fail(f"address expected, got {x}")
    wide = isinstance(x.base, Reg) and x.base.bits == 64
    if space is None and not wide:
        b.fail("a generic address has 64 bits")
    slot = b.src(x.base, "u64" if wide else "u32")
    offset = np.uint32(x.offset & 0xFFFFFFFF)

    def address(R):
        a = R[slot]
        if wide:
            a = a.astype(np.uint32)
        return a + offset if offset else a

    return address


_MB_SPACES = ("shared", "shared::cta", "shared::cluster")


@opcode("mbarrier")
def _mbarrier(b: Builder, m: Mods):
    kind = m.one_of(
        "init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait", required=True
    )
    m.last_type("b64")
    space = m.one_of(*_MB_SPACES)
    if kind in ("test_wait", "try_wait"):
        return _mbarrier_wait(b, m, kind, space)
    if kind == "arrive_drop":
        b.fail("arrive_drop is not modelled")
    tx = kind == "arrive" and m.flag("expect_tx")
    no_complete = kind == "arrive" and m.flag("noComplete")
    if no_complete:
        b.fail("noComplete is not modelled")
    release = m.one_of("release", "relaxed") != "relaxed"
    m.one_of("cta", "cluster")
    m.done()
    ops = list(b.ins.operands)
    if kind == "arrive" and not isinstance(ops[0], Addr):
        state = ops.pop(0)
        if isinstance(state, Reg):
            b.dst(state, "b64")  # an opaque token; waits by token are not modelled
    address = shared_address(b, ops[0], space)
    if len(ops) > 2 or (len(ops) == 1 and (tx or kind in ("init", "expect_tx", "complete_tx"))):
        b.fail("operand count")
    value = b.src(ops[1], "u32") if len(ops) == 2 else b.program.const(1, "u4")
    line = b.ins.line

    def run(w, R, mask):
        bars, races = w.cta.barriers, w.cta.races
        a, n = address(R), R[value]
        for lane in lanes_of(mask):
            where, count = int(a[lane]), int(n[lane])
            if kind == "init":
                bars.init(where, count, w, line)
                continue
            if kind == "inval":
                bars.invalidate(where, line)
                continue
            bar = bars.at(where, line)
            if races:
                bar.check_visible(w)
                if kind == "arrive" and release:
                    w.release_by(mask, bar.clock)
            if kind == "expect_tx" or tx:
                bar.expect(count)
            if kind == "complete_tx":
                bar.complete(count)
            if kind == "arrive":
                bar.arrive(1 if tx else count)
        if races:
            w.tick()

    b.emit(run)


def _mbarrier_wait(b: Builder, m: Mods, kind: str, space):
    """test_wait returns at once; try_wait may suspend the thread (9.7.13.15.16). Only the parity form is modelled."""
    m.expect("parity")
    acquire = m.one_of("acquire", "relaxed") != "relaxed"
    m.one_of("cta", "cluster")
    m.done()
    ops = b.operands(3, 4) if kind == "try_wait" else b.operands(3)
    d, address, parity = b.dst(ops[0], "pred"), shared_address(b, ops[1], space), b.src(ops[2], "u32")
    if len(ops) == 4:
        b.src(ops[3], "u32")
    lanes, line = b.guard_mask(), b.ins.line

    def run(w, g):
        R, mask = w.R, lanes(w.R, g.mask)
        active = lanes_of(mask)
        if not active:
            return True
        a, p = address(R), R[parity]
        wanted = {(int(a[i]), int(p[i])) for i in active}
        done, blocked = {}, None
        for key in wanted:
            bar = w.cta.barriers.at(key[0], line)
            if w.cta.races:
                bar.check_visible(w)
            done[key] = bar.passed(key[1])
            if done[key]:
                if acquire and w.cta.races:
                    w.acquire(bar.done)
            else:
                blocked = bar
        if blocked is not None and kind == "try_wait":
            if not g.timed_out and not w.launch.scheduler.spurious_timeout():
                g.pc -= 1  # executed again when woken
                blocked.waiters.append((w, g))
                w.sleep(g, blocked)
                w.launch.scheduler.note_wait(w, g)
                return False
            g.timed_out = False
        for i in active:
            R[d][i] = done[int(a[i]), int(p[i])]
        return True

    b.control(run)


# ---- fences ------------------------------------------------------------------------------------------------------
@opcode("fence", "membar")
def _fence(b: Builder, m: Mods):
    """Memory fences order nothing more here (one warp runs at a time); proxy fences matter to the race detector."""
    b.operands(0)
    if m.flag("proxy"):
        which = m.one_of("alias", "async", "async.global", "async::generic", "tensormap::generic", required=True)
        m.one_of("acquire", "release")
        m.one_of("global", "shared::cta", "shared::cluster", "sync_restrict::shared::cta")
        m.one_of("cta", "cluster", "gpu", "sys")
        m.done()
        if which.startswith("async"):
            return b.emit(lambda w, R, mask: w.proxy_fence())
        return b.emit(lambda w, R, mask: None)
    if m.flag("mbarrier_init"):
        m.expect("release", "cluster")
        m.done()

        def visible(w, R, mask):
            for barrier in w.unfenced_barriers:
                barrier.fenced = True
            w.unfenced_barriers.clear()

        return b.emit(visible)
    m.one_of("sc", "acq_rel", "acquire", "release")
    m.one_of("cta", "cluster", "gpu", "sys", "gl")
    m.done()
    b.emit(lambda w, R, mask: None)


# ---- instructions that only steer the machine --------------------------------------------------------------------
@opcode("setmaxnreg")
def _setmaxnreg(b: Builder, m: Mods):
    """Register reallocation (9.7.19.5): the count is checked, nothing else happens here."""
    m.one_of("inc", "dec", required=True)
    m.expect("sync", "aligned", "u32")
    m.done()
    count = b.integer(b.operands(1)[0])
    if not 24 <= count <= 256 or count % 8:
        b.fail("setmaxnreg needs a multiple of 8 in 24..256")
    b.emit(lambda w, R, mask: None)


@opcode("griddepcontrol")
def _griddepcontrol(b: Builder, m: Mods):
    """Launches are serial here, so both forms are no-ops."""
    m.one_of("launch_dependents", "wait", required=True)
    m.done()
    b.emit(lambda w, R, mask: None)


@opcode("nanosleep")
def _nanosleep(b: Builder, m: Mods):
    """Gives other warps a turn."""
    m.last_type("u32")
    m.done()
    b.src(b.operands(1)[0], "u32")

    def run(w, g):
        w.launch.scheduler.pause(w, g)
        return False

    b.control(run, alone=False)


@opcode("discard", "applypriority", "prefetch", "prefetchu", "pmevent")
def _hint(b: Builder, m: Mods):
    m.matching("global", "local", "L1", "L2", "L2::evict_last", "L2::evict_normal", "L2::128B", "tensormap")
    m.done()
    b.emit(lambda w, R, mask: None)
