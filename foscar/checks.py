"""The checks of :mod:`foscar.api`'s arguments: one clear line that names what is supported."""

from __future__ import annotations

import itertools
import math

import torch

from .common.cache import PagedKVCache
from .hopper.decode import Tables

Q_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
LSE_BASES = (2, "e")
BACKENDS = ("auto", "cuda", "torch")


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def check_types(cache: PagedKVCache, **tensors: torch.Tensor | None) -> None:
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache must be a foscar.PagedKVCache, not {type(cache).__name__}")
    check_tensors(**tensors)


def check_tensors(**tensors: torch.Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(x).__name__}")


def check_query(q: torch.Tensor, cache: PagedKVCache, batch: int) -> None:
    require(q.dtype in Q_DTYPES, f"q must be bfloat16 or float16, not {q.dtype}")
    require(
        q.ndim == 3 and q.shape[0] == batch and q.shape[2] == cache.head_dim,
        f"q must be [batch, query heads, head_dim] = [{batch}, *, {cache.head_dim}], not {list(q.shape)}",
    )
    heads, kv = q.shape[1], cache.num_kv_heads
    require(heads > 0 and heads % kv == 0, f"{heads} query heads are not a multiple of {kv} KV heads")
    require(q.device == cache.device, f"q is on {q.device}, the cache on {cache.device}")


def check_int32(name: str, x: torch.Tensor, ndim: int, device: torch.device) -> None:
    require(
        x.dtype == torch.int32 and x.ndim == ndim,
        f"{name} must be int32 with {ndim} dimension{'s' * (ndim > 1)}, not {x.dtype} {list(x.shape)}",
    )
    require(x.device == device, f"{name} is on {x.device}, not on {device}")


def check_scale(sm_scale: float | None, head_dim: int) -> float:
    if sm_scale is None:
        return 1.0 / math.sqrt(head_dim)
    require(math.isfinite(sm_scale) and sm_scale > 0, f"sm_scale must be positive and finite, not {sm_scale}")
    return float(sm_scale)


def check_result(name: str, x: torch.Tensor, shape: tuple, dtype: torch.dtype, device: torch.device) -> None:
    require(
        tuple(x.shape) == shape and x.dtype == dtype and x.device == device,
        f"{name} must be {dtype} {list(shape)} on {device}, not {x.dtype} {list(x.shape)} on {x.device}",
    )


def check_pages(cache: PagedKVCache, tables: Tables) -> None:
    """Page ids and lengths against the cache; waits for the device."""
    lengths, rows = tables.lengths.tolist(), tables.pages.cpu()
    if tables.indptr is not None:
        starts = tables.indptr.tolist()
        ok = 0 <= starts[0] and starts[-1] <= len(rows) and all(a <= b for a, b in itertools.pairwise(starts))
        require(ok, f"indptr must ascend within the {len(rows)} entries of indices")
        rows = [rows[a:b] for a, b in itertools.pairwise(starts)]
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        fits = 0 <= length <= len(row) * cache.page_size
        require(fits, f"request {b} has {length} tokens and {len(row)} pages of {cache.page_size}")
        used = row[: -(-length // cache.page_size)]
        bad = used[(used < 0) | (used >= cache.num_pages)].tolist()
        require(not bad, f"request {b} uses page {bad[:1]}; the cache has pages 0 .. {cache.num_pages - 1}")
