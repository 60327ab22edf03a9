"""Decode attention over packed caches against BF16 and FP8 peers, cold cache, one table.

    python examples/bench_decode.py
    python examples/bench_decode.py --grid --json bench.json
    python examples/bench_decode.py --shapes 16x16384,63x512+1x131072 --heads 32:8 --formats int2,k2v4 --set kv_stages=3

Every kernel reads copies of its cache in turn, so that no byte is still in L2 when it is read again.  A call's time is
that of a CUDA-graph replay divided by the calls in it; the table shows the median over replays, the bytes of K and V
(parameters included) per second, the speed against FlashInfer BF16 (where missing: the faster SDPA), and the relative
error against float64 attention over the same dequantized cache, beside that of the usual route (dequantize to BF16).
Without a supported GPU it runs one small shape on the CPU backend.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import statistics
import traceback
from collections.abc import Callable
from importlib import metadata

import bench_support as bs
import torch
from bench_table import show, summary

import foscar
from foscar import aot
from foscar.common.launch import device_arch
from foscar.common.reference import relative_error
from foscar.hopper.config import ARCH, DecodeConfig

BASELINES = ("flashinfer-bf16", "sdpa-cudnn-bf16", "sdpa-flash-bf16")
PEERS: dict[str, Callable[[bs.Problem], bs.Bench]] = {
    "flashinfer-bf16": bs.flashinfer_bench,
    "sdpa-cudnn-bf16": lambda p: bs.sdpa_bench(p, "CUDNN_ATTENTION"),
    "sdpa-flash-bf16": lambda p: bs.sdpa_bench(p, "FLASH_ATTENTION"),
    "trtllm-xqa-fp8": bs.xqa_bench,
}


GRID_HEADS = "32:8,40:8,64:8,8:1"
GRID_SHAPES = "1x32768,1x131072,4x32768,8x32768,16x16384,32x8192,64x8192,128x4096,64x32768"


class Lost(RuntimeError):
    """The device takes no more work."""


def parse_format(text: str) -> foscar.KVFormat:
    """ "int2", "int4" or "k2v4"."""
    match = re.fullmatch(r"int([24])|k([24])v([24])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"a format is int2, int4 or such as k2v4, not {text!r}")
    both, k, v = match.groups()
    return foscar.KVFormat.make(int(both or k), int(both or v))


def parse_tile(settings: list[str]) -> foscar.TileConfig:
    """The tile config with ``name=value`` overrides."""
    try:
        return foscar.TileConfig(**aot.knobs_of(foscar.TileConfig, settings))
    except foscar.ConfigError as e:
        raise SystemExit(f"--set: {e}") from None
    except ValueError as e:
        raise SystemExit(str(e)) from None


def check_tile(tile: foscar.TileConfig, formats: dict[str, foscar.KVFormat], args: argparse.Namespace) -> None:
    """End in one line where the tile config does not fit the SM."""
    for fmt, (q_heads, kv_heads) in itertools.product(formats.values(), args.heads):
        try:
            DecodeConfig(fmt, args.head_dim, args.page, -(-q_heads // kv_heads // 4) * 4, tile=tile)
        except foscar.ConfigError as e:
            raise SystemExit(f"--set: {e}") from None
        except foscar.FormatError:
            pass  # there is no kernel for this shape; its row will say so


def pairs(separator: str) -> Callable[[str], list[tuple[int, int]]]:
    """A parser of "32:8,8:1" and the like."""

    def parse(text: str) -> list[tuple[int, int]]:
        found = [re.fullmatch(rf"([1-9]\d*){separator}([1-9]\d*)", part) for part in text.split(",")]
        if not all(found):
            raise argparse.ArgumentTypeError(f"expected a list such as 16{separator}8, not {text!r}")
        return [(int(m[1]), int(m[2])) for m in found]

    return parse


def batches(text: str) -> list[tuple[int, ...]]:
    """The lengths of every batch of "16x16384,63x512+1x131072"."""
    parts = [pairs("x")(part.replace("+", ",")) for part in text.split(",")]
    return [tuple(n for count, n in part for _ in range(count)) for part in parts]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", type=batches, default="16x16384,1x131072,64x8192", help="batch x length [+ ...], ..."
    )
    parser.add_argument("--heads", type=pairs(":"), default="32:8", help="query heads : KV heads, ...")
    parser.add_argument(
        "--grid", action="store_true", help="instead of shapes and heads: the 36 of docs/performance.md"
    )
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--formats", default="int2,int4,k2v4", help="int2, int4, k2v4, k4v2")
    parser.add_argument("--peers", nargs="?", const=",".join(PEERS), default=",".join(PEERS), help="which, or none")
    parser.add_argument("--reps", type=int, default=20, help="graph replays per row")
    parser.add_argument(
        "--sustain", type=float, default=0, metavar="SECONDS", help="also replay for so long: GB/s then"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="override the tile config")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    args = parser.parse_args()
    if args.grid:
        args.shapes, args.heads = batches(GRID_SHAPES), pairs(":")(GRID_HEADS)
    return args


def errors(bench: bs.Bench, batch: int) -> dict[str, float]:
    """Relative errors of the first and last request: the row's own, and the BF16 route's where there is one."""
    bench.calls[0]()
    picked = sorted({0, batch - 1})
    truth = torch.stack([bench.truth(b) for b in picked])
    result = {"error": relative_error(bench.out()[picked], truth)}
    if bench.usual is not None:
        result["error_bf16"] = relative_error(torch.stack([bench.usual(b) for b in picked]), truth)
    return result


def measure(bench: bs.Bench, reps: int, sustain: float = 0) -> dict[str, float]:
    """Median, fastest and slowest microseconds of a call, from ``reps`` replays of a graph that walks the copies.

    ``sustain``: then so many seconds of replays, as ``us_sustained``: the clock falls under a steady load.
    """
    per_graph = len(bench.calls) * -(-16 // len(bench.calls))  # the gap between replays is shared by 16 calls or more
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in bench.calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for i in range(per_graph):
            bench.calls[i % len(bench.calls)]()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(reps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 / per_graph for a, b in zip(marks, marks[1:], strict=False)]
    found = {"us": statistics.median(times), "us_min": min(times), "us_max": max(times), "copies": len(bench.calls)}
    if sustain:
        replays = max(1, round(sustain * 1e6 / (found["us"] * per_graph)))
        marks[0].record()
        for _ in range(replays):
            graph.replay()
        marks[1].record()
        torch.cuda.synchronize()
        found["us_sustained"] = marks[0].elapsed_time(marks[1]) * 1e3 / replays / per_graph
    return found


def row_of(name: str, make: Callable[[], bs.Bench], problem: bs.Problem, reps: int, sustain: float = 0) -> dict:
    """Measure one row; whatever goes wrong ends up in it.

    Raises:
        Lost: the failure took the device along.
    """
    row: dict = {"name": name}
    try:
        bench = make()
        row["bytes"] = bench.nbytes
        if bench.truth is not None:
            row |= errors(bench, problem.batch)
        row |= measure(bench, reps, sustain)
        row["gbps"] = bench.nbytes / row["us"] / 1e3
        if sustain:
            row["gbps_sustained"] = bench.nbytes / row["us_sustained"] / 1e3
    except bs.Skip as e:
        row["skipped"] = str(e)
    except ImportError as e:
        row["skipped"] = f"not installed: {e}"
    except Exception as e:
        row["failed"] = f"{type(e).__name__}: {e}".splitlines()[0][:300]
        row["trace"] = traceback.format_exc()
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            raise Lost(f"{name}: {row['failed']}; the device is lost: {str(lost).splitlines()[0]}") from e
    finally:
        bench = None
        torch.cuda.empty_cache()
    return row


def rows_of(
    problem: bs.Problem, formats: dict[str, foscar.KVFormat], tile: foscar.TileConfig | None, args: argparse.Namespace
) -> list[dict]:
    """All rows of one problem, with their speed against the baseline."""
    jobs = {f"read {name}": lambda f=f: bs.read_bench(problem, f) for name, f in formats.items()}
    jobs |= {f"foscar {name}": lambda f=f: bs.foscar_bench(problem, f, tile, "cuda") for name, f in formats.items()}
    wanted = [p for p in args.peers.split(",") if p not in ("", "none")]
    if unknown := [p for p in wanted if p not in PEERS]:
        raise SystemExit(f"no peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    jobs |= {name: lambda f=PEERS[name]: f(problem) for name in wanted}
    rows = [row_of(name, make, problem, args.reps, args.sustain) for name, make in jobs.items()]
    times = {r["name"]: r["us"] for r in rows if "us" in r}
    baseline = BASELINES[0] if BASELINES[0] in times else min(BASELINES, key=lambda n: times.get(n, float("inf")))
    for row in rows:
        if "us" in row and baseline in times:
            row |= {"ratio": times[baseline] / row["us"], "baseline": baseline}
    return rows


def on_cpu(reason: str, formats: dict[str, foscar.KVFormat]) -> None:
    """One small shape on the CPU backend, errors only."""
    print(f"{reason}\nOne small shape on the CPU backend instead; times would say nothing.")
    problem = bs.Problem(2, 300, 8, 2, 128, 64, torch.device("cpu"))
    rows = []
    for name, fmt in formats.items():
        bench = bs.foscar_bench(problem, fmt, None, "torch")
        rows.append({"name": f"foscar {name}", "bytes": bench.nbytes} | errors(bench, problem.batch))
    show(problem, rows)


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in ("torch", "triton", "flashinfer-python", "nvidia-cutlass-dsl", "cuda-python"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def main() -> int:
    args = arguments()
    try:
        formats = {name: parse_format(name) for name in args.formats.split(",")}
    except argparse.ArgumentTypeError as e:
        raise SystemExit(f"--formats: {e}") from None
    tile = parse_tile(args.set)
    check_tile(tile, formats, args)
    try:
        arch = device_arch()
    except foscar.UnsupportedDeviceError as e:
        on_cpu(str(e), formats)
        if args.json:
            print(f"{args.json} was not written: there is nothing measured.")
        return 0
    gpu = torch.cuda.get_device_name()
    print(f"{gpu} ({arch}), {tile}, {', '.join(f'{k} {v}' for k, v in versions().items() if v)}")
    if arch != ARCH and not args.set:
        tile = None  # the other kernel's own default
    knobs = None if tile is None else dataclasses.asdict(tile)
    report: dict = {"gpu": gpu, "tile": knobs, "versions": versions(), "problems": []}
    device, failed = torch.device("cuda", torch.cuda.current_device()), False
    try:
        for q_heads, kv_heads in args.heads:
            for lengths in args.shapes:
                ragged = lengths if len(set(lengths)) > 1 else ()
                problem = bs.Problem(
                    len(lengths), max(lengths), q_heads, kv_heads, args.head_dim, args.page, device, ragged
                )
                rows = rows_of(problem, formats, tile, args)
                show(problem, rows)
                failed |= any("failed" in r and r["name"].startswith("foscar") for r in rows)
                shape = {k: v for k, v in dataclasses.asdict(problem).items() if k != "device"}
                report["problems"].append(shape | {"rows": rows})
    except Lost as e:
        print(f"stopped: {e}")
        failed = True
    finally:
        summary(report["problems"], PEERS)
        if args.json:
            with open(args.json, "w") as f:
                json.dump(report, f, indent=1)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
