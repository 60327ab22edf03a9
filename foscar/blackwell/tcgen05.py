"""The tcgen05 instructions that the kernel uses, as PTX text, and their descriptors.

A load waits within the same block of text: its registers may not be touched before the wait, and nothing else would
keep the compiler from moving their uses up.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from ..common import device


def _effect(text: str, constraints: str, *operands) -> None:
    device._asm(None, list(operands), text, ",".join([constraints, "~{memory}"]) if constraints else "~{memory}", True)


@dsl_user_op
def _loads(addresses, shape, repeat, per_load, *, loc=None, ip=None):
    n = len(addresses) * per_load
    text = ""
    for i in range(len(addresses)):
        registers = ", ".join(f"${i * per_load + k}" for k in range(per_load))
        text += f"tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {{{registers}}}, [${n + i}];\n"
    text += "tcgen05.wait::ld.sync.aligned;"
    result = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * n)})>"),
        [Int32(a).ir_value(loc=loc, ip=ip) for a in addresses],
        text,
        ",".join(["=&r"] * n + ["r"] * len(addresses) + ["~{memory}"]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Uint32(llvm.extractvalue(T.i32(), result, [k], loc=loc, ip=ip)) for k in range(n)]


def load_rows(addresses: list, columns: int) -> list[list[Uint32]]:
    """For each address 16 lanes of ``columns`` (a multiple of 8), waited for: per thread ``columns / 2`` registers.

    Lane ``(g, t)`` of the warp gets in register ``2 j + rh`` tensor-memory lane ``g + 8 rh``, column ``4 j + t``: the
    same column of two lanes in neighbouring registers, as packed arithmetic wants them.
    """
    n = columns // 2
    flat = _loads(addresses, "16x128b", columns // 4, n)
    return [flat[i * n : (i + 1) * n] for i in range(len(addresses))]


def store_rows(address, registers: list) -> None:
    """16 lanes of ``2 * len(registers)`` columns: register ``2 j + rh`` is lane ``g + 8 rh``, column ``4 j + t``."""
    n = len(registers)
    names = ", ".join(f"${k + 1}" for k in range(n))
    text = f"tcgen05.st.sync.aligned.16x128b.x{n // 2}.b32 [$0], {{{names}}};"
    _effect(text, ",".join(["r"] * (n + 1)), Int32(address), *registers)


def wait_stores() -> None:
    _effect("tcgen05.wait::st.sync.aligned;", "")


def fence_before() -> None:
    """Before the thread synchronization that hands over what tcgen05 instructions did."""
    _effect("tcgen05.fence::before_thread_sync;", "")


def fence_after() -> None:
    _effect("tcgen05.fence::after_thread_sync;", "")


def multiply(d, a, b, row_bytes: int, instruction: int, accumulate: bool, scales: tuple = ()) -> None:
    """D (+)= A B of one step of 32 bytes of the contraction index, by one thread.

    Args:
        d, a: addresses in tensor memory.
        b: :func:`operand_descriptor` of a B operand with rows of ``row_bytes``.
        instruction: :func:`instruction_descriptor`, or :func:`digit_descriptor` with ``scales``.
        scales: addresses of A's and B's scales: e2m1 operands, two elements a byte; without: e4m3.
    """
    # Upper half of the shared-memory descriptor: eight rows are one swizzle atom.
    upper = 8 * row_bytes >> 4 | 1 << 14 | {128: 2, 64: 4, 32: 6}[row_bytes] << 29
    kind, where = ("mxf4.block_scale.scale_vec::2X", "[$4], [$5], ") if scales else ("f8f6f4", "")
    text = (
        f"{{ .reg .pred p; .reg .b64 b; mov.b64 b, {{$2, {upper:#x}}}; setp.ne.b32 p, $3, 0; "
        f"tcgen05.mma.cta_group::1.kind::{kind} [$0], [$1], b, {instruction:#x}, {where}p; }}"
    )
    operands = [Int32(d), Int32(a), Uint32(b), Int32(int(accumulate)), *(Int32(x) for x in scales)]
    _effect(text, ",".join("r" * len(operands)), *operands)


def commit(barrier: cute.Pointer) -> None:
    """Arrive once at the barrier when all products issued by this thread are done."""
    text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];"
    _effect(text, "r", barrier.toint())


def instruction_descriptor(m: int, n: int) -> int:
    """e4m3 x e4m3 -> float32, both operands with the contraction index innermost (PTX ISA: Instruction descriptor)."""
    assert m in (64, 128) and n % (16 if m == 128 else 8) == 0
    return 1 << 4 | n >> 3 << 17 | m >> 4 << 24


def digit_descriptor(m: int, n: int) -> int:
    """e2m1 x e2m1 -> float32 with ue8m0 scales, the first of a word (PTX ISA: Instruction descriptor of kind::mxf4)."""
    assert m == 128 and n % 8 == 0
    return 1 << 7 | 1 << 10 | n >> 3 << 17 | 1 << 23 | m >> 7 << 27


def operand_row(head, term):
    """Row of a B operand, and column of its accumulator, of one term of a head: what :func:`load_rows` gives a thread
    of its heads ``lane % 4 + 4 j`` is ``[j][term][rh]``."""
    return 8 * (head // 4) + 4 * term + head % 4


def operand_byte(row_bytes: int, row, k):
    """Byte ``k`` of a row of a B operand: rows of 32, 64 or 128 bytes, swizzled as wide."""
    at = row * row_bytes
    return at + ((((k // 16) ^ (at >> 7)) & (row_bytes // 16 - 1)) * 16) + k % 16


def operand_descriptor(address) -> Uint32:
    """Lower half of the shared-memory descriptor of an operand from the step that begins at ``address``.

    The leading offset is not used where a swizzle atom holds the whole row.
    """
    return Uint32(address) >> 4 | Uint32(1 << 16)
