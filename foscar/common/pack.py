"""Codes <-> row bytes <-> records.

Row bytes are planar (see :mod:`foscar.common.formats`): byte ``i`` of ``R`` holds channels ``i, i + R, i + 2R, ...``
in ascending bit positions.  Where row bytes and parameter pairs lie in a record is read from
:class:`~foscar.common.formats.RecordLayout` once per layout and device and kept as tables of int64 byte offsets;
nothing else in the package computes a position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from foscar.common.formats import PARAM_BYTES, RecordLayout, TensorFormat
from foscar.common.quantize import Quantized, pad_channels, param_dtype


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [..., head_dim] -> planar row bytes uint8 [..., head_dim * bits / 8]."""
    positions = 8 // bits
    planes = codes.unflatten(-1, (positions, codes.shape[-1] // positions))
    row = planes[..., 0, :].clone()
    for p in range(1, positions):
        row |= planes[..., p, :] << (bits * p)
    return row


def unpack_codes(row: torch.Tensor, bits: int) -> torch.Tensor:
    """Planar row bytes uint8 [..., R] -> uint8 codes [..., R * 8 / bits]; the inverse of :func:`pack_codes`."""
    mask = (1 << bits) - 1
    return torch.cat([(row >> shift) & mask for shift in range(0, 8, bits)], dim=-1)


@dataclass(frozen=True)
class TensorTable:
    """Byte offsets in the record of K's or V's row bytes and parameter pairs (int64, on one device).

    Attributes:
        format: K's or V's own format.
        group: channels per pair (axis "token"), or tokens per *stored* pair (axis "channel"): the token group, but at
            most a page, since larger groups are repeated in each of their pages.
        codes: [page_size, row bytes].
        params: the pair's four bytes; axis "token": [page_size, channel groups, 4];
            axis "channel": [token groups in a page, padded_head_dim, 4].
    """

    format: TensorFormat
    group: int
    codes: torch.Tensor
    params: torch.Tensor

    def padded(self, x: Quantized, padded_head_dim: int) -> Quantized:
        """``x`` with the channels and the parameter pairs of a record."""
        return pad_channels(x, padded_head_dim, self.params.shape[1])


@dataclass(frozen=True)
class RecordTables:
    """:class:`TensorTable` of K and of V."""

    k: TensorTable
    v: TensorTable


@cache
def record_tables(layout: RecordLayout, device: torch.device) -> RecordTables:
    """The tables of ``layout`` on ``device``, built once."""
    fmt = layout.format
    return RecordTables(
        _table(layout, fmt.k, layout.k_group, layout.k_byte, layout.k_param, device),
        _table(layout, fmt.v, layout.v_group, layout.v_byte, layout.v_param, device),
    )


def _table(layout, tensor_format, group, byte, param, device) -> TensorTable:
    # the layout's functions are integer arithmetic only, so they take whole numpy index grids
    tokens = np.arange(layout.page_size, dtype=np.int64)
    row = np.arange(tensor_format.row_bytes(layout.padded_head_dim), dtype=np.int64)
    codes = byte(tokens[:, None], row[None, :])
    if tensor_format.axis == "token":
        pairs = param(tokens[:, None], np.arange(0, layout.padded_head_dim, group, dtype=np.int64)[None, :])
    else:
        group = min(group, layout.page_size)
        pairs = param(tokens[::group, None], np.arange(layout.padded_head_dim, dtype=np.int64)[None, :])
    params = pairs[..., None] + np.arange(PARAM_BYTES)
    return TensorTable(tensor_format, group, torch.from_numpy(codes).to(device), torch.from_numpy(params).to(device))


def param_bytes(scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Parameter pairs -> uint8 [..., 4]."""
    pair = [p.contiguous().view(torch.int16) for p in (scale, bias)]  # as bytes: torch.autocast would change the type
    return torch.stack(pair, dim=-1).view(torch.uint8)


def params_from_bytes(pairs: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [..., 4] -> (scale, bias); the inverse of :func:`param_bytes`."""
    both = pairs.contiguous().view(dtype)
    return both[..., 0], both[..., 1]


def pack_record(layout: RecordLayout, k: Quantized, v: Quantized) -> torch.Tensor:
    """Whole pages of codes -> records uint8 [pages, heads, record_bytes].

    Args:
        k, v: codes [pages * page_size, heads, head_dim] with the parameters of :func:`quantize` for the layout's
            groups (token groups counted from the first token of page 0); or padded already.

    Raises:
        ValueError: a number of tokens that is not whole pages, or other shapes or parameters than the layout's.
    """
    tokens, heads, head_dim = k.codes.shape
    dtype = param_dtype(layout.format.params)
    known = (layout.head_dim, layout.padded_head_dim)
    if tokens % layout.page_size or head_dim not in known or v.codes.shape != k.codes.shape:
        raise ValueError(
            f"pack_record needs K and V codes [pages * {layout.page_size}, heads, {layout.head_dim}], "
            f"not {list(k.codes.shape)} and {list(v.codes.shape)}"
        )
    if {k.scale.dtype, k.bias.dtype, v.scale.dtype, v.bias.dtype} != {dtype}:
        raise ValueError(f"pack_record: the parameters of this layout are {layout.format.params}")
    pages = tokens // layout.page_size
    records = torch.zeros(pages, heads, layout.record_bytes, dtype=torch.uint8, device=k.codes.device)
    tables = record_tables(layout, k.codes.device)
    for x, table, group in ((k, tables.k, layout.k_group), (v, tables.v, layout.v_group)):
        x = table.padded(x, layout.padded_head_dim)
        rows = pack_codes(x.codes, table.format.bits)
        records[:, :, table.codes] = rows.view(pages, layout.page_size, heads, rows.shape[2]).transpose(1, 2)
        pairs = param_bytes(x.scale, x.bias)
        if table.format.axis == "channel" and group > layout.page_size:
            pairs = pairs.repeat_interleave(group // layout.page_size, dim=0)[:pages]
        per_page, per_group = table.params.shape[:2]
        records[:, :, table.params] = pairs.view(pages, per_page, heads, per_group, PARAM_BYTES).transpose(1, 2)
    return records


def unpack_tensor(layout: RecordLayout, table: TensorTable, records: torch.Tensor) -> Quantized:
    """K (``table = record_tables(..).k``) or V of records uint8 [pages, heads, record_bytes].

    Returns:
        Codes [pages * page_size, heads, padded_head_dim]; parameters [pages * page_size, heads, channel groups] (axis
        "token") or [pages * token groups in a page, heads, padded_head_dim] (axis "channel"), for groups of
        ``table.group``.
    """
    heads = records.shape[1]

    def tokens_first(offsets: torch.Tensor) -> torch.Tensor:
        taken = records.index_select(2, offsets.flatten()).unflatten(2, offsets.shape)
        return taken.transpose(1, 2).reshape(-1, heads, *offsets.shape[1:])

    codes = unpack_codes(tokens_first(table.codes), table.format.bits)
    scale, bias = params_from_bytes(tokens_first(table.params), param_dtype(layout.format.params))
    return Quantized(codes, scale, bias)


def unpack_record(layout: RecordLayout, records: torch.Tensor) -> tuple[Quantized, Quantized]:
    """Records uint8 [pages, heads, record_bytes] -> (K, V) as of :func:`unpack_tensor`."""
    tables = record_tables(layout, records.device)
    return unpack_tensor(layout, tables.k, records), unpack_tensor(layout, tables.v, records)
