"""Decode attention over a cache with windows (:mod:`foscar.common.windows`)."""

from __future__ import annotations

import math

import torch

from .api import decode_attention, make_results
from .checks import check_int32, check_lse_base, check_pages, check_query, check_scale, check_tensors, require
from .common.merge import merge_states
from .common.reference import decode_folded
from .common.window_attention import window_attention
from .common.window_move import check_lengths, check_slots
from .common.windows import WindowedKVCache
from .hopper.decode import Tables


@torch.no_grad()
def decode_windowed(
    q: torch.Tensor,
    cache: WindowedKVCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_ids: torch.Tensor,
    *,
    sm_scale: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base: int | str = 2,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one new token per request over its sink, history and recent tokens.

    The history is decoded from its codes, the tokens in 16 bits in float32, and the two are merged by their LSEs.

    Args:
        q: [batch, query heads, head_dim], bfloat16 or float16.
        cache: on the same device.
        block_table: int32 [batch, max_pages], the pages of the histories.
        seq_lens: int32 [batch], tokens per request, the new one included and appended.
        slot_ids: int32 [batch], the requests' window slots; -1 only with a length of 0.
        sm_scale, out, return_lse, lse_base, backend: see :func:`foscar.decode_attention`.

    Returns:
        out of q's dtype, or (out, lse): see :func:`foscar.decode_attention`.

    Raises:
        ValueError, TypeError: an argument that does not fit, naming what does.
        FormatError, UnsupportedDeviceError: see :func:`foscar.decode_attention`.
    """
    if not isinstance(cache, WindowedKVCache):
        raise TypeError(f"cache must be a foscar.WindowedKVCache, not {type(cache).__name__}")
    check_tensors(q=q, block_table=block_table, seq_lens=seq_lens)
    check_int32("seq_lens", seq_lens, 1, cache.device)
    check_int32("block_table", block_table, 2, cache.device)
    batch, packed = seq_lens.shape[0], cache.packed
    require(block_table.shape[0] == batch, f"block_table has {block_table.shape[0]} rows for {batch} requests")
    check_slots(slot_ids, seq_lens, cache.max_batch)
    check_lengths(cache, seq_lens, slot_ids, read=True)
    check_query(q, packed, batch)
    check_lse_base(lse_base)
    scale = check_scale(sm_scale, packed.head_dim)
    out, lse = make_results(q, out, None, return_lse)
    history = cache.history_lens(seq_lens, slot_ids)
    if backend == "torch" or (backend == "auto" and cache.device.type != "cuda"):
        check_pages(packed, Tables(block_table, history))
        parts = decode_folded(q, packed, block_table, history, scale)
    else:
        options = {"sm_scale": scale, "return_lse": True, "lse_base": "e", "backend": backend}
        parts = decode_attention(q, packed, block_table, history, **options)
    exact = window_attention(q, cache, seq_lens, slot_ids, scale)
    result, log_sum = merge_states(parts[0].float(), parts[1], *exact, lse_base="e")
    out.copy_(result)
    if lse is None:
        return out
    lse.copy_(log_sum if lse_base == "e" else log_sum / math.log(2.0))
    return out, lse
