"""PTX text -> kernels with resolved operands (PTX ISA, sections 4 Syntax, 5 State Spaces, 6 Operands).

Only syntax is handled here; what an instruction means, and whether its modifiers and types are legal, is checked in
`decode.py`. Registers are numbered per kernel; registers and labels declared inside `{ ... }` are local to that scope.
"""

from __future__ import annotations

import re
import struct

from .errors import PtxError
from .syntax import (
    REG_BITS,
    Addr,
    Imm,
    Instruction,
    Kernel,
    Label,
    Not,
    Pair,
    Param,
    Reg,
    Sink,
    Special,
    Sym,
    Variable,
    Vec,
)

_VARIABLE = re.compile(
    r"(?:\.(?:extern|visible|weak)\s+)*\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)"
    r"(?:\[(\d*)\])?(?:\s*=\s*(\{[^}]*\}|[^;]*))?\s*$",
    re.S,
)
_ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+)*\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{;]*)\{", re.S)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?"
    r"(?:\.align\s+(\d+)\s+)?([\w$]+)(?:\[(\d+)\])?\s*$"
)
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_TOP_DIRECTIVES = (".version", ".target", ".address_size", ".extern .func", ".file", ".section")


def parse_module(text: str) -> dict[str, Kernel]:
    """All `.entry` functions of a PTX module, by name."""
    text = _blank_comments(text)
    kernels: dict[str, Kernel] = {}
    outside, pos = [], 0
    bodies = []
    for m in _ENTRY.finditer(text):
        if m.start() < pos:
            continue
        end = _closing_brace(text, m.end())
        outside.append(text[pos : m.start()])
        bodies.append((m, end))
        pos = end
    outside.append(text[pos:])
    rest = "".join(outside)
    target = re.search(r"\.target\s+(\w+)", rest)
    variables = _module_variables(rest)
    for m, end in bodies:
        line = text.count("\n", 0, m.end()) + 1
        kernel = Kernel(
            m.group(1),
            _params(m.group(2), line),
            [],
            [],
            dict(variables),
            _directives(m.group(3), line),
            target.group(1) if target else "",
        )
        _Body(kernel, text[m.end() : end - 1], line).parse()
        kernels[kernel.name] = kernel
    if not kernels:
        raise PtxError("no .entry in the PTX text")
    return kernels


def _blank_comments(text: str) -> str:
    keep_lines = lambda m: "\n" * m.group(0).count("\n")  # noqa: E731
    text = re.sub(r"/\*.*?\*/", keep_lines, text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r"^\s*\.(?:loc|file)\s[^\n]*$", "", text, flags=re.M)


def _closing_brace(text: str, pos: int) -> int:
    depth = 1
    for m in re.compile(r"[{}]").finditer(text, pos):
        depth += 1 if m.group() == "{" else -1
        if depth == 0:
            return m.end()
    raise PtxError("unbalanced braces")


def _module_variables(text: str) -> dict[str, Variable]:
    text = re.sub(r"\.section\s+[.\w]+\s*\{[^}]*\}", "", text, flags=re.S)
    text = re.sub(r"^\s*\.(version|target|address_size)\b[^\n]*$", "", text, flags=re.M)
    variables = {}
    for statement in text.split(";"):
        statement = statement.strip()
        if not statement or statement.startswith(_TOP_DIRECTIVES):
            continue
        v = parse_variable(statement)
        if v is None:
            raise PtxError(f"unsupported module-level statement: {statement[:120]!r}")
        variables[v.name] = v
    return variables


def parse_variable(statement: str) -> Variable | None:
    m = _VARIABLE.match(statement)
    if not m or m.group(3) not in REG_BITS:
        return None
    size = REG_BITS[m.group(3)] // 8
    count = 0 if m.group(5) == "" else int(m.group(5) or 1)
    data = b""
    if m.group(6):
        values = [int(x.strip(), 0) for x in m.group(6).strip("{}").split(",") if x.strip()]
        data = b"".join((x & ((1 << 8 * size) - 1)).to_bytes(size, "little") for x in values)
    return Variable(m.group(4), m.group(1), int(m.group(2) or size), size * count, data)


def _params(text: str, line: int) -> list[Param]:
    """Kernel parameters at naturally aligned offsets (5.1.6.1 Kernel Function Parameters)."""
    params, offset = [], 0
    for item in filter(None, (p.strip() for p in text.split(","))):
        m = _PARAM.match(item)
        if not m or m.group(2) not in REG_BITS:
            raise PtxError(f"line {line}: unsupported parameter {item!r}")
        unit = REG_BITS[m.group(2)] // 8
        align = int(m.group(1) or m.group(3) or unit)
        size = unit * int(m.group(5) or 1)
        offset = -(-offset // align) * align
        params.append(Param(m.group(4), offset, size, m.group(2)))
        offset += size
    return params


_DIRECTIVES = {
    "reqntid",
    "maxntid",
    "minnctapersm",
    "maxnctapersm",
    "maxnreg",
    "reqnctapercluster",
    "explicitcluster",
    "maxclusterrank",
    "blocksareclusters",
    "noreturn",
    "pragma",
}


def _directives(text: str, line: int) -> dict[str, str]:
    found = {}
    for m in re.finditer(r"\.(\w+)\s*([^.\n]*)", text):
        if m.group(1) not in _DIRECTIVES:
            raise PtxError(f"line {line}: unknown performance directive .{m.group(1)}")
        found[m.group(1)] = m.group(2).strip()
    return found


def split_operands(text: str) -> list[str]:
    """Split at commas outside of any bracket."""
    parts, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        elif ch == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [p for p in parts if p]


class _Scope:
    def __init__(self, number: int):
        self.number = number
        self.registers: dict[str, Reg] = {}
        self.labels: set[str] = set()


class _Body:
    """One kernel's body: a statement scanner and an operand resolver with nested scopes."""

    def __init__(self, kernel: Kernel, text: str, line: int):
        self.kernel, self.text, self.line0 = kernel, text, line
        self.scopes: list[_Scope] = []
        self.scope_count = 0

    def parse(self) -> None:
        events = list(self._events())
        labels = self._labels_by_scope(events)
        self._open(labels)
        for kind, text, line in events:
            if kind == "{":
                self._open(labels)
            elif kind == "}":
                self.scopes.pop()
            elif kind == "label":
                self.kernel.body.append(Label(self._label(text)))
            elif text.startswith("."):
                self._directive(text, line)
            else:
                self.kernel.body.append(self._instruction(text, line))

    def _events(self):
        """Yields ('{' | '}' | 'label' | 'statement', text, line)."""
        pos, start, depth, line = 0, 0, 0, self.line0
        counted = 0
        token = re.compile(r"[;{}:]|\"[^\"]*\"")
        while m := token.search(self.text, pos):
            pos = m.end()
            ch, head = m.group(), self.text[start : m.start()]
            stripped = head.strip()
            if ch in "{}:;" and (ch == ";" or not stripped or ch == ":"):
                first = start + len(head) - len(head.lstrip())
                line += self.text.count("\n", counted, first)
                counted = first
            if ch == "{":
                if stripped:
                    depth += 1
                else:
                    yield "{", "", line
                    start = pos
            elif ch == "}":
                if depth:
                    depth -= 1
                else:
                    if stripped:
                        raise PtxError(f"line {line}: statement without ';': {stripped!r}")
                    yield "}", "", line
                    start = pos
            elif ch == ":" and depth == 0 and self.text[pos : pos + 1] != ":" and re.fullmatch(r"[\w$]+", stripped):
                yield "label", stripped, line
                start = pos
            elif ch == ";" and depth == 0:
                if stripped:
                    yield "statement", stripped, line
                start = pos
        if self.text[start:].strip():
            raise PtxError(f"line {line}: trailing text {self.text[start:].strip()[:60]!r}")

    @staticmethod
    def _labels_by_scope(events) -> list[set[str]]:
        scopes, stack = [set()], [0]
        for kind, text, _ in events:
            if kind == "{":
                scopes.append(set())
                stack.append(len(scopes) - 1)
            elif kind == "}":
                stack.pop()
            elif kind == "label":
                scopes[stack[-1]].add(text)
        return scopes

    def _open(self, labels: list[set[str]]) -> None:
        scope = _Scope(self.scope_count)
        scope.labels = labels[self.scope_count]
        self.scope_count += 1
        self.scopes.append(scope)

    def _label(self, name: str) -> str | None:
        for scope in reversed(self.scopes):
            if name in scope.labels:
                return name if scope.number == 0 else f"{name}@{scope.number}"
        return None

    def _register(self, name: str) -> Reg | None:
        for scope in reversed(self.scopes):
            if name in scope.registers:
                return scope.registers[name]
        return None

    def _directive(self, text: str, line: int) -> None:
        if m := re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S):
            if m.group(1) not in REG_BITS:
                raise PtxError(f"line {line}: register type .{m.group(1)}")
            for item in split_operands(m.group(2)):
                if many := re.fullmatch(r"([%\w$]+)<(\d+)>", item):
                    names = [f"{many.group(1)}{i}" for i in range(int(many.group(2)))]
                else:
                    names = [item]
                for name in names:
                    reg = Reg(name, len(self.kernel.registers), REG_BITS[m.group(1)])
                    self.kernel.registers.append(reg)
                    self.scopes[-1].registers[name] = reg
        elif text.startswith((".shared", ".local")):
            v = parse_variable(text)
            if v is None:
                raise PtxError(f"line {line}: unsupported declaration {text!r}")
            (self.kernel.locals_ if v.space == "local" else self.kernel.variables)[v.name] = v
        elif not text.startswith((".pragma", ".branchtargets", ".callprototype")):
            raise PtxError(f"line {line}: unknown directive {text!r}")

    def _instruction(self, text: str, line: int) -> Instruction:
        source, guard, negated = " ".join(text.split()), None, False
        if m := re.match(r"@(!?)\s*([%\w$]+)\s+(.*)", text, re.S):
            guard, negated, text = self._register(m.group(2)), bool(m.group(1)), m.group(3)
            if guard is None or guard.bits != 1:
                raise PtxError(f"line {line}: guard {m.group(2)} is not a declared predicate: {source}")
        opcode, _, rest = (
            text.partition(" ") if re.match(r"\S+ ", text) else (text.split()[0], "", text[len(text.split()[0]) :])
        )
        parts = opcode.strip().split(".")
        operands = [self._operand(x, line, source) for x in split_operands(rest)]
        return Instruction(opcode.strip(), operands, line, source, guard, negated, parts[1:], parts[0])

    def _operand(self, x: str, line: int, source: str):
        if reg := self._register(x):
            return reg
        if x.startswith("{") and x.endswith("}"):
            return Vec(tuple(self._operand(y, line, source) for y in split_operands(x[1:-1])))
        if x.startswith("[") and x.endswith("]"):
            parts = split_operands(x[1:-1])
            m = re.fullmatch(r"([%\w$.]+)\s*(?:([+-])\s*(-?(?:0[xX])?[0-9a-fA-F]+))?", parts[0])
            if not m:
                raise PtxError(f"line {line}: address {x!r} in: {source}")
            offset = int(m.group(3), 0) if m.group(3) else 0
            base = self._operand(m.group(1), line, source)
            return Addr(
                base, -offset if m.group(2) == "-" else offset, tuple(self._operand(y, line, source) for y in parts[1:])
            )
        if x == "_":
            return Sink()
        if "|" in x:
            first, second = (self._operand(y.strip(), line, source) for y in x.split("|"))
            return Pair(first, second)
        if x.startswith("!") and (reg := self._register(x[1:].strip())):
            return Not(reg)
        if m := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", x):
            return Imm(int(m.group(1), 16), 32)
        if m := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", x):
            return Imm(int(m.group(1), 16), 64)
        if _NUMBER.fullmatch(x):
            return Imm(int(x.rstrip("U"), 0))
        if re.fullmatch(r"-?\d*\.\d+(?:[eE][-+]?\d+)?", x):
            return Imm(struct.unpack("<Q", struct.pack("<d", float(x)))[0], 64)
        if x.startswith("%"):
            return Special(x)
        if label := self._label(x):
            return Label(label)
        if m := re.fullmatch(r"([%\w$]+)\s*(?:\+\s*(-?\d+))?", x):
            if (
                m.group(1) not in self.kernel.variables
                and m.group(1) not in self.kernel.locals_
                and all(p.name != m.group(1) for p in self.kernel.params)
            ):
                raise PtxError(f"line {line}: unknown name {m.group(1)!r} in: {source}")
            return Sym(m.group(1), int(m.group(2) or 0))
        raise PtxError(f"line {line}: operand {x!r} in: {source}")
