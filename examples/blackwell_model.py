"""Where a B200 should bind the Blackwell kernel: cycles of one 128-token tile on every resource of an SM.

    python examples/blackwell_model.py           the table (markdown), from the SASS counts and the ledgers

A model, not a measurement: resources overlap perfectly, latencies are hidden, waits cost one try.  ``of 8 TB/s`` is the
HBM column over the largest one; ``over BF16`` what the largest column comes to over a BF16 cache read at the memory's
full speed; ``published`` the measured speed-up over FlashInfer's BF16, and the cycles of a tile that is, were that BF16
read at full speed.  docs/performance.md has the table; tests/test_blackwell_sass.py compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

from count_blackwell import TILES, all_configs, counts_of, loops_of
from count_instructions import find_nvdisasm, run
from model_table import ALU_CYCLES, FMA_CYCLES, MUFU_CYCLES, Resources, shared_access, table

from foscar.blackwell.config import ROLES, TILE_TOKENS, DecodeConfig
from foscar.hopper import folds

# B200: 148 SMs at 1.965 GHz, 8 TB/s (2.39 times an H100's 3.35 TB/s, with 11 % more issue slots).
SMS, CLOCK, HBM = 148, 1.965e9, 8.0e12
SHARED = 128  # bytes a clock of one SM
TENSOR_MEMORY = 4 * 128  # bytes a clock of one SM: every quarter of 32 lanes gives or takes 4 bytes a lane (assumed)
MMA_BYTES = 256  # of A a clock: what a tcgen05.mma of small N is assumed to be bound by, whatever its type
# The published speed-ups over FlashInfer's BF16 on a B200, geometric means.
PUBLISHED = {"int2": 2.67, "int4": 2.30}


@dataclass(frozen=True)
class Tile(Resources):
    """Cycles of a tile on each resource, the busiest scheduler's where there are four."""

    hbm: float
    shared: float
    tensor_memory: float
    tensor_cores: float
    issue: float
    integer: float
    fma: float
    mufu: float

    @property
    def fraction(self) -> float:
        return self.hbm / self.cycles


def _shared_bytes(config: DecodeConfig, loops: dict) -> float:
    """Bulk copies in, loads and stores of all warps (no broadcast counted), B operands read by the tensor cores."""
    total = float(config.tile_bytes)
    for role, loop in loops.items():
        total += shared_access(loop.instructions) * ROLES[role] / TILES[role]
    return total + config.columns * (_k_bytes(config) * _k_products(config) + TILE_TOKENS)


def _k_bytes(config: DecodeConfig) -> float:
    """Of one token's codes, or one column of Q, as an operand."""
    return config.head_dim / (2 if config.digit_steps else 1)


def _k_products(config: DecodeConfig) -> int:
    """How often K is multiplied: with every digit of a term of Q, or every pair of terms, of every unit's Q."""
    return (config.digit_steps or config.byte_steps) * folds.k_side(config).units


def tile(config: DecodeConfig) -> Tile:
    loops = loops_of(config)
    counts = counts_of(loops)

    def busiest(key: str) -> float:
        """Wide roles have a warp on every scheduler; load, mma and both query warps sit on different ones."""
        wide = sum(c[key] for role, c in counts.items() if ROLES[role] == 4)
        return wide + max(c[key] for role, c in counts.items() if ROLES[role] < 4)

    k, v = TILE_TOKENS * _k_bytes(config), TILE_TOKENS * config.head_dim  # bytes of the unpacked operands
    read = k * _k_products(config) + v  # by the tensor cores
    # Scores of every unit are written, a warp's own read; products with V written and read.
    sums = 4 * TILE_TOKENS * config.columns * (folds.k_side(config).units + 1 + 2 * folds.v_side(config).units)
    per_sm = HBM / SMS / CLOCK
    return Tile(
        hbm=config.tile_bytes / per_sm,
        shared=_shared_bytes(config, loops) / SHARED,
        tensor_memory=(k + v + read + sums) / TENSOR_MEMORY,
        tensor_cores=read / MMA_BYTES,
        issue=busiest("total"),
        integer=busiest("alu") * ALU_CYCLES,
        fma=busiest("fma") * FMA_CYCLES,
        mufu=busiest("mufu") * MUFU_CYCLES,
    )


def row(name: str, config: DecodeConfig) -> tuple[str, Tile, tuple[str, ...]]:
    t = tile(config)
    bf16 = t.hbm * 4 * config.head_dim / config.layout.bytes_per_token
    speed_up = PUBLISHED.get(name.split()[0])
    published = f"{speed_up:.2f}, {bf16 / speed_up:.0f} cycles" if speed_up else ""
    return name, t, (f"{t.fraction:.0%}", f"{bf16 / t.cycles:.2f}", published)


def model() -> str:
    """The table."""
    rows = (row(name, config) for name, config in all_configs().items())
    return table("cycles of 128 tokens", Tile, ("of 8 TB/s", "over BF16", "published"), rows)


def main() -> None:
    find_nvdisasm()  # before anything is compiled
    print(model())


if __name__ == "__main__":
    run(main)
