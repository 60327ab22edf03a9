"""What the two models of a tile share: the resource that binds, and the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

ALU_CYCLES, FMA_CYCLES, MUFU_CYCLES = 2, 1, 8  # of a warp's instruction: 16, 32 and 4 lanes a clock of a scheduler
_LANE_BYTES = {"32": 4, "64": 8, "128": 16}  # of a shared load or store, by its suffix


class Resources:
    """Cycles of a tile on each resource: the fields of a dataclass."""

    @property
    def binding(self) -> str:
        return max(vars(self), key=lambda name: getattr(self, name))

    @property
    def cycles(self) -> float:
        return max(vars(self).values())


def shared_access(instructions: Iterable[str]) -> int:
    """Bytes that a warp's loads from and stores to shared memory move (no broadcast counted)."""
    split = (text.split()[0].split(".") for text in instructions)
    return sum(32 * _LANE_BYTES.get(op[-1], 4) for op in split if op[0] in ("LDS", "STS"))


def table(first: str, kind: type, more: tuple[str, ...], rows: Iterable[tuple[str, Resources, tuple[str, ...]]]) -> str:
    """Markdown: a row's name, its cycles, what binds, and ``more`` columns."""
    names = [f.name for f in dataclasses.fields(kind)]
    lines = [(first, *names, "binds", *more), ("---",) * (len(names) + 2 + len(more))]
    for name, tile, rest in rows:
        lines.append((name, *(f"{getattr(tile, n):.0f}" for n in names), tile.binding, *rest))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
