"""The checks of :mod:`foscar.api`'s arguments: one clear line that names what is supported."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Sequence

import torch

from .blackwell.config import TileConfig as BlackwellTileConfig
from .common.cache import PagedKVCache
from .common.formats import check_whole
from .common.mask import spans
from .common.options import DEFAULT_Q_LEN, FLOAT32_MAX, FLOAT32_MIN, AttentionOptions, Variant, check_real
from .common.tensor_checks import check_tensors
from .hopper.config import TileConfig
from .hopper.decode import Tables

Q_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
LSE_BASES = (2, "e")
BACKENDS = ("auto", "cuda", "torch")


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def check_types(cache: PagedKVCache, **tensors: torch.Tensor) -> None:
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache must be a foscar.PagedKVCache, not {type(cache).__name__}")
    check_tensors(**tensors)


def check_query(q: torch.Tensor, cache: PagedKVCache, batch: int | None) -> None:
    """``batch`` None: any number of query tokens."""
    require(q.dtype in Q_DTYPES, f"q must be bfloat16 or float16, not {q.dtype}")
    rows, size = ("query tokens", "*") if batch is None else ("batch", batch)
    require(
        q.ndim == 3 and batch in (None, q.shape[0]) and q.shape[2] == cache.head_dim,
        f"q must be [{rows}, query heads, head_dim] = [{size}, *, {cache.head_dim}], not {list(q.shape)}",
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
    scale = check_real("sm_scale", sm_scale, "a real number or None")
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


def check_variant(
    options: AttentionOptions | None,
    q_indptr: torch.Tensor | None,
    max_q_len: int | None,
    batch: int,
    device: torch.device,
    q_rows: int | None = None,
) -> Variant:
    """What a call adds to plain attention; its sinks come with :func:`with_sinks`.

    ``q_rows``: rows of q, or None where they are not known yet.
    """
    if options is not None and not isinstance(options, AttentionOptions):
        raise TypeError(f"options must be foscar.AttentionOptions or None, not {type(options).__name__}")
    limit = None if max_q_len is None else check_whole("max_q_len", max_q_len)
    require(limit is None or limit >= 1, f"max_q_len must be 1 or more, not {limit}")
    if q_indptr is not None:
        check_tensors(q_indptr=q_indptr)
        check_int32("q_indptr", q_indptr, 1, device)
        n = q_indptr.shape[0]
        require(n == batch + 1, f"q_indptr has {n} entries for {batch} requests; it needs one more than those")
    even = q_rows // batch if q_rows and batch and q_rows % batch == 0 else DEFAULT_Q_LEN
    return Variant(options or AttentionOptions(), None, q_indptr, limit or even, limit)


def with_sinks(variant: Variant, sinks: torch.Tensor | None, heads: int, device: torch.device) -> Variant:
    """The variant with the sinks of one layer, contiguous."""
    if sinks is None:
        return variant
    check_tensors(sinks=sinks)
    require(
        sinks.dtype == torch.float32 and tuple(sinks.shape) == (heads,),
        f"sinks must be float32 [{heads}], a logit per query head, not {sinks.dtype} {list(sinks.shape)}",
    )
    require(sinks.device == device, f"sinks is on {sinks.device}, the cache on {device}")
    return dataclasses.replace(variant, sinks=sinks.contiguous())


def check_call(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    sm_scale: float | None,
    options: AttentionOptions | None,
    sinks: torch.Tensor | None,
    q_indptr: torch.Tensor | None,
    max_q_len: int | None,
    lse_base: int | str,
) -> tuple[Tables, Variant, float]:
    """What every call over dense tables takes, checked; see :func:`foscar.decode_attention`.

    Returns:
        (tables as the kernels take them, what the call adds to plain attention, sm_scale).
    """
    check_types(cache, q=q, block_table=block_table, seq_lens=seq_lens)
    check_int32("seq_lens", seq_lens, 1, cache.device)
    check_int32("block_table", block_table, 2, cache.device)
    batch = seq_lens.shape[0]
    require(block_table.shape[0] == batch, f"block_table has {block_table.shape[0]} rows for {batch} requests")
    check_query(q, cache, None if q_indptr is not None else batch)
    check_lse_base(lse_base)
    variant = check_variant(options, q_indptr, max_q_len, batch, cache.device, q.shape[0])
    variant = with_sinks(variant, sinks, q.shape[1], q.device)
    tables = Tables(block_table if block_table.stride(1) == 1 else block_table.contiguous(), seq_lens.contiguous())
    return tables, variant, check_scale(sm_scale, cache.head_dim)


def check_rows(q_indptr: Sequence[int], rows: int, limit: int | None) -> None:
    """The bounds of the requests' query rows, read from the device."""
    ok = q_indptr[0] == 0 and q_indptr[-1] <= rows and all(a <= b for a, b in itertools.pairwise(q_indptr))
    require(ok, f"q_indptr must ascend from 0 within the {rows} rows of q")
    for b, (start, stop) in enumerate(itertools.pairwise(q_indptr)):
        fits = limit is None or stop - start <= limit
        require(fits, f"request {b} has {stop - start} query tokens; max_q_len is {limit}")


def check_values(q: torch.Tensor, cache: PagedKVCache, tables: Tables, variant: Variant) -> None:
    """Lengths, page ids and query rows against q and the cache; waits for the device."""
    bounds = None if variant.q_indptr is None else variant.q_indptr.tolist()
    if bounds is not None:
        check_rows(bounds, q.shape[0], variant.q_limit)
    check_pages(cache, tables, bounds, variant.options.window)


def check_pages(
    cache: PagedKVCache, tables: Tables, q_indptr: Sequence[int] | None = None, window: int | None = None
) -> None:
    """Lengths, and the page ids that a query looks up, against the cache; waits for the device."""
    lengths, rows = tables.lengths.tolist(), tables.pages.cpu()
    if tables.indptr is not None:
        starts = tables.indptr.tolist()
        ok = 0 <= starts[0] and starts[-1] <= len(rows) and all(a <= b for a, b in itertools.pairwise(starts))
        require(ok, f"indptr must ascend within the {len(rows)} entries of indices")
        rows = [rows[a:b] for a, b in itertools.pairwise(starts)]
    page = cache.page_size
    for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        require(0 <= length <= len(row) * page, f"request {b} has {length} tokens and {len(row)} pages of {page}")
    for span in spans(lengths, q_indptr, window):
        used = rows[span.request][span.first // page : -(-span.stop // page)]
        bad = used[(used < 0) | (used >= cache.num_pages)].tolist()
        require(not bad, f"request {span.request} uses page {bad[:1]}; the cache has pages 0 .. {cache.num_pages - 1}")
