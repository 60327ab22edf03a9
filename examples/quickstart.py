"""The main job in seconds: K and V into 2- and 4-bit pages, one decode step from them, its error and its cost.

    python examples/quickstart.py

Runs the Hopper kernel where it can, the CPU backend elsewhere, and says which and why.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass

import torch

import foscar
from foscar.common.launch import device_arch
from foscar.common.reference import attention_bf16, attention_reference, relative_error
from foscar.hopper.config import ARCH

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
Q_TYPE = torch.float16  # of the output too: BF16's rounding would hide what differs
FORMATS = {"INT2": foscar.KVFormat.int2(), "INT4": foscar.KVFormat.int4()}
CPU_LENGTHS = (3000, 777, 1, 1300)
GPU_LENGTHS = (16384,) * 16


@dataclass
class Step:
    """One decode step: queries, and where the requests' tokens lie in the cache."""

    q: torch.Tensor
    cache: foscar.PagedKVCache
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    def request(self, b: int) -> tuple:
        """Request ``b`` alone, as the arguments of a decode."""
        return self.q[b : b + 1], self.cache, self.block_table[b : b + 1], self.seq_lens[b : b + 1]


def plan(wrapper: foscar.BatchDecodeWithPagedKVCacheWrapper, fmt: foscar.KVFormat, table, lengths) -> None:
    wrapper.plan(
        block_table=table, seq_lens=lengths, num_qo_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        page_size=PAGE, format=fmt, q_data_type=Q_TYPE,
    )  # fmt: skip


def choose_device() -> torch.device:
    """A GPU whose kernels can be had (compiled now if need be), else the CPU; says which."""
    try:
        arch = device_arch()
        if arch != ARCH:
            gpu = torch.cuda.get_device_name()
            raise foscar.UnsupportedDeviceError(f"{gpu} is {arch}; this example runs the proven kernel, {ARCH}")
        device = torch.device("cuda", torch.cuda.current_device())
        empty = torch.zeros(1, 1, dtype=torch.int32, device=device)
        for fmt in FORMATS.values():
            plan(foscar.BatchDecodeWithPagedKVCacheWrapper(), fmt, empty, empty[0])
    except foscar.UnsupportedDeviceError as e:
        print(f"no supported GPU: CPU backend\n  ({e})")
    except (foscar.CompileError, foscar.MissingDependencyError) as e:
        print(f"a supported GPU, but no kernel for it: CPU backend\n  ({e})")
    else:
        print(f"backend: the {ARCH} kernel on {torch.cuda.get_device_name()}")
        return device
    return torch.device("cpu")


def random_step(fmt: foscar.KVFormat, lengths: tuple[int, ...], device: torch.device) -> Step:
    """Random queries, and a cache filled with random K and V whose channels have means of their own."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    pages = [-(-n // PAGE) for n in lengths]
    cache = foscar.PagedKVCache(sum(pages), PAGE, KV_HEADS, HEAD_DIM, fmt, device)
    order = torch.randperm(sum(pages)).to(device, torch.int32)
    table = torch.full((len(lengths), max(pages)), -1, dtype=torch.int32, device=device)
    for b, row in enumerate(order.split(pages)):
        table[b, : len(row)] = row
    k_mean, v_mean = normal(KV_HEADS, HEAD_DIM), normal(KV_HEADS, HEAD_DIM) + 1
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    for b, n in enumerate(lengths):
        k, v = normal(n, KV_HEADS, HEAD_DIM) + k_mean, normal(n, KV_HEADS, HEAD_DIM) + v_mean
        rows = torch.tensor([0, n], dtype=torch.int32, device=device)
        cache.append(k, v, table[b : b + 1], nothing, rows)
    q = normal(len(lengths), Q_HEADS, HEAD_DIM).to(Q_TYPE)
    return Step(q, cache, table, torch.tensor(lengths, dtype=torch.int32, device=device))


def errors(out: torch.Tensor, step: Step, requests: list[int]) -> tuple[float, float]:
    """Relative errors against float64 attention over the same cache: of ``out``, and of the usual BF16 route."""
    truth = torch.cat([attention_reference(*step.request(b))[0] for b in requests])
    usual = torch.cat([attention_bf16(*step.request(b))[0] for b in requests]).to(out.dtype)
    return relative_error(out[requests], truth), relative_error(usual, truth)


def microseconds(step: Step, calls: int = 20, replays: int = 20) -> float:
    """Median time of a decode in a CUDA graph of ``calls``; the cache is larger than L2."""
    wrapper = foscar.BatchDecodeWithPagedKVCacheWrapper()
    plan(wrapper, step.cache.format, step.block_table, step.seq_lens)
    out = torch.empty_like(step.q)
    wrapper.run(step.q, step.cache, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            wrapper.run(step.q, step.cache, out=out)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e3 / calls for a, b in zip(marks, marks[1:], strict=False))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device = choose_device()
    lengths = GPU_LENGTHS if device.type == "cuda" else CPU_LENGTHS
    shown = f"{len(lengths)} x {lengths[0]}" if len(set(lengths)) == 1 else ", ".join(map(str, lengths))
    print(f"one decode step: {shown} tokens, {Q_HEADS} query heads over {KV_HEADS} KV heads of {HEAD_DIM}")
    bf16_bytes = 2 * 2 * sum(lengths) * KV_HEADS * HEAD_DIM
    print(f"{'':6}{'cache':>11}{'of BF16':>9}{'saved':>11}{'error':>10}{'BF16 route':>12}"
          + (f"{'median':>12}{'cache read':>12}" if device.type == "cuda" else ""))  # fmt: skip
    for name, fmt in FORMATS.items():
        step = random_step(fmt, lengths, device)
        out = foscar.decode_attention(step.q, step.cache, step.block_table, step.seq_lens)
        nbytes = step.cache.bytes_per_token * sum(lengths)
        error, usual = errors(out, step, sorted({0, len(lengths) - 1}))
        row = (f"{name:6}{nbytes / 2**20:>7.1f} MiB{nbytes / bf16_bytes:>9.1%}{(bf16_bytes - nbytes) / 2**20:>7.1f} MiB"
               f"{error:>10.1e}{usual:>12.1e}")  # fmt: skip
        if device.type == "cuda":
            us = microseconds(step)
            row += f"{us:>9.1f} us{nbytes / us / 1e3:>7.0f} GB/s"
        print(row)
        if not math.isfinite(error) or error > usual:
            raise SystemExit(f"{name}: the error is larger than the BF16 route's")
    print("error: relative, against float64 attention over the same quantized cache, output in float16;\n"
          "BF16 route: the same for dequantizing to BF16 first, the usual way")  # fmt: skip


if __name__ == "__main__":
    main()
