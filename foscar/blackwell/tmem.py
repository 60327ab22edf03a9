"""Tensor memory as a ledger: which of the 512 columns belong to whom, all 128 lanes.

====  ==================  ========  ====================================================================
room  columns             written   what
====  ==================  ========  ====================================================================
K     head_dim / 4 or / 8 unpack    e4m3 codes, four channels a column, or e2m1, eight; lane: token (unpack.py)
V     TILE_TOKENS / 4     unpack    e4m3 codes, four tokens a column; lane: channel
S     columns x units     mma       float32 scores, lane: token, column of head and term: tcgen05.operand_row; with K
                                    per channel with the Q of each unit
O     columns x units     mma       float32 products of one tile, lane: channel, columns likewise; with V per channel
                                    of each unit (hopper/folds.py)
scale 4                   unpack    with K in e2m1, once: the scales of one step's operands, all alike (digits.py)
====  ==================  ========  ====================================================================

There are BUFFERS steps of K, V, S and O, each of STEP_TILES tiles, and a scale room per step of digits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hopper import folds
from .config import BUFFERS, STEP_TILES, TENSOR_COLUMNS, TILE_TOKENS, ConfigError, DecodeConfig

SCALE_COLUMNS = 4  # of the scales of 128 rows: 32 a column


@dataclass(frozen=True)
class TensorLedger:
    """Columns of every room's buffers, room after room."""

    cfg: DecodeConfig

    @property
    def rooms(self) -> dict[str, int]:
        """Columns of one buffer."""
        c = self.cfg
        k = c.head_dim // (8 if c.digit_steps else 4)
        s, o = (c.columns * side.units for side in (folds.k_side(c), folds.v_side(c)))
        return {"k": k, "v": TILE_TOKENS // 4, "s": s, "o": o, "scale": SCALE_COLUMNS}

    @property
    def buffers(self) -> dict[str, int]:
        return {**dict.fromkeys(("k", "v", "s", "o"), BUFFERS * STEP_TILES), "scale": self.cfg.digit_steps}

    def _size(self, room: str) -> int:
        return self.rooms[room] * self.buffers[room]

    def column(self, room: str, buffer):
        """First column of a room's buffer (which may be a run-time value)."""
        names = list(self.rooms)
        before = sum(self._size(n) for n in names[: names.index(room)])
        return before + buffer * self.rooms[room]

    def tile(self, room: str, buffer, tile: int):
        """First column of a tile of a step's buffer."""
        return self.column(room, STEP_TILES * buffer + tile)

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
                f"the Blackwell kernel has {TENSOR_COLUMNS} columns of tensor memory; {self.cfg.format.name} with "
                f"{self.cfg.heads} heads and head_dim {self.cfg.head_dim} takes {self.used}: {self.rooms} columns, "
                f"{self.buffers} of them; larger token groups or fewer heads fit"
            )


def lane_address(tensor, warp, half: int):
    """Address of the first of 16 lanes that a warp (0..3 of its group) reads or writes: half 0 or 1 of its 32."""
    return tensor + ((32 * warp + 16 * half) << 16)
