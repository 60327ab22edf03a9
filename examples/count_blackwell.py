"""Count the instructions of the Blackwell kernels' tile loops, role by role, from the SASS; needs no GPU.

    python examples/count_blackwell.py           the table, per tile of 128 tokens
    python examples/count_blackwell.py --write   and store it as the budget that tests/test_blackwell_sass.py holds

``masks`` are the instructions that make operands of codes: LOP3 with a mask of codes, SHF by their width.  A role of
four warps has one on each of the SM's four schedulers, load and mma are single warps, so a scheduler issues the sum
of all roles, of these a quarter on average (``all``).  A role's loop is the innermost backward branch that spans what
only that role does.  What lies out of line (the second try of a wait) is not counted; what runs once per item within
the loop of mma is, for every tile.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from count_instructions import HEAD_DIM, HEADS, PAGE, SLACK, configs, count, disassemble, run

from foscar.blackwell.config import ARCHS, BUFFERS, ROLES, STEP_TILES, TILE_TOKENS, DecodeConfig
from foscar.blackwell.decode import kernels
from foscar.common import jit
from foscar.common.formats import KVFormat
from foscar.hopper import folds

BUDGET = Path(__file__).resolve().parents[1] / "tests" / "blackwell_budget.json"

# Beside the plain formats: names of KVFormat, and for which numbers of heads.
FOLDS = {
    "k2c128v2": HEADS,
    "k2v2c128": HEADS,
    "k2c128v2c128": HEADS,
    "k4c128v4": (8,),
    "k4v4c128": (8,),
    "k4c128v4c128": (8,),
}
# What only one role's loop over tiles holds: instructions that must be there, and that must not.
MARKS = {
    "load": ({"UBLKCP"}, set()),
    "mma": ({"UTCQMMA"}, set()),
    "unpack": ({"STTM"}, set()),
    "softmax": ({"LDTM", "STS", "MUFU"}, set()),
    "correct": ({"LDTM", "MUFU"}, {"STS"}),
    "query": ({"SHFL", "STS", "SYNCS"}, {"LDTM", "STG"}),
}
TILES = {role: STEP_TILES * (BUFFERS if role == "mma" else 1) for role in MARKS}  # of a pass of the loop
CLASSES = ("alu", "fma", "mufu", "lds", "sts", "tensor", "sync", "uniform", "other")
COLUMNS = ("total", "masks", *CLASSES)
_ROOTS = {
    "alu": "LOP3 SHF IADD3 IADD VIADD ISETP FSETP SEL FSEL PRMT LEA FMNMX FMNMX3 IMNMX VIMNMX VIMNMX3 MOV PLOP3 I2FP "
    "I2F F2I F2F F2FP IABS P2R R2P",
    "fma": "FFMA FFMA2 FMUL FMUL2 FADD FADD2 IMAD HADD2 HFMA2 HMUL2",
    "mufu": "MUFU",
    "lds": "LDS LDSM",
    "sts": "STS STSM",
    "tensor": "LDTM STTM UTCQMMA UTCOMMA UTCBAR",
    "sync": "BAR SYNCS WARPSYNC FENCE MEMBAR BSSY BSYNC DEPBAR ERRBAR ELECT NANOSLEEP YIELD BRA",
}
_CLASS_OF = {root: name for name, roots in _ROOTS.items() for root in roots.split()}
_MASK = re.compile(
    r"LOP3\.LUT R\d+, R\d+(\.reuse)?, 0x(3030303|c0c0c0c|f0f0f0f|33333333), RZ, 0xc0|SHF\.R\.U32\.HI R\d+, RZ, 0x[24], "
)
_NIBBLES = re.compile(r"LOP3\.LUT .* 0x33333333, RZ, 0xc0|SHF\.R\.U32\.HI R\d+, RZ, 0x2, ")  # 2-bit K's alone
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<text>[^;]*);?")
_LABEL = re.compile(r"^(\.L\w+):")
_BRANCH = re.compile(r"BRA(?:\.\w+)*\s.*`\((\.L\w+)\)")


@dataclass(frozen=True)
class Loop:
    """The instructions of one role's loop, without addresses and predicates."""

    instructions: tuple[str, ...]

    @property
    def roots(self) -> list[str]:
        return [text.split()[0].split(".")[0] for text in self.instructions]

    def counts(self, tiles: int) -> dict[str, float]:
        """Per tile, where a pass of the loop takes ``tiles``."""
        uniform = ("U", "R2UR", "S2UR")
        found = Counter(_CLASS_OF.get(r, "uniform" if r.startswith(uniform) else "other") for r in self.roots)
        found["total"] = len(self.instructions)
        found["masks"] = sum(bool(_MASK.match(text)) for text in self.instructions)
        return {name: found[name] / tiles for name in COLUMNS}

    @property
    def k_masks(self) -> int:
        """Of the masks those of 2-bit K; 0: K has no operands of its own form."""
        return sum(bool(_NIBBLES.match(text)) for text in self.instructions)

    @property
    def local_memory(self) -> list[str]:
        """Loads and stores of spilled registers."""
        return [text for text in self.instructions if text.split()[0].split(".")[0] in ("LDL", "STL")]


def all_configs() -> dict[str, DecodeConfig]:
    """What is counted, by name."""
    more = {(name, heads): KVFormat.parse(name) for name, some in FOLDS.items() for heads in some}
    made = {f"{name} heads {heads}": DecodeConfig(f, HEAD_DIM, PAGE, heads) for (name, heads), f in more.items()}
    return {**configs(DecodeConfig), **made}


def roles_of(config: DecodeConfig) -> tuple[str, ...]:
    """Those with a loop over tiles: without K per channel the query warps walk items."""
    return tuple(role for role in MARKS if role != "query" or folds.k_side(config).channel)


def role_loops(sass: str, roles: tuple[str, ...]) -> dict[str, Loop]:
    """The tile loop of every one of ``roles``.

    Raises:
        ValueError: a role has none, so the kernel is not what this script was written for.
    """
    labels: dict[str, int] = {}
    texts: list[str] = []
    spans: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(texts)
        elif (found := _LINE.match(line)) and found["text"].strip():
            texts.append(found["text"].strip())
            target = _BRANCH.match(texts[-1])
            if target and target[1] in labels:  # backward
                spans.append((labels[target[1]], len(texts)))
    loops = sorted((Loop(tuple(texts[a:b])) for a, b in spans), key=lambda loop: len(loop.instructions))
    result = {}
    for role in roles:
        present, absent = MARKS[role]
        fitting = [x for x in loops if present <= set(x.roots) and not absent & set(x.roots)]
        if not fitting:
            raise ValueError(f"no loop of the {role} warps (one with {sorted(present)}, without {sorted(absent)})")
        result[role] = fitting[0]
    return result


def loops_of(config: DecodeConfig, arch: str = ARCHS[0]) -> dict[str, Loop]:
    name, part, builder, _ = kernels(config)[0]
    return role_loops(disassemble(jit.load_or_compile(name, part, arch, builder).cubin), roles_of(config))


def counts_of(loops: dict[str, Loop]) -> dict[str, dict[str, float]]:
    """Per tile."""
    return {role: loop.counts(TILES[role]) for role, loop in loops.items()}


def per_scheduler(counts: dict[str, dict[str, float]]) -> float:
    """Instructions that one of the four schedulers issues per tile."""
    return sum(c["total"] * ROLES[role] / 4 for role, c in counts.items())


def masks_per_element(counts: dict[str, dict[str, float]]) -> float:
    """Of the unpack role; a tile has K and V, its four warps share both."""
    return counts["unpack"]["masks"] / (2 * TILE_TOKENS * HEAD_DIM / (32 * ROLES["unpack"]))


def k_masks_per_element(loops: dict[str, Loop]) -> float:
    """Of 2-bit K alone; V's are the rest."""
    return loops["unpack"].k_masks / TILES["unpack"] / (TILE_TOKENS * HEAD_DIM / (32 * ROLES["unpack"]))


def table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [f"{'a tile':<26}" + "".join(f"{c:>8}" for c in COLUMNS)]
    for name, counts in rows.items():
        for role, c in counts.items():
            lines.append(f"{name + ' ' + role:<26}" + "".join(f"{c[k]:8.0f}" for k in COLUMNS))
        lines.append(
            f"{name + ' all':<26}{per_scheduler(counts):8.0f} issue slots of a scheduler; "
            f"{masks_per_element(counts):.3f} masks per KV element"
        )
    return "\n".join(lines)


def excess(name: str, counts: dict, budget: dict) -> list[str]:
    """What is over the budget, as text."""
    return [
        f"{name} {role}: {key} {counts[role][key]} instructions a tile, budget {budget[role][key]} + {SLACK:.0%}"
        for role in budget
        for key in ("total", "masks", "tensor")
        if counts[role][key] > budget[role][key] * (1 + SLACK)
    ]


def measure(name: str, config: DecodeConfig) -> dict[str, dict[str, float]]:
    loops = loops_of(config)
    if loops["unpack"].k_masks:
        print(f"{name}: {k_masks_per_element(loops):.4f} masks per element of K")
    for role, loop in loops.items():
        for bad in loop.local_memory:
            print(f"{name} {role}: {bad}")
    return counts_of(loops)


def main() -> None:
    measures = {name: lambda n=name, c=c: measure(n, c) for name, c in all_configs().items()}
    count(__doc__, BUDGET, measures, table)


if __name__ == "__main__":
    run(main)
