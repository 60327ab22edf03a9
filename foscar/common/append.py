"""What an append writes: new tokens -> (page, byte offsets, bytes), for both axes.

:meth:`foscar.common.cache.PagedKVCache.append` is the entry; it plans K and V here first, and stores only when nothing
was refused.  All indices are int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from foscar.common.append_checks import check_cut_groups, check_page_ids, check_positions
from foscar.common.autocast import without_autocast
from foscar.common.pack import TensorTable, pack_codes, param_bytes, params_from_bytes, record_tables, unpack_codes
from foscar.common.quantize import (
    Quantized,
    explain_bad_group,
    nearest_codes,
    param_dtype,
    quantize,
    quantize_padded,
)

_CHUNK_ELEMENTS = 1 << 24  # of the float temporaries of token groups


def request_positions(seq_lens: torch.Tensor, indptr: torch.Tensor | None, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(request, position) int64 [n] of the ``n`` new rows of an append."""
    start, rows = seq_lens.long(), torch.arange(n, device=seq_lens.device)
    if indptr is None:
        return rows, start
    ends = indptr.long()
    request = torch.searchsorted(ends[1:], rows, right=True)
    return request, start[request] + rows - ends[request]


@dataclass(frozen=True)
class NewTokens:
    """Where the ``n`` new tokens go.

    Attributes:
        page, slot: int64 [n], the page and the token within it.
        block_table, seq_lens, indptr: as given to ``append`` (indptr None: one token per request).
    """

    page: torch.Tensor
    slot: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    indptr: torch.Tensor | None

    @classmethod
    def make(cls, cache, k, v, block_table, seq_lens, indptr) -> NewTokens:
        """Of arguments that :func:`check_new_values` passed; checks that make the host wait run on the CPU only."""
        request, position = request_positions(seq_lens, indptr, k.shape[0])
        column = position // cache.page_size
        if cache.device.type == "cpu":
            check_positions(cache, block_table, request, position, column)
        page = _pages(cache, block_table, request, column)
        if cache.device.type == "cpu":
            check_page_ids(cache, page, request)
        return cls(page, position % cache.page_size, block_table, seq_lens, indptr)

    @cached_property
    def lists(self) -> tuple[list[int], list[int]]:
        """(seq_lens, ends of the rows [batch + 1]) on the host, which waits for them once."""
        starts = self.seq_lens.tolist()
        return starts, list(range(len(starts) + 1)) if self.indptr is None else self.indptr.tolist()


def _pages(cache, block_table: torch.Tensor, request: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """int64 page ids to write to; on a GPU, where nobody checks them, a negative one does not count from the end."""
    page = block_table[request, column].long()
    return page if page.device.type == "cpu" else torch.where(page < 0, cache.num_pages, page)


@dataclass(frozen=True)
class Write:
    """Bytes ``values`` [m, heads, w] for byte offsets [m, w] of the records of ``page`` [m]."""

    page: torch.Tensor
    offsets: torch.Tensor
    values: torch.Tensor

    def store(self, data: torch.Tensor) -> None:
        data.transpose(1, 2)[self.page[:, None], self.offsets] = self.values.transpose(1, 2)


def _read(data: torch.Tensor, page: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Bytes [m, heads, w] of ``data`` [pages, heads, record] at byte offsets [m, w] of the records of ``page`` [m]."""
    return data.transpose(1, 2)[page[:, None], offsets].transpose(1, 2)


@without_autocast
def store(cache, k: torch.Tensor, v: torch.Tensor, new: NewTokens, check: bool, records: torch.Tensor) -> None:
    """Plan both sides, then write to ``records``: ``cache.data``, or what that is the beginning of."""
    tables, layout = record_tables(cache.layout, cache.device), cache.layout
    writes = []
    for name, x, table, group in (("k", k, tables.k, layout.k_group), ("v", v, tables.v, layout.v_group)):
        plan = plan_tokens if table.format.axis == "token" else plan_channels
        writes += plan(cache, new, name, x, table, group, check)
    for write in writes:
        write.store(records)


def plan_tokens(cache, new: NewTokens, name, x, table: TensorTable, group: int, check: bool) -> list[Write]:
    """Axis "token": every token stands alone."""
    params = cache.format.params
    padded = cache.layout.padded_head_dim
    q = quantize_padded(x, table.format, padded, group=group, params=params, check=check, name=name)
    pairs = param_bytes(q.scale, q.bias).flatten(2)
    return [
        Write(new.page, table.codes[new.slot], pack_codes(q.codes, table.format.bits)),
        Write(new.page, table.params[new.slot].flatten(1), pairs),
    ]


def plan_channels(cache, new: NewTokens, name, x, table: TensorTable, group: int, check: bool) -> list[Write]:
    """Axis "channel": a segment is the part of one token group that one request's new tokens fall in."""
    if cache.device.type == "cpu":
        check_cut_groups(cache, new.block_table, *new.lists, group)
    segments = _segments(new, group)
    step = max(1, _CHUNK_ELEMENTS // (group * cache.num_kv_heads * cache.head_dim))
    writes = []
    for i in range(0, len(segments), step):
        writes += _plan_segments(cache, new, name, x, table, group, check, segments[i : i + step])
    return writes


def _segments(new: NewTokens, group: int) -> list[tuple[int, int, int, int, int]]:
    """(request, first position of the group, first and last + 1 new position, row of the first) of each segment."""
    starts, ends = new.lists
    segments = []
    for b, start in enumerate(starts):
        stop = start + ends[b + 1] - ends[b]
        for base in range(start // group * group, stop, group):
            first, last = max(start, base), min(stop, base + group)
            if first < last:
                segments.append((b, base, first, last, ends[b] + first - start))
    return segments


def _plan_segments(cache, new, name, x, table, group, check, segments) -> list[Write]:
    dev, page_size = x.device, cache.page_size
    request, base, first, last, row = torch.tensor(segments, device=dev).unbind(1)
    position = base[:, None] + torch.arange(group, device=dev)  # [segments, group]
    is_old = position < first[:, None]
    is_new = ~is_old & (position < last[:, None])
    # outside the new tokens repeat the nearest one, which changes no minimum or maximum
    rows = row[:, None] + torch.minimum(torch.maximum(position, first[:, None]), last[:, None] - 1) - first[:, None]
    values = x[rows].to(torch.float64 if x.dtype == torch.float64 else torch.float32)  # [segments, group, heads, D]

    continued = [i for i, s in enumerate(segments) if s[2] > s[1]]
    old = None
    if continued:
        index = torch.tensor(continued, device=dev)
        old = _read_groups(cache, new, table, request[index], position[index], first[index])
        old.merge(values, is_old, index, table.format.max_code)
    q = quantize(values.flatten(0, 1), table.format, group=group, params=cache.format.params, check=False)
    codes, scale, bias = q.codes.view(values.shape), q.scale, q.bias
    changed = torch.ones(len(segments), dtype=torch.bool, device=dev)
    known = torch.zeros_like(bias, dtype=torch.bool)
    if old is not None:
        known[index] = old.keep
        changed[index] = (~old.keep).flatten(1).any(1)
        scale[index] = torch.where(old.keep, old.scale, scale[index])
        bias[index] = torch.where(old.keep, old.bias, bias[index])
        kept = nearest_codes(values[index], scale[index][:, None], bias[index][:, None], table.format.max_code)
        kept = torch.where(is_old[index][:, :, None, None], old.codes, kept)
        codes[index] = torch.where(old.keep[:, None], kept, codes[index])
    if check and bool((bad := bias.isnan()).any()):
        s, head, channel = bad.nonzero()[0].tolist()
        b, start, p0, p1, _ = segments[s]
        where = f"{name}[request {b}, positions {p0}:{p1}, head {head}, channel {channel}]"
        if known[s, head, channel]:
            raise ValueError(f"{where}: the tokens before it, from position {start}, hold NaN (appended unchecked)")
        group_values = values[s, is_old[s] | is_new[s], head, channel]
        raise ValueError(explain_bad_group(group_values, where, param_dtype(cache.format.params)))

    q = table.padded(Quantized(codes, scale, bias), cache.layout.padded_head_dim)
    codes, scale, bias = q.codes, q.scale, q.bias
    stored = is_new | (is_old & changed[:, None])
    s, j = stored.nonzero().unbind(1)
    page = _pages(cache, new.block_table, request[s], position[s, j] // page_size)
    write_codes = Write(page, table.codes[position[s, j] % page_size], pack_codes(codes[s, j], table.format.bits))

    # the pair of a group is stored in each of its pages that holds one of its tokens
    pages = [(i, p) for i, g in enumerate(segments) for p in range(g[1] // page_size, (g[3] - 1) // page_size + 1)]
    s, column = torch.tensor(pages, device=dev).unbind(1)
    offsets = table.params[(base[s] % page_size) // table.group].flatten(1)
    page = _pages(cache, new.block_table, request[s], column)
    return [write_codes, Write(page, offsets, param_bytes(scale[s], bias[s]).flatten(2))]


@dataclass
class _OldGroups:
    """What the cache holds of partially filled token groups: codes [c, group, heads, D], parameters [c, heads, D].

    ``keep`` (bool [c, heads, D]), set by :meth:`merge`: the parameters stay.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor
    keep: torch.Tensor | None = None

    def merge(self, values: torch.Tensor, is_old: torch.Tensor, index: torch.Tensor, max_code: int) -> None:
        """Decide what to keep against the new ``values`` [segments, group, heads, D] of the segments ``index``, then
        put the dequantized old values in their places."""
        fresh = values[index]
        old = is_old[index][:, :, None, None]
        scale, bias = self.scale.to(values.dtype), self.bias.to(values.dtype)
        several = (self.codes * old).amax(1) > 0  # all codes 0: one value, whatever the scale
        top = torch.where(several, bias + scale * max_code, bias)
        self.keep = bias.isnan() | ((fresh.amin(1) >= bias) & (fresh.amax(1) <= top))
        values[index] = torch.where(old, self.codes * scale[:, None] + bias[:, None], fresh)


def _read_groups(cache, new, table, request, position, first) -> _OldGroups:
    """The old part (positions below ``first`` [c]) of token groups ``position`` [c, group]; the rest is filler."""
    position = torch.minimum(position, first[:, None] - 1)
    page = new.block_table[request[:, None], position // cache.page_size].long()
    if page.device.type == "cpu":
        check_page_ids(cache, page, request[:, None].expand_as(page))
    slot = position % cache.page_size
    row_bytes = _read(cache.data, page.flatten(), table.codes[slot.flatten()])
    codes = unpack_codes(row_bytes, table.format.bits).unflatten(0, page.shape)
    pairs = _read(cache.data, page[:, -1], table.params[slot[:, -1] // table.group].flatten(1))
    scale, bias = params_from_bytes(pairs.unflatten(2, (-1, 4)), param_dtype(cache.format.params))
    return _OldGroups(*(x[..., : cache.head_dim] for x in (codes, scale, bias)))
