"""The plan/run form of decode attention: a step's tables once, then every layer."""

from __future__ import annotations

import dataclasses

import torch

from .api import decode_into, kernels_for, make_results, takes_windows
from .checks import (
    BACKENDS,
    Q_DTYPES,
    check_int32,
    check_lse_base,
    check_query,
    check_scale,
    check_tile,
    check_types,
    check_variant,
    require,
    with_sinks,
)
from .common.cache import PagedKVCache, check_device
from .common.formats import KVFormat, check_format, check_whole
from .common.options import AttentionOptions
from .common.tensor_checks import check_tensors
from .common.window_move import WindowConfig, check_lengths, check_slot_ids, check_slots
from .common.windows import WindowedKVCache
from .hopper.config import TileConfig
from .hopper.decode import Buffers, HopperDecode, Tables
from .replay import Replay
from .windowed import Room, check_no_window, check_windowed, decode_windows_into, exact_room, exact_tokens


class BatchDecodeWithPagedKVCacheWrapper:
    """plan / run, as FlashInfer's wrapper of that name: the tables once per step, then every layer.

    ``plan`` keeps references to the tables that it is given, ``run`` launches, and the kernel reads them on the device
    when it runs.  A captured graph of ``run`` therefore follows in-place changes of the planned tables:

    * ``block_table``, ``seq_lens``, ``slot_ids`` and ``q_indptr``: as they are.
    * ``indptr``, ``indices`` and ``last_page_len``: lengths are derived in ``plan``.  After changing ``indptr`` or
      ``last_page_len`` in place, call ``plan`` again with the same tensors; it writes the lengths where a graph of that
      batch size reads them.  Plans of other batch sizes and dense plans in between do no harm; other tables of the same
      batch size need another wrapper.

    The launches of one wrapper share a workspace: a wrapper must not run on two streams at once, nor may its graphs.

    Args:
        device: where caches will be; None: the tables' device.

    Raises:
        ValueError, UnsupportedDeviceError: no device, or "cuda" where torch sees no GPU.
    """

    def __init__(self, device: torch.device | str | None = None):
        self.device = None if device is None else check_device(device)
        if self.device is not None and self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())  # as a tensor names it
        self._tables: Tables | None = None
        self._lengths: dict[tuple[int, torch.device], torch.Tensor] = {}  # derived ones, where graphs read them
        self._buffers: dict[tuple, Buffers] = {}
        self._rooms: dict[tuple, Room] = {}  # likewise, for tokens in 16 bits
        self._replay: Replay | None = None  # of the plan's first run

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
        slot_ids: torch.Tensor | None = None,
        window: WindowConfig | None = None,
        format: KVFormat | None = None,
        q_data_type: torch.dtype = torch.bfloat16,
        sm_scale: float | None = None,
        options: AttentionOptions | None = None,
        q_indptr: torch.Tensor | None = None,
        max_q_len: int | None = None,
        has_sinks: bool = False,
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
            block_table, seq_lens: see :func:`foscar.decode_attention`.
            slot_ids: int32 [batch]: ``run`` gets a :class:`foscar.WindowedKVCache`, and ``block_table``, ``seq_lens``
                and this are as of :func:`foscar.decode_windowed`.  None: a :class:`foscar.PagedKVCache`.
            window: that cache's; None: foscar.WindowConfig.oscar().  With ``slot_ids`` only.
            sm_scale, options, q_indptr, lse_base, backend, tile: see :func:`foscar.decode_attention`.
                Sinks, which differ from layer to layer, are given to :meth:`run`.
            max_q_len: likewise, but None chooses the kernel for 16 query tokens: there is no q yet.
            has_sinks: whether ``run`` will get them: compile and load that kernel now, instead of on first use.

        No host synchronization.  Raises as :func:`foscar.decode_attention`.
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
        if slot_ids is not None:
            require(given[0] is dense and tile is None, "slot_ids go with block_table and seq_lens, and without a tile")
            window = WindowConfig.oscar() if window is None else window
        if window is not None and not isinstance(window, WindowConfig):
            raise TypeError(f"window must be a foscar.WindowConfig or None, not {type(window).__name__}")
        require(slot_ids is not None or window is None, "a window goes with slot_ids")
        settings = (check_scale(sm_scale, head_dim), lse_base, backend, tile)
        device = self.device or (block_table if given[0] is dense else indices).device
        if given[0] is dense:
            tables = self._dense(block_table, seq_lens, device)
        else:
            tables = self._compressed(indptr, indices, last_page_len, page_size, device)
        batch = tables.lengths.shape[0]
        variant = check_variant(options, q_indptr, max_q_len, batch, device)
        require(q_indptr is None or q_indptr.is_contiguous(), "plan keeps q_indptr: it must be contiguous")
        if slot_ids is not None:
            check_slot_ids(slot_ids, seq_lens)
            check_no_window(variant)
            require(slot_ids.is_contiguous(), "plan keeps slot_ids: it must be contiguous")
        if device.type == "cuda" and backend != "torch":
            probe = PagedKVCache(0, page_size, num_kv_heads, head_dim, layout.format, device)
            sinks = torch.empty(num_qo_heads, device=device) if has_sinks else None
            planned = dataclasses.replace(variant, sinks=sinks)
            if slot_ids is not None and takes_windows(backend, probe):
                windows = WindowedKVCache(
                    0, page_size, num_kv_heads, head_dim, layout.format, max_batch=1, window=window, device=device
                )
                nothing = (torch.empty(0, device=device),) * 2
                planned = dataclasses.replace(planned, exact=exact_tokens(windows, slot_ids, nothing))
            kernels = kernels_for(backend, probe, batch, num_qo_heads, q_data_type, tile, planned)
            if kernels is not None:
                self._workspace(kernels, num_qo_heads // num_kv_heads)
        self._slot_ids, self._window = slot_ids, window
        self._tables = self._in_place(tables)
        self._expected = (layout, num_kv_heads, num_qo_heads, q_data_type)
        self._settings, self._batch, self._variant = settings, batch, variant
        self._replay = None

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

    def _room(self, q: torch.Tensor, cache: WindowedKVCache) -> Room:
        """The workspace for q's rows over tokens in 16 bits, made once likewise."""
        key = (q.shape[:2], cache.packed.padded_head_dim, q.device)
        if key not in self._rooms:
            self._rooms[key] = exact_room(q, cache)
        return self._rooms[key]

    def run(
        self,
        q: torch.Tensor,
        cache: PagedKVCache | WindowedKVCache,
        *,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the planned requests over one layer's cache.

        Args:
            q: [batch, query heads, head_dim] of the planned dtype; with a planned ``q_indptr``: [query tokens, ...].
            cache: a cache of the planned format and shape; with planned ``slot_ids`` one with the planned windows.
            sinks: float32 [query heads], of this layer, or None.
            out, lse: where to write, or None.

        Returns:
            out, or (out, lse) with ``return_lse``; see :func:`foscar.decode_attention`.
        """
        wants_lse = return_lse or lse is not None
        if self._replay is not None and self._replay.fits(q, cache, out, lse, sinks, wants_lse):
            out, lse = self._replay(q, cache, out, lse, sinks)
            return (out, lse) if return_lse else out
        require(self._tables is not None, "call plan before run")
        if self._slot_ids is not None:
            check_windowed(cache)
        packed = cache if self._slot_ids is None else cache.packed
        check_types(packed, q=q)
        given = (out, lse)
        layout, kv_heads, heads, dtype = self._expected
        check_query(q, packed, None if self._variant.q_indptr is not None else self._batch)
        if packed.layout != layout or packed.num_kv_heads != kv_heads:
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
        scale, lse_base, backend, tile = self._settings
        variant = with_sinks(self._variant, sinks, heads, cache.device)
        if self._slot_ids is not None:
            require(cache.window == self._window, f"the plan is for {self._window}, the cache has {cache.window}")
            check_slots(self._slot_ids, self._tables.lengths, cache.max_batch)
            check_lengths(cache, self._tables.lengths, self._slot_ids, read=True)
        out, lse = make_results(q, out, lse, return_lse)
        if self._slot_ids is None:
            kernels = kernels_for(backend, cache, self._batch, heads, dtype, tile, variant)
            buffers = kernels and self._workspace(kernels, heads // kv_heads)
            bound = decode_into(q, cache, self._tables, scale, out, lse, lse_base, kernels, buffers, variant)
        else:
            bound = decode_windows_into(
                q, cache, self._tables, self._slot_ids, scale, out, lse, lse_base, backend, variant,
                lambda kernels: self._workspace(kernels, heads // kv_heads), lambda: self._room(q, cache),
            )  # fmt: skip
        if bound is not None and q.device.type == "cuda":
            self._replay = Replay(q, cache, *given, sinks, lse, bound)
        return (out, lse) if return_lse else out
