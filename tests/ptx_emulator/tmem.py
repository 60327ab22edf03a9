"""Tensor memory: 128 lanes of 512 32-bit columns, allocated by column (PTX ISA 9.7.16.1, 9.7.16.7)."""

from __future__ import annotations

import numpy as np

from .errors import EmulatorError, MemoryFault

LANES, COLUMNS = 128, 512


class TensorMemory:
    """The cells of one CTA, poisoned, and which columns are allocated. Also the state of its tensor core."""

    def __init__(self, cta):
        self.cta = cta
        self.cells = np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.owner = np.zeros(COLUMNS, np.int32)  # the start column + 1 of the allocation
        self.relinquished = False
        self.agent = cta.races.agent("tensor core", "the tensor core") if cta.races else None
        self.tick = 0

    def allocate(self, columns: int) -> int:
        if columns < 32 or columns > COLUMNS or columns & (columns - 1):
            raise EmulatorError(f"tcgen05.alloc of {columns} columns: a power of two in 32..512 is needed")
        if self.relinquished:
            raise EmulatorError("tcgen05.alloc after relinquish_alloc_permit")
        for start in range(0, COLUMNS, columns):
            if not self.owner[start : start + columns].any():
                self.owner[start : start + columns] = start + 1
                return start
        raise EmulatorError(f"tcgen05.alloc of {columns} columns: no room, the CTA would wait for ever")

    def free(self, start: int, columns: int) -> None:
        if (
            start % COLUMNS != start
            or not (self.owner[start : start + columns] == start + 1).all()
            or (self.owner == start + 1).sum() != columns
        ):
            raise EmulatorError(
                f"tcgen05.dealloc of columns {start}..{start + columns} that were not allocated as such"
            )
        self.owner[start : start + columns] = 0

    def check(self, lane: int, lanes: int, column: int, columns: int, what: str) -> None:
        if not (0 <= lane and lane + lanes <= LANES and 0 <= column and column + columns <= COLUMNS):
            raise MemoryFault(
                f"{what}: lanes {lane}..{lane + lanes}, columns {column}..{column + columns} of tensor memory"
            )
        if not self.owner[column : column + columns].all():
            raise MemoryFault(f"{what}: columns {column}..{column + columns} of tensor memory are not allocated")

    def granules(self, lanes: np.ndarray, column: int, columns: int) -> np.ndarray:
        """Race-detector indices of a block of cells; they follow those of shared memory."""
        cells = lanes[:, None] * COLUMNS + column + np.arange(columns)
        return self.cta.races.tensor_base + cells.ravel()

    def check_end(self) -> None:
        if self.owner.any():
            raise EmulatorError("the CTA ended with tensor memory still allocated (no tcgen05.dealloc)")


def tensor_memory(cta) -> TensorMemory:
    if "tmem" not in cta.units:
        cta.units["tmem"] = TensorMemory(cta)
    return cta.units["tmem"]


def split(address: int) -> tuple[int, int]:
    """(lane, column) of a tensor-memory address."""
    return address >> 16, address & 0xFFFF
