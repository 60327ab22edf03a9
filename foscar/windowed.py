"""Decode attention over a cache with windows (:mod:`foscar.common.windows`)."""

from __future__ import annotations

import dataclasses
import math

import torch

from . import api
from .checks import (
    check_int32,
    check_lse_base,
    check_pages,
    check_query,
    check_rows,
    check_scale,
    check_variant,
    require,
    with_sinks,
)
from .common.merge import merge_states
from .common.options import AttentionOptions, ExactTokens, Variant
from .common.reference import decode_folded
from .common.tensor_checks import check_tensors
from .common.window_attention import rows_as_requests, window_attention
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
    options: AttentionOptions | None = None,
    sinks: torch.Tensor | None = None,
    q_indptr: torch.Tensor | None = None,
    max_q_len: int | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base: int | str = 2,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's new tokens, one or several, over its sink, history and recent tokens.

    Args:
        q: [batch, query heads, head_dim] (with ``q_indptr``: [query tokens, query heads, head_dim]), bfloat16 or
            float16.
        cache: on the same device.
        block_table: int32 [batch, max_pages], the pages of the histories.
        seq_lens: int32 [batch], tokens per request, the new ones included and appended.
        slot_ids: int32 [batch], the requests' window slots; -1 only with a length of 0.
        options: soft-cap and output scale; a sliding window is refused.
        sm_scale, sinks, q_indptr, max_q_len, out, return_lse, lse_base, backend: see :func:`foscar.decode_attention`.

    Returns:
        out of q's dtype, or (out, lse): see :func:`foscar.decode_attention`.

    Raises:
        ValueError, TypeError: an argument that does not fit, naming what does.
        FormatError, UnsupportedDeviceError: see :func:`foscar.decode_attention`.

    On Hopper three kernels follow each other by programmatic dependent launch: over the tokens in 16 bits
    (:mod:`foscar.common.window_kernel`), the decode, which joins it to items that one worker holds, and the combine,
    which joins it to the others.  Lengths, slots and histories are read on the device, so the call can be captured in a
    CUDA graph.  The torch backend and Blackwell's decode merge two results by their LSEs.
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
    check_query(q, packed, None if q_indptr is not None else batch)
    check_lse_base(lse_base)
    variant = check_variant(options, q_indptr, max_q_len, batch, cache.device, q.shape[0])
    variant = with_sinks(variant, sinks, q.shape[1], q.device)
    window = variant.options.window
    require(window is None, f"decode_windowed takes no sliding window (options.window is {window}): it sees all tokens")
    scale = check_scale(sm_scale, packed.head_dim)
    out, lse = api.make_results(q, out, None, return_lse)
    if batch == 0:
        pass
    elif api.takes_windows(backend, packed):
        variant = dataclasses.replace(variant, exact=_exact_tokens(q, cache, slot_ids))
        table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
        kernels = api.kernels_for(backend, packed, batch, q.shape[1], q.dtype, None, variant)
        buffers = kernels.buffers(q.shape[1] // packed.num_kv_heads)
        tables = Tables(table, seq_lens.contiguous())
        api.decode_into(q, packed, tables, scale, out, lse, lse_base, kernels, buffers, variant)
    else:
        _merged(q, cache, block_table, seq_lens, slot_ids, scale, variant, out, lse, lse_base, backend)
    return out if lse is None else (out, lse)


def _exact_tokens(q: torch.Tensor, cache: WindowedKVCache, slot_ids: torch.Tensor) -> ExactTokens:
    """What the kernels read and write beside the packed cache."""
    shape = (*q.shape[:2], cache.packed.padded_head_dim)
    room = (torch.empty(n, dtype=torch.float32, device=q.device) for n in (shape, shape[:2]))
    windows = (cache.sink_k, cache.sink_v, cache.recent_k, cache.recent_v)
    return ExactTokens(slot_ids.contiguous(), cache.packed_lens, *windows, *room)


def _merged(q, cache, block_table, seq_lens, slot_ids, sm_scale, variant: Variant, out, lse, lse_base, backend) -> None:
    """History and tokens in 16 bits one after the other, merged by their LSEs; the sinks and the output scale last."""
    packed, options = cache.packed, variant.options
    on_torch = backend == "torch" or (backend == "auto" and cache.device.type != "cuda")
    if on_torch:
        bounds = None if variant.q_indptr is None else variant.q_indptr.tolist()
        if bounds is not None:
            check_rows(bounds, q.shape[0], variant.q_limit)
        check_pages(packed, Tables(block_table, cache.history_lens(seq_lens, slot_ids)), bounds)
    if variant.q_indptr is not None:
        rows, seq_lens = rows_as_requests(variant.q_indptr, seq_lens)
        block_table, slot_ids = block_table[rows], slot_ids[rows]
        q, out, lse = (None if x is None else x[: len(rows)] for x in (q, out, lse))
    history = cache.history_lens(seq_lens, slot_ids)
    part = AttentionOptions(soft_cap=options.soft_cap)
    if on_torch:
        packed_part = decode_folded(q, packed, block_table, history, sm_scale, options=part)
    else:
        packed_part = api.decode_attention(
            q, packed, block_table, history, sm_scale=sm_scale, options=part, return_lse=True, lse_base="e",
            backend=backend,
        )  # fmt: skip
    exact = window_attention(q, cache, seq_lens, slot_ids, sm_scale, options.soft_cap)
    result, log_sum = merge_states(packed_part[0].float(), packed_part[1], *exact, lse_base="e")
    if variant.sinks is not None:
        whole = torch.logaddexp(log_sum, variant.sinks)
        share = torch.exp(log_sum - whole.masked_fill(whole == -math.inf, 0.0))
        result, log_sum = result * share[..., None], whole
    out.copy_(result * options.out_scale)
    if lse is not None:
        lse.copy_(log_sum if lse_base == "e" else log_sum / math.log(2.0))
