"""Global and shared memory with bounds checks (PTX ISA 5.1 State Spaces).

Global memory is a set of registered arrays, each at its own range of invented addresses, so an access that leaves its
array is an error even when it would hit another one. Shared memory starts poisoned with 0xFF (NaN in every format).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from .decode import SHARED_BASE
from .errors import MemoryFault

VIEWS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
POISON = 0xFF
_FIRST_ADDRESS = 0x7000_0000_0000
_GAP = 1 << 24


class Allocation:
    """One registered array: its bytes at `base`, and typed views of them."""

    def __init__(self, base: int, data: np.ndarray, name: str, owner):
        self.base, self.size, self.name, self.owner = base, data.size, name, owner
        self.bytes = data
        self.views = {n: data[: data.size // n * n].view(t) for n, t in VIEWS.items()}
        self.rows = {n: data[: data.size // n * n].reshape(-1, n) for n in (8, 16, 32)}


@dataclass(frozen=True)
class Ptr:
    """A kernel argument that points `offset` bytes into an array."""

    array: object
    offset: int = 0


def as_bytes(array, whole: bool = False) -> tuple[np.ndarray, int]:
    """(flat uint8 view, byte offset of the first element) of a numpy array or CPU tensor; never a copy.

    A contiguous one is exactly its own bytes; of a strided view, or if `whole`, it is all the memory it is a view of.
    """
    if hasattr(array, "detach"):
        import torch

        if array.device.type != "cpu":
            raise TypeError("only CPU tensors can be passed to the emulator")
        array = array.detach()
        if array.is_contiguous() and not whole:
            return array.view(-1).view(torch.uint8).numpy(), 0
        storage = torch.empty(0, dtype=torch.uint8).set_(array.untyped_storage())
        return storage.numpy(), array.data_ptr() - storage.data_ptr()
    if not isinstance(array, np.ndarray):
        raise TypeError(f"an array or a tensor is needed, not {type(array).__name__}")
    root = array
    while (whole or not root.flags.c_contiguous) and isinstance(root.base, np.ndarray):
        root = root.base
    if not root.flags.c_contiguous:
        raise TypeError("the array's memory is not contiguous")
    return root.reshape(-1).view(np.uint8), array.ctypes.data - root.ctypes.data


class Memory:
    """Global memory. The same Memory can serve several launches, one after another.

    With `host_addresses` an array lies at its real address (`data_ptr()`), so that arguments prepared as plain integers
    work; every array must then be registered first, and bounds are those of the whole storage behind it.
    """

    def __init__(self, host_addresses: bool = False):
        self.host_addresses = host_addresses
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []
        self._by_data: dict[tuple[int, int], Allocation] = {}
        self._next = _FIRST_ADDRESS
        self._recent: Allocation | None = None

    def register(self, array, name: str = "") -> Allocation:
        """The allocation of an array's memory, made on first use; `name` appears in reports."""
        return self._allocation(as_bytes(array, self.host_addresses)[0], array, name)

    def _allocation(self, data: np.ndarray, array, name: str = "") -> Allocation:
        key = (data.ctypes.data, data.size)
        if key not in self._by_data:
            base = data.ctypes.data if self.host_addresses else self._next
            a = Allocation(base, data, name or f"array{len(self._allocations)}", array)
            self._next += -(-(data.size + _GAP) // _GAP) * _GAP
            at = bisect.bisect_left(self._starts, base)
            self._starts.insert(at, base)
            self._allocations.insert(at, a)
            self._by_data[key] = a
        elif name:
            self._by_data[key].name = name
        return self._by_data[key]

    def address(self, array, offset: int = 0) -> int:
        """The invented device address of a byte in a registered array (for tables of pointers)."""
        data, first = as_bytes(array, self.host_addresses)
        return self._allocation(data, array).base + first + offset

    def find(self, address: int, size: int = 1) -> Allocation:
        i = bisect.bisect_right(self._starts, address) - 1
        if i < 0:
            raise MemoryFault(f"global address {address:#x} belongs to no array (a null or uninitialised pointer?)")
        a = self._allocations[i]
        if not a.base <= address <= a.base + a.size - size:
            raise MemoryFault(
                f"global access of {size} bytes at {a.name} + {address - a.base} is outside its {a.size} bytes"
            )
        return a

    def slice(self, address: int, size: int) -> np.ndarray:
        """A contiguous byte view, checked."""
        a = self.find(address, max(size, 1))
        return a.bytes[address - a.base : address - a.base + size]

    def offsets(self, addresses: np.ndarray, size: int) -> tuple[Allocation | None, np.ndarray]:
        """(array, byte offsets) of valid, aligned addresses (uint64, not empty); array None if they lie in several."""
        a, first = self._recent, int(addresses[0])
        if a is None or not a.base <= first < a.base + a.size:
            a = self._recent = self.find(first, size)
        off = addresses - np.uint64(a.base)
        last = int(off.max())
        if last > a.size - size:
            bad = int(np.argmax(off > a.size - size))
            self.find(int(addresses[bad]), size)
            return None, off
        if size > 1 and (off & np.uint64(size - 1)).any():
            bad = int(off[(off % np.uint64(size)) != 0][0])
            raise MemoryFault(f"misaligned {size}-byte access at {a.name} + {bad}")
        return a, off


class SharedMemory:
    """A CTA's shared memory, addressed from 0; the first kilobyte belongs to the system."""

    def __init__(self, end: int, poison: int = POISON):
        self.end = end
        self.bytes = np.full(-(-end // 128) * 128, poison, np.uint8)
        self.views = {n: self.bytes.view(t) for n, t in VIEWS.items()}
        self.rows = {n: self.bytes.reshape(-1, n) for n in (8, 16, 32)}

    def check(self, addresses: np.ndarray, size: int) -> None:
        low, high = int(addresses.min()), int(addresses.max())
        if low < SHARED_BASE or high > self.end - size:
            bad = low if low < SHARED_BASE else high
            raise MemoryFault(f"shared access of {size} bytes at {bad:#x}, valid are {SHARED_BASE:#x}..{self.end:#x}")
        if size > 1 and (addresses & (size - 1)).any():
            bad = int(addresses[(addresses % size) != 0][0])
            raise MemoryFault(f"misaligned {size}-byte shared access at {bad:#x}")

    def slice(self, address: int, size: int) -> np.ndarray:
        if address < SHARED_BASE or address + size > self.end:
            raise MemoryFault(
                f"shared range {address:#x}..{address + size:#x}, valid are {SHARED_BASE:#x}..{self.end:#x}"
            )
        return self.bytes[address : address + size]
