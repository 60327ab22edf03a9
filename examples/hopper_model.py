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

from count_instructions import MissingTool, configs, find_nvdisasm, loop_of

import foscar
from foscar.hopper.config import TILE_TOKENS, DecodeConfig

# H200: 132 SMs, at the clock of a burst of tensor work; a read reaches 4.65 TB/s.
SMS, CLOCK, HBM = 132, 1.78e9, 4.65e12
SHARED = 128  # bytes a clock of one SM
RS_CYCLES = {8: 13.1, 16: 13.1, 24: 13.1, 32: 16.1}  # of an SM for a wgmma of 64 x N x 32 with A in registers
ALU_CYCLES, FMA_CYCLES, MUFU_CYCLES = 2, 1, 8  # of a warp's instruction: 16, 32 and 4 lanes a clock of a scheduler
WIDTH = {"32": 4, "64": 8, "128": 16}  # bytes of a lane in a shared load or store, by its suffix


@dataclass(frozen=True)
class Tile:
    """Cycles of a tile on each resource; a math warpgroup has one warp on each of the SM's four schedulers."""

    hbm: float
    shared: float
    tensor_cores: float
    issue: float
    alu: float
    fma: float
    mufu: float

    @property
    def binding(self) -> str:
        return max(vars(self), key=lambda name: getattr(self, name))

    @property
    def cycles(self) -> float:
        return max(vars(self).values())


def tile(config: DecodeConfig) -> Tile:
    loop = loop_of(config)
    counts = loop.counts()
    shared = float(config.stage_bytes)  # written by bulk copies; then every warp's loads and stores, the B operands
    for text in loop.instructions:
        op = text.split()[0].split(".")
        if op[0] in ("LDS", "STS"):
            shared += 4 * 32 * WIDTH.get(op[-1], 4)
    shared += counts["wgmma"] * 32 * config.columns
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
    problems = json.loads(path.read_text())["problems"]
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
    try:
        find_nvdisasm()
    except MissingTool as e:
        raise SystemExit(str(e)) from None
    found = measured(options.json) if options.json else {}
    names = list(Tile.__dataclass_fields__)
    print(f"| cycles of {TILE_TOKENS} tokens | {' | '.join(names)} | binds | bound, GB/s | measured |")
    print("|---" * (len(names) + 4) + "|")
    for name, config in configs().items():
        t = tile(config)
        got = found.get((name.split()[0], config.heads))
        cells = [f"{getattr(t, n):.0f}" for n in names]
        text = f"{got:.0f} ({got / bandwidth(config, t.cycles):.0%})" if got else "-"
        print(f"| {name} | {' | '.join(cells)} | {t.binding} | {bandwidth(config, t.cycles):.0f} | {text} |")


if __name__ == "__main__":
    try:
        main()
    except (foscar.MissingDependencyError, foscar.CompileError) as e:
        raise SystemExit(str(e)) from None
