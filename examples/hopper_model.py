"""Where an H200 should bind the Hopper kernel: cycles of one 128-token tile on every resource of an SM.

    python examples/hopper_model.py                    the table (markdown), from the SASS counts; needs no GPU
    python examples/hopper_model.py --json bench.json  with what bench_decode.py measured at its largest shape beside it

A model, not a measurement: resources overlap perfectly and latencies are hidden, so it is a lower bound of the time.
The distance between it and a measurement is latency that the warps do not hide.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from count_instructions import configs, find_nvdisasm, loop_of, run
from model_table import ALU_CYCLES, FMA_CYCLES, MUFU_CYCLES, Resources, shared_access, table

from foscar.hopper.config import TILE_TOKENS, DecodeConfig

# H200: 132 SMs, at the clock of a burst of tensor work; a read reaches 4.65 TB/s.
SMS, CLOCK, HBM = 132, 1.78e9, 4.65e12
SHARED = 128  # bytes a clock of one SM
RS_CYCLES = {8: 13.1, 16: 13.1, 24: 13.1, 32: 16.1}  # of an SM for a wgmma of 64 x N x 32 with A in registers


@dataclass(frozen=True)
class Tile(Resources):
    """Cycles of a tile on each resource; a math warpgroup has one warp on each of the SM's four schedulers."""

    hbm: float
    shared: float
    tensor_cores: float
    issue: float
    alu: float
    fma: float
    mufu: float


def tile(config: DecodeConfig) -> Tile:
    loop = loop_of(config)
    counts = loop.counts()
    # written by bulk copies; then every warp's loads and stores, and the B operands
    shared = config.stage_bytes + 4 * shared_access(loop.instructions) + counts["wgmma"] * 32 * config.columns
    return Tile(
        hbm=config.stage_bytes / (HBM / SMS / CLOCK),
        shared=shared / SHARED,
        tensor_cores=counts["wgmma"] * RS_CYCLES[config.columns],
        issue=counts["total"],
        alu=counts["alu"] * ALU_CYCLES,
        fma=counts["fma"] * FMA_CYCLES,
        mufu=counts["mufu"] * MUFU_CYCLES,
    )


def bandwidth(config: DecodeConfig, cycles: float) -> float:
    """GB/s of cache bytes at so many cycles of an SM for a tile."""
    return config.stage_bytes * SMS * CLOCK / cycles / 1e9


def measured(path: Path) -> dict[tuple[str, int], float]:
    """GB/s by (format, query heads per KV head) of the problem with the most tokens."""
    try:
        problems = json.loads(path.read_text())["problems"]
    except (OSError, ValueError, LookupError) as e:
        raise SystemExit(f"--json: {path} is not what bench_decode.py writes: {e}") from None
    most = max(p["batch"] * p["length"] for p in problems)
    return {
        (row["name"].removeprefix("foscar "), p["q_heads"] // p["kv_heads"]): row["gbps"]
        for p in problems
        if p["batch"] * p["length"] == most
        for row in p["rows"]
        if row["name"].startswith("foscar ") and "gbps" in row
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="what bench_decode.py wrote")
    options = parser.parse_args()
    found = measured(options.json) if options.json else {}
    find_nvdisasm()  # before anything is compiled

    def row(name: str, config: DecodeConfig) -> tuple[str, Tile, tuple[str, str]]:
        t = tile(config)
        got, bound = found.get((name.split()[0], config.heads)), bandwidth(config, t.cycles)
        return name, t, (f"{bound:.0f}", f"{got:.0f} ({got / bound:.0%})" if got else "-")

    rows = (row(name, config) for name, config in configs().items())
    print(table(f"cycles of {TILE_TOKENS} tokens", Tile, ("bound, GB/s", "measured"), rows))


if __name__ == "__main__":
    run(main)
