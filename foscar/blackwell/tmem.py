"""Tensor memory as a ledger: which of the 512 columns belong to whom, all 128 lanes.

====  ==================  ========  ====================================================================
room  columns             written   what
====  ==================  ========  ====================================================================
K     head_dim / 4        unpack    e4m3 codes, four channels a column; lane: token (see unpack.py)
V     TILE_TOKENS / 4     unpack    e4m3 codes, four tokens a column; lane: channel
S     columns             mma       float32 scores, lane: token, column ``2 h + term``
O     columns             mma       float32 products of one tile, lane: channel, column ``2 h + term``
====  ==================  ========  ====================================================================

There are CODE_BUFFERS of K and V and BUFFERS of S and O.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import BUFFERS, CODE_BUFFERS, TENSOR_COLUMNS, TILE_TOKENS, ConfigError, DecodeConfig


@dataclass(frozen=True)
class TensorLedger:
    """Columns of every room's buffers, room after room."""

    cfg: DecodeConfig

    @property
    def rooms(self) -> dict[str, int]:
        """Columns of one buffer."""
        c = self.cfg
        return {"k": c.head_dim // 4, "v": TILE_TOKENS // 4, "s": c.columns, "o": c.columns}

    def _size(self, room: str) -> int:
        return self.rooms[room] * (CODE_BUFFERS if room in ("k", "v") else BUFFERS)

    def column(self, room: str, buffer):
        """First column of a buffer (``buffer`` may be a run-time value)."""
        names = list(self.rooms)
        before = sum(self._size(n) for n in names[: names.index(room)])
        return before + buffer * self.rooms[room]

    @property
    def used(self) -> int:
        return sum(self._size(room) for room in self.rooms)

    @property
    def allocated(self) -> int:
        """A power of two, at least 32."""
        return max(32, 1 << (self.used - 1).bit_length())

    def check(self) -> None:
        if self.allocated > TENSOR_COLUMNS:
            raise ConfigError(
                f"tensor memory: {self.rooms}, of k, v {CODE_BUFFERS} and of s, o {BUFFERS}: {self.used} columns of "
                f"{TENSOR_COLUMNS}"
            )


def lane_address(tensor, warp, half: int):
    """Address of the first of 16 lanes that a warp (0..3 of its group) reads or writes: half 0 or 1 of its 32."""
    return tensor + ((32 * warp + 16 * half) << 16)
