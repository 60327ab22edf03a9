"""The Blackwell decode kernel's configuration; its canonical form is the compile key.

Field by field the same cache formats and shapes as Hopper's: a cache written once decodes on either architecture.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property

from ..common.config import ConfigError, check_problem, check_tile_fields
from ..common.errors import FormatError
from ..common.formats import KVFormat, RecordLayout
from ..common.plan import PLAIN, KernelOptions
from ..hopper import folds

ARCHS = ("sm_100a", "sm_103a")
TILE_TOKENS = 128  # M of Q K^T, the contraction of P V, and what has a maximum and is promoted to float32 alone
STEP_TILES = 2  # of one segment that roles hand over at once: waits and addresses cost as much as the work of a tile
STEP_TOKENS = STEP_TILES * TILE_TOKENS
SHARED_BYTES = 227 * 1024  # of one CTA
STATIC_BYTES = 1024 + 1024  # left to alignment and barriers
TENSOR_COLUMNS = 512
BUFFERS = 2  # of Q^T and sums; steps of P^T, accumulators and unpacked codes
STEP_BYTES = 32  # of an operand's row that one tcgen05.mma takes: tokens of P V
DIGIT_STEPS = 3  # operands of Q where K's codes are 4-bit operands: digits.py

# Warps of a CTA, in order; groups of four begin at a multiple of four, because a warp reaches the 32 lanes of tensor
# memory that its number modulo four says.
ROLES = {"load": 1, "mma": 1, "query": 2, "unpack": 4, "softmax": 4, "correct": 4}
THREADS = 32 * sum(ROLES.values())


def first_warp(role: str) -> int:
    names = list(ROLES)
    return sum(ROLES[name] for name in names[: names.index(role)])


@dataclass(frozen=True)
class TileConfig:
    """What may be tuned without changing any result."""

    kv_stages: int | None = None  # of STEP_TOKENS tokens in flight; None: as many as fit, at most MAX_STAGES

    MAX_STAGES = 12

    def __post_init__(self) -> None:
        check_tile_fields(self)


def check_folds(config: DecodeConfig) -> None:
    """Raise :class:`FormatError` where the format has groups that the kernel has no stages for."""
    for name in ("k", "v"):
        f, group = getattr(config.format, name), getattr(config.layout, f"{name}_group")
        what = f"the Blackwell kernel takes {name.upper()}"
        if f.axis == "channel" and group % STEP_BYTES:
            raise FormatError(f"{what} per channel in groups of {STEP_BYTES} tokens or multiples of it, not {group}")
        if f.axis == "token" and group != config.head_dim:
            one = f"{what} quantized per token with one group of head_dim channels"
            raise FormatError(f"{one}, not axis 'token' with groups of {group}")


OPTIONS = ("window", "soft_cap", "wide_cap", "sinks", "out_scale", "rows")  # those that the kernel has


def check_options(config: DecodeConfig) -> None:
    """Raise :class:`FormatError` where there is an option that the kernel does not have."""
    if not isinstance(config.options, KernelOptions):
        raise TypeError(f"options must be KernelOptions, not {type(config.options).__name__}")
    refused = [f.name for f in fields(config.options) if getattr(config.options, f.name) and f.name not in OPTIONS]
    if refused:
        raise FormatError(f"the Blackwell kernel has the options {', '.join(OPTIONS)}, not {', '.join(refused)}")
    if config.options.window and (not folds.k_side(config).plain or folds.v_side(config).channel):
        # Pages before a window are not loaded: parameters that other tokens share may be missing.
        raise FormatError(
            f"the Blackwell kernel takes a window with K per token in one group and V per token, "
            f"not with {config.format.name}; backend='torch' takes both"
        )


@dataclass(frozen=True)
class DecodeConfig:
    """One decode kernel.

    Args:
        format: the cache's format; per token with one group of head_dim channels, per channel with groups of 32 tokens
            or multiples of it.
        head_dim: 64 or 128.
        page_size: tokens per page: 16, 32, 64 or 128.
        heads: query heads per KV head that the kernel has room for: 4, 8, 12 or 16.
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
        check_problem("Blackwell", self, folds=True)
        check_folds(self)
        if not isinstance(self.tile, TileConfig):
            raise TypeError(f"tile must be a foscar.blackwell.config.TileConfig, not {type(self.tile).__name__}")
        check_options(self)
        self.check()

    # ---- derived sizes
    @cached_property
    def layout(self) -> RecordLayout:
        return self.format.layout(self.head_dim, self.page_size)

    @property
    def warpgroups(self) -> int:
        """Workers of a CTA: the roles share one range of tiles."""
        return 1

    @property
    def pages_per_tile(self) -> int:
        return TILE_TOKENS // self.page_size

    @property
    def tile_bytes(self) -> int:
        """Of a tile in the ring."""
        return self.pages_per_tile * self.layout.record_bytes

    @property
    def stage_bytes(self) -> int:
        return STEP_TILES * self.tile_bytes

    @property
    def heads_per_thread(self) -> int:
        return self.heads // 4

    @property
    def columns(self) -> int:
        """N of both products: two terms of each head, in steps of 16 (M = 128); the rest is never read."""
        return -(-2 * self.heads // 16) * 16

    @property
    def load_columns(self) -> int:
        """Columns of an accumulator that a thread's heads lie in, in one tcgen05.ld: a power of two."""
        return 8 << (self.heads_per_thread - 1).bit_length()

    @property
    def digit_steps(self) -> int:
        """Operands of Q: its digits, where K's codes are 4-bit operands (digits.py); 0: K in bytes, Q in e4m3."""
        return DIGIT_STEPS if self.format.k.bits == 2 else 0

    @property
    def query_operands(self) -> int:
        """Q^T of one buffer: of an item, or with K per channel of every unit of a step."""
        k = folds.k_side(self)
        return STEP_TILES * k.units if k.channel else 1

    @property
    def byte_steps(self) -> int:
        """Operands of Q in e4m3, of two terms per element each: one holds a bfloat16, but no float16 and no Q'."""
        if self.digit_steps:
            return 0
        return 1 + (folds.k_side(self).channel or self.q_dtype == "float16")

    @property
    def query_bytes(self) -> int:
        """Of one Q^T."""
        return self.columns * self.head_dim * (self.digit_steps or 2 * self.byte_steps) // 2

    @property
    def prob_bytes(self) -> int:
        """Of a tile."""
        return self.columns * TILE_TOKENS

    @property
    def ring_readers(self) -> tuple[str, ...]:
        """Roles that read parameters per channel from the ring."""
        return ("query",) * folds.k_side(self).channel + ("correct",) * folds.v_side(self).channel

    @property
    def param_bytes(self) -> int:
        """float32 of the tokens of a step: five each where both sides are per token, at least one."""
        return 4 * max(1, folds.token_values(self)) * STEP_TOKENS

    @property
    def reduce_bytes(self) -> int:
        """Of one buffer: per head maxima (with V per channel: and sums) of each tile, sums, offsets of four warps, two
        numbers of every query; the item's tiles."""
        of_tiles = STEP_TILES * (2 if folds.v_side(self).channel else 1)
        return 4 * self.heads * ((of_tiles + 2) * 4 + 2 * self.query_operands) + 16

    @property
    def workspace_bytes(self) -> int:
        """Shared memory besides the stages."""
        probs = STEP_TILES * self.prob_bytes
        return BUFFERS * (self.query_operands * self.query_bytes + probs + self.reduce_bytes) + self.param_bytes

    @cached_property
    def stages(self) -> int:
        t = self.tile
        if t.kv_stages is not None:
            return t.kv_stages
        return min(t.MAX_STAGES, (SHARED_BYTES - STATIC_BYTES - self.workspace_bytes) // self.stage_bytes)

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self.workspace_bytes + STATIC_BYTES

    def check(self) -> None:
        """Raise :class:`ConfigError` with the arithmetic where the configuration does not fit the SM."""
        from .tmem import TensorLedger  # it takes this module's constants

        TensorLedger(self).check()
        if self.stages < 2 or self.shared_bytes > SHARED_BYTES:
            raise ConfigError(f"{self.describe()}: at least 2 stages and at most {SHARED_BYTES} B fit")

    def describe(self) -> str:
        return (
            f"shared memory: {self.stages} stages x {self.stage_bytes} B + {self.workspace_bytes} B + "
            f"{STATIC_BYTES} B = {self.shared_bytes} B"
        )
