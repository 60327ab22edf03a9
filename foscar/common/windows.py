"""A cache whose requests keep their first and last tokens in 16 bits: OSCAR's sink and recent windows, KIVI's residual.

A request of L tokens is three runs of positions::

    0 .. n_sink             sink: exact, [slots, kv heads, n_sink, D], by position
    n_sink .. end           history: 2 or 4 bits, pages; position p is token p - n_sink of the request's block table
    end .. L                recent: exact, a ring [slots, kv heads, capacity, D], position p at p % capacity

``end`` follows L: it is the largest ``n_sink + i * unit`` with ``L - end >= n_recent`` (or n_sink), so there are
n_recent .. n_recent + unit - 1 recent tokens once there is a history.  ``unit`` is 1 for formats per token; where K or
V is quantized per channel, the tokens of a group (of both, their least common multiple): groups are quantized whole.

``end - n_sink`` is kept per slot (``packed_lens``) and not derived from L: a request that was forked from a longer one
has more history than its length asks for, and its recent window is shorter until it has grown.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from foscar.common import append as _append
from foscar.common.append_checks import check_new_values, check_page_ids, check_positions
from foscar.common.autocast import without_autocast
from foscar.common.cache import PagedKVCache, check_device
from foscar.common.formats import KVFormat, check_whole
from foscar.common.quantize import param_dtype
from foscar.common.window_move import Move, WindowConfig, check_finite, check_lengths, check_slots
from foscar.common.window_storage import capacity_of, check_count, check_storage, unit_of


class WindowedKVCache:
    """A paged cache (``packed``) and, for up to ``max_batch`` requests at a time, their windows.

    A request owns a window slot, 0 .. max_batch - 1, from its first token to its last; a slot starts anew when its
    request's length is 0.  Its block table is of its history, the ``L - n_sink - n_recent`` tokens between the windows
    (rounded down to units): token ``n_sink + i`` is token i there.

    Requests may share pages: those of which every token is the same for all, and whose tokens are all in the history of
    one of them, or will be.  A page that receives different tokens must be the request's own.

    Args:
        num_pages, page_size, num_kv_heads, head_dim, format, device: see :class:`foscar.PagedKVCache`.
        max_batch: window slots.
        window: sizes and type.

    Attributes:
        packed: the PagedKVCache of the histories.
        window, max_batch: as above.
        unit: tokens that leave the recent window together: 1, or whole token groups of a format per channel.
        capacity: entries of the ring of recent tokens.
        sink_k, sink_v: [max_batch, num_kv_heads, n_sink, padded_head_dim], of the window's type.
        recent_k, recent_v: [max_batch, num_kv_heads, capacity, padded_head_dim].
        packed_lens: int32 [max_batch], tokens of each slot's history.
        operator_tensors: all of the storage, a page and a slot more than asked for included, as the operators of
            :mod:`foscar.ops` take it: records, sink K and V, recent K and V, packed lengths.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        format: KVFormat | None = None,
        *,
        max_batch: int,
        window: WindowConfig | None = None,
        device: str | torch.device = "cpu",
    ):
        if window is not None and not isinstance(window, WindowConfig):
            raise TypeError(f"window must be a foscar.WindowConfig such as foscar.WindowConfig.oscar(), not {window!r}")
        self.window = window = WindowConfig.oscar() if window is None else window
        self.max_batch = check_whole("max_batch", max_batch)
        if self.max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, not {max_batch}")
        one = PagedKVCache(min(check_whole("num_pages", num_pages), 1), page_size, num_kv_heads, head_dim, format)
        device = check_device(device)
        # one page and one slot more than asked for: where rows go that store nothing, so that the host need not know
        self._records = torch.zeros(num_pages + 1, *one.data.shape[1:], dtype=torch.uint8, device=device)
        self.unit = unit_of(one)
        self.capacity = capacity_of(window.n_recent, self.unit)

        def storage(tokens: int) -> torch.Tensor:
            shape = (self.max_batch + 1, num_kv_heads, tokens, one.padded_head_dim)
            return torch.zeros(shape, dtype=param_dtype(window.dtype), device=device)

        self._sink, self._recent = ((storage(n), storage(n)) for n in (window.n_sink, self.capacity))
        self._packed_lens = torch.zeros(self.max_batch + 1, dtype=torch.int32, device=device)
        self._make_views((num_pages, page_size, num_kv_heads, head_dim, one.format))

    @classmethod
    def from_storage(
        cls, storage: Sequence[torch.Tensor], format: KVFormat, page_size: int, head_dim: int, n_recent: int
    ) -> WindowedKVCache:
        """A cache over the tensors of another one's :attr:`operator_tensors`, which it shares.

        Args:
            storage: those six tensors.
            format, page_size, head_dim: the cache's; ``n_recent``: its window's.

        Raises:
            TypeError, ValueError: tensors that are not the storage of such a cache.
        """
        records, sink_k, sink_v, recent_k, recent_v, packed_lens = check_count(storage)
        self = cls.__new__(cls)
        self.window = WindowConfig(sink_k.shape[2], n_recent, str(sink_k.dtype).removeprefix("torch."))
        self.max_batch, self.capacity = len(sink_k) - 1, recent_k.shape[2]
        self._records, self._sink, self._recent = records, (sink_k, sink_v), (recent_k, recent_v)
        self._packed_lens = packed_lens
        self._make_views((len(records) - 1, page_size, records.shape[1], head_dim, format))
        self.unit = unit_of(self.packed)
        check_storage(storage, self.packed, self.window, self.unit)
        return self

    def _make_views(self, shape: tuple) -> None:
        """All but the spare page and slot; ``shape``: of the packed cache."""
        self._shape, self.packed = shape, PagedKVCache(*shape, data=self._records[: shape[0]])
        self.operator_tensors = [self._records, *self._sink, *self._recent, self._packed_lens]
        self.operator_shape = (*self.packed.operator_shape, self.window.n_recent)
        self.sink_k, self.sink_v = (x[: self.max_batch] for x in self._sink)
        self.recent_k, self.recent_v = (x[: self.max_batch] for x in self._recent)
        self.packed_lens = self._packed_lens[: self.max_batch]

    def __getstate__(self) -> dict:
        # pickle would take them apart
        views = ("packed", "sink_k", "sink_v", "recent_k", "recent_v", "packed_lens", "operator_tensors")
        return {name: x for name, x in vars(self).items() if name not in views}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._make_views(self._shape)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def storage(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """(sink, recent) of K and of V, the spare slot ``max_batch`` included."""
        return tuple(zip(self._sink, self._recent, strict=True))

    @property
    def window_tensors(self) -> tuple[torch.Tensor, ...]:
        """packed_lens, sink_k, sink_v, recent_k, recent_v: what a decode reads beside the packed cache."""
        return self.packed_lens, self.sink_k, self.sink_v, self.recent_k, self.recent_v

    @property
    def nbytes(self) -> int:
        """Bytes of all records and windows."""
        return self.packed.nbytes + sum(x.nbytes for x in self.window_tensors)

    def __repr__(self) -> str:
        w = self.window
        return (
            f"WindowedKVCache({w.n_sink} + {w.n_recent} tokens in {w.dtype} for {self.max_batch} requests, "
            f"{self.nbytes / 2**20:.1f} MiB, {self.packed!r})"
        )

    def history_lens(self, seq_lens: torch.Tensor, slot_ids: torch.Tensor) -> torch.Tensor:
        """int32 [batch]: the tokens of each request that are in the packed cache; no host synchronization."""
        beyond_sink = (seq_lens - self.window.n_sink).clamp(min=0)
        return torch.minimum(self._packed_lens[self.storage_slots(slot_ids)], beyond_sink)

    def storage_slots(self, slot_ids: torch.Tensor) -> torch.Tensor:
        """int64 [batch]: where requests store, the spare slot max_batch for -1."""
        slots = slot_ids.long()
        return torch.where(slots < 0, self.max_batch, slots)

    @without_autocast
    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        slot_ids: torch.Tensor,
        indptr: torch.Tensor | None = None,
        *,
        check: bool | None = None,
    ) -> None:
        """Store new tokens in the windows, and quantize the tokens that leave them.

        What a token is rounded to does not depend on how the appends are cut: values are rounded to the window's type
        first, and quantized from there.  The request's length may also be smaller than at its last append (a rejected
        draft), as long as it does not end in the history's last, partly rejected group of a format per channel.

        Args:
            k, v, seq_lens, indptr: as of :meth:`foscar.PagedKVCache.append`.
            block_table: int32 [batch, max_pages], of the histories: see the module's docstring.
            slot_ids: int32 [batch], all different; -1: the request stores nothing (padding of a captured batch).
            check: as of :meth:`foscar.PagedKVCache.append`; values that are not finite in the window's type or the
                parameters' are refused on arrival.

        Formats per token: no host synchronization on CUDA.  Per channel: the host waits for the lengths.

        Raises:
            TypeError, ValueError: as :meth:`foscar.PagedKVCache.append`; on the CPU also a length that the
                slot cannot have.  Nothing is written then.
        """
        check_new_values(self.packed, k, v, block_table, seq_lens, indptr)
        check_slots(slot_ids, seq_lens, self.max_batch)
        check_lengths(self, seq_lens, slot_ids)
        check = self.device.type == "cpu" if check is None else check
        if check:
            check_finite(self, k, v)
        padding = (0, self.packed.padded_head_dim - self.packed.head_dim)
        new = [F.pad(x.to(param_dtype(self.window.dtype)), padding) for x in (k, v)]
        move = Move.make(self, seq_lens, slot_ids, indptr, k.shape[0])
        if self.unit == 1:
            self._pack_tokens(move, new, block_table, check)
        else:
            self._pack_groups(move, new, block_table, seq_lens, check)
        position, slot, end = move.position, move.slots[move.request], move.new_end[move.request]
        for (store_sink, store_recent), x in zip(self.storage, new, strict=True):
            if self.window.n_sink:
                inside = (position >= 0) & (position < self.window.n_sink)
                _put(store_sink, torch.where(inside, slot, self.max_batch), torch.where(inside, position, 0), x)
            if self.capacity:
                inside = (position >= end) & (position >= self.window.n_sink)
                _put(store_recent, torch.where(inside, slot, self.max_batch), position % self.capacity, x)
        self._packed_lens[move.slots] = (move.new_end - self.window.n_sink).int()

    def _pack_tokens(self, move: Move, new, block_table: torch.Tensor, check: bool) -> None:
        """Each new token pushes at most one out, ``n_recent`` before it; those that push none go to the spare page."""
        packed, request = self.packed, move.request
        leaving = move.position - self.window.n_recent
        valid = (leaving >= move.old_end[request]) & (move.slots[request] < self.max_batch)
        values = [x.masked_fill(~valid[:, None, None], 0) for x in self._values(move, new, request, leaving)]
        token = torch.where(valid, leaving - self.window.n_sink, 0)
        column = token // packed.page_size
        if block_table.shape[1] == 0:
            block_table = F.pad(block_table, (0, 1), value=-1)
        if self.device.type == "cpu":
            check_positions(packed, block_table, request, token, column)
        page = block_table[request, column].long()
        if self.device.type == "cpu":
            check_page_ids(packed, page[valid], request[valid])
        else:
            page = torch.where(page < 0, packed.num_pages + 1, page)  # a negative index would count from the end
        page = torch.where(valid, page, packed.num_pages)
        tokens = _append.NewTokens(page, token % packed.page_size, block_table, move.new_end, None)
        _append.store(packed, *values, tokens, check, self._records)

    def _pack_groups(self, move: Move, new, block_table: torch.Tensor, seq_lens: torch.Tensor, check: bool) -> None:
        """The tokens between the old and the new end, whole groups, through the packed cache's own append."""
        counts = torch.where(move.slots < self.max_batch, move.new_end - move.old_end, 0)
        indptr = F.pad(counts.cumsum(0), (1, 0)).int()
        n = int(indptr[-1])
        if n == 0:
            return
        request, position = _append.request_positions(move.old_end, indptr, n)
        values = self._values(move, new, request, position)
        history = (move.old_end - self.window.n_sink).int()
        self.packed.append(*values, block_table, history, indptr, check=check)

    def _values(self, move: Move, new, request: torch.Tensor, position: torch.Tensor) -> list[torch.Tensor]:
        """Tokens that leave, [n, heads, head_dim]: from the ring, or, if they never were there, from the new rows."""
        old = position < move.start[request]
        row = (move.first_row[request] + position - move.start[request]).clamp(0, max(0, len(new[0]) - 1))
        found = []
        for ring, x in zip(self._recent, new, strict=True):
            x = x[row]
            if self.capacity:
                kept = ring[move.slots[request], :, position % self.capacity]
                x = torch.where(old[:, None, None], kept, x)
            found.append(x[..., : self.packed.head_dim])
        return found

    def fork(self, source: int, target: int) -> None:
        """Make slot ``target`` a request that begins like slot ``source``'s, with as many of its tokens as it likes.

        The new request's length, at most the source's now, says how many.  Its block table starts as the source's:
        pages wholly below the length (see the class) can be shared, a page that both will write to must be copied
        first.  Per channel that goes for every page of a token group that the length cuts: the group's parameters lie
        in all of its pages and may change with its later tokens.  Tokens that the source has already quantized stay
        quantized.
        """
        for name, slot in (("source", source), ("target", target)):
            if not 0 <= check_whole(name, slot) < self.max_batch:
                raise ValueError(f"{name} must be a slot, 0 .. {self.max_batch - 1}, not {slot}")
        for x in (*self._sink, *self._recent):
            x[target] = x[source]
        self.packed_lens[target] = self.packed_lens[source]

    @without_autocast
    def read_request(
        self, block_table_row: torch.Tensor, length: int, slot: int, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(K, V) of one request [length, num_kv_heads, head_dim]: what is kept of it, as ``dtype``; the host waits.

        Raises:
            TypeError, ValueError: no slot, a length below 0, a row as of :meth:`foscar.PagedKVCache.read_tokens`.
        """
        if check_whole("length", length) < 0 or not 0 <= check_whole("slot", slot) < self.max_batch:
            raise ValueError(f"length must be 0 or more and slot 0 .. {self.max_batch - 1}, not {length} and {slot}")
        n_sink, dev = self.window.n_sink, self.device
        sink = min(length, n_sink)
        packed = min(int(self.packed_lens[slot]), length - sink)
        recent = torch.arange(sink + packed, length, device=dev)
        history = self.packed.dequantize_request(block_table_row, packed, dtype)
        read = []
        for (store_sink, ring), middle in zip(self.storage, history, strict=True):
            parts = [store_sink[slot, :, :sink]]
            if len(recent):
                parts.append(ring[slot, :, recent % self.capacity])
            head, *tail = (x.transpose(0, 1)[..., : self.packed.head_dim].to(dtype) for x in parts)
            read.append(torch.cat([head, middle, *tail]))
        return tuple(read)


def _put(store: torch.Tensor, slot: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """store [slots, heads, tokens, D] at (slot, index) [n] = values [n, heads, D]."""
    store[slot, :, index] = values
