"""What users call: decode attention over a packed paged cache.  All user errors are raised here or in checks.py."""

from __future__ import annotations

import functools
import math

import torch

from .blackwell import config as blackwell
from .blackwell.decode import decoder as blackwell_decoder
from .checks import (
    BACKENDS,
    Q_DTYPES,
    check_int32,
    check_lse_base,
    check_pages,
    check_query,
    check_result,
    check_scale,
    check_tensors,
    check_tile,
    check_types,
    require,
)
from .common.cache import PagedKVCache
from .common.config import MAX_HEADS
from .common.errors import UnsupportedDeviceError
from .common.formats import KVFormat, check_format, check_whole
from .common.launch import device_arch
from .common.reference import decode_folded
from .hopper.config import ARCH, DecodeConfig, TileConfig
from .hopper.decode import Buffers, HopperDecode, Tables, decoder


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
_blackwell_config = functools.cache(blackwell.DecodeConfig)


def _kernels(cache: PagedKVCache, heads: int, dtype: torch.dtype, tile: TileConfig | None) -> HopperDecode:
    """What a call needs, compiled and loaded on first use."""
    group = heads // cache.num_kv_heads
    require(group <= MAX_HEADS, f"the Hopper kernel takes 1 to {MAX_HEADS} query heads per KV head, not {group}")
    arch = device_arch(cache.device)
    shape = (cache.format, cache.head_dim, cache.page_size, -(-group // 4) * 4, Q_DTYPES[dtype])
    if arch in blackwell.ARCHS:
        return blackwell_decoder(_blackwell_config(*shape, tile or blackwell.TileConfig()), cache.device.index)
    if arch != ARCH:
        raise UnsupportedDeviceError(f"there are kernels for {ARCH} (Hopper: H100, H200) and "
                                     f"{', '.join(blackwell.ARCHS)} (Blackwell: B200, B300) only, not for {arch}; "
                                     f"backend='torch' runs anywhere")  # fmt: skip
    return decoder(_config(*shape, tile or TileConfig()), cache.device.index)


def _backend(name: str, cache: PagedKVCache) -> str:
    require(name in BACKENDS, f"backend must be one of {BACKENDS}, not {name!r}")
    if name == "auto":
        return "cuda" if cache.device.type == "cuda" else "torch"
    on_gpu = cache.device.type == "cuda"
    require(name == "torch" or on_gpu, f"backend 'cuda' needs a cache on a GPU, not on {cache.device}")
    return name


@torch.no_grad()
def _decode(q, cache, tables, sm_scale, out, lse, lse_base, kernels, buffers):
    """Checked arguments to results; ``lse`` is a tensor to fill or None, ``kernels`` None for the torch backend."""
    if q.shape[0] == 0:
        return
    if kernels is None:
        check_pages(cache, tables)
        dense = _dense(tables)
        result, log_sum = decode_folded(q, cache, dense.pages, dense.lengths, sm_scale)
        out.copy_(result)
        if lse is not None:
            lse.copy_(log_sum if lse_base == "e" else log_sum / math.log(2.0))
        return
    target = out if out.stride(2) == 1 else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    log_sum = lse if lse is None or lse.is_contiguous() else torch.empty(lse.shape, device=lse.device)
    kernels(_readable(q), cache, tables, target, log_sum, buffers, sm_scale, lse_base)
    if target is not out:
        out.copy_(target)
    if log_sum is not lse:
        lse.copy_(log_sum)


def _results(q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool):
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
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base: int | str = 2,
    backend: str = "auto",
    tile: TileConfig | None = None,
    check: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one new token per request over its cached tokens: ``softmax(sm_scale q K^T) V``.

    Args:
        q: [batch, query heads, head_dim], bfloat16 or float16, any strides; query head ``h`` reads KV head
            ``h // (query heads / KV heads)``.
        cache: K and V, packed; on the same device.
        block_table: int32 [batch, max_pages]; entries beyond a request's length are never read.
        seq_lens: int32 [batch], tokens per request, the new token included; 0 gives zeros and an LSE of -inf.
        sm_scale: None: 1 / sqrt(head_dim).
        out: where to write, of q's shape and dtype; None: a new tensor.
        return_lse: also return log(sum(exp(sm_scale q K^T))) in base ``lse_base``, float32 [batch, query heads].
        lse_base: 2 (FlashInfer's convention) or "e" (FlashAttention's, vLLM's).
        backend: "auto": the kernel on a GPU, torch elsewhere; "cuda": the kernel; "torch": the folded torch route.
        tile: tuning knobs of the kernel (foscar.TileConfig); None: the default.
        check: verify lengths and page ids first (waits for the device); the torch backend always does.

    Returns:
        out of q's dtype, or (out, lse).  On a GPU the call returns before the work is done; it uses the current
        stream of the cache's device, allocates from torch's allocator and can be captured in a CUDA graph once the
        kernel has been used (compiled and loaded) outside.

    Raises:
        ValueError, TypeError: an argument that does not fit, naming what does.
        FormatError: a format, head_dim or page size that the kernel does not take.
        UnsupportedDeviceError: a GPU that there is no kernel for.
    """
    check_types(cache, q=q, block_table=block_table, seq_lens=seq_lens)
    check_int32("seq_lens", seq_lens, 1, cache.device)
    check_int32("block_table", block_table, 2, cache.device)
    batch = seq_lens.shape[0]
    require(block_table.shape[0] == batch, f"block_table has {block_table.shape[0]} rows for {batch} requests")
    check_query(q, cache, batch)
    check_lse_base(lse_base)
    check_tile(tile)
    tables = Tables(block_table if block_table.stride(1) == 1 else block_table.contiguous(), seq_lens.contiguous())
    if check:
        check_pages(cache, tables)
    scale = check_scale(sm_scale, cache.head_dim)
    out, lse = _results(q, out, None, return_lse)
    kernels = buffers = None
    if _backend(backend, cache) == "cuda" and batch > 0:
        kernels = _kernels(cache, q.shape[1], q.dtype, tile)
        buffers = kernels.buffers(q.shape[1] // cache.num_kv_heads)
    _decode(q, cache, tables, scale, out, lse, lse_base, kernels, buffers)
    return (out, lse) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper:
    """plan / run, as FlashInfer's wrapper of that name: the tables once per step, then every layer.

    ``plan`` keeps references to the tables that it is given, ``run`` launches, and the kernel reads them on the device
    when it runs.  A captured graph of ``run`` therefore follows in-place changes of the planned tables:

    * ``block_table`` and ``seq_lens``: as they are.
    * ``indptr``, ``indices`` and ``last_page_len``: lengths are derived in ``plan``.  After changing ``indptr`` or
      ``last_page_len`` in place, call ``plan`` again with the same tensors; it writes the lengths where a graph of that
      batch size reads them.  Plans of other batch sizes and dense plans in between do no harm; other tables of the same
      batch size need another wrapper.

    The launches of one wrapper share a workspace: a wrapper must not run on two streams at once, nor may its graphs.

    Args:
        device: where caches will be; None: the tables' device.

    Raises:
        UnsupportedDeviceError: "cuda" where torch sees no GPU.
    """

    def __init__(self, device: torch.device | str | None = None):
        self.device = None if device is None else torch.device(device)
        if self.device is not None and self.device.type == "cuda" and self.device.index is None:
            if not torch.cuda.is_available():
                raise UnsupportedDeviceError(f"device {str(device)!r} needs a GPU, and torch sees none")
            self.device = torch.device("cuda", torch.cuda.current_device())  # as a tensor names it
        self._tables: Tables | None = None
        self._lengths: dict[tuple[int, torch.device], torch.Tensor] = {}  # derived ones, where graphs read them
        self._buffers: dict[tuple, Buffers] = {}

    def plan(
        self,
        indptr: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        last_page_len: torch.Tensor | None = None,
        num_qo_heads: int = 0,
        num_kv_heads: int = 0,
        head_dim: int = 0,
        page_size: int = 0,
        *,
        block_table: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        format: KVFormat | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        sm_scale: float | None = None,
        lse_base: int | str = 2,
        backend: str = "auto",
        tile: TileConfig | None = None,
    ) -> None:
        """Take the tables of a step, either FlashInfer's three or ``block_table`` and ``seq_lens``.

        Args:
            indptr: int32 [batch + 1]; request b's pages are ``indices[indptr[b] : indptr[b + 1]]``.
            indices: int32 [pages], page ids.
            last_page_len: int32 [batch], tokens in the last page, 1 .. page_size (no matter for a request without
                pages).
            num_qo_heads, num_kv_heads, head_dim, page_size, format, q_data_type: what ``run``'s q and cache will be;
                checked there, and used here to compile and load the kernel.
            block_table, seq_lens: see :func:`decode_attention`.
            sm_scale, lse_base, backend, tile: see :func:`decode_attention`.

        No host synchronization.  Raises as :func:`decode_attention`.
        """
        num_qo_heads = check_whole("num_qo_heads", num_qo_heads)
        num_kv_heads = check_whole("num_kv_heads", num_kv_heads)
        head_dim, page_size = check_whole("head_dim", head_dim), check_whole("page_size", page_size)
        require(
            num_qo_heads > 0 and num_kv_heads > 0 and num_qo_heads % num_kv_heads == 0,
            f"num_qo_heads ({num_qo_heads}) must be a positive multiple of num_kv_heads ({num_kv_heads})",
        )
        require(q_data_type in Q_DTYPES, f"q must be bfloat16 or float16, not {q_data_type}")
        check_lse_base(lse_base)
        check_tile(tile)
        require(backend in BACKENDS, f"backend must be one of {BACKENDS}, not {backend!r}")
        compressed = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        dense = {"block_table": block_table, "seq_lens": seq_lens}
        given = [tables for tables in (compressed, dense) if any(x is not None for x in tables.values())]
        require(
            len(given) == 1 and all(x is not None for x in given[0].values()),
            "plan takes either indptr, indices, last_page_len or block_table, seq_lens",
        )
        check_tensors(**given[0])
        layout = check_format(format).layout(head_dim, page_size)
        options = (check_scale(sm_scale, head_dim), lse_base, backend, tile)
        device = self.device or (block_table if given[0] is dense else indices).device
        if given[0] is dense:
            tables = self._dense(block_table, seq_lens, device)
        else:
            tables = self._compressed(indptr, indices, last_page_len, page_size, device)
        batch = tables.lengths.shape[0]
        if device.type == "cuda" and backend != "torch":
            probe = PagedKVCache(0, page_size, num_kv_heads, head_dim, layout.format, device)
            self._workspace(_kernels(probe, num_qo_heads, q_data_type, tile), num_qo_heads // num_kv_heads)
        self._tables = self._in_place(tables)
        self._expected = (layout, num_kv_heads, num_qo_heads, q_data_type)
        self._options, self._batch = options, batch

    @staticmethod
    def _dense(block_table, seq_lens, device) -> Tables:
        check_int32("block_table", block_table, 2, device)
        check_int32("seq_lens", seq_lens, 1, device)
        require(
            block_table.shape[0] == seq_lens.shape[0],
            f"block_table has {block_table.shape[0]} rows for {seq_lens.shape[0]} requests",
        )
        require(
            (block_table.stride(1) == 1 or block_table.shape[1] == 1) and seq_lens.is_contiguous(),
            "plan keeps block_table and seq_lens: their last dimension must be contiguous",
        )
        return Tables(block_table, seq_lens)

    @staticmethod
    def _compressed(indptr, indices, last_page_len, page_size, device) -> Tables:
        for name, x in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
            check_int32(name, x, 1, device)
            require(x.is_contiguous(), f"plan keeps {name}: it must be contiguous")
        require(
            indptr.shape[0] == last_page_len.shape[0] + 1,
            f"indptr has {indptr.shape[0]} entries for {last_page_len.shape[0]} requests; it needs one more than those",
        )
        pages = indptr[1:] - indptr[:-1]
        if device.type == "cpu":
            bad = (pages > 0) & ((last_page_len < 1) | (last_page_len > page_size))
            require(not bad.any(), f"last_page_len must be 1 .. {page_size}, not {last_page_len[bad][:1].tolist()}")
        lengths = torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0)
        return Tables(indices, lengths.to(torch.int32), indptr)

    def _in_place(self, tables: Tables) -> Tables:
        """Derived lengths in the storage of earlier plans of their batch size, which a captured graph reads."""
        if tables.indptr is None:
            return tables
        new = tables.lengths
        lengths = self._lengths.setdefault((len(new), new.device), new)
        if lengths is not new:
            lengths.copy_(new)
        return Tables(tables.pages, lengths, tables.indptr)

    def _workspace(self, kernels: HopperDecode, group: int) -> Buffers:
        """The workspace for one kind of launch, made once: a captured graph writes to it."""
        key = (kernels, group)
        if key not in self._buffers:
            self._buffers[key] = kernels.buffers(group)
        return self._buffers[key]

    def run(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned requests over one layer's cache.

        Args:
            q: [batch, query heads, head_dim] of the planned dtype.
            cache: a cache of the planned format and shape.
            out, lse: where to write, or None.

        Returns:
            out, or (out, lse) with ``return_lse``; see :func:`decode_attention`.
        """
        require(self._tables is not None, "call plan before run")
        check_types(cache, q=q)
        layout, kv_heads, heads, dtype = self._expected
        check_query(q, cache, self._batch)
        if cache.layout != layout or cache.num_kv_heads != kv_heads:
            raise ValueError(f"the plan is for {layout.format.name}, {kv_heads} KV heads of {layout.head_dim}, "
                             f"pages of {layout.page_size}; the cache is {cache!r}")  # fmt: skip
        require(
            q.shape[1] == heads and q.dtype == dtype,
            f"the plan is for {heads} query heads of {dtype}, q has {q.shape[1]} of {q.dtype}",
        )
        require(
            self._tables.lengths.device == cache.device,
            f"the planned tables are on {self._tables.lengths.device}, the cache on {cache.device}",
        )
        scale, lse_base, backend, tile = self._options
        out, lse = _results(q, out, lse, return_lse)
        kernels = buffers = None
        if _backend(backend, cache) == "cuda" and self._batch > 0:
            kernels = _kernels(cache, heads, dtype, tile)
            buffers = self._workspace(kernels, heads // kv_heads)
        _decode(q, cache, self._tables, scale, out, lse, lse_base, kernels, buffers)
        return (out, lse) if return_lse else out
