"""What a launch did: instructions by class and role, bytes by memory, shared-memory bank conflicts, matrix work."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

_CLASSES = {
    root: name
    for name, roots in {
        "matrix": "wgmma mma tcgen05",
        "control": "bra ret exit",
        "sync": "bar barrier mbarrier fence membar",
        "memory": "ld st atom red ldmatrix stmatrix",
        "copy": "cp",
        "warp": "shfl vote redux elect match",
        "special": "ex2 lg2 rcp rsqrt sqrt sin cos tanh",
        "convert": "cvt",
        "logic": "and or xor not lop3 shl shr shf prmt",
        "move": "mov selp",
    }.items()
    for root in roots.split()
}


def instruction_class(ins) -> str:
    root = ins.root
    if root in _CLASSES:
        return _CLASSES[root]
    if any(t.startswith(("f16", "f32", "bf16", "f64")) for t in ins.mods):
        return "float"
    return "integer"


@dataclass
class Counters:
    """Filled during a launch; `warps` maps a warp number to its executed instructions by class (all CTAs together)."""

    conflicts: bool = False
    bytes: Counter = field(default_factory=Counter)
    bank_conflicts: int = 0
    shared_wavefronts: int = 0
    multiply_adds: Counter = field(default_factory=Counter)
    matrix_operations: Counter = field(default_factory=Counter)
    warps: dict[int, Counter] = field(default_factory=dict)
    opcodes: Counter = field(default_factory=Counter)
    instructions: int = 0
    seconds: float = 0.0
    ctas: int = 0

    def shared_access(self, warp, addresses: np.ndarray, size: int, what: str) -> None:
        self.bytes["shared " + what] += len(addresses) * size
        if self.conflicts:
            self._banks(addresses, size)

    def _banks(self, addresses: np.ndarray, size: int) -> None:
        """32 banks of 4 bytes; 8-byte accesses go in two halves of the warp, 16-byte accesses in four quarters."""
        words = max(size // 4, 1)
        per_pass = 32 // words
        for start in range(0, len(addresses), per_pass):
            first = addresses[start : start + per_pass].astype(np.int64) >> 2
            touched = np.unique((first[:, None] + np.arange(words)).ravel())
            degree = int(np.bincount(touched % 32, minlength=32).max())
            self.shared_wavefronts += degree
            self.bank_conflicts += degree - 1

    def global_access(self, warp, size: int, what: str) -> None:
        self.bytes["global " + what] += size

    def matrix(self, unit: str, multiply_adds: int) -> None:
        self.multiply_adds[unit] += multiply_adds
        self.matrix_operations[unit] += 1

    def add_blocks(self, blocks: list, warp: int, times: list[int]) -> None:
        """Adds how often a warp number executed each block."""
        classes = self.warps.setdefault(warp, Counter())
        for block, n in zip(blocks, times, strict=True):
            if n:
                for ins in block.all_instructions:
                    classes[instruction_class(ins)] += n
                    self.opcodes[ins.opcode] += n
                    self.instructions += n

    def role(self, warps) -> Counter:
        """Instructions by class of a set of warps, e.g. `role(range(12, 16))` for a producer warpgroup."""
        return sum((self.warps.get(i, Counter()) for i in warps), Counter())

    @property
    def by_class(self) -> Counter:
        return self.role(self.warps)
