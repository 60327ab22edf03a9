"""The checks of :mod:`foscar.api`'s arguments: one clear line that names what is supported."""

from __future__ import annotations

import itertools
import math
import numbers

import torch

from .blackwell.config import TileConfig as BlackwellTileConfig
from .common.cache import PagedKVCache
from .hopper.config import TileConfig
from .hopper.decode import Tables

Q_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
LSE_BASES = (2, "e")
BACKENDS = ("auto", "cuda", "torch")
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def check_types(cache: PagedKVCache, **tensors: torch.Tensor) -> None:
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache must be a foscar.PagedKVCache, not {type(cache).__name__}")
    check_tensors(**tensors)


def check_tensors(**tensors: torch.Tensor) -> None:
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
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
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, numbers.Real):
        raise TypeError(f"sm_scale must be a real number or None, not {type(sm_scale).__name__}")
    try:
        scale = float(sm_scale)
    except OverflowError:
        scale = math.inf
    require(math.isfinite(scale) and scale > 0, f"sm_scale must be positive and finite, not {scale}")
    # the kernel's factor is sm_scale log2(e), a float32
    fits = FLOAT32_MIN <= scale <= FLOAT32_MAX / math.log2(math.e)
    require(fits, f"sm_scale must be a normal number of float32, log2(e) times it too, not {scale}")
    return scale


def check_lse_base(lse_base: int | str) -> None:
    if not isinstance(lse_base, (numbers.Real, str)):
        raise TypeError(f"lse_base must be 2 or 'e', not a {type(lse_base).__name__}")
    require(lse_base in LSE_BASES, f"lse_base must be 2 or 'e', not {lse_base!r}")


def check_tile(tile: TileConfig | None) -> None:
    if tile is not None and not isinstance(tile, (TileConfig, BlackwellTileConfig)):
        raise TypeError(f"tile must be a foscar.TileConfig or None, not {type(tile).__name__}")


def overlaps(x: torch.Tensor) -> bool:
    """Whether elements may share memory: a stride is smaller than what the smaller ones span."""
    if x.is_contiguous() or x.numel() == 0:
        return False
    span = 1
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride < span:
            return True
        span += stride * (size - 1)
    return False


def check_result(name: str, x: torch.Tensor, shape: tuple, dtype: torch.dtype, device: torch.device) -> None:
    check_tensors(**{name: x})
    require(
        tuple(x.shape) == shape and x.dtype == dtype and x.device == device,
        f"{name} must be {dtype} {list(shape)} on {device}, not {x.dtype} {list(x.shape)} on {x.device}",
    )
    require(not overlaps(x), f"{name} has elements that overlap in memory: its strides are {list(x.stride())}")


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
