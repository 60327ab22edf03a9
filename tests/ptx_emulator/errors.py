"""Everything the emulator can complain about. All derive from EmulatorError, so a test needs one name."""


class EmulatorError(Exception):
    """Base class. `kind` is a short stable word that tests can match."""

    kind = "error"


class PtxError(EmulatorError):
    """The text uses something outside the supported, strictly checked subset (names the line)."""

    kind = "ptx"


class MemoryFault(EmulatorError):
    """An access out of bounds, misaligned, or in the wrong state space."""

    kind = "memory"


class Hazard(EmulatorError):
    """An asynchronous operation was used against the rules: a missing wait, fence or commit."""

    kind = "hazard"


class Race(EmulatorError):
    """Two conflicting shared-memory accesses with no synchronization between them."""

    kind = "race"


class Deadlock(EmulatorError):
    """Nothing can run and nothing is in flight; the message lists every warp."""

    kind = "deadlock"


class SyncError(EmulatorError):
    """A barrier was misused (not initialised, count underflow, inconsistent thread counts)."""

    kind = "sync"


class Trap(EmulatorError):
    """The kernel executed `trap`."""

    kind = "trap"
