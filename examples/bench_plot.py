"""Bandwidth against context, from what ``bench_decode.py --json`` wrote.

    python examples/bench_plot.py bench.json bench.png

One panel per head configuration: bytes of cache per second over batch x length for every format and peer, and as
dashed lines the pure reads of as many bytes in the same run.  Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict


def series(report: dict) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """{heads: {row name: [(tokens, GB/s), ...]}}, tokens ascending."""
    panels: dict = defaultdict(lambda: defaultdict(list))
    for problem in report["problems"]:
        heads = f"{problem['q_heads']} query / {problem['kv_heads']} KV heads"
        for row in problem["rows"]:
            if "gbps" in row:
                panels[heads][row["name"]].append((problem["batch"] * problem["length"], row["gbps"]))
    return {heads: {name: sorted(points) for name, points in rows.items()} for heads, rows in panels.items()}


def main(source: str, target: str) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("bench_plot.py needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    try:
        with open(source) as f:
            report = json.load(f)
        panels = series(report)
    except (OSError, ValueError, LookupError) as e:
        raise SystemExit(f"{source} is not what bench_decode.py --json writes: {e}") from None
    if not panels:
        raise SystemExit(f"{source} holds no measurements")
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), sharey=True, squeeze=False)
    for axis, (heads, rows) in zip(axes[0], panels.items(), strict=True):
        for name, points in rows.items():
            read = name.startswith("read")
            axis.plot(*zip(*points, strict=True), "--" if read else "o-", label=name, alpha=0.6 if read else 1.0)
        axis.set(xscale="log", xlabel="tokens (batch x length)", title=heads)
        axis.grid(alpha=0.3)
    axes[0][0].set(ylabel="GB/s of cache bytes", ylim=(0, None))
    axes[0][-1].legend(fontsize=7)
    figure.suptitle(report["gpu"])
    figure.tight_layout()
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
