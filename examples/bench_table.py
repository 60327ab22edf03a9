"""What bench_decode.py prints."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable

import bench_support as bs


def show(problem: bs.Problem, rows: list[dict]) -> None:
    """Print the table of one problem."""
    p = problem
    lengths = " + ".join(f"{n} x {length}" for length, n in Counter(p.lengths).items())
    print(f"\n{lengths} tokens, {p.q_heads}:{p.kv_heads} heads of {p.head_dim}, pages of {p.page}")
    baseline = next((r["baseline"] for r in rows if "baseline" in r), "-")
    print(f"{'':22}{'median us':>11}{'GB/s':>8}{'speed':>8}{'error':>10}{'BF16 route':>12}{'sustained':>11}"
          f"   speed against {baseline}")  # fmt: skip

    def cell(row: dict, key: str, form: str, width: int) -> str:
        return (format(row[key], form) if key in row else "-").rjust(width)

    for row in rows:
        text = row.get("skipped") or row.get("failed")
        if text:
            print(f"{row['name']:22}  {'skipped' if 'skipped' in row else 'FAILED'}: {text}")
            continue
        cells = (("us", ".1f", 11), ("gbps", ".0f", 8), ("ratio", ".2f", 8), ("error", ".1e", 10),
                 ("error_bf16", ".1e", 12), ("gbps_sustained", ".0f", 11))  # fmt: skip
        print(f"{row['name']:22}" + "".join(cell(row, *c) for c in cells))


def summary(problems: list[dict], peers: Iterable[str]) -> None:
    """Geometric means of the speed against each BF16 and FP8 peer, over the problems that have both rows."""
    means: dict[tuple[str, str], list[float]] = {}
    for problem in problems:
        times = {row["name"]: row["us"] for row in problem["rows"] if "us" in row}
        for mine, peer in itertools.product(
            [n for n in times if n.startswith("foscar ")], [n for n in times if n in peers]
        ):
            means.setdefault((mine, peer), []).append(times[peer] / times[mine])
    for (mine, peer), ratios in means.items():
        print(f"{mine} over {peer}: {statistics.geometric_mean(ratios):.2f} (geometric mean of {len(ratios)})")
