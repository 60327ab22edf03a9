"""What bench_decode.py measures: random caches larger than L2, FOSCAR over them, a read ceiling and the peers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

import foscar
from foscar.common.reference import attention_bf16, attention_reference

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Bytes read between two uses of the same byte: several times any L2 (50 MB H100, 60 MB H200, 126 MB B200).
COLD_BYTES = 1 << 30
WORKSPACE_BYTES = 512 << 20  # FlashInfer's
READ_BLOCK, READ_STEPS = 4096, 4  # words of 32 bits that a program of the read ceiling loads at once, and how often


class Skip(Exception):
    """This row does not apply here; the message says why."""


@dataclass(frozen=True)
class Problem:
    """One decode step: ``batch`` requests of ``length`` tokens, ``q_heads`` query heads over ``kv_heads``.

    The peers take requests of one length only.
    """

    batch: int
    length: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page: int
    device: torch.device
    ragged: tuple[int, ...] = ()  # lengths that differ; ``length`` is then the longest

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.ragged or (self.length,) * self.batch

    @property
    def pages_per_request(self) -> int:
        return -(-self.length // self.page)

    @property
    def pages(self) -> int:
        return sum(-(-n // self.page) for n in self.lengths)

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """block_table int32 [batch, pages per request], random pages, -1 past an end; seq_lens int32 [batch]."""
        order = torch.randperm(self.pages, generator=torch.Generator().manual_seed(7)).to(torch.int32)
        counts = torch.tensor([-(-n // self.page) for n in self.lengths])
        table = torch.full((self.batch, self.pages_per_request), -1, dtype=torch.int32)
        table[torch.arange(self.pages_per_request) < counts[:, None]] = order
        return table.to(self.device), torch.tensor(self.lengths, dtype=torch.int32, device=self.device)

    def query(self) -> torch.Tensor:
        """[batch, query heads, head_dim] BF16, standard normal."""
        generator = torch.Generator(self.device).manual_seed(11)
        shape = (self.batch, self.q_heads, self.head_dim)
        return torch.randn(shape, device=self.device, generator=generator).to(torch.bfloat16)


@dataclass
class Bench:
    """One row of the table: a call per copy of the cache, all writing ``out()`` of shape [batch, q heads, head_dim]."""

    calls: list[Callable[[], object]]
    out: Callable[[], torch.Tensor] | None
    truth: Callable[[int], torch.Tensor] | None  # float64 attention of request b, [q heads, head_dim]
    nbytes: int  # of one copy of the cache
    usual: Callable[[int], torch.Tensor] | None = None  # the same by the BF16 route
    keep: tuple = ()  # what the calls need alive


def copies_of(nbytes: int, device: torch.device) -> int:
    """How many copies of a cache make every read a cold one, within two fifths of the device's memory.

    Raises:
        Skip: not even one fits.
    """
    room = torch.cuda.mem_get_info(device)[0] * 2 // 5
    if nbytes > room:
        raise Skip(f"one copy of {nbytes / 2**30:.1f} GiB leaves no room on this GPU")
    return max(1, min(room // nbytes, max(2, -(-COLD_BYTES // nbytes))))


def random_caches(problem: Problem, fmt: foscar.KVFormat, copies: int) -> list[foscar.PagedKVCache]:
    """Caches of random codes with random parameters near those of a standard normal K and a V of mean 0.5."""
    layout = fmt.layout(problem.head_dim, problem.page)
    shape = (copies, problem.pages, problem.kv_heads, layout.record_bytes)
    generator = torch.Generator(problem.device).manual_seed(5)
    data = torch.empty(shape, dtype=torch.uint8, device=problem.device)
    data.view(torch.int32).random_(-(2**31), 2**31, generator=generator)
    dtype = getattr(torch, fmt.params)
    sections = (
        (fmt.k, layout.k_params_offset, layout.v_offset, 0.0),
        (fmt.v, layout.v_params_offset, layout.record_bytes, 0.5),
    )
    for f, start, stop, mean in sections:
        width = math.sqrt((4**f.bits - 1) / 12)  # standard deviation of uniform codes
        for records in data:  # one copy at a time: the parameters of 10 GB need no second 10 GB
            pairs = records[..., start:stop].view(dtype).unflatten(-1, (-1, 2))
            scale = torch.empty(pairs.shape[:-1], device=data.device).uniform_(0.7, 1.3, generator=generator) / width
            noise = torch.empty_like(scale).normal_(0.0, 0.2, generator=generator)
            pairs[..., 0] = scale
            pairs[..., 1] = mean + noise - scale * (f.max_code / 2)
            if f.axis == "channel" and (f.group or 0) > problem.page:
                pairs[:] = pairs[:1].clone()  # the pages of a group hold the same pairs; here all pages do
    return [
        foscar.PagedKVCache(problem.pages, problem.page, problem.kv_heads, problem.head_dim, fmt, data=records)
        for records in data
    ]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """float64 attention of one request: q [q heads, D], k and v [kv heads, length, D] -> [q heads, D]."""
    q = q.double().unflatten(0, (k.shape[0], -1))
    p = torch.softmax(q @ k.double().transpose(1, 2) * scale, -1)
    return (p @ v.double()).flatten(0, 1)


def foscar_bench(problem: Problem, fmt: foscar.KVFormat, tile: foscar.TileConfig | None, backend: str) -> Bench:
    """The packed caches of one format; ``backend`` "cuda" or "torch" (then one copy, on any device)."""
    layout = fmt.layout(problem.head_dim, problem.page)
    nbytes = problem.pages * problem.kv_heads * layout.record_bytes
    caches = random_caches(problem, fmt, copies_of(nbytes, problem.device) if backend == "cuda" else 1)
    table, lengths = problem.tables()
    q = problem.query()
    out = torch.empty_like(q)
    wrapper = foscar.BatchDecodeWithPagedKVCacheWrapper(problem.device)
    wrapper.plan(
        num_qo_heads=problem.q_heads,
        num_kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        page_size=problem.page,
        block_table=table,
        seq_lens=lengths,
        format=fmt,
        backend=backend,
        tile=tile,
    )

    def by(reference, dtype: torch.dtype) -> Callable[[int], torch.Tensor]:
        return lambda b: reference(q[b : b + 1], caches[0], table[b : b + 1], lengths[b : b + 1])[0][0].to(dtype)

    calls = [lambda c=c: wrapper.run(q, c, out=out) for c in caches]
    return Bench(
        calls, lambda: out, by(attention_reference, torch.float64), nbytes, by(attention_bf16, q.dtype), [caches]
    )


if triton is not None:

    @triton.jit
    def _read(source, sink, BLOCK: tl.constexpr, STEPS: tl.constexpr):
        base = tl.program_id(0).to(tl.int64) * BLOCK * STEPS
        total = tl.zeros((BLOCK,), tl.int32)
        for step in tl.static_range(STEPS):
            total ^= tl.load(source + base + step * BLOCK + tl.arange(0, BLOCK))
        tl.store(sink + tl.program_id(0), tl.sum(total, 0))


def read_bench(problem: Problem, fmt: foscar.KVFormat) -> Bench:
    """A kernel that only reads as many bytes as a cache of this format holds: the ceiling of the memory."""
    if triton is None:
        raise Skip("needs triton")
    record = fmt.layout(problem.head_dim, problem.page).record_bytes
    per = 4 * READ_BLOCK * READ_STEPS
    nbytes = problem.pages * problem.kv_heads * record // per * per
    if nbytes == 0:
        raise Skip("the cache is smaller than one block of the read kernel")
    copies = copies_of(nbytes, problem.device)
    data = torch.empty(copies, nbytes // 4, dtype=torch.int32, device=problem.device).random_()
    sink = torch.empty(nbytes // per, dtype=torch.int32, device=problem.device)
    calls = [lambda d=d: _read[(nbytes // per,)](d, sink, READ_BLOCK, READ_STEPS, num_warps=8) for d in data]
    return Bench(calls, None, None, nbytes, keep=(data,))


def _random_kv(problem: Problem, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[copies, 2, *shape], standard normal; K at [:, 0], V at [:, 1]."""
    if problem.ragged:
        raise Skip("measured with requests of one length only")
    copies = copies_of(2 * math.prod(shape) * dtype.itemsize, problem.device)
    generator = torch.Generator(problem.device).manual_seed(3)
    data = torch.empty(copies, 2, *shape, dtype=dtype, device=problem.device)
    for part in data.flatten(0, 1).flatten(1):
        for chunk in part.split(1 << 26):
            values = torch.empty(chunk.shape, device=data.device).normal_(generator=generator)
            chunk.copy_(values.to(dtype))
    return data


def sdpa_bench(problem: Problem, backend: str) -> Bench:
    """torch's scaled_dot_product_attention over contiguous BF16 K and V."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = getattr(SDPBackend, backend)
    kv = _random_kv(problem, (problem.batch, problem.kv_heads, problem.length, problem.head_dim), torch.bfloat16)
    q = problem.query()
    last: list[torch.Tensor] = []

    def call(k: torch.Tensor, v: torch.Tensor) -> None:
        with sdpa_kernel(chosen):
            last[:] = [torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)]

    def truth(b: int) -> torch.Tensor:
        return attend(q[b], kv[0, 0, b], kv[0, 1, b], problem.scale)

    calls = [lambda c=c: call(c[0], c[1]) for c in kv]
    return Bench(calls, lambda: last[0][:, :, 0], truth, kv[0].nbytes, keep=(kv,))


def _paged_kv(problem: Problem, dtype: torch.dtype, table: torch.Tensor, q: torch.Tensor):
    """Paged K and V [copies, 2, pages, kv heads, page, D] and the truth of request b over the first copy."""
    kv = _random_kv(problem, (problem.pages, problem.kv_heads, problem.page, problem.head_dim), dtype)

    def truth(b: int) -> torch.Tensor:
        # [pages, heads, page, D] -> [heads, length, D]
        k, v = (kv[0, i][table[b].long()].transpose(0, 1).flatten(1, 2)[:, : problem.length] for i in (0, 1))
        return attend(q[b], k, v, problem.scale)

    return kv, truth


def flashinfer_bench(problem: Problem) -> Bench:
    """FlashInfer's paged BF16 decode on tensor cores."""
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    (table, _), q = problem.tables(), problem.query()
    kv, truth = _paged_kv(problem, torch.bfloat16, table, q)
    out = torch.empty_like(q)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=problem.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True, backend="fa2")
    indptr = torch.arange(problem.batch + 1, dtype=torch.int32) * problem.pages_per_request
    in_last = problem.length - (problem.pages_per_request - 1) * problem.page
    last = torch.full((problem.batch,), in_last, dtype=torch.int32)
    wrapper.plan(
        *(indptr, table.flatten(), last, problem.q_heads, problem.kv_heads, problem.head_dim, problem.page),
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    calls = [lambda c=c: wrapper.run(q, (c[0], c[1]), out=out) for c in kv]
    return Bench(
        calls,
        lambda: out,
        truth,
        kv[0].nbytes,
        keep=(
            kv,
            workspace,
        ),
    )


def xqa_bench(problem: Problem) -> Bench:
    """TensorRT-LLM's XQA over FP8 pages, as FlashInfer calls it."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    (table, lengths), q = problem.tables(), problem.query()
    kv, truth = _paged_kv(problem, torch.float8_e4m3fn, table, q)
    out = torch.empty_like(q)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=problem.device)

    def call(k: torch.Tensor, v: torch.Tensor) -> None:
        trtllm_batch_decode_with_kv_cache(
            *(q, (k, v), workspace, table, lengths, problem.length),
            bmm1_scale=problem.scale,
            bmm2_scale=1.0,
            out=out,
            kv_layout="HND",
            backend="xqa",
        )

    calls = [lambda c=c: call(c[0], c[1]) for c in kv]
    return Bench(
        calls,
        lambda: out,
        truth,
        kv[0].nbytes,
        keep=(
            kv,
            workspace,
        ),
    )
