"""Decode attention over a packed paged cache in one call.

All user errors are raised here, in wrapper.py or in checks.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from .blackwell import config as blackwell
from .blackwell.decode import decoder as blackwell_decoder
from .checks import (
    BACKENDS,
    Q_DTYPES,
    check_call,
    check_result,
    check_tile,
    check_values,
    require,
)
from .common import traced
from .common.cache import PagedKVCache
from .common.config import ConfigError
from .common.errors import UnsupportedDeviceError
from .common.launch import device_arch
from .common.options import AttentionOptions, Variant
from .common.plan import KernelOptions, rows_of_item
from .common.reference import decode_folded
from .hopper.config import ARCH, DecodeConfig, TileConfig
from .hopper.decode import Bound, HopperDecode, Tables, decoder, options_of


def _readable(q: torch.Tensor) -> torch.Tensor:
    """q, or a copy where the kernel's loads of 4 or 8 bytes could not follow its strides."""
    width = 4 * (q.shape[2] // 64)
    aligned = q.data_ptr() % width == 0 and all(2 * s % width == 0 for s in q.stride()[:2])
    return q if q.stride(2) == 1 and aligned else q.clone(memory_format=torch.contiguous_format)


def _dense(tables: Tables) -> Tables:
    """The dense block table that the torch backend takes, from checked tables."""
    if tables.indptr is None:
        return tables
    starts = tables.indptr.long()
    counts = starts[1:] - starts[:-1]
    width = max(1, int(counts.max())) if len(counts) else 1
    table = torch.full((len(counts), width), -1, dtype=torch.int32, device=tables.pages.device)
    inside = torch.arange(width, device=table.device)[None] < counts[:, None]
    table[inside] = tables.pages[int(starts[0]) : int(starts[-1])]
    return Tables(table, tables.lengths)


_config = functools.cache(DecodeConfig)  # checking one costs as much as all of a call's other checks


@functools.cache
def _blackwell_config(shape: tuple, tile: blackwell.TileConfig, options: KernelOptions) -> blackwell.DecodeConfig:
    """``shape``: its first fields.  An item has fewer rows than asked for where no more fit: further passes follow."""
    *before, heads, dtype = shape
    while True:
        try:
            return blackwell.DecodeConfig(*before, heads, dtype, tile, options)
        except ConfigError:
            if not options.rows or heads == 4:
                raise
            heads -= 4


def _load(
    cache: PagedKVCache, heads: int, dtype: torch.dtype, tile: TileConfig | None, variant: Variant
) -> HopperDecode:
    """What a call launches, compiled and loaded on first use."""
    group = heads // cache.num_kv_heads
    arch = device_arch(cache.device)
    layout = cache.layout
    rows = rows_of_item(group, 1 if variant.q_indptr is None else variant.max_q_len)
    shape = (layout.kernel_format, layout.padded_head_dim, cache.page_size, rows, Q_DTYPES[dtype])
    options = options_of(variant, group)
    if arch in blackwell.ARCHS:
        return blackwell_decoder(_blackwell_config(shape, tile or blackwell.TileConfig(), options), cache.device.index)
    if arch != ARCH:
        raise UnsupportedDeviceError(f"there are kernels for {ARCH} (Hopper: H100, H200) and "
                                     f"{', '.join(blackwell.ARCHS)} (Blackwell: B200, B300) only, not for {arch}; "
                                     f"backend='torch' runs anywhere")  # fmt: skip
    return decoder(_config(*shape, tile or TileConfig(), options), cache.device.index)


def _backend(name: str, cache: PagedKVCache) -> str:
    require(name in BACKENDS, f"backend must be one of {BACKENDS}, not {name!r}")
    if name == "auto":
        return "cuda" if cache.device.type == "cuda" else "torch"
    on_gpu = cache.device.type == "cuda"
    require(name == "torch" or on_gpu, f"backend 'cuda' needs a cache on a GPU, not on {cache.device}")
    return name


def on_torch(backend: str, cache: PagedKVCache) -> bool:
    """Whether a call over ``cache`` takes the torch backend."""
    return _backend(backend, cache) == "torch"


def takes_windows(backend: str, cache: PagedKVCache) -> bool:
    """Whether the kernels of a call attend over tokens in 16 bits (options.ExactTokens) too: Hopper's do."""
    return not on_torch(backend, cache) and device_arch(cache.device) == ARCH


def kernels_for(
    backend: str,
    cache: PagedKVCache,
    batch: int,
    heads: int,
    dtype: torch.dtype,
    tile: TileConfig | None,
    variant: Variant,
) -> HopperDecode | None:
    """What a call launches, compiled and loaded on first use; None for the torch backend and for no requests."""
    if on_torch(backend, cache) or batch == 0:
        return None
    return _load(cache, heads, dtype, tile, variant)


def _decode_folded(q, cache, tables, sm_scale, out, lse, lse_base, variant):
    """The torch backend; rows of q that no request has are not written."""
    check_values(q, cache, tables, variant)
    dense = _dense(tables)
    result, log_sum = decode_folded(
        q, cache, dense.pages, dense.lengths, sm_scale,
        options=variant.options, sinks=variant.sinks, q_indptr=variant.q_indptr,
    )  # fmt: skip
    rows = q.shape[0] if variant.q_indptr is None else int(variant.q_indptr[-1])
    out[:rows].copy_(result[:rows])
    if lse is not None:
        lse[:rows].copy_(log_sum[:rows] if lse_base == "e" else log_sum[:rows] / math.log(2.0))


@torch.no_grad()
def decode_into(q, cache, tables, sm_scale, out, lse, lse_base, kernels, buffers, variant) -> Bound | None:
    """Checked arguments to results; ``lse`` is a tensor to fill or None, ``kernels`` None for the torch backend.

    Returns the launch if the kernels took these very tensors, without a copy of one: it can be repeated with others.
    """
    if q.shape[0] == 0 or tables.lengths.shape[0] == 0:
        return None
    if kernels is None:
        _decode_folded(q, cache, tables, sm_scale, out, lse, lse_base, variant)
        return None
    padding = cache.padded_head_dim - cache.head_dim
    direct = out.stride(2) == 1 and not padding
    target = out if direct else out.new_empty(*out.shape[:2], cache.padded_head_dim)
    log_sum = lse if lse is None or lse.is_contiguous() else torch.empty(lse.shape, device=lse.device)
    if variant.q_indptr is not None:
        variant = dataclasses.replace(variant, q_indptr=variant.q_indptr.contiguous())
        if target is not out:  # rows that no request has stay as they are
            target[..., : cache.head_dim].copy_(out)
        if log_sum is not lse:
            log_sum.copy_(lse)
    query = torch.nn.functional.pad(q, (0, padding)) if padding else _readable(q)
    bound = kernels.bind(query, cache, tables, target, log_sum, buffers, sm_scale, lse_base, variant)
    windows = variant.exact.windows if variant.exact else ()
    bound(query, cache.data, target, log_sum, variant.sinks, windows)
    if target is not out:
        out.copy_(target[..., : cache.head_dim])
    if log_sum is not lse:
        lse.copy_(log_sum)
    return bound if query is q and target is out and log_sum is lse else None


def make_results(q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool):
    """(out, lse) to write to: those given, checked, or new ones; lse None where it is neither given nor asked for."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    check_result("out", out, tuple(q.shape), q.dtype, q.device)
    if lse is not None:
        check_result("lse", lse, tuple(q.shape[:2]), torch.float32, q.device)
    elif return_lse:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return out, lse


def decode_attention(
    q: torch.Tensor,
    cache: PagedKVCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    sm_scale: float | None = None,
    options: AttentionOptions | None = None,
    sinks: torch.Tensor | None = None,
    q_indptr: torch.Tensor | None = None,
    max_q_len: int | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base: int | str = 2,
    backend: str = "auto",
    tile: TileConfig | None = None,
    check: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's new tokens, one or several, over its cached ones: ``softmax(sm_scale q K^T) V``.

    Args:
        q: [batch, query heads, head_dim] (with ``q_indptr``: [query tokens, query heads, head_dim]), bfloat16 or
            float16, any strides; query head ``h`` reads KV head ``h // (query heads / KV heads)``.
        cache: K and V, packed; on the same device.
        block_table: int32 [batch, max_pages]; entries beyond a request's length are never read.
        seq_lens: int32 [batch], tokens per request, the new ones included; 0 gives zeros and an LSE of -inf.
        sm_scale: None: 1 / sqrt(head_dim).
        options: sliding window, logits soft-cap, output scale: :class:`foscar.AttentionOptions`; None: none of them.
        sinks: float32 [query heads], in natural-log units whatever ``lse_base`` is: a learned logit per head that joins
            the softmax denominator, and so the LSE, after sm_scale and soft-cap (gpt-oss); None: none.
        q_indptr: int32 [batch + 1], ascending from 0: request ``b`` has the query tokens
            ``q_indptr[b] : q_indptr[b + 1]``, its last ones, so that the j-th of n is at position
            ``seq_lens[b] - n + j`` and sees the tokens up to there (speculative drafts).  One before position 0 sees
            nothing: zeros, and an LSE of -inf or of the sink's logit.  Rows from ``q_indptr[batch]`` on are not
            written: in a new ``out`` they hold anything.  None: one query token per request.
        max_q_len: no request has more query tokens than this; with ``q_indptr`` only.  It chooses the kernel.  None:
            the kernel is chosen for q's rows divided by the requests where that comes out even (drafts of one length),
            else for 16; the result is right however many a request has.
        out: where to write, of q's shape and dtype; None: a new tensor.
        return_lse: also return the log of the softmax denominator, ``log(sum(exp(sm_scale q K^T)))``, in base
            ``lse_base``, float32 [q's rows, query heads].
        lse_base: 2 (FlashInfer's convention) or "e" (FlashAttention's, vLLM's).
        backend: "auto": the kernel on a GPU, torch elsewhere; "cuda": the kernel; "torch": the folded torch route.
        tile: tuning knobs of the kernel (foscar.TileConfig); None: the default.
        check: verify lengths, page ids and ``q_indptr`` first (waits for the device); the torch backend always does.

    Returns:
        out of q's dtype, or (out, lse).  On a GPU the call returns before the work is done; it uses the current
        stream of the cache's device, allocates from torch's allocator and can be captured in a CUDA graph once the
        kernel has been used (compiled and loaded) outside.  Under torch.compile the call is one node of the graph,
        the operator ``foscar::decode_attention`` (:mod:`foscar.ops`), which checks the arguments when it runs.

    Raises:
        ValueError, TypeError: an argument that does not fit, naming what does.
        FormatError: a format, head_dim or page size that the kernel does not take.
        UnsupportedDeviceError: a GPU that there is no kernel for.

    What the options compute is written out in :mod:`foscar.common.options`; ``backend="torch"`` takes all of them on
    any device.  The kernels compute 16 (query token, head of a group) pairs in one pass over the cache and read it
    again for every further 16; how many a request has is read on the device.
    """
    if torch.compiler.is_compiling():
        return traced.decode_attention(
            q, cache, block_table, seq_lens, sm_scale=sm_scale, options=options, sinks=sinks, q_indptr=q_indptr,
            max_q_len=max_q_len, out=out, return_lse=return_lse, lse_base=lse_base, backend=backend, tile=tile,
            check=check,
        )  # fmt: skip
    tables, variant, scale = check_call(
        q, cache, block_table, seq_lens, sm_scale=sm_scale, options=options, sinks=sinks, q_indptr=q_indptr,
        max_q_len=max_q_len, lse_base=lse_base,
    )  # fmt: skip
    check_tile(tile)
    if check:
        check_values(q, cache, tables, variant)
    out, lse = make_results(q, out, None, return_lse)
    kernels = kernels_for(backend, cache, seq_lens.shape[0], q.shape[1], q.dtype, tile, variant)
    buffers = kernels and kernels.buffers(q.shape[1] // cache.num_kv_heads)
    decode_into(q, cache, tables, scale, out, lse, lse_base, kernels, buffers, variant)
    return (out, lse) if return_lse else out
