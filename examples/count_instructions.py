"""Count the instructions of the Hopper kernels' tile loop per KV element, from the SASS; needs no GPU.

    python examples/count_instructions.py           the table
    python examples/count_instructions.py --write   and store it as the budget that tests/test_instructions.py holds

One pass of the loop is one tile of 128 tokens by one math warpgroup: ``2 * 128 * head_dim / 128`` elements (K and V)
per thread.  The loop is the innermost backward branch that spans the tile's wgmmas; what lies out of line (the second
try of a wait) is not counted.  ``unpack`` are the LOP3, SHF and PRMT of the loop, the softmax's own few included.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import foscar
from foscar.common import jit
from foscar.common.formats import KVFormat
from foscar.hopper.config import ARCH, TILE_TOKENS, DecodeConfig
from foscar.hopper.decode import kernels

BUDGET = Path(__file__).resolve().parents[1] / "tests" / "instruction_budget.json"
HEADS = (4, 8, 16)
HEAD_DIM, PAGE = 128, 64
SLACK = 0.02  # what a count may exceed its budget by
GMMAS = range(12, 21)  # of one tile

CLASSES = ("alu", "fma", "mufu", "lds", "sts", "wgmma", "sync", "other")
_ROOTS = {
    "alu": "LOP3 SHF IADD3 VIADD ISETP FSETP SEL FSEL PRMT LEA FMNMX IMNMX VIMNMX MOV PLOP3 I2FP I2F F2I F2FP IABS P2R",
    "fma": "FFMA FMUL FADD IMAD HADD2 HFMA2 HMUL2",
    "mufu": "MUFU",
    "lds": "LDS LDSM",
    "sts": "STS STSM",
    "wgmma": "IGMMA HGMMA QGMMA BGMMA",
    "sync": "BAR SYNCS WARPSYNC FENCE MEMBAR BSSY BSYNC DEPBAR WARPGROUP WARPGROUPSET ERRBAR ELECT NANOSLEEP YIELD",
}
_CLASS_OF = {root: name for name, roots in _ROOTS.items() for root in roots.split()}
_UNPACK = ("LOP3", "SHF", "PRMT")
_LINE = re.compile(r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<text>[^;]*);?")
_LABEL = re.compile(r"^(\.L\w+):")
_BRANCH = re.compile(r"BRA(?:\.\w+)*\s.*`\((\.L\w+)\)")
# The accumulator, then A: a register, or with B together in one descriptor.
_REGISTER_A = re.compile(r"GMMA\S*\s+R\d+,\s*R\d+(\.\w+)?,\s*gdesc\[")


class MissingTool(RuntimeError):
    """No nvdisasm; the message says how to get it."""


@dataclass(frozen=True)
class Loop:
    """The instructions of a tile loop, as SASS text without addresses and predicates."""

    instructions: tuple[str, ...]

    @property
    def roots(self) -> list[str]:
        return [text.split()[0].split(".")[0] for text in self.instructions]

    @property
    def by_class(self) -> dict[str, int]:
        found = Counter(_CLASS_OF.get(root, "other") for root in self.roots)
        return {name: found[name] for name in CLASSES}

    @property
    def unpack(self) -> int:
        return sum(root in _UNPACK for root in self.roots)

    @property
    def local_memory(self) -> list[str]:
        """Loads and stores of spilled registers."""
        return [text for text in self.instructions if text.split()[0].split(".")[0] in ("LDL", "STL")]

    @property
    def a_from_memory(self) -> list[str]:
        """Matrix products whose A operand is not in registers."""
        return [text for text in self.instructions if "GMMA" in text.split()[0] and not _REGISTER_A.search(text)]

    def counts(self) -> dict[str, int]:
        """What the budget holds."""
        return {"total": len(self.instructions), "unpack": self.unpack, **self.by_class}


def find_nvdisasm() -> str:
    """The disassembler of the nvidia-cuda-nvdisasm wheel, or one on PATH.

    Raises:
        MissingTool: there is none.
    """
    found = [p for root in sys.path for p in sorted(Path(root or ".").glob("nvidia/*/bin/nvdisasm"))]
    tool = str(found[-1]) if found else shutil.which("nvdisasm")
    if tool is None:
        raise MissingTool("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    return tool


def disassemble(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory(prefix="foscar-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([find_nvdisasm(), "-c", str(path)], check=True, capture_output=True, text=True).stdout


def tile_loop(sass: str) -> Loop:
    """The innermost loop that spans one tile's matrix products.

    Raises:
        ValueError: no such loop, so the kernel is not what this script was written for.
    """
    labels: dict[str, int] = {}
    texts: list[str] = []
    loops: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(texts)
        elif found := _LINE.match(line):
            text = found["text"].strip()
            texts.append(text)
            target = _BRANCH.match(text)
            if target and target[1] in labels:  # backward
                loops.append((labels[target[1]], len(texts)))
    gmmas = {loop: sum("GMMA" in t.split()[0] for t in texts[slice(*loop)] if t) for loop in loops}
    fitting = [loop for loop, n in gmmas.items() if n in GMMAS]
    if not fitting:
        raise ValueError(f"no loop of {GMMAS.start} to {GMMAS[-1]} wgmmas; loops have {sorted(gmmas.values())}")
    begin, end = min(fitting, key=lambda loop: loop[1] - loop[0])
    return Loop(tuple(t for t in texts[begin:end] if t))


def configs(make: type = DecodeConfig) -> dict:
    """What is counted, by name; ``make``: an architecture's DecodeConfig."""
    formats = {"int2": KVFormat.int2(), "int4": KVFormat.int4()}
    return {
        f"{name} heads {heads}": make(fmt, HEAD_DIM, PAGE, heads) for name, fmt in formats.items() for heads in HEADS
    }


def loop_of(config: DecodeConfig) -> Loop:
    name, part, builder, _ = kernels(config)[0]
    return tile_loop(disassemble(jit.load_or_compile(name, part, ARCH, builder).cubin))


def elements(config: DecodeConfig) -> int:
    """KV elements (K and V) of one thread in a pass of the loop."""
    return 2 * TILE_TOKENS * config.head_dim // 128


def table(rows: Iterable[tuple[str, dict[str, int]]], per: int) -> str:
    """Counts per element; the last column is the whole count of a pass."""
    columns = ("total", "unpack", *CLASSES)
    lines = [f"{'per KV element':<22}" + "".join(f"{c:>8}" for c in columns) + f"{'a pass':>8}"]
    for name, counts in rows:
        values = "".join(f"{counts[c] / per:8.3f}" for c in columns)
        lines.append(f"{name:<22}{values}{counts['total']:8d}")
    return "\n".join(lines)


def excess(name: str, counts: dict[str, int], budget: dict[str, int]) -> list[str]:
    """What is over the budget, as text; more wgmmas, or fewer, are never right."""
    over = []
    for key in ("total", "unpack"):
        if counts[key] > budget[key] * (1 + SLACK):
            over.append(f"{name}: {key} {counts[key]} instructions a pass, budget {budget[key]} + {SLACK:.0%}")
    if counts["wgmma"] != budget["wgmma"]:
        over.append(f"{name}: {counts['wgmma']} wgmmas a pass, budget {budget['wgmma']}")
    return over


def measure(name: str, config: DecodeConfig) -> dict[str, int]:
    loop = loop_of(config)
    for bad in (*loop.local_memory, *loop.a_from_memory):
        print(f"{name}: {bad}")
    return loop.counts()


# ---------------------------------------------------------------------------------------------- what the scripts share
def count(
    description: str, budget: Path, measures: dict[str, Callable[[], dict]], table: Callable[[dict], str]
) -> None:
    """The command: counts of every kernel as a table, with --write stored as the budget."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"store the counts in {budget.name}")
    options = parser.parse_args()
    find_nvdisasm()  # before anything is compiled
    rows = {name: measured() for name, measured in measures.items()}
    print(table(rows))
    if options.write:
        budget.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"stored in {budget}")


def run(main: Callable[[], None]) -> None:
    """A script; a tool or package that is missing is one line."""
    try:
        main()
    except (MissingTool, foscar.MissingDependencyError, foscar.CompileError) as e:
        raise SystemExit(str(e)) from None


def main() -> None:
    measures = {name: lambda n=name, c=c: measure(n, c) for name, c in configs().items()}
    count(__doc__, BUDGET, measures, lambda rows: table(rows.items(), 2 * TILE_TOKENS * HEAD_DIM // 128))


if __name__ == "__main__":
    run(main)
