"""Integer, logic, comparison, move and float32/64 arithmetic (PTX ISA 9.7.1 to 9.7.5, 9.7.6 comparison, 9.7.8 logic)."""

from __future__ import annotations

import numpy as np

from . import lowfloat as lf
from .decode import DTYPE, Builder, Mods, bits_of, opcode
from .parser import Pair, Special, Vec

INTS = ("u16", "u32", "u64", "s16", "s32", "s64")
F32 = ("f32", "f64")
PACKED = ("f16", "bf16", "f16x2", "bf16x2", "f32x2")


def ufunc(f, d: int, *s: int):
    """A closure for a numpy ufunc that writes straight into the destination view."""
    if len(s) == 1:
        a, = s

        def one(w, R, m):
            if m is None:
                f(R[a], R[d])
            else:
                f(R[a], R[d], where=m)
        return one
    a, b = s

    def two(w, R, m):
        if m is None:
            f(R[a], R[b], R[d])
        else:
            f(R[a], R[b], R[d], where=m)
    return two


def function(f, d: int, *s: int):
    """A closure for any function of lane vectors."""
    if len(s) == 1:
        a, = s

        def one(w, R, m):
            np.copyto(R[d], f(R[a]), where=True if m is None else m)
        return one
    if len(s) == 2:
        a, b = s

        def two(w, R, m):
            np.copyto(R[d], f(R[a], R[b]), where=True if m is None else m)
        return two
    a, b, c = s

    def three(w, R, m):
        np.copyto(R[d], f(R[a], R[b], R[c]), where=True if m is None else m)
    return three


# ---- float helpers ----------------------------------------------------------------------------------------------------
_TINY = np.float32(1.1754944e-38)


def ftz(x):
    """Subnormals flushed to sign-preserving zero (9.7.3, .ftz)."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def _flushing(f):
    return lambda *x: ftz(f(*(ftz(v) for v in x)))


def fma32(a, b, c):
    """float32 a*b+c with one rounding. The product is exact in float64; the sum is redone where float64 rounding
    landed on a float32 tie. (Results that are float32 subnormals may be one unit off.)"""
    p = np.multiply(a, b, dtype=np.float64)
    s = p + c
    tie = (s.view(np.uint64) & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    if tie.any():
        back = s - p
        error = (p - (s - back)) + (c - back)
        up = (error > 0) == (s > 0)
        step = np.where(up, 1, -1) * (tie & (error != 0) & np.isfinite(s))
        s = (s.view(np.int64) + step).view(np.float64)
    return s.astype(np.float32)


def _saturate(f):
    return lambda *x: np.clip(np.nan_to_num(f(*x), nan=0.0), 0, 1)


def _float_op(b: Builder, m: Mods, t: str, f, sources: list, is_ufunc=True) -> None:
    """Emits an arithmetic operation on f32/f64, with .rn (or none), .ftz and .sat."""
    m.one_of("rn")
    flush, sat = m.flag("ftz"), m.flag("sat")
    m.done()
    d = b.dst(b.ins.operands[0], t)
    s = [b.src(x, t) for x in sources]
    if flush or sat:
        f, is_ufunc = (_flushing(f) if flush else f), False
        f = _saturate(f) if sat else f
    b.emit(ufunc(f, d, *s) if is_ufunc else function(f, d, *s))


def _packed_op(b: Builder, m: Mods, t: str, f, sources: list) -> None:
    """add, sub, mul, fma, min, max, neg, abs on f16, bf16, f16x2, bf16x2 and f32x2: exact in float64, rounded once.
    (float64 holds products and sums of f16/bf16 exactly enough for one rounding; 9.7.4.)"""
    m.one_of("rn")
    flush = m.flag("ftz")
    m.done()
    d = b.dst(b.ins.operands[0], t)
    s = [b.src(x, t) for x in sources]
    unpack, pack = lf.PACKED[t]

    def run(*x):
        x = [unpack(v) for v in x]
        return pack(f(*([ftz(v) for v in x] if flush else x)))
    b.emit(function(run, d, *s))


def _max(nan):
    return np.maximum if nan else np.fmax


def _min(nan):
    return np.minimum if nan else np.fmin


FLOAT_FUNCTIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs}


def _arith(b: Builder, m: Mods):
    name = b.ins.root
    t = m.last_type(*INTS, *F32, *PACKED)
    ops = b.operands(2 if name in ("neg", "abs") else 3)
    f = FLOAT_FUNCTIONS[name]
    if t in F32:
        return _float_op(b, m, t, f, ops[1:])
    if t == "f32x2":
        return _packed_op(b, m, t, f, ops[1:])
    if t in PACKED:
        wide = lambda *x: f(*(v.astype(np.float64) for v in x))  # noqa: E731
        return _packed_op(b, m, t, wide, ops[1:])
    if name == "mul":
        return _mul(b, m, t, ops, None)
    if m.flag("sat"):
        b.fail(".sat on integers is not supported")
    m.done()
    b.emit(ufunc(f, b.dst(ops[0], t), *(b.src(x, t) for x in ops[1:])))


opcode("add", "sub", "mul", "neg", "abs")(_arith)


@opcode("fma")
def _fma(b: Builder, m: Mods):
    t = m.last_type("f32", "f64", *PACKED)
    m.expect("rn")
    ops = b.operands(4)
    if t == "f32":
        return _float_op(b, m, t, fma32, ops[1:], is_ufunc=False)
    if t == "f64":
        b.fail("fma.f64 is not modelled with a single rounding")
    if t == "f32x2":
        return _packed_op(b, m, t, lambda x, y, z: fma32(*(np.ascontiguousarray(v).ravel() for v in (x, y, z))), ops[1:])
    relu = m.flag("relu")
    wide = lambda x, y, z: x.astype(np.float64) * y + z  # noqa: E731
    _packed_op(b, m, t, (lambda *v: np.maximum(wide(*v), 0)) if relu else wide, ops[1:])


@opcode("min", "max")
def _minmax(b: Builder, m: Mods):
    t = m.last_type(*INTS, *F32, *PACKED)
    ops = b.operands(3, 4)
    largest, nan = b.ins.root == "max", m.flag("NaN")
    f = (_max if largest else _min)(nan)
    if len(ops) == 4:
        if t != "f32":
            b.fail("three-input min/max is for .f32")
        two = f
        f = lambda x, y, z: two(two(x, y), z)  # noqa: E731
        return _float_op(b, m, t, f, ops[1:], is_ufunc=False)
    if t in F32:
        return _float_op(b, m, t, f, ops[1:])
    if t in PACKED:
        return _packed_op(b, m, t, f, ops[1:])
    m.done()
    b.emit(ufunc(np.maximum if largest else np.minimum, b.dst(ops[0], t), b.src(ops[1], t), b.src(ops[2], t)))


# ---- integer multiply and divide ------------------------------------------------------------------------------------
def _mul_high(t: str):
    kind, bits = t[0], int(t[1:])
    if bits == 64:
        def f(x, y):
            out = [(int(p) * int(q)) >> 64 for p, q in zip(x, y, strict=True)]
            return np.array([v & (2**64 - 1) for v in out], np.uint64).view(DTYPE[t])
        return f
    wide = np.dtype(("i" if kind == "s" else "u") + str(bits // 4))
    return lambda x, y: (np.multiply(x, y, dtype=wide) >> wide.type(bits)).astype(DTYPE[t])


def _mul(b: Builder, m: Mods, t: str, ops: list, addend) -> None:
    """mul and mad with .lo, .hi and .wide (9.7.1.3, 9.7.1.4)."""
    part = m.one_of("lo", "hi", "wide", required=True)
    m.done()
    x, y = b.src(ops[1], t), b.src(ops[2], t)
    if part == "wide":
        if bits_of(t) == 64:
            b.fail("mul.wide of 64-bit integers")
        result = t[0] + str(2 * bits_of(t))
        wide = DTYPE[result]
        product = lambda p, q: np.multiply(p, q, dtype=wide)  # noqa: E731
    else:
        result = t
        product = _mul_high(t) if part == "hi" else np.multiply
    d = b.dst(ops[0], result)
    if addend is None:
        b.emit(ufunc(np.multiply, d, x, y) if part == "lo" else function(product, d, x, y))
    else:
        b.emit(function(lambda p, q, r: product(p, q) + r, d, x, y, b.src(addend, result)))


@opcode("mad")
def _mad(b: Builder, m: Mods):
    t = m.last_type(*INTS, "f32")
    ops = b.operands(4)
    if t == "f32":
        m.expect("rn")
        return _float_op(b, m, t, fma32, ops[1:], is_ufunc=False)
    _mul(b, m, t, ops, ops[3])


def _divide(x, y):
    """Quotient truncated towards zero; division by zero gives all ones (machine specific by 9.7.1.7)."""
    zero = y == 0
    y = np.where(zero, y.dtype.type(1), y)
    if x.dtype.kind == "u":
        q = x // y
    else:
        q = x // y
        q = q + ((q * y != x) & ((x < 0) != (y < 0))).astype(x.dtype)
    return np.where(zero, np.array(-1).astype(x.dtype), q)


@opcode("div", "rem")
def _div(b: Builder, m: Mods):
    t = m.last_type(*INTS, *F32)
    ops = b.operands(3)
    if t in F32:
        if b.ins.root == "rem":
            b.fail("rem of floats")
        m.one_of("full", "approx", "rn")
        return _float_op(b, m, t, np.divide, ops[1:])
    m.done()
    f = _divide if b.ins.root == "div" else (lambda x, y: x - _divide(x, y) * y)
    b.emit(function(f, b.dst(ops[0], t), b.src(ops[1], t), b.src(ops[2], t)))


# ---- special functions (9.7.3): computed in float64 and rounded, the hardware is within a few units in the last place --
_APPROX = {"ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt,
           "sin": np.sin, "cos": np.cos, "tanh": np.tanh}


@opcode(*_APPROX)
def _special_function(b: Builder, m: Mods):
    t = m.last_type("f32", "f16", "f16x2", "bf16", "bf16x2")
    exact = b.ins.root in ("rcp", "sqrt") and m.flag("rn")
    if not exact:
        m.expect("approx")
    ops = b.operands(2)
    f = _APPROX[b.ins.root]
    wide = lambda x: f(x.astype(np.float64))  # noqa: E731
    if t == "f32":
        _float_op(b, m, t, lambda x: wide(x).astype(np.float32), ops[1:], is_ufunc=False)
    else:
        _packed_op(b, m, t, wide, ops[1:])


# ---- logic and shifts --------------------------------------------------------------------------------------------------
@opcode("and", "or", "xor", "not", "cnot")
def _logic(b: Builder, m: Mods):
    t = m.last_type("b16", "b32", "b64", "pred")
    m.done()
    unary = b.ins.root in ("not", "cnot")
    ops = b.operands(2 if unary else 3)
    d, s = b.dst(ops[0], t), [b.src(x, t) for x in ops[1:]]
    if b.ins.root == "cnot":
        return b.emit(function(lambda x: (x == 0).astype(x.dtype), d, *s))
    f = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}[b.ins.root]
    b.emit(ufunc(f, d, *s))


@opcode("shl", "shr")
def _shift(b: Builder, m: Mods):
    t = m.last_type("b16", "b32", "b64", *(INTS if b.ins.root == "shr" else ()))
    m.done()
    ops = b.operands(3)
    d, x, n = b.dst(ops[0], t), b.src(ops[1], t), b.src(ops[2], "u32")
    bits, dtype, left = bits_of(t), DTYPE[t].type, b.ins.root == "shl"
    if not isinstance(ops[2], (Pair, Vec)) and hasattr(ops[2], "value"):
        count = int(ops[2].value) & 0xFFFFFFFF
        if count < bits or t[0] == "s":
            k = b.program.const(min(count, bits - 1), DTYPE[t])
            return b.emit(ufunc(np.left_shift if left else np.right_shift, d, x, k))
    shift = np.left_shift if left else np.right_shift

    def f(v, count):
        small = np.minimum(count, bits - 1).astype(dtype)
        out = shift(v, small)
        return out if t[0] == "s" else np.where(count < bits, out, dtype(0))
    b.emit(function(f, d, x, n))


@opcode("shf")
def _funnel(b: Builder, m: Mods):
    """Funnel shift of {b,a} (9.7.8.7)."""
    t = m.last_type("b32")
    side, mode = m.one_of("l", "r", required=True), m.one_of("wrap", "clamp", required=True)
    m.done()
    ops = b.operands(4)

    def f(lo, hi, n):
        n = ((n & np.uint32(31)) if mode == "wrap" else np.minimum(n, np.uint32(32))).astype(np.uint64)
        both = (hi.astype(np.uint64) << np.uint64(32)) | lo
        return ((both << n) >> np.uint64(32) if side == "l" else both >> n).astype(np.uint32)

    def clamped(lo, hi, n):
        return np.where(n >= 32, lo if side == "l" else hi, f(lo, hi, np.minimum(n, np.uint32(31))))
    b.emit(function(f if mode == "wrap" else clamped, b.dst(ops[0], t), *(b.src(x, t) for x in ops[1:])))


@opcode("lop3")
def _lop3(b: Builder, m: Mods):
    """Any function of three bits, from its truth table (9.7.8.6): ta = 0xF0, tb = 0xCC, tc = 0xAA."""
    t = m.last_type("b32")
    m.done()
    ops = b.operands(5)
    table = b.integer(ops[4]) & 255

    def f(x, y, z):
        out = np.zeros(32, np.uint32)
        for i in range(8):
            if table >> i & 1:
                out |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        return out
    short = {0xC0: lambda x, y, z: x & y, 0xEA: lambda x, y, z: (x & y) | z, 0xF8: lambda x, y, z: x | (y & z),
             0x96: lambda x, y, z: x ^ y ^ z, 0x6A: lambda x, y, z: (x & y) ^ z, 0x80: lambda x, y, z: x & y & z,
             0xFE: lambda x, y, z: x | y | z}
    b.emit(function(short.get(table, f), b.dst(ops[0], t), *(b.src(x, t) for x in ops[1:4])))


@opcode("prmt")
def _prmt(b: Builder, m: Mods):
    """Byte permute, default mode (9.7.8.8): selector nibble bits 0..2 pick a byte of {b,a}, bit 3 replicates its sign."""
    t = m.last_type("b32")
    m.done()
    ops = b.operands(4)
    d, x, y, c = b.dst(ops[0], t), *(b.src(v, t) for v in ops[1:])
    rows = np.arange(32)[:, None]

    def f(lo, hi, selector):
        data = np.empty((32, 2), np.uint32)
        data[:, 0], data[:, 1] = lo, hi
        nibbles = (selector[:, None] >> np.array([0, 4, 8, 12], np.uint32)) & np.uint32(15)
        out = data.view(np.uint8)[rows, nibbles & 7]
        if (nibbles & 8).any():
            out = np.where(nibbles & 8, np.where(out & 0x80, 255, 0).astype(np.uint8), out)
        return np.ascontiguousarray(out).view(np.uint32)[:, 0]
    b.emit(function(f, d, x, y, c))


@opcode("bfe")
def _bfe(b: Builder, m: Mods):
    """Bit field extract (9.7.1.19)."""
    t = m.last_type("u32", "s32", "u64", "s64")
    m.done()
    ops = b.operands(4)
    bits = bits_of(t)

    def f(x, position, length):
        out = []
        for v, p, n in zip(x.tolist(), (position & 255).tolist(), (length & 255).tolist(), strict=True):
            raw = v & ((1 << bits) - 1)
            sign = 0 if t[0] == "u" or n == 0 else raw >> min(p + n - 1, bits - 1) & 1
            field_ = (raw | (sign * -1 << bits)) >> p & ((1 << n) - 1)
            out.append((field_ | (sign * -1 << n)) & ((1 << bits) - 1))
        return np.array(out, "u%d" % (bits // 8)).view(DTYPE[t])
    b.emit(function(f, b.dst(ops[0], t), b.src(ops[1], t), b.src(ops[2], "u32"), b.src(ops[3], "u32")))


@opcode("bfi")
def _bfi(b: Builder, m: Mods):
    """Bit field insert: the low bits of a into b (9.7.1.20)."""
    t = m.last_type("b32", "b64")
    m.done()
    ops = b.operands(5)
    bits = bits_of(t)
    d, a, base, p, n = b.dst(ops[0], t), b.src(ops[1], t), b.src(ops[2], t), b.src(ops[3], "u32"), b.src(ops[4], "u32")

    def run(w, R, mask):
        out = []
        for v, x, q, k in zip(R[a].tolist(), R[base].tolist(), (R[p] & 255).tolist(), (R[n] & 255).tolist(), strict=True):
            ones = (((1 << k) - 1) << q) & ((1 << bits) - 1)
            out.append(((v << q) & ones) | (x & ~ones))
        np.copyto(R[d], np.array(out, DTYPE[t]), where=True if mask is None else mask)
    b.emit(run)


def _bit_count(x):
    return np.array([int(v).bit_count() for v in x.tolist()], np.uint32)


@opcode("popc", "clz", "brev")
def _bits(b: Builder, m: Mods):
    t = m.last_type("b32", "b64")
    m.done()
    ops = b.operands(2)
    n = bits_of(t)
    f = {"popc": _bit_count,
         "clz": lambda x: np.array([n - int(v).bit_length() for v in x.tolist()], np.uint32),
         "brev": lambda x: np.array([int(format(int(v), f"0{n}b")[::-1], 2) for v in x.tolist()], DTYPE[t])}[b.ins.root]
    b.emit(function(f, b.dst(ops[0], t if b.ins.root == "brev" else "u32"), b.src(ops[1], t)))


@opcode("bfind")
def _bfind(b: Builder, m: Mods):
    """Position of the most significant non-sign bit (9.7.1.17)."""
    t = m.last_type("u32", "s32")
    shift = m.flag("shiftamt")
    m.done()
    ops = b.operands(2)

    def f(x):
        out = [(v if v >= 0 else ~v).bit_length() - 1 for v in x.tolist()]
        return np.array([(31 - v if shift and v >= 0 else v) & 0xFFFFFFFF for v in out], np.uint32)
    b.emit(function(f, b.dst(ops[0], "u32"), b.src(ops[1], t)))


# ---- moves, selection, comparison --------------------------------------------------------------------------------------
@opcode("mov")
def _mov(b: Builder, m: Mods):
    t = m.last_type("pred", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64", "f16")
    m.done()
    d, s = b.operands(2)
    if isinstance(d, Vec) or isinstance(s, Vec):
        return _mov_vector(b, d, s, bits_of(t))
    if isinstance(s, Special) and s.name in ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo"):
        slot = b.dst(d, t)

        def clock(w, R, mask):
            np.copyto(R[slot], DTYPE[t].type(w.launch.clock() & (2 ** bits_of(t) - 1)),
                      where=True if mask is None else mask)
        return b.emit(clock)
    x, y = b.dst(d, t), b.src(s, t)

    def run(w, R, mask):
        if mask is None:
            R[x][...] = R[y]
        else:
            np.copyto(R[x], R[y], where=mask)
    b.emit(run)


def _mov_vector(b: Builder, d, s, total: int) -> None:
    """Packing and unpacking moves (9.7.9.3 mov, vector form)."""
    parts = (d if isinstance(d, Vec) else s).items
    bits = total // len(parts)
    if bits * len(parts) != total or bits not in (8, 16, 32):
        b.fail(f"{len(parts)} parts of a {total}-bit value")
    part, whole = f"b{bits}", f"b{total}"
    unsigned = DTYPE[whole].type
    if isinstance(d, Vec):
        x = b.src(s, whole)
        slots = [b.dst_or_sink(p, part) for p in parts]

        def unpack(w, R, mask):
            pieces = R[x].view(DTYPE[part]).reshape(32, -1).copy()
            for i, slot in enumerate(slots):
                if slot is not None:
                    np.copyto(R[slot], pieces[:, i], where=True if mask is None else mask)
        return b.emit(unpack)
    x, slots = b.dst(d, whole), [b.src(p, part) for p in parts]

    def pack(w, R, mask):
        out = R[slots[0]].astype(unsigned)
        for i, slot in enumerate(slots[1:], 1):
            out |= R[slot].astype(unsigned) << unsigned(bits * i)
        np.copyto(R[x], out, where=True if mask is None else mask)
    b.emit(pack)


@opcode("selp")
def _selp(b: Builder, m: Mods):
    t = m.last_type("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
    m.done()
    ops = b.operands(4)
    d, x, y = b.dst(ops[0], t), b.src(ops[1], t), b.src(ops[2], t)
    p, negated = b.predicate(ops[3])
    x, y = (y, x) if negated else (x, y)

    def run(w, R, mask):
        np.copyto(R[d], np.where(R[p], R[x], R[y]), where=True if mask is None else mask)
    b.emit(run)


_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
            "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu")


def _comparison(name: str, is_float: bool):
    if not is_float:
        return _COMPARE[name]
    either_nan = lambda x, y: np.isnan(x) | np.isnan(y)  # noqa: E731
    if name == "nan":
        return either_nan
    if name == "num":
        return lambda x, y: ~either_nan(x, y)
    if name in _UNORDERED:
        f = _COMPARE[name[:-1]]
        return lambda x, y: f(x, y) | either_nan(x, y)
    if name == "ne":
        return lambda x, y: (x != y) & ~either_nan(x, y)
    return _COMPARE[name]


@opcode("setp")
def _setp(b: Builder, m: Mods):
    """Compare, optionally combined with a predicate, into one or two predicates (9.7.6.2)."""
    t = m.last_type("b16", "b32", "b64", *INTS, *F32, "f16", "bf16")
    is_float = t in F32 or t in ("f16", "bf16")
    names = ["eq", "ne", "lt", "le", "gt", "ge"]
    names = ["eq", "ne"] if t[0] == "b" and t != "bf16" else names + (
        [*_UNORDERED, "num", "nan"] if is_float else ["lo", "ls", "hi", "hs"] if t[0] == "u" else [])
    compare = _comparison(m.one_of(*names, required=True), is_float)
    combine = m.one_of("and", "or", "xor")
    flush = m.flag("ftz")
    m.done()
    ops = b.operands(4 if combine else 3)
    x, y = b.src(ops[1], t), b.src(ops[2], t)
    p, q = (ops[0].first, ops[0].second) if isinstance(ops[0], Pair) else (ops[0], None)
    p, q = b.dst_or_sink(p, "pred"), None if q is None else b.dst_or_sink(q, "pred")
    if not combine and q is None and p is not None and not flush and t != "bf16" and isinstance(compare, np.ufunc):
        return b.emit(ufunc(compare, p, x, y))
    c, negated = b.predicate(ops[3]) if combine else (None, False)
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, None: None}[combine]
    view = lf.bf16_to_f32 if t == "bf16" else ftz if flush else (lambda v: v)

    def run(w, R, mask):
        r = compare(view(R[x]), view(R[y]))
        other = ~r
        if join is not None:
            k = ~R[c] if negated else R[c].copy()
            r, other = join(r, k), join(other, k)
        where = True if mask is None else mask
        if p is not None:
            np.copyto(R[p], r, where=where)
        if q is not None:
            np.copyto(R[q], other, where=where)
    b.emit(run)
