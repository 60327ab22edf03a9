"""Two e4m3 terms of a number, four numbers at a time: ``x ~ hi + lo``, ``lo`` the rounded remainder.

Through f16: ``hi`` is rounded to four significant bits by an integer addition and a mask, which e4m3 holds exactly
from 2^-6 on, so that the remainder needs no conversion back.  Such a conversion of the e4m3 pair, the natural way to
write it, is wrong in machine code: ptxas 13.4 moves it above the instruction that makes the pair where two pairs are
joined to a word (sm_100a, sm_103a; the PTX is right, so only the SASS shows it).
"""

from __future__ import annotations

from cutlass import Float32, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

CODE_SHIFT = 9  # a byte 0..15 read as e4m3 is the integer times 2^-9

_SPLIT = """{ .reg .b16 a, b, c, d; .reg .b32 x, y, u, v;
cvt.rn.f16x2.f32 x, $3, $2; cvt.rn.f16x2.f32 y, $5, $4;
add.u32 u, x, 0x00400040; add.u32 v, y, 0x00400040;
and.b32 u, u, 0xff80ff80; and.b32 v, v, 0xff80ff80;
cvt.rn.satfinite.e4m3x2.f16x2 a, u; cvt.rn.satfinite.e4m3x2.f16x2 b, v;
sub.rn.f16x2 x, x, u; sub.rn.f16x2 y, y, v;
cvt.rn.satfinite.e4m3x2.f16x2 c, x; cvt.rn.satfinite.e4m3x2.f16x2 d, y;
mov.b32 $0, {a, b}; mov.b32 $1, {c, d}; }"""
_VALUES = """{ .reg .b16 a, b, h0, h1, h2, h3; .reg .b32 x, y;
mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;
mov.b32 {h0, h1}, x; mov.b32 {h2, h3}, y;
cvt.f32.f16 $0, h0; cvt.f32.f16 $1, h1; cvt.f32.f16 $2, h2; cvt.f32.f16 $3, h3; }"""


@dsl_user_op
def _pure(kinds, operands, text, constraints, *, loc=None, ip=None):
    """Several results of one block of PTX without side effects."""
    result = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(kinds)})>"),
        [x.ir_value(loc=loc, ip=ip) for x in operands],
        text,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    types = {"i32": T.i32(), "f32": T.f32()}
    return [llvm.extractvalue(types[kind], result, [i], loc=loc, ip=ip) for i, kind in enumerate(kinds)]


def split(x: list) -> tuple[Uint32, Uint32]:
    """Up to four float32 as bytes of two words: their first and second terms; ``|x|`` at most 448."""
    four = [Float32(v) for v in (*x, *[0.0] * (4 - len(x)))]
    high, low = _pure(["i32", "i32"], four, _SPLIT, "=&r,=&r,f,f,f,f")
    return Uint32(high), Uint32(low)


def values(word) -> list[Float32]:
    """The four e4m3 bytes of a word as float32."""
    return [Float32(v) for v in _pure(["f32"] * 4, [Uint32(word)], _VALUES, "=&f,=&f,=&f,=&f,r")]
