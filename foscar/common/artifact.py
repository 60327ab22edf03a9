"""A compiled kernel: machine code, PTX and the facts that a launch needs, in memory and as three plain files.

Kernels are compiled from a ``@cute.jit`` host function that launches exactly one kernel.  What the DSL gives, and where
each fact is read:

========================  ==================================================================================
entry name, parameters    the one ``.entry`` of the PTX; offsets follow from natural alignment
block, shared memory      the ``cudaLaunchConfig_t`` that the compiled host function fills in: its field 2 is
                          the *dynamic* shared memory in bytes, inferred by the DSL from the kernel's allocations
                          (the PTX only says ``.extern .shared``, with no size)
registers, spills, notes  ptxas's own text
========================  ==================================================================================
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CompileError

SCHEMA = 2
CUBIN, PTX, FACTS = "kernel.cubin", "kernel.ptx", "kernel.json"

# ptxas notes that cost speed without failing the build: serialized wgmma, setmaxnreg ignored.
COSTLY_REMARKS = ("C7508", "C7512", "C7514", "C7519")

_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_LAUNCH_CONFIG = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
_LAUNCH_ATTRIBUTE = r"!llvm\.struct<\(i32, array<4 x i8>, array<64 x i8>\)>"
_COOPERATIVE, _CLUSTER = 2, 4  # CUlaunchAttributeID


@dataclass(frozen=True)
class Param:
    """One kernel parameter: its PTX type ("u64", "u32", "f32", ...), bytes and offset in the parameter space."""

    type: str
    size: int
    offset: int


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel.

    Args:
        cubin: ELF image for ``arch``.
        ptx: PTX text; "" where a cache folder holds none (only the cubin is needed to launch).
        entry: the kernel's symbol.
        arch: "sm_90a", "sm_100a", ...
        block: threads per block in x, y, z.
        smem: dynamic shared memory of a launch, bytes.
        static_smem: shared memory that the cubin itself declares, bytes.
        params: in order.
        registers: per thread at launch (before setmaxnreg), or None.
        spill_bytes: bytes of spill stores and loads, or None.
        remarks: ptxas notes with a number, such as ``(C7514) Potential Performance Loss: ...``.
        dsl: version of nvidia-cutlass-dsl that compiled it.
        name, key, config: identity, filled in by :mod:`foscar.common.jit`.
    """

    cubin: bytes
    ptx: str
    entry: str
    arch: str
    block: tuple[int, int, int]
    smem: int
    static_smem: int
    params: tuple[Param, ...]
    registers: int | None = None
    spill_bytes: int | None = None
    remarks: tuple[str, ...] = ()
    dsl: str = ""
    name: str = ""
    key: str = ""
    config: Any = None

    @property
    def threads(self) -> int:
        """Threads per block."""
        x, y, z = self.block
        return x * y * z

    @property
    def cubin_sha256(self) -> str:
        return hashlib.sha256(self.cubin).hexdigest()

    @property
    def costly_remarks(self) -> tuple[str, ...]:
        """The remarks that cost speed: serialized wgmma, ignored setmaxnreg."""
        return tuple(r for r in self.remarks if any(c in r for c in COSTLY_REMARKS))

    def facts(self) -> dict[str, Any]:
        """What ``kernel.json`` holds; the last entry covers all others."""
        facts = {
            "schema": SCHEMA,
            "name": self.name,
            "entry": self.entry,
            "arch": self.arch,
            "threads": self.threads,
            "block": list(self.block),
            "smem": self.smem,
            "static_smem": self.static_smem,
            "params": [{"type": p.type, "size": p.size, "offset": p.offset} for p in self.params],
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "remarks": list(self.remarks),
            "config": self.config,
            "key": self.key,
            "dsl": self.dsl,
            "cubin_sha256": self.cubin_sha256,
            "ptx_sha256": hashlib.sha256(self.ptx.encode()).hexdigest(),
        }
        return facts | {"facts_sha256": _digest(facts)}

    def save(self, folder: Path) -> None:
        """Write the three files into an existing, empty folder."""
        (folder / CUBIN).write_bytes(self.cubin)
        (folder / PTX).write_bytes(self.ptx.encode())
        (folder / FACTS).write_text(json.dumps(self.facts(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, key: str | None = None, arch: str | None = None) -> Artifact:
        """Read and verify a folder that :meth:`save` wrote.

        Raises:
            OSError: a file is missing or unreadable (``kernel.ptx`` may be missing).
            ValueError: the files contradict their checksums, or are another kernel's than ``key`` for ``arch``.
        """
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
            raise ValueError(f"{folder / FACTS}: not of schema {SCHEMA}")
        if facts.pop("facts_sha256", None) != _digest(facts):
            raise ValueError(f"{folder / FACTS}: checksum differs")
        cubin = (folder / CUBIN).read_bytes()
        try:
            ptx = (folder / PTX).read_bytes()
        except FileNotFoundError:
            ptx = None
        if ptx is not None and hashlib.sha256(ptx).hexdigest() != facts.get("ptx_sha256"):
            raise ValueError(f"{folder / PTX}: checksum differs")
        if hashlib.sha256(cubin).hexdigest() != facts.get("cubin_sha256"):
            raise ValueError(f"{folder / CUBIN}: checksum differs")
        if key is not None and facts.get("key") != key:
            raise ValueError(f"{folder}: holds the kernel {facts.get('key')}, not {key}")
        if arch is not None and facts.get("arch") != arch:
            raise ValueError(f"{folder}: is for {facts.get('arch')}, not for {arch}")
        try:
            x, y, z = facts["block"]
            plain = ("entry", "arch", "smem", "static_smem", "registers", "spill_bytes", "dsl", "name", "key", "config")
            return cls(
                cubin=cubin,
                ptx="" if ptx is None else ptx.decode(),
                block=(x, y, z),
                params=tuple(Param(p["type"], p["size"], p["offset"]) for p in facts["params"]),
                remarks=tuple(facts["remarks"]),
                **{k: facts[k] for k in plain},
            )
        except (KeyError, TypeError) as e:
            raise ValueError(f"{folder / FACTS}: {e!r}") from e


def _digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------- reading the facts
def parse_entry(ptx: str) -> tuple[str, tuple[Param, ...], tuple[int, int, int] | None, int]:
    """The kernel that a PTX text holds: symbol, parameters, ``.reqntid`` if any, static shared memory in bytes.

    Raises:
        CompileError: not exactly one ``.entry``.
    """
    entries = re.findall(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", ptx, re.S)
    if len(entries) != 1:
        raise CompileError(f"expected one kernel in the PTX, found {len(entries)}: {[e[0] for e in entries]}")
    symbol, body, directives = entries[0]
    params: list[Param] = []
    end = 0
    for align, kind, count in re.findall(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+[\w$]+(?:\[(\d+)\])?", body):
        size = _SIZES[kind[1:]]
        step = max(size, int(align or 1))
        offset = -(-end // step) * step
        nbytes = size * int(count or 1)
        params.append(Param(kind + (f"[{count}]" if count else ""), nbytes, offset))
        end = offset + nbytes
    reqntid = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    block = tuple(int(n or 1) for n in reqntid.groups()) if reqntid else None
    arrays = re.findall(r"^\s*\.shared\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+[\w$]+((?:\[\d+\])*)\s*;", ptx, re.M)
    static = 0
    for kind, dims in arrays:
        n = _SIZES[kind[1:]]
        for d in re.findall(r"\d+", dims):
            n *= int(d)
        static += n
    return symbol, tuple(params), block, static


def parse_launch(host_ir: str) -> tuple[tuple[int, int, int], int]:
    """Block shape and dynamic shared memory in the launch configuration of a compiled host function (LLVM dialect).

    Raises:
        CompileError: not exactly one launch; a block or shared memory known only at run time; a cluster or
            cooperative launch (``launch.py`` has no attributes for those).
    """
    launches = []
    for function in re.split(r"^\s*llvm\.func @", host_ir, flags=re.M)[1:]:
        consts = {n: int(v) for n, v in re.findall(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i\d+\)", function)}
        consts |= {n: 0 for n in re.findall(r"(%\w+) = llvm\.mlir\.zero : i\d+", function)}
        stores = {target: value for value, target in re.findall(r"llvm\.store (%\w+), (%\w+) :", function)}

        def fields(struct: str, text=function, stores=stores) -> dict[str, dict[str, str]]:
            found: dict[str, dict[str, str]] = {}
            gep = rf"(%\w+) = llvm\.getelementptr (%\w+)\[0, ([\d, ]+)\] : .*?, {struct}"
            for pointer, base, path in re.findall(gep, text):
                if pointer in stores:
                    found.setdefault(base, {})[path] = stores[pointer]
            return found

        found = [f for f in fields(_LAUNCH_CONFIG).values() if "2" in f]
        launches += [[consts.get(f.get(p, "")) for p in ("1, 0", "1, 1", "1, 2", "2")] for f in found]
        for attribute in fields(_LAUNCH_ATTRIBUTE).values():
            number, value = (consts.get(attribute.get(p, "")) for p in ("0", "2"))
            if number == _CLUSTER or (number == _COOPERATIVE and value != 0):
                raise CompileError("cluster and cooperative launches are not supported")
    if len(launches) != 1:
        raise CompileError(f"the host function must launch one kernel, not {len(launches)}")
    x, y, z, smem = launches[0]
    if None in (x, y, z, smem):
        raise CompileError(f"block ({x}, {y}, {z}) and shared memory ({smem}) must be compile-time constants")
    return (x, y, z), smem


def parse_ptxas(text: str) -> tuple[int | None, int | None, tuple[str, ...]]:
    """Registers, spilled bytes and numbered notes in ptxas's verbose output."""
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    notes = dict.fromkeys(m.strip().replace("''", "'") for m in re.findall(r"\(C\d{4}\)[^\n]*", text))
    return (
        int(registers[1]) if registers else None,
        int(spills[1]) + int(spills[2]) if spills else None,
        tuple(notes),
    )


def make_artifact(cubin: bytes, ptx: str, host_ir: str, ptxas: str, *, arch: str, dsl: str) -> Artifact:
    """Put together what one compilation gave.

    Raises:
        CompileError: see :func:`parse_entry` and :func:`parse_launch`; or the two disagree about the block.
    """
    entry, params, reqntid, static = parse_entry(ptx)
    block, smem = parse_launch(host_ir)
    if reqntid is not None and reqntid != block:
        raise CompileError(f"{entry}: launched with {block} threads, compiled for {reqntid}")
    registers, spills, remarks = parse_ptxas(ptxas)
    return Artifact(cubin, ptx, entry, arch, block, smem, static, params, registers, spills, remarks, dsl)
