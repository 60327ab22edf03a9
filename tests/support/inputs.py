"""Random caches: values of non-zero mean, shuffled pages, and poison wherever nothing may be read."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from foscar.common.cache import PagedKVCache
from foscar.common.errors import FormatError
from foscar.common.formats import KVFormat, RecordLayout

POISON = 0xFF  # as codes: all ones; as 16-bit parameters of either type: NaN


def all_formats(
    bits=(2, 4), axes=("token", "channel"), groups=(None, 32, 64, 128), params=("float16", "bfloat16")
) -> list[KVFormat]:
    """K and V of every combination of bits and axis, every group for both, every parameter type (no duplicates)."""
    found = {}
    for kb, vb, ka, va, g, p in itertools.product(bits, bits, axes, axes, groups, params):
        fmt = KVFormat.make(kb, vb, k_axis=ka, v_axis=va, k_group=g, v_group=g, params=p)
        found[fmt.name] = fmt
    return list(found.values())


def fits(fmt: KVFormat, head_dim: int, page_size: int) -> bool:
    """Whether the format has a record for this head_dim and page size."""
    try:
        fmt.layout(head_dim, page_size)
    except FormatError:
        return False
    return True


def random_values(shape, seed: int, dtype=torch.float32, mean: float = 1.0) -> torch.Tensor:
    """Normal values whose last two dimensions (head, channel) have means of their own, of size ``mean``."""
    gen = torch.Generator().manual_seed(seed)
    center = torch.randn(shape[-2:], generator=gen) * mean + mean
    return (torch.randn(shape, generator=gen) + center).to(dtype)


def shuffled_table(lengths, page_size: int, num_pages: int, seed: int, spare: int = 2, fill: int = -1) -> torch.Tensor:
    """int32 [batch, max_pages]: distinct random pages for ``lengths`` tokens, then ``fill`` (never to be read)."""
    need = [-(-n // page_size) for n in lengths]
    if sum(need) > num_pages:
        raise ValueError(f"{sum(need)} pages needed, {num_pages} there")
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).int()
    table = torch.full((len(lengths), max(need, default=0) + spare), fill, dtype=torch.int32)
    used = 0
    for b, n in enumerate(need):
        table[b, :n] = pages[used : used + n]
        used += n
    return table


@dataclass
class Case:
    """A filled cache and one query per request; k and v are the exact values [sum of lengths, heads, D]."""

    cache: PagedKVCache
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def tables(self) -> tuple[PagedKVCache, torch.Tensor, torch.Tensor]:
        return self.cache, self.block_table, self.seq_lens


def int32(values, device="cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def indptr_of(lengths, device="cpu") -> torch.Tensor:
    """int32 [batch + 1]: where each request's rows begin."""
    return int32([0, *itertools.accumulate(lengths)], device)


def make_case(
    lengths,
    *,
    fmt: KVFormat | None = None,
    page_size: int = 64,
    kv_heads: int = 2,
    group_heads: int = 4,
    head_dim: int = 128,
    device: str = "cpu",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    extra_pages: int = 3,
) -> Case:
    """A cache filled with poison, then with ``lengths`` tokens; pages shuffled, tables padded with -1.

    Args:
        k, v, q: values to use instead of random ones of non-zero mean ([sum(lengths), kv_heads, head_dim] and
            [batch, kv_heads * group_heads, head_dim]).
    """
    lengths, total = list(lengths), sum(lengths)
    k = random_values((total, kv_heads, head_dim), seed + 1, dtype) if k is None else k
    v = random_values((total, kv_heads, head_dim), seed + 2, dtype) if v is None else v
    heads = kv_heads * group_heads
    q = random_values((len(lengths), heads, head_dim), seed + 3, dtype, mean=0.5) if q is None else q
    num_pages = sum(-(-n // page_size) for n in lengths) + extra_pages
    cache = PagedKVCache(num_pages, page_size, kv_heads, head_dim, fmt, device)
    cache.data.fill_(POISON)
    table = shuffled_table(lengths, page_size, num_pages, seed + 4).to(device)
    k, v, q = k.to(device), v.to(device), q.to(device)
    cache.append(k, v, table, int32([0] * len(lengths), device), indptr_of(lengths, device))
    return Case(cache, q, k, v, table, int32(lengths, device))


@functools.cache
def live_bytes(layout: RecordLayout, first: int, stop: int) -> torch.Tensor:
    """bool [record_bytes]: the bytes of tokens ``first:stop`` of a page, straight from the layout's functions."""
    live = torch.zeros(layout.record_bytes, dtype=torch.bool)
    sides = (
        (layout.k_byte, layout.k_param, layout.k_row_bytes, layout.format.k, layout.k_group),
        (layout.v_byte, layout.v_param, layout.v_row_bytes, layout.format.v, layout.v_group),
    )
    for token in range(first, stop):
        for byte, param, row_bytes, f, group in sides:
            for i in range(row_bytes):
                live[byte(token, i)] = True
            for channel in range(0, layout.padded_head_dim, group if f.axis == "token" else 1):
                at = param(token, channel)
                live[at : at + 4] = True
    return live


def poison_slack(case: Case, value: int = POISON) -> None:
    """Overwrite every byte of the cache that holds none of the requests' tokens: slack rows, other pages."""
    cache = case.cache
    live = torch.zeros(cache.num_pages, cache.layout.record_bytes, dtype=torch.bool)
    for row, length in zip(case.block_table.tolist(), case.seq_lens.tolist(), strict=True):
        for i in range(-(-length // cache.page_size)):
            live[row[i]] |= live_bytes(cache.layout, 0, min(cache.page_size, length - i * cache.page_size))
    cache.data.masked_fill_(~live[:, None, :].to(cache.device), value)
