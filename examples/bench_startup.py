"""What users wait for besides the kernel: compiling, starting, and the host's share of a call.

    python examples/bench_startup.py

Compiling and starting are measured in processes of their own, the former over an empty cache.  Without a GPU the
launch itself is left out: kernels come from a cache but are not loaded, and host times end before the driver call.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import torch

import foscar
from foscar import api
from foscar.common import jit
from foscar.common.launch import ParamBuffer, device_arch
from foscar.hopper import decode as hopper_decode
from foscar.hopper.config import ARCH, DecodeConfig
from foscar.hopper.decode import HopperDecode, kernels

BATCH, LENGTH, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 100, 32, 8, 128, 64
FORMAT, SMS = foscar.KVFormat.int2(), 132  # SMS: of an H100 or H200, which sizes the workspace
SHAPE = {"num_qo_heads": Q_HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "page_size": PAGE}
STARTS, CALLS, REPEATS = 7, 200, 15

# A process's own time from the import of torch to a kernel that is ready: (torch, the rest) in seconds.
START = """
import time
start = time.perf_counter()
import torch
if torch.cuda.is_available():
    torch.zeros(1, device="cuda")
there = time.perf_counter()
import sys
sys.path.insert(0, {folder!r})
import bench_startup
bench_startup.ready()
print(there - start, time.perf_counter() - there)
"""


def config() -> DecodeConfig:
    return DecodeConfig(FORMAT, HEAD_DIM, PAGE, -(-Q_HEADS // KV_HEADS // 4) * 4)


def ready() -> None:
    """Everything before the first launch: with a GPU the kernels in its memory, else compiled and read."""
    if on_gpu():
        step = Step(torch.device("cuda", torch.cuda.current_device()))
        step.run()
        torch.cuda.synchronize()
    else:
        for name, part, builder, _ in kernels(config()):
            jit.load_or_compile(name, part, ARCH, builder)


def on_gpu() -> bool:
    try:
        return device_arch() == ARCH
    except foscar.UnsupportedDeviceError:
        return False


class Step:
    """One decode step of short requests, so that on a GPU the host is what takes the time."""

    def __init__(self, device: torch.device):
        pages = -(-LENGTH // PAGE)
        self.cache = foscar.PagedKVCache(BATCH * pages, PAGE, KV_HEADS, HEAD_DIM, FORMAT, device)
        self.q = torch.randn(BATCH, Q_HEADS, HEAD_DIM, device=device).bfloat16()
        self.out = torch.empty_like(self.q)
        self.table = torch.arange(BATCH * pages, dtype=torch.int32, device=device).view(BATCH, pages)
        self.lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32, device=device)
        self.indptr = torch.arange(BATCH + 1, dtype=torch.int32, device=device) * pages
        self.last = torch.full_like(self.lengths, (LENGTH - 1) % PAGE + 1)
        self.k, self.v = torch.randn(2, BATCH, KV_HEADS, HEAD_DIM, device=device)
        self.wrapper = foscar.BatchDecodeWithPagedKVCacheWrapper()
        self.plan_dense()

    def plan_dense(self) -> None:
        self.wrapper.plan(block_table=self.table, seq_lens=self.lengths, format=FORMAT, **SHAPE)

    def plan_indptr(self) -> None:
        self.wrapper.plan(self.indptr, self.table.view(-1), self.last, format=FORMAT, **SHAPE)

    def run(self) -> None:
        self.wrapper.run(self.q, self.cache, out=self.out)

    def decode(self) -> None:
        foscar.decode_attention(self.q, self.cache, self.table, self.lengths, out=self.out)

    def operator(self) -> None:
        torch.ops.foscar.decode_attention(
            self.q, self.cache.data, self.table, self.lengths, FORMAT.name, PAGE, HEAD_DIM
        )

    @functools.cached_property
    def channels(self) -> foscar.PagedKVCache:
        """Its like with K per channel."""
        fmt = foscar.KVFormat.make(2, k_axis="channel")
        return foscar.PagedKVCache(self.cache.num_pages, PAGE, KV_HEADS, HEAD_DIM, fmt, self.cache.device)

    def append_channels(self) -> None:
        self.channels.append(self.k, self.v, self.table, self.lengths - 1)

    def append(self) -> None:
        self.cache.append(self.k, self.v, self.table, self.lengths - 1)


# ---------------------------------------------------------------------------------------------- without a GPU
class _Stub:
    """In the place of a PreparedLaunch: parameters are written, nothing is launched."""

    def __init__(self, artifact, values):
        self.update = ParamBuffer(artifact.params, values).update

    def __call__(self, grid, stream) -> None:
        pass


@contextlib.contextmanager
def stubbed_launch() -> Iterator[None]:
    """CPU tensors take the kernels' host code."""

    def load_kernel(artifact, index):
        return SimpleNamespace(prepare=lambda values, pdl: _Stub(artifact, values))

    with (
        mock.patch.object(hopper_decode, "load_kernel", load_kernel),
        mock.patch.object(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=SMS)),
        mock.patch.object(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0)),
        mock.patch.object(api, "device_arch", lambda device: ARCH),
        mock.patch.object(api, "_backend", lambda name, cache: "cuda"),
    ):
        decode = HopperDecode(config(), torch.device("cpu"))
        with mock.patch.object(api, "decoder", lambda config, index: decode):
            yield


# ---------------------------------------------------------------------------------------------- measuring
def start(cache: str) -> tuple[float, float]:
    """Seconds of a process until torch is there, and from there to a kernel that is ready."""
    folder = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(folder)
    env = os.environ | {"FOSCAR_CACHE_DIR": cache, "PYTHONPATH": root + os.pathsep + os.environ.get("PYTHONPATH", "")}
    done = subprocess.run([sys.executable, "-c", START.format(folder=folder)], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit((done.stderr.strip().splitlines() or ["the process failed"])[-1])
    torch_seconds, rest = map(float, done.stdout.split())
    return torch_seconds, rest


def microseconds(call: Callable[[], None], synchronize: Callable[[], None]) -> tuple[float, float]:
    """Median and fastest host time of a call."""
    times = []
    call()
    for _ in range(REPEATS):
        synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    synchronize()
    return statistics.median(times), min(times)


def host_rows(step: Step, synchronize: Callable[[], None]) -> Iterator[tuple[str, str]]:
    """The host's share of every call, ``run`` first."""
    for name, call in (
        ("wrapper.run", step.run),
        ("wrapper.plan, block_table and seq_lens", step.plan_dense),
        ("wrapper.plan, indptr, indices, last_page_len", step.plan_indptr),
        ("decode_attention", step.decode),
        ("torch.ops.foscar.decode_attention", step.operator),
        ("cache.append, one token per request", step.append),
        ("cache.append, the same with K per channel", step.append_channels),
    ):
        median, fastest = microseconds(call, synchronize)
        yield f"host time of {name}", f"{median:.1f} us (fastest {fastest:.1f})"


def rows() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as cache:
        if jit.dsl_version() is not None and jit.may_compile():
            yield "first call: two kernels compiled", f"{start(cache)[1]:.1f} s"
        warm = [start(cache) for _ in range(STARTS)]
    yield "import torch", f"{statistics.median(t for t, _ in warm) * 1e3:.0f} ms"
    yield "warm start over that", f"{statistics.median(x for _, x in warm) * 1e3:.0f} ms"
    if on_gpu():
        yield from host_rows(Step(torch.device("cuda", torch.cuda.current_device())), torch.cuda.synchronize)
    else:
        with stubbed_launch():
            yield from host_rows(Step(torch.device("cpu")), lambda: None)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    where = f"on {torch.cuda.get_device_name()}" if on_gpu() else "no GPU: launches left out"
    print(f"{FORMAT.name}, {Q_HEADS}/{KV_HEADS} heads of {HEAD_DIM}, pages of {PAGE}, {BATCH} requests; {where}")
    try:
        for name, value in rows():
            print(f"{name:<60}{value}", flush=True)
    except (foscar.CompileError, foscar.MissingDependencyError) as e:
        raise SystemExit(str(e)) from None


if __name__ == "__main__":
    main()
