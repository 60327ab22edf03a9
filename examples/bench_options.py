"""What folds and options of a decode cost against the plain one: INT2, cold cache, one table.

    python examples/bench_options.py
    python examples/bench_options.py --shape 64x8192 --heads 64:8

Every row is a kernel of its own over caches of the same bytes of codes; times as in bench_decode.py.  The error is that
of the first and last request against float64, beside the BF16 route's (rows without options).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import bench_support as bs
import torch
from bench_decode import batches, pairs, row_of

import foscar
from foscar.common.launch import device_arch

PLAIN = "plain: per token, one group"
MAKE = foscar.KVFormat.make
FORMATS = {
    PLAIN: MAKE(2),
    "K per channel, groups of 128 tokens": MAKE(2, k_axis="channel", k_group=128),
    "K per channel, 64": MAKE(2, k_axis="channel", k_group=64),
    "K per channel, 32": MAKE(2, k_axis="channel", k_group=32),
    "V per channel, 128": MAKE(2, v_axis="channel", v_group=128),
    "K and V per channel, 128": MAKE(2, k_axis="channel", v_axis="channel", k_group=128, v_group=128),
    "K and V per channel, 32": MAKE(2, k_axis="channel", v_axis="channel", k_group=32, v_group=32),
    "K per token, groups of 64 channels": MAKE(2, k_group=64),
    "K and V per token, 64": MAKE(2, k_group=64, v_group=64),
    "K and V per token, 32": MAKE(2, k_group=32, v_group=32),
}
OPTIONS = {
    "window of a quarter": {"window": 0.25},
    "soft-cap 30": {"soft_cap": 30.0},
    "output scale": {"out_scale": 0.5},
    "sinks": {"sinks": True},
    "all of them": {"window": 1.0, "soft_cap": 30.0, "out_scale": 0.5, "sinks": True},
    "2 query tokens": {"q_len": 2},
    "4 query tokens": {"q_len": 4},
}


def option_bench(problem: bs.Problem, window: float = 0, q_len: int = 1, sinks: bool = False, **options) -> bs.Bench:
    """The plain format with options; ``window`` as a part of the length."""
    fmt = FORMATS[PLAIN]
    if window:
        options["window"] = int(window * problem.length)
    layout = fmt.layout(problem.head_dim, problem.page)
    nbytes = problem.pages * problem.kv_heads * layout.record_bytes
    caches = bs.random_caches(problem, fmt, bs.copies_of(nbytes, problem.device))
    table, lengths = problem.tables()
    q = problem.query().repeat_interleave(q_len, 0)
    out = torch.empty_like(q)
    wrapper = foscar.BatchDecodeWithPagedKVCacheWrapper(problem.device)
    drafts = {}
    if q_len > 1:
        indptr = torch.arange(problem.batch + 1, dtype=torch.int32, device=problem.device) * q_len
        drafts = {"q_indptr": indptr, "max_q_len": q_len}
    wrapper.plan(
        num_qo_heads=problem.q_heads, num_kv_heads=problem.kv_heads, head_dim=problem.head_dim, format=fmt,
        page_size=problem.page, block_table=table, seq_lens=lengths, options=foscar.AttentionOptions(**options),
        has_sinks=sinks, **drafts,
    )  # fmt: skip
    logits = torch.zeros(problem.q_heads, device=problem.device) if sinks else None
    calls = [lambda c=c: wrapper.run(q, c, sinks=logits, out=out) for c in caches]
    return bs.Bench(calls, None, None, nbytes, keep=(caches,))


def windowed_bench(problem: bs.Problem) -> bs.Bench:
    """The plain format behind OSCAR's windows: as many tokens, 64 + 256 of them in 16 bits."""
    fmt, window, device = FORMATS[PLAIN], foscar.WindowConfig.oscar(), problem.device
    table, lengths = problem.tables()
    shape = (problem.pages, problem.page, problem.kv_heads, problem.head_dim, fmt)
    exact = 4 * problem.batch * (window.n_sink + window.n_recent) * problem.head_dim * problem.kv_heads
    nbytes = problem.pages * problem.kv_heads * fmt.layout(problem.head_dim, problem.page).record_bytes + exact
    caches = []
    for packed in bs.random_caches(problem, fmt, bs.copies_of(nbytes, device)):
        cache = foscar.WindowedKVCache(*shape, max_batch=problem.batch, window=window, device=device)
        cache.packed.data.copy_(packed.data)
        cache.packed_lens.fill_(max(0, problem.length - window.n_sink - window.n_recent))
        for x in (cache.sink_k, cache.sink_v, cache.recent_k, cache.recent_v):
            x.normal_()
        caches.append(cache)
    slots = torch.arange(problem.batch, dtype=torch.int32, device=device)
    q = problem.query()
    out = torch.empty_like(q)
    calls = [lambda c=c: foscar.decode_windowed(q, c, table, lengths, slots, out=out) for c in caches]
    return bs.Bench(calls, None, None, nbytes, keep=(caches,))


def jobs(problem: bs.Problem) -> dict[str, Callable[[], bs.Bench]]:
    found = {name: lambda f=f: bs.foscar_bench(problem, f, None, "cuda") for name, f in FORMATS.items()}
    found |= {name: lambda o=o: option_bench(problem, **o) for name, o in OPTIONS.items()}
    return found | {"windows of 64 + 256 in 16 bits": lambda: windowed_bench(problem)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=batches, default="16x16384", help="batch x length")
    parser.add_argument("--heads", type=pairs(":"), default="32:8", help="query heads : KV heads")
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    args = parser.parse_args()
    try:
        device_arch()
    except foscar.UnsupportedDeviceError as e:
        unwritten = f"; {args.json} was not written" if args.json else ""
        print(f"{e}\nTimes need a GPU; the folds and options themselves run on the CPU backend{unwritten}.")
        return 0
    (lengths,), ((q_heads, kv_heads),) = args.shape, args.heads
    device = torch.device("cuda", torch.cuda.current_device())
    problem = bs.Problem(len(lengths), max(lengths), q_heads, kv_heads, 128, 64, device)
    print(
        f"{torch.cuda.get_device_name()}: {len(lengths)} x {lengths[0]} tokens, {q_heads}:{kv_heads} heads of 128, INT2"
    )
    print(f"{'':38}{'median us':>10}{'GB/s':>7}{'time':>7}{'error':>10}{'BF16 route':>12}   time against plain")
    rows, failed = [], False
    for name, make in jobs(problem).items():
        row = row_of(name, make, problem, args.reps)
        rows.append(row)
        if "us" not in row:
            print(f"{name:38}{row.get('skipped') or row.get('failed')}")
            failed |= "failed" in row
            continue
        errors = "".join(f"{row[key]:{width}.1e}" for key, width in (("error", 10), ("error_bf16", 12)) if key in row)
        print(f"{name:38}{row['us']:10.1f}{row['gbps']:7.0f}{row['us'] / rows[0].get('us', row['us']):7.2f}{errors}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
