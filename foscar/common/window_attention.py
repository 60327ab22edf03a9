"""Attention over a cache with windows: the float64 truth, and the part over the tokens in 16 bits.

Shapes as in :mod:`foscar.common.reference`, one query row per request.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from foscar.common.autocast import without_autocast
from foscar.common.windows import WindowedKVCache


def windowed_reference(
    q: torch.Tensor,
    cache: WindowedKVCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_ids: torch.Tensor,
    sm_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention over what the cache keeps, exact and dequantized, as one softmax.

    Returns:
        out float64 [batch, query heads, head_dim]; lse float64 [batch, query heads], natural logarithm.
    """
    heads = cache.packed.num_kv_heads
    scale = 1.0 / math.sqrt(cache.packed.head_dim) if sm_scale is None else sm_scale
    out, lse = torch.zeros_like(q, dtype=torch.float64), torch.full_like(q[..., 0], -math.inf, dtype=torch.float64)
    for b, (length, slot) in enumerate(zip(seq_lens.tolist(), slot_ids.tolist(), strict=True)):
        if length:
            k, v = cache.read_request(block_table[b], length, slot)
            s = torch.einsum("hgc,nhc->hgn", q[b].double().unflatten(0, (heads, -1)), k) * scale
            out[b] = torch.einsum("hgn,nhc->hgc", s.softmax(-1), v).flatten(0, 1)
            lse[b] = s.logsumexp(-1).flatten()
    return out, lse


def rows_as_requests(q_indptr: torch.Tensor, seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts as requests of one query token each: (int64 [query tokens], the request of each; int32 [query tokens], how
    many tokens it sees).  Waits for the device."""
    counts = q_indptr.diff().long()
    rows = torch.repeat_interleave(counts)
    token = torch.arange(len(rows), device=rows.device) - q_indptr.long()[rows]
    return rows, (seq_lens.long()[rows] - counts[rows] + token + 1).clamp(min=0).int()


@without_autocast
def window_attention(
    q: torch.Tensor,
    cache: WindowedKVCache,
    seq_lens: torch.Tensor,
    slot_ids: torch.Tensor,
    sm_scale: float,
    soft_cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 attention over the sink and recent tokens alone; no host synchronization.

    Entries of the windows that hold no token of the request are not used, whatever they hold.

    Returns:
        out float32 [batch, query heads, head_dim]; lse float32 [batch, query heads], natural logarithm; a request
        without tokens there: zeros and -inf.
    """
    packed = cache.packed
    slots = cache.storage_slots(slot_ids)
    live = _live(cache, seq_lens, slot_ids)[:, None, :, None]  # [batch, 1, tokens, 1]
    if live.shape[2] == 0:
        return torch.zeros_like(q, dtype=torch.float32), torch.full_like(q[..., 0], -math.inf, dtype=torch.float32)
    k, v = (
        torch.cat([sink[slots], recent[slots]], dim=2).float()[..., : packed.head_dim].masked_fill(~live, 0.0)
        for sink, recent in cache.storage
    )
    query = q.float().unflatten(1, (packed.num_kv_heads, -1))
    s = torch.einsum("bhgc,bhnc->bhgn", query, k) * sm_scale
    if soft_cap:
        s = soft_cap * torch.tanh(s / soft_cap)
    s = s.masked_fill(~live.transpose(2, 3), -math.inf)
    maximum = s.amax(-1, keepdim=True)
    p = torch.exp(s - maximum.masked_fill(maximum == -math.inf, 0.0))
    total = p.sum(-1)
    out = torch.einsum("bhgn,bhnc->bhgc", p, v) / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return out.flatten(1, 2), (maximum[..., 0] + total.log()).flatten(1, 2)


def _live(cache: WindowedKVCache, seq_lens: torch.Tensor, slot_ids: torch.Tensor) -> torch.Tensor:
    """bool [batch, n_sink + capacity]: which entries of the windows hold tokens of the request."""
    n_sink, capacity, length = cache.window.n_sink, cache.capacity, seq_lens.long()[:, None]
    sink = torch.arange(n_sink, device=length.device)[None] < length
    first = n_sink + cache.history_lens(seq_lens, slot_ids).long()[:, None]
    entry = torch.arange(capacity, device=length.device)[None]
    recent = first + (entry - first) % max(1, capacity) < length  # the position that an entry may hold
    return F.pad(sink, (0, capacity)) | F.pad(recent, (n_sink, 0))
