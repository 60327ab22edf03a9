"""Single instructions that device code of every architecture uses, each pure unless said otherwise.

The DSL contracts no ``a * b + c``, and some of its wrappers are side-effecting and so pinned in place; these are not.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def _asm(result_type, operands, text, constraints, effects, *, loc=None, ip=None):
    values = [x.ir_value(loc=loc, ip=ip) for x in operands]
    return llvm.inline_asm(
        result_type,
        values,
        text,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _pure(result_type, operands, text, constraints):
    return _asm(result_type, operands, text, constraints, False)


def store_pair_where(condition, address, first, second) -> None:
    """:func:`store_shared_where` of two consecutive words."""
    text = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.shared.v2.b32 [$1], {$2, $3}; }"
    _asm(None, [Int32(condition), Int32(address), Uint32(first), Uint32(second)], text, "r,r,r,r,~{memory}", True)


def store_shared_where(condition, address, word) -> None:
    """Store a word where ``condition`` (per lane) holds, by a predicate: a branch would split the wgmmas around it."""
    text = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.shared.b32 [$1], $2; }"
    _asm(None, [Int32(condition), Int32(address), Uint32(word)], text, "r,r,r,~{memory}", True)


def warp_max(word) -> Uint32:
    """The largest unsigned word of the warp, in every lane."""
    return Uint32(_pure(T.i32(), [Uint32(word)], "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r"))


def warp_add(number) -> Int32:
    """The sum of an Int32 over the warp, in every lane."""
    return Int32(_pure(T.i32(), [Int32(number)], "redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r"))


def divide(n, d, inverse) -> Int32:
    """``n // d`` of non-negative Int32, ``inverse`` from plan.inverse_of(d): a product that is at most one short."""
    q = Int32((Uint64(Uint32(n)) * Uint64(Uint32(inverse))) >> 32)
    return q + cutlass.select_(n - q * d >= d, Int32(1), Int32(0))


def quotient(n, d) -> Int32:
    """``n // d`` of non-negative Int32 where it is below 2^20: then its float32 estimate is off by at most one."""
    q = Int32(Float32(n) * reciprocal(Float32(d)))
    rest = n - q * d
    return q + cutlass.select_(rest >= d, Int32(1), Int32(0)) - cutlass.select_(rest < 0, Int32(1), Int32(0))


def separate_zero() -> Uint32:
    """0 in a register that no other zero shares: one that a wgmma in flight reads must not be accessed."""
    return Uint32(_pure(T.i32(), [], "mov.b32 $0, 0;", "=r"))


def multiply_codes(a, b, c) -> list[Int32]:
    """mma.sync of u8 [16, 32] by s8 [32, 8] added to int32 [16, 8], by one warp: 4, 2 and 4 registers of a lane."""
    text = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
    values = [*(Uint32(x) for x in (*a, *b)), *(Int32(x) for x in c)]
    four = llvm.StructType.get_literal([T.i32()] * 4)
    result = _pure(four, values, text + "{$10, $11, $12, $13};", "=r,=r,=r,=r" + ",r" * 10)
    return [Int32(llvm.extractvalue(T.i32(), result, [i])) for i in range(4)]


def multiply_halves(a, b, c, dtype: str) -> list[Float32]:
    """mma.sync of "float16" or "bfloat16" [16, 16] by [16, 8] added to float32 [16, 8], by one warp: 4, 2 and 4
    registers of a lane."""
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, "
    values = [*(Uint32(x) for x in (*a, *b)), *(Float32(x) for x in c)]
    four = llvm.StructType.get_literal([T.f32()] * 4)
    result = _pure(four, values, text + "{$8, $9}, {$10, $11, $12, $13};", "=f,=f,=f,=f" + ",r" * 6 + ",f" * 4)
    return [Float32(llvm.extractvalue(T.f32(), result, [i])) for i in range(4)]


def arrive_where(condition, barrier) -> None:
    """Arrive at an mbarrier (a shared address) where ``condition`` (per lane) holds, by a predicate."""
    text = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p mbarrier.arrive.shared::cta.b64 _, [$1]; }"
    _asm(None, [Int32(condition), Int32(barrier)], text, "r,r,~{memory}", True)


def fma(a, b, c) -> Float32:
    """``a * b + c`` in float32, one rounding."""
    return Float32(_pure(T.f32(), [Float32(a), Float32(b), Float32(c)], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"))


def _unary(name: str, x) -> Float32:
    return Float32(_pure(T.f32(), [Float32(x)], f"{name}.approx.ftz.f32 $0, $1;", "=f,f"))


def exp2(x) -> Float32:
    return _unary("ex2", x)


def log2(x) -> Float32:
    return _unary("lg2", x)


def max_nan(a, b) -> Float32:
    """The larger one; NaN where either is (cute.arch.fmax drops a NaN)."""
    return Float32(_pure(T.f32(), [Float32(a), Float32(b)], "max.NaN.f32 $0, $1, $2;", "=f,f,f"))


def absolute(x) -> Float32:
    return Float32(_pure(T.f32(), [Float32(x)], "abs.f32 $0, $1;", "=f,f"))


def reciprocal(x) -> Float32:
    return _unary("rcp", x)


def byte_permute(a, b, selector: int) -> Uint32:
    """Bytes of ``{b, a}`` chosen by the four nibbles of ``selector`` (PTX prmt)."""
    return Uint32(_pure(T.i32(), [Uint32(a), Uint32(b)], f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r"))


def pack_bytes(values) -> list[Uint32]:
    """The lowest bytes of a list of words, four to a word, the first lowest (a list of two: the upper bytes repeat)."""
    words = []
    for i in range(0, len(values), 4):
        four = (values[i : i + 4] * 2)[:4]
        first, second = byte_permute(four[0], four[1], 0x0040), byte_permute(four[2], four[3], 0x0040)
        words.append(byte_permute(first, second, 0x5410))
    return words


def unpack_halves(word, dtype: str) -> list[Float32]:
    """The two 16-bit floats ("float16" or "bfloat16") of a word as float32, the low half first."""
    if dtype == "bfloat16":
        return [(word << 16).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)]
    return [
        Float32(
            _pure(
                T.f32(),
                [Uint32(word)],
                f"{{ .reg .b16 lo, hi; mov.b32 {{lo, hi}}, $1; cvt.f32.f16 $0, {name}; }}",
                "=f,r",
            )
        )
        for name in ("lo", "hi")
    ]


def to_half(x, dtype: str) -> Uint32:
    """The 16-bit float ("float16" or "bfloat16") nearest to a float32, ties to even, as the low half of a word."""
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    text = f"{{ .reg .b16 h; cvt.rn.{kind}.f32 h, $1; cvt.u32.u16 $0, h; }}"
    return Uint32(_pure(T.i32(), [Float32(x)], text, "=r,f"))


def pack_halves(low, high, dtype: str) -> Uint32:
    """Two float32, rounded as by :func:`to_half`, in one word."""
    kind = {"float16": "f16x2", "bfloat16": "bf16x2"}[dtype]
    return Uint32(_pure(T.i32(), [Float32(high), Float32(low)], f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f"))


def arith(name: str, a, b) -> Float32:
    """One float32 instruction that nothing may contract or reassociate: "add.rn", "sub.rn", "mul.rn", "div.rn"."""
    return Float32(_pure(T.f32(), [Float32(a), Float32(b)], f"{name}.f32 $0, $1, $2;", "=f,f,f"))


def min_nan(a, b) -> Float32:
    """The smaller one; NaN where either is."""
    return arith("min.NaN", a, b)


def global_pointer(dtype, address, align: int) -> cute.Pointer:
    """A pointer to global memory from an Int64 address."""
    return cute.make_ptr(dtype, Int64(address), cute.AddressSpace.gmem, assumed_align=align)


def shared_vector(address, words: int) -> cute.Tensor:
    """``words`` (1, 2 or 4) consecutive 32-bit words of shared memory at a byte address aligned to their size."""
    ptr = cute.make_ptr(Uint32, Int32(address), cute.AddressSpace.smem, assumed_align=4 * words)
    return cute.make_tensor(ptr, cute.make_layout(words))


def load_shared(address, words: int) -> cute.Tensor:
    """The words at ``address`` in registers, by one load."""
    r = cute.make_rmem_tensor((words,), Uint32)
    cute.autovec_copy(shared_vector(address, words), r)
    return r


def store_shared(address, values) -> None:
    """Store a list of 1, 2 or 4 words (Uint32) by one store."""
    r = cute.make_rmem_tensor((len(values),), Uint32)
    for i, v in enumerate(values):
        r[i] = v
    cute.autovec_copy(r, shared_vector(address, len(values)))


def tree(op, values):
    """Reduce a list pairwise, so that the depth is logarithmic."""
    values = list(values)
    while len(values) > 1:
        pairs = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[2 * len(pairs) :]
    return values[0]


def butterfly(op, value, offsets):
    """Reduce over the lanes that differ in the bits ``offsets``; every lane gets the result."""
    for offset in offsets:
        value = op(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


def add(a, b):
    return a + b


def spread(op, values: list, lane, offsets) -> tuple:
    """Reduce each of ``values`` over the lanes that differ in the bits ``offsets``.

    While the number of values is even, lanes that differ in one bit share them out: half the shuffles.
    Returns (index of this lane's first value, a run-time value or 0; those it ended with; the bits it still shares).
    """
    base = Int32(0)
    shared_bits = 0
    for offset in offsets:
        n = len(values)
        if n % 2 == 0:
            up = (lane & offset) != 0
            low, high = values[: n // 2], values[n // 2 :]
            mine = [cutlass.select_(up, b, a) for a, b in zip(low, high, strict=True)]
            other = [cutlass.select_(up, a, b) for a, b in zip(low, high, strict=True)]
            values = [op(a, cute.arch.shuffle_sync_bfly(b, offset=offset)) for a, b in zip(mine, other, strict=True)]
            base = base + cutlass.select_(up, Int32(n // 2), Int32(0))
        else:
            values = [butterfly(op, v, (offset,)) for v in values]
            shared_bits |= offset
    return base, values, shared_bits
