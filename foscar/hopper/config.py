"""The Hopper decode kernel's configuration: edit :class:`TileConfig`, run again, and the kernel is recompiled.

``DecodeConfig`` is all that generates code; its canonical form is the compile key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ..common.config import ConfigError, check_problem, check_tile_fields
from ..common.formats import KVFormat, RecordLayout
from ..common.plan import PLAIN, TILE_TOKENS, KernelOptions
from ..common.tensor_format import PADDED_HEAD_DIMS
from . import folds

ARCH = "sm_90a"
SHARED_BYTES = 227 * 1024  # of one CTA (sm_90)
REGISTERS = 65536  # of one SM
STATIC_BYTES = 1024  # left to alignment and barriers


@dataclass(frozen=True)
class TileConfig:
    """What may be tuned without changing any result beyond rounding."""

    # None: 3, but 2 with more registers where a thread holds four heads (or two of 256 channels), and fewer where two
    # stages of that many would not fit. Four were slower (96 registers at launch).
    math_warpgroups: int | None = None
    # Stages of TILE_TOKENS tokens in flight per math warpgroup; None: as many as fit, at most MAX_STAGES.
    kv_stages: int | None = None
    # Registers of a thread after setmaxnreg; the pool is what the launch gives. None: all that load warps leave.
    math_registers: int | None = None
    load_registers: int = 32  # 24 spill

    MAX_STAGES = 6

    def __post_init__(self) -> None:
        check_tile_fields(self)


@dataclass(frozen=True)
class DecodeConfig:
    """One decode kernel.

    Args:
        format: the cache's format.
        head_dim: 64, 128 or 256.
        page_size: tokens per page: 16, 32, 64 or 128.
        heads: query heads per KV head that the kernel has room for: 4, 8, 12 or 16; with ``options.rows`` rows of an
            item, pairs of a query token and a head.
        q_dtype: "bfloat16" or "float16", of the query and the output.
        tile: the tuning knobs.
        options: what it computes beside plain attention.
    """

    format: KVFormat
    head_dim: int
    page_size: int
    heads: int
    q_dtype: str = "bfloat16"
    tile: TileConfig = field(default_factory=TileConfig)
    options: KernelOptions = PLAIN

    def __post_init__(self) -> None:
        check_problem("Hopper", self, head_dims=PADDED_HEAD_DIMS, folds=True)
        if not isinstance(self.tile, TileConfig):
            raise TypeError(f"tile must be a foscar.TileConfig, not {type(self.tile).__name__}")
        if not isinstance(self.options, KernelOptions):
            raise TypeError(f"options must be KernelOptions, not {type(self.options).__name__}")
        self.check()

    # ---- derived sizes
    @cached_property
    def layout(self) -> RecordLayout:
        return self.format.layout(self.head_dim, self.page_size)

    @property
    def pages_per_tile(self) -> int:
        return TILE_TOKENS // self.page_size

    @property
    def stage_bytes(self) -> int:
        return self.pages_per_tile * self.layout.record_bytes

    @property
    def columns(self) -> int:
        """N of both matrix products: two terms of each head."""
        return 2 * self.heads

    @property
    def heads_per_thread(self) -> int:
        return self.heads // 4

    @cached_property
    def warpgroups(self) -> int:
        """Math warpgroups, each with a load warp."""
        if self.tile.math_warpgroups is not None:
            return self.tile.math_warpgroups
        most = 3 if self.heads_per_thread <= (1 if self.head_dim == 256 else 3) else 2
        need = 2 * self.stage_bytes + self.workspace_bytes
        return max(1, min(most, (SHARED_BYTES - STATIC_BYTES) // need))

    @property
    def query_bytes(self) -> int:
        """Q^T, once per unit of a K with parameters per channel."""
        return self.columns * self.head_dim * folds.query_operands(self)

    @property
    def value_bytes(self) -> int:
        """The query as float32, which a K with parameters per channel needs again for every unit."""
        return 4 * self.heads * self.head_dim if folds.k_side(self).channel else 0

    @property
    def prob_columns(self) -> int:
        """N of P V: the columns of one operand."""
        return self.columns * folds.prob_shape(self)[0]

    @property
    def prob_bytes(self) -> int:
        return self.prob_columns * TILE_TOKENS * folds.prob_shape(self)[1]

    @property
    def param_bytes(self) -> int:
        """Per math warpgroup: the float32 per token of a tile."""
        return 4 * folds.token_values(self) * TILE_TOKENS

    @property
    def reduce_bytes(self) -> int:
        """Per math warpgroup: maxima, sums and offsets of four warps, pairs of query factors, for every head."""
        return 4 * self.heads * ((2 + folds.offset_slots(self)) * 4 + 2 * folds.factor_pairs(self))

    @property
    def workspace_bytes(self) -> int:
        """Shared memory of one math warpgroup besides its stages."""
        return self.query_bytes + self.value_bytes + self.prob_bytes + self.param_bytes + self.reduce_bytes

    @cached_property
    def stages(self) -> int:
        t = self.tile
        if t.kv_stages is not None:
            return t.kv_stages
        room = SHARED_BYTES - STATIC_BYTES - self.warpgroups * self.workspace_bytes
        return min(t.MAX_STAGES, room // (self.warpgroups * self.stage_bytes))

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def launch_registers(self) -> int:
        """Registers of a thread at launch, as ptxas chooses them: the SM's, shared by one CTA's threads."""
        return min(REGISTERS // self.threads // 8 * 8, 240)

    @property
    def math_registers(self) -> int:
        t = self.tile
        if t.math_registers is not None:
            return t.math_registers
        pool = self.launch_registers * self.threads // 128
        return min((pool - t.load_registers) // self.warpgroups // 8 * 8, 240)

    def check(self) -> None:
        """Raise :class:`ConfigError` with the arithmetic where the configuration does not fit the SM."""
        t = self.tile
        w = self.warpgroups
        if w not in (1, 2, 3):
            raise ConfigError(f"math_warpgroups must be 1, 2 or 3 (one load warp each), not {w}")
        shared = w * (self.stages * self.stage_bytes + self.workspace_bytes) + STATIC_BYTES
        if self.stages < 2 or shared > SHARED_BYTES:
            raise ConfigError(
                f"shared memory: {w} warpgroups x ({self.stages} stages x {self.stage_bytes} B + "
                f"{self.workspace_bytes} B) + {STATIC_BYTES} B = {shared} B; at least 2 stages and at most "
                f"{SHARED_BYTES} B fit"
            )
        for name, r in (("math_registers", self.math_registers), ("load_registers", t.load_registers)):
            if r % 8 or not 24 <= r <= 240:
                raise ConfigError(f"{name} must be a multiple of 8 from 24 to 240, not {r}")
        if not t.load_registers <= self.launch_registers <= self.math_registers:
            raise ConfigError(
                f"registers: the launch gives {self.threads} threads min({REGISTERS} / {self.threads}, 240) = "
                f"{self.launch_registers} each; load_registers ({t.load_registers}) must not exceed that, "
                f"math_registers ({self.math_registers}) not be below it: setmaxnreg lowers the one, raises the other"
            )
        pool, need = self.launch_registers * self.threads, 128 * (w * self.math_registers + t.load_registers)
        if need > pool:
            raise ConfigError(
                f"registers: 128 x ({w} x {self.math_registers} + {t.load_registers}) = {need}, but the launch gives "
                f"{self.threads} threads x {self.launch_registers} = {pool}: the kernel would wait for ever"
            )

    def describe(self) -> str:
        """The arithmetic of :meth:`check` as text."""
        w = self.warpgroups
        shared = w * (self.stages * self.stage_bytes + self.workspace_bytes) + STATIC_BYTES
        return (
            f"{w} math warpgroups x {self.stages} stages x {self.stage_bytes} B "
            f"({w * self.stages * self.stage_bytes >> 10} KiB in flight per SM), {shared} of {SHARED_BYTES} B shared, "
            f"{self.math_registers}/{self.tile.load_registers} registers, "
            f"{self.layout.record_bytes} B per (page, head), {self.layout.bytes_per_token:g} B per token and KV head"
        )
