"""Decode attention over a cache with windows (:mod:`foscar.common.windows`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from . import api
from .checks import check_call, check_pages, check_rows, require
from .common import traced
from .common.merge import merge_states
from .common.options import AttentionOptions, ExactTokens, Variant
from .common.reference import decode_folded
from .common.window_attention import rows_as_requests, window_attention
from .common.window_move import check_lengths, check_slots
from .common.windows import WindowedKVCache
from .hopper.decode import Bound, Buffers, HopperDecode, Tables

Room = tuple[torch.Tensor, torch.Tensor]


def check_windowed(cache: WindowedKVCache) -> None:
    if not isinstance(cache, WindowedKVCache):
        raise TypeError(f"cache must be a foscar.WindowedKVCache, not {type(cache).__name__}")


def check_no_window(variant: Variant) -> None:
    """A cache with windows of its own is seen whole."""
    window = variant.options.window
    require(window is None, f"decode_windowed takes no sliding window (options.window is {window}): it sees all tokens")


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
        out of q's dtype, or (out, lse): see :func:`foscar.decode_attention`.  Under torch.compile the call is one node
        of the graph, the operator ``foscar::decode_windowed``.

    Raises:
        ValueError, TypeError: an argument that does not fit, naming what does.
        FormatError, UnsupportedDeviceError: see :func:`foscar.decode_attention`.

    On Hopper three kernels follow each other by programmatic dependent launch: over the tokens in 16 bits
    (:mod:`foscar.common.window_kernel`), the decode, which joins it to items that one worker holds, and the combine,
    which joins it to the others.  Lengths, slots and histories are read on the device, so the call can be captured in a
    CUDA graph.  The torch backend and Blackwell's decode merge two results by their LSEs.
    """
    check_windowed(cache)
    settings = {"sm_scale": sm_scale, "options": options, "sinks": sinks, "q_indptr": q_indptr, "max_q_len": max_q_len}
    if torch.compiler.is_compiling():
        return traced.decode_windowed(
            q, cache, block_table, seq_lens, slot_ids, out=out, return_lse=return_lse, lse_base=lse_base,
            backend=backend, **settings,
        )  # fmt: skip
    tables, variant, scale = check_call(q, cache.packed, block_table, seq_lens, lse_base=lse_base, **settings)
    check_no_window(variant)
    check_slots(slot_ids, seq_lens, cache.max_batch)
    check_lengths(cache, seq_lens, slot_ids, read=True)
    out, lse = api.make_results(q, out, None, return_lse)
    group = q.shape[1] // cache.packed.num_kv_heads
    decode_windows_into(
        q, cache, tables, slot_ids.contiguous(), scale, out, lse, lse_base, backend, variant,
        lambda kernels: kernels.buffers(group), lambda: exact_room(q, cache),
    )  # fmt: skip
    return (out, lse) if return_lse else out


@torch.no_grad()
def decode_windows_into(
    q, cache, tables, slot_ids, sm_scale, out, lse, lse_base, backend, variant,
    buffers_of: Callable[[HopperDecode], Buffers], room_of: Callable[[], Room],
) -> Bound | None:  # fmt: skip
    """Checked arguments to results, as :func:`foscar.api.decode_into`; the workspaces as they are needed."""
    packed = cache.packed
    if tables.lengths.shape[0] == 0:
        return None
    if not api.takes_windows(backend, packed):
        _merged(q, cache, tables, slot_ids, sm_scale, variant, out, lse, lse_base, backend)
        return None
    variant = dataclasses.replace(variant, exact=exact_tokens(cache, slot_ids, room_of()))
    kernels = api.kernels_for(backend, packed, tables.lengths.shape[0], q.shape[1], q.dtype, None, variant)
    return api.decode_into(q, packed, tables, sm_scale, out, lse, lse_base, kernels, buffers_of(kernels), variant)


def exact_room(q: torch.Tensor, cache: WindowedKVCache) -> Room:
    """Workspace for attention over the tokens in 16 bits of q's rows."""
    shape = (*q.shape[:2], cache.packed.padded_head_dim)
    return tuple(torch.empty(n, dtype=torch.float32, device=q.device) for n in (shape, shape[:2]))


def exact_tokens(cache: WindowedKVCache, slot_ids: torch.Tensor, room: Room) -> ExactTokens:
    """What the kernels read and write beside the packed cache."""
    return ExactTokens(slot_ids, *cache.window_tensors, *room)


def _merged(q, cache, tables: Tables, slot_ids, sm_scale, variant: Variant, out, lse, lse_base, backend) -> None:
    """History and tokens in 16 bits one after the other, merged by their LSEs; the sinks and the output scale last."""
    packed, options, on_torch = cache.packed, variant.options, api.on_torch(backend, cache.packed)
    block_table, seq_lens = tables.pages, tables.lengths
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
