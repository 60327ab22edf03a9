"""What the parser produces: operands, instructions and kernels (PTX ISA 6 Instruction Operands)."""

from __future__ import annotations

from dataclasses import dataclass, field

# fmt: off
REG_BITS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32,
            "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "b128": 128}
# fmt: on


@dataclass(frozen=True)
class Reg:
    name: str
    id: int
    bits: int


@dataclass(frozen=True)
class Imm:
    value: int
    float_bits: int = 0  # 0: an integer; 32 or 64: `value` is the bit pattern of a float of that width


@dataclass(frozen=True)
class Vec:
    items: tuple


@dataclass(frozen=True)
class Addr:
    """`[base + offset]`; base is a Reg, Sym or Imm. `extra` holds further comma-separated parts of the brackets."""

    base: object
    offset: int = 0
    extra: tuple = ()


@dataclass(frozen=True)
class Special:
    name: str


@dataclass(frozen=True)
class Sym:
    name: str
    offset: int = 0


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Pair:
    """`d|p`, as in `shfl.sync` and `elect.sync`."""

    first: object
    second: object


@dataclass(frozen=True)
class Not:
    reg: Reg


@dataclass(frozen=True)
class Sink:
    """The bit bucket `_`."""


@dataclass
class Instruction:
    opcode: str
    operands: list
    line: int
    text: str
    guard: Reg | None = None
    negated: bool = False
    mods: list[str] = field(default_factory=list)
    root: str = ""


@dataclass(frozen=True)
class Param:
    name: str
    offset: int
    size: int
    type: str


@dataclass(frozen=True)
class Variable:
    name: str
    space: str
    align: int
    size: int  # 0: `extern ... []`, the dynamic shared memory
    data: bytes = b""


@dataclass
class Kernel:
    name: str
    params: list[Param]
    body: list  # Instruction or Label, in order
    registers: list[Reg]
    variables: dict[str, Variable]
    directives: dict[str, str]
    target: str = ""
    locals_: dict[str, Variable] = field(default_factory=dict)

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params), default=0)
