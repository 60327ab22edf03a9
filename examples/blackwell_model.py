"""Where a B200 should bind the Blackwell kernel: cycles of one 128-token tile on every resource of an SM.

    python examples/blackwell_model.py           the table (markdown), from the SASS counts and the ledgers

A model, not a measurement: resources overlap perfectly, latencies are hidden, waits cost one try.  The fraction of the
memory's speed is the HBM column over the largest one.
"""

from __future__ import annotations

from dataclasses import dataclass

from count_blackwell import TILES, counts_of, loops_of
from count_instructions import configs, find_nvdisasm, run
from model_table import ALU_CYCLES, FMA_CYCLES, MUFU_CYCLES, Resources, print_table, shared_access

from foscar.blackwell.config import ROLES, TILE_TOKENS, DecodeConfig

# B200: 148 SMs at 1.965 GHz, 8 TB/s (2.39 times an H100's 3.35 TB/s, with 11 % more issue slots).
SMS, CLOCK, HBM = 148, 1.965e9, 8.0e12
SHARED = 128  # bytes a clock of one SM
TENSOR_MEMORY = 4 * 128  # bytes a clock of one SM: every quarter of 32 lanes gives or takes 4 bytes a lane (assumed)
MMA_BYTES = 256  # of A a clock: what a tcgen05.mma of small N is assumed to be bound by
# Bytes of BF16 per token against ours, and the published speed-ups over FlashInfer's BF16 on a B200.
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
    total = float(config.stage_bytes)
    for role, loop in loops.items():
        total += shared_access(loop.instructions) * ROLES[role] / TILES.get(role, 1)
    return total + config.columns * (config.head_dim + TILE_TOKENS)


def tile(config: DecodeConfig) -> Tile:
    loops = loops_of(config)
    counts = counts_of(loops)

    def busiest(key: str) -> float:
        """Wide roles have a warp on every scheduler; load and mma sit on different ones."""
        wide = sum(c[key] for role, c in counts.items() if ROLES[role] == 4)
        return wide + max(c[key] for role, c in counts.items() if ROLES[role] < 4)

    codes = TILE_TOKENS * config.head_dim  # bytes of one unpacked operand
    sums = 4 * TILE_TOKENS * config.columns
    per_sm = HBM / SMS / CLOCK
    return Tile(
        hbm=config.stage_bytes / per_sm,
        shared=_shared_bytes(config, loops) / SHARED,
        tensor_memory=(2 * 2 * codes + 2 * 2 * sums) / TENSOR_MEMORY,
        tensor_cores=2 * codes / MMA_BYTES,
        issue=busiest("total"),
        integer=busiest("alu") * ALU_CYCLES,
        fma=busiest("fma") * FMA_CYCLES,
        mufu=busiest("mufu") * MUFU_CYCLES,
    )


def main() -> None:
    find_nvdisasm()  # before anything is compiled

    def row(name: str, config: DecodeConfig) -> tuple[str, Tile, tuple[str, str]]:
        t = tile(config)
        bf16 = 4 * config.head_dim / config.layout.bytes_per_token
        return name, t, (f"{t.fraction:.0%}", f"{PUBLISHED[name.split()[0]] / bf16:.0%} of BF16's")

    rows = (row(name, config) for name, config in configs(DecodeConfig).items())
    print_table("kernel", Tile, ("of 8 TB/s", "published implies"), rows)


if __name__ == "__main__":
    run(main)
