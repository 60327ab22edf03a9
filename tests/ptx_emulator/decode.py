"""Instructions -> closures, checked strictly (PTX ISA, section 9 Instruction Set).

Every opcode has one decoder, registered with `@opcode(...)`. A decoder must consume every modifier through `Mods`; what
is left over, an unknown opcode, or an operand of the wrong size raises PtxError with the line. A decoder turns its
instruction into a closure `f(warp, R, mask)` over the warp's register views `R` (a list of 32-lane numpy arrays), where
`mask` is None for all lanes, or a boolean vector. Instructions that steer or may sleep become a block's control:
`f(warp, group) -> bool`, False when the thread group cannot go on.

Operands are resolved once to indices into `R`: register views (one per register and type), constants and special
registers alike, so that most instructions are a single numpy call.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .errors import PtxError
from .parser import parse_module
from .syntax import Imm, Instruction, Kernel, Label, Not, Reg, Sink, Special, Sym, Vec

# fmt: off
DTYPE = {
    "pred": np.dtype(bool), "b8": np.dtype("u1"), "u8": np.dtype("u1"), "s8": np.dtype("i1"), "b16": np.dtype("u2"),
    "u16": np.dtype("u2"), "s16": np.dtype("i2"), "f16": np.dtype("f2"), "bf16": np.dtype("u2"),
    "b32": np.dtype("u4"), "u32": np.dtype("u4"), "s32": np.dtype("i4"), "f32": np.dtype("f4"),
    "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4"), "e4m3x2": np.dtype("u2"), "e5m2x2": np.dtype("u2"),
    "b64": np.dtype("u8"), "u64": np.dtype("u8"), "s64": np.dtype("i8"), "f64": np.dtype("f8"),
    "f32x2": np.dtype("u8")}
# fmt: on


SHARED_BASE = 1024  # shared-memory addresses start above the part reserved by the system
SHARED_WINDOW = 1 << 40  # generic addresses of shared memory; global allocations lie far above
LOCAL_WINDOW = 1 << 41
FULL = 0xFFFFFFFF


def bits_of(type_: str) -> int:
    return 1 if type_ == "pred" else 8 * DTYPE[type_].itemsize


class Mods:
    """The modifiers of one instruction; `done` insists that each one was understood."""

    def __init__(self, ins: Instruction):
        self.ins, self.left = ins, list(ins.mods)

    def flag(self, *names: str) -> bool:
        return self.one_of(*names) is not None

    def one_of(self, *names: str, required: bool = False) -> str | None:
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return name
        if required:
            raise PtxError(f"line {self.ins.line}: one of .{' .'.join(names)} expected: {self.ins.text}")
        return None

    def last_type(self, *allowed: str) -> str:
        if not self.left or self.left[-1] not in allowed:
            raise PtxError(
                f"line {self.ins.line}: type .{self.left[-1] if self.left else ''} not supported: {self.ins.text}"
            )
        return self.left.pop()

    def expect(self, *names: str) -> None:
        for name in names:
            self.one_of(name, required=True)

    def matching(self, *prefixes: str) -> list[str]:
        found = [x for x in self.left if x.startswith(prefixes)]
        self.left = [x for x in self.left if x not in found]
        return found

    def done(self) -> None:
        if self.left:
            raise PtxError(f"line {self.ins.line}: unsupported modifier .{'.'.join(self.left)}: {self.ins.text}")


@dataclass
class Block:
    """Straight-line closures and at most one control at the end. Program counters are block numbers."""

    index: int
    body: list = field(default_factory=list)
    instructions: list = field(default_factory=list)  # of the body, parallel to it
    control: Callable | None = None
    control_instruction: Instruction | None = None
    needs: int | None = None  # slot of a member mask whose lanes must be converged here
    touch: int = 0  # bit mask of registers read or written
    cost: int = 0

    @property
    def all_instructions(self) -> list:
        return self.instructions + ([self.control_instruction] if self.control_instruction else [])


@dataclass
class Target:
    name: str
    block: int = -1


OPCODES: dict[str, Callable] = {}


def opcode(*names: str):
    """Registers a decoder for the given opcode roots."""

    def register(f):
        for name in names:
            if name in OPCODES:
                raise ValueError(f"opcode {name} registered twice")
            OPCODES[name] = f
        return f

    return register


class Program:
    """A decoded kernel: blocks, the slots of `R`, the shared-memory layout. Independent of any launch."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.name = kernel.name
        self.slots: list[tuple] = []  # ("reg", id, dtype) | ("const", array) | ("special", name, dtype)
        self._slot_of: dict[tuple, int] = {}
        self.blocks: list[Block] = []
        self.targets: dict[str, Target] = {}
        self.uses_wgmma = any(i.root == "wgmma" for i in kernel.body if isinstance(i, Instruction))
        self.uses_tcgen05 = any(i.root == "tcgen05" for i in kernel.body if isinstance(i, Instruction))
        self.race_granule = 4
        self.touched: dict[int, int] = {}  # id(instruction) -> register mask
        self._place_variables()
        Builder(self).build()
        self.special_slots = [(i, *rest) for i, (kind, *rest) in enumerate(self.slots) if kind == "special"]

    def _place_variables(self) -> None:
        """Static shared variables first, the dynamic block after them (5.1.7); local variables per thread."""
        address, self.addresses = SHARED_BASE, {}
        shared = [v for v in self.kernel.variables.values() if v.space == "shared"]
        for v in [x for x in shared if x.size] + [x for x in shared if not x.size]:
            address = -(-address // v.align) * v.align
            self.addresses[v.name] = address
            address += v.size
        self.static_end = address
        self.local_bytes = 0
        for v in self.kernel.locals_.values():
            self.local_bytes = -(-self.local_bytes // v.align) * v.align
            self.addresses[v.name] = self.local_bytes
            self.local_bytes += v.size

    def slot(self, *key) -> int:
        if key not in self._slot_of:
            self._slot_of[key] = len(self.slots)
            self.slots.append(key)
        return self._slot_of[key]

    def const(self, value, dtype) -> int:
        array = np.array([value], np.dtype(dtype))
        return self.slot("const", array.dtype.str, array.tobytes())


class Builder:
    """What decoders see: operand resolution and emission, for one kernel."""

    def __init__(self, program: Program):
        self.program, self.kernel = program, program.kernel
        self.ins: Instruction | None = None
        self.touch = 0
        self.params = {p.name: p for p in self.kernel.params}
        self._fresh()

    # ---- operands -------------------------------------------------------------------------------------------------
    def fail(self, why: str):
        raise PtxError(f"line {self.ins.line}: {why}: {self.ins.text}")

    def operands(self, *counts: int) -> list:
        if len(self.ins.operands) not in counts:
            self.fail(f"{len(self.ins.operands)} operands, expected {' or '.join(map(str, counts))}")
        return self.ins.operands

    def _reg(self, reg: Reg, type_: str, wider: bool) -> int:
        bits = bits_of(type_)
        if reg.bits != bits and not (wider and reg.bits > bits and bits > 1):
            self.fail(f"register {reg.name} has {reg.bits} bits, .{type_} needs {bits}")
        self.touch |= 1 << reg.id
        return self.program.slot("reg", reg.id, DTYPE[type_].str)

    def src(self, x, type_: str, wider: bool = False) -> int:
        """The slot of a source operand seen as `type_`; `wider` allows a larger register (ld, st, cvt; 9.4.1)."""
        dtype = DTYPE[type_]
        if isinstance(x, Reg):
            return self._reg(x, type_, wider)
        if isinstance(x, Imm):
            return self.program.const(self._immediate(x, type_), dtype)
        if isinstance(x, Special):
            return self.program.slot("special", x.name, dtype.str)
        if isinstance(x, Sym):
            return self.program.const(self.symbol(x, generic=False), dtype)
        self.fail(f"operand {x} cannot be a source")

    def symbol(self, x: Sym, generic: bool) -> int:
        v = self.kernel.variables.get(x.name) or self.kernel.locals_.get(x.name)
        if v is None:
            self.fail(f"address of {x.name}")
        if v.space not in ("shared", "local"):
            self.fail(f"module variable in .{v.space}")
        window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}[v.space] if generic else 0
        return self.program.addresses[x.name] + x.offset + window

    def _immediate(self, x: Imm, type_: str):
        dtype = DTYPE[type_]
        if type_ == "pred":
            return bool(x.value)
        if dtype.kind == "f":
            if x.float_bits == 32:
                return np.array([x.value], "u4").view("f4")[0]
            if x.float_bits == 64:
                return struct.unpack("<d", struct.pack("<Q", x.value))[0]
            self.fail(f"integer {x.value} used as .{type_}")
        bits = 8 * dtype.itemsize
        value = x.value & ((1 << bits) - 1)
        return value - (1 << bits) if dtype.kind == "i" and value >> (bits - 1) else value

    def dst(self, x, type_: str, wider: bool = False) -> int:
        if not isinstance(x, Reg):
            self.fail(f"destination {x} is not a register")
        return self._reg(x, type_, wider)

    def dst_or_sink(self, x, type_: str) -> int | None:
        return None if isinstance(x, Sink) else self.dst(x, type_)

    def dst_natural(self, reg: Reg, signed: bool) -> tuple[int, np.dtype]:
        """A destination seen with its own full width, for instructions that extend (ld, cvt)."""
        kind = "si" if signed else "bu"
        type_ = {8: "8", 16: "16", 32: "32", 64: "64"}[reg.bits]
        name = (kind[0] if signed else "b") + type_
        return self.dst(reg, name), DTYPE[name]

    def vector(self, x) -> list:
        return list(x.items) if isinstance(x, Vec) else [x]

    def predicate(self, x) -> tuple[int, bool]:
        """(slot, negated) of a predicate operand."""
        if isinstance(x, Not):
            return self.src(x.reg, "pred"), True
        return self.src(x, "pred"), False

    def integer(self, x) -> int:
        if not isinstance(x, Imm) or x.float_bits:
            self.fail(f"integer constant expected, got {x}")
        return x.value

    # ---- emission -------------------------------------------------------------------------------------------------
    def _fresh(self) -> None:
        block = Block(len(self.program.blocks))
        self.program.blocks.append(block)
        self.block = block

    def _used(self) -> bool:
        return bool(self.block.body or self.block.control or self.block.needs is not None)

    def emit(self, f: Callable) -> None:
        """Adds a plain closure for the current instruction, guarded if the instruction is."""
        if self.ins.guard is not None:
            f = _guarded(f, self.src(self.ins.guard, "pred"), self.ins.negated)
        self.block.body.append(f)
        self.block.instructions.append(self.ins)

    def end_block(self) -> None:
        """The next instruction starts a block of its own (registers change owner here)."""
        self._ends = True

    def converge(self, member_slot: int) -> None:
        """The current instruction needs the lanes of a member mask to be here together (`.sync`)."""
        if self._used():
            self._fresh()
        self.block.needs = member_slot

    def control(self, f: Callable, alone: bool = True) -> None:
        """Ends the block with a control; `alone` puts it in a block of its own, so that it can be retried."""
        if alone and self.block.body:
            touch = self.touch
            self._fresh()
            self.touch = touch
        self.block.control = f
        self.block.control_instruction = self.ins

    def guard_mask(self) -> Callable:
        """mask of a group -> (mask of the lanes that execute, any): for controls, which handle guards themselves."""
        if self.ins.guard is None:
            return lambda R, m: m
        slot, negated = self.src(self.ins.guard, "pred"), self.ins.negated

        def lanes(R, m):
            p = ~R[slot] if negated else R[slot]
            p = p.copy() if m is None else p & m
            return None if p.all() else p

        return lanes

    def target(self, name: str) -> Target:
        return self.program.targets.setdefault(name, Target(name))

    def build(self) -> None:
        for item in self.kernel.body:
            if isinstance(item, Label):
                if self._used():
                    self._fresh()
                self.target(item.name).block = self.block.index
                continue
            decoder = OPCODES.get(item.root)
            self.ins, self.touch, self._ends = item, 0, False
            if decoder is None:
                self.fail(f"unknown opcode {item.opcode}")
            decoder(self, Mods(item))
            self.block.touch |= self.touch
            self.block.cost += 1
            self.program.touched[id(item)] = self.touch
            if self.block.control is not None or self._ends:
                self._fresh()
        for t in self.program.targets.values():
            if t.block < 0:
                raise PtxError(f"label {t.name} is never defined")


def _guarded(f: Callable, slot: int, negated: bool) -> Callable:
    def g(w, R, m):
        p = ~R[slot] if negated else R[slot]
        if m is not None:
            p = p & m
        if p.all():
            f(w, R, None)
        elif p.any():
            f(w, R, p.copy() if m is None and not negated else p)

    return g


@functools.lru_cache(maxsize=64)
def _decode_module(text: str) -> dict[str, Program]:
    return {name: Program(kernel) for name, kernel in parse_module(text).items()}


def decode(text: str, entry: str | None = None) -> Program:
    """The decoded kernel `entry` (or the only one) of a PTX module; cached by text."""
    from . import isa  # noqa: F401  (registers all decoders)

    programs = _decode_module(text)
    if entry is None:
        if len(programs) != 1:
            raise PtxError(f"several kernels, name one of {sorted(programs)}")
        return next(iter(programs.values()))
    if entry not in programs:
        raise PtxError(f"no kernel {entry!r}, only {sorted(programs)}")
    return programs[entry]
