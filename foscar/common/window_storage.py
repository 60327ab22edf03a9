"""The storage of a cache with windows (:mod:`foscar.common.windows`): its sizes, and whether given tensors are one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from foscar.common.cache import PagedKVCache
from foscar.common.tensor_checks import check_tensors
from foscar.common.window_move import WindowConfig

RING_UNIT = 16  # the ring's capacity is a multiple
NAMES = ("records", "sink_k", "sink_v", "recent_k", "recent_v", "packed_lens")


def unit_of(packed: PagedKVCache) -> int:
    """Tokens that leave the recent window together: 1, or whole token groups of a format per channel."""
    sides = ((packed.format.k, packed.layout.k_group), (packed.format.v, packed.layout.v_group))
    return math.lcm(*(group for f, group in sides if f.axis == "channel"))


def capacity_of(n_recent: int, unit: int) -> int:
    """Entries of the ring of recent tokens."""
    return -(-(n_recent + unit - 1) // RING_UNIT) * RING_UNIT


def check_count(storage: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors, if they are as many as NAMES, with as many dimensions as those and a spare page and slot.

    Raises:
        TypeError, ValueError: they are not.
    """
    if len(storage) != len(NAMES):
        raise ValueError(f"storage must be the tensors {', '.join(NAMES)}, not {len(storage)}")
    check_tensors(**dict(zip(NAMES, storage, strict=True)))
    for name, x, ndim in zip(NAMES, storage, (3, 4, 4, 4, 4, 1), strict=True):
        if x.ndim != ndim or len(x) == 0:
            raise ValueError(f"{name} must have {ndim} dimensions and a spare entry in the first, not {list(x.shape)}")
    return storage


def check_storage(storage: Sequence[torch.Tensor], packed: PagedKVCache, window: WindowConfig, unit: int) -> None:
    """Raise ValueError where the tensors are not the storage of ``packed`` with those windows."""
    records, sink_k, *_ = storage
    slots, heads, dim = len(sink_k), packed.num_kv_heads, packed.padded_head_dim
    sink, ring = ((slots, heads, n, dim) for n in (window.n_sink, capacity_of(window.n_recent, unit)))
    shapes = (tuple(records.shape), sink, sink, ring, ring, (slots,))
    dtypes = (torch.uint8, *[sink_k.dtype] * 4, torch.int32)
    for name, x, shape, dtype in zip(NAMES, storage, shapes, dtypes, strict=True):
        if tuple(x.shape) != shape or x.dtype != dtype or x.device != records.device or not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype} {list(shape)} on {records.device}, "
                             f"not {x.dtype} {list(x.shape)} on {x.device}")  # fmt: skip
