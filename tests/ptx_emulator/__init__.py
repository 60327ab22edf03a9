"""A functional PTX interpreter: runs compiled kernels on a machine without a GPU. See README.md in this directory."""

from .counters import Counters
from .debug import Debugger
from .decode import decode
from .errors import Deadlock, EmulatorError, Hazard, MemoryFault, PtxError, Race, SyncError, Trap
from .launch import Launch
from .memory import Memory, Ptr

__all__ = [
    "Counters",
    "Deadlock",
    "Debugger",
    "EmulatorError",
    "Hazard",
    "Launch",
    "Memory",
    "MemoryFault",
    "Ptr",
    "PtxError",
    "Race",
    "SyncError",
    "Trap",
    "decode",
]
