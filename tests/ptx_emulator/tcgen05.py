"""tcgen05 for one CTA: alloc, ld, st, cp, mma, commit, wait, fence (PTX ISA 9.7.16).

mma, cp and commit share one queue and complete in the order issued; commit arrives on its mbarrier when it comes up.
ld and st are asynchronous too: a loaded register may not be touched before wait::ld, stored data appears at wait::st at
the latest. Sums keep 25 bits like Hopper's 16-bit ones (nothing else is measured); shapes and forms whose layout is not
known for certain are refused. Of the forms implemented, 4-bit A in tensor memory (an element in bits 2..5 of each byte)
is from the manual's figure alone, never compared with anything, and so is what tensor_scaled.py reads.
"""

from __future__ import annotations

from . import tensor_core, tensor_ldst, tensor_scaled
from .decode import Builder, Mods, opcode
from .syncops import shared_address
from .tensor_operands import group_of_one, whole_warp
from .tmem import tensor_memory


@opcode("tcgen05")
def _tcgen05(b: Builder, m: Mods):
    forms = {
        "alloc": _alloc,
        "dealloc": _dealloc,
        "relinquish_alloc_permit": _relinquish,
        "ld": tensor_ldst.load,
        "st": tensor_ldst.store,
        "cp": tensor_core.copy,
        "mma": _multiply,
        "commit": tensor_core.commit,
        "wait::ld": tensor_ldst.wait,
        "wait::st": tensor_ldst.wait,
        "fence::before_thread_sync": _fence,
        "fence::after_thread_sync": _fence,
    }
    kind = m.one_of(*forms, required=True)
    forms[kind](b, m, kind)


def _multiply(b: Builder, m: Mods, kind: str) -> None:
    (tensor_scaled.multiply if m.flag("block_scale") else tensor_core.multiply)(b, m, kind)


def _alloc(b: Builder, m: Mods, kind: str) -> None:
    group_of_one(b, m)
    m.one_of("shared::cta")
    m.last_type("b32")
    whole_warp(b, m)
    m.done()
    to, columns = b.operands(2)
    address, count, line = shared_address(b, to, "shared"), b.src(columns, "u32"), b.ins.line

    def run(w, R, mask):
        at = address(R)[:1]
        start = tensor_memory(w.cta).allocate(int(R[count][0]))
        w.cta.shared.check(at, 4)
        races = w.cta.races
        if races:
            races.write(w.agent, w.clock[0], w.clock[0], int(w.clock[0, w.agent]), races.granules(at, 4), line)
        w.cta.shared.views[4][at >> 2] = start

    b.emit(run)


def _dealloc(b: Builder, m: Mods, kind: str) -> None:
    group_of_one(b, m)
    m.last_type("b32")
    whole_warp(b, m)
    m.done()
    address, columns = (b.src(x, "u32") for x in b.operands(2))
    b.emit(lambda w, R, mask: tensor_memory(w.cta).free(int(R[address][0]), int(R[columns][0])))


def _relinquish(b: Builder, m: Mods, kind: str) -> None:
    group_of_one(b, m)
    whole_warp(b, m)
    m.done()

    def run(w, R, mask):
        tensor_memory(w.cta).relinquished = True

    b.emit(run)


def _fence(b: Builder, m: Mods, kind: str) -> None:
    """Orders tcgen05 operations around thread synchronization; the synchronization itself is what is modelled."""
    m.done()
    b.emit(lambda w, R, mask: None)
