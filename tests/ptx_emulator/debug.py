"""Looking inside a run: trace instructions, watch addresses, print registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Debugger:
    """Pass to Launch(debug=...). Everything is off until asked for.

    trace       print every instruction of these warps (numbers within the CTA), or of all with trace=True
    lines       only these PTX source lines (a range, a set)
    registers   names printed after each traced instruction
    lane        the lane whose values are printed
    on_instruction      called as f(warp, group, instruction) before each instruction
    watches     shared-memory byte ranges (start, end): printed whenever their contents change
    """

    trace: object = ()
    lines: object = None
    registers: tuple = ()
    lane: int = 0
    on_instruction: Callable | None = None
    watches: list = field(default_factory=list)
    write: Callable = print

    def run_block(self, warp, group, block) -> None:
        """Executes a block one instruction at a time (called by the machine)."""
        for f, ins in zip(block.body, block.instructions, strict=True):
            before = self._watched(warp)
            if self.on_instruction:
                self.on_instruction(warp, group, ins)
            f(warp, warp.R, group.mask)
            self._show(warp, ins)
            self._changes(warp, ins, before)
        if block.control_instruction is not None:
            if self.on_instruction:
                self.on_instruction(warp, group, block.control_instruction)
            self._show(warp, block.control_instruction)

    def _wanted(self, warp, ins) -> bool:
        if self.trace is not True and warp.index not in (self.trace or ()):
            return False
        return self.lines is None or ins.line in self.lines

    def _show(self, warp, ins) -> None:
        if not self._wanted(warp, ins):
            return
        values = []
        for name in self.registers:
            try:
                v = warp.register(name)[self.lane]
                values.append(f"{name}={v} ({int(v):#x})")
            except KeyError:
                values.append(f"{name}=?")
        self.write(f"{warp.name} line {ins.line}: {ins.text}" + ("   # " + " ".join(values) if values else ""))

    def _watched(self, warp) -> list:
        return [warp.cta.shared.bytes[a:b].copy() for a, b in self.watches]

    def _changes(self, warp, ins, before: list) -> None:
        for (a, b), old in zip(self.watches, before, strict=True):
            new = warp.cta.shared.bytes[a:b]
            if not np.array_equal(old, new):
                self.write(
                    f"shared {a:#x}..{b:#x} changed by {warp.name} line {ins.line}: {ins.text}\n"
                    f"    {old.tobytes().hex(' ')}\n    {new.tobytes().hex(' ')}"
                )
