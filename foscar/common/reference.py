"""Decode attention without a kernel: the float64 truth, the usual BF16 route, and the folded CPU backend.

Shapes, for all three::

    q [batch, num_q_heads, head_dim]   query head h reads KV head h // (num_q_heads / num_kv_heads)
    out [batch, num_q_heads, head_dim]   lse [batch, num_q_heads], natural logarithm of sum_t exp(sm_scale * q . k_t)

An empty request gives zeros and lse -inf.  Requests are computed one by one, so what one holds (NaN included) never
reaches another; block-table entries and rows beyond a length are not read.  Any torch device works.

The numeric contract: measured against :func:`attention_reference`, a backend's error is at most that of
:func:`attention_bf16` on the same inputs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from foscar.common import fold
from foscar.common.append import check_tables
from foscar.common.formats import TensorFormat
from foscar.common.pack import record_tables
from foscar.common.quantize import Quantized, dequantize


def attention_reference(
    q: torch.Tensor, cache, block_table: torch.Tensor, seq_lens: torch.Tensor, sm_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention over the dequantized cache.

    Args:
        q: any float type. ``cache``: a PagedKVCache. ``block_table``: int32 [batch, max_pages].
        seq_lens: int32 [batch]. ``sm_scale``: None: 1 / sqrt(head_dim).

    Returns:
        out float64, lse float64.
    """
    return _dequantized_attention(q.double(), cache, block_table, seq_lens, sm_scale, _same, torch.float64)


def attention_bf16(
    q: torch.Tensor, cache, block_table: torch.Tensor, seq_lens: torch.Tensor, sm_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual route, the baseline of the numeric contract.

    K and V are dequantized to BF16, Q is BF16, S is accumulated in float32, P is rounded to BF16, O is accumulated in
    float32 and divided by the float32 sum of the unrounded P.

    Returns:
        out float32, lse float32.
    """
    return _dequantized_attention(_to_bf16(q), cache, block_table, seq_lens, sm_scale, _to_bf16, torch.float32)


def decode_folded(
    q: torch.Tensor,
    cache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float | None = None,
    *,
    block_tokens: int = 4096,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU backend: attention from the codes, by :mod:`foscar.common.fold`, for every format.

    float32, with an online softmax over blocks of ``block_tokens`` tokens (rounded up to whole pages), so memory
    does not grow with the length.

    Returns:
        out float32, lse float32.
    """
    q, sm_scale, lengths, heads = _prepare(q.float(), cache, block_table, seq_lens, sm_scale)
    tables = record_tables(cache.layout, cache.device)
    out, lse = _empty_results(q)
    step = -(-block_tokens // cache.page_size) * cache.page_size
    for b, length in enumerate(lengths):
        if length == 0:
            continue
        maximum = torch.full(heads, -math.inf, dtype=q.dtype, device=q.device)
        total, acc = torch.zeros_like(maximum), torch.zeros_like(q[b])
        for start in range(0, length, step):
            k, v = cache.read_tokens(block_table[b], start, min(start + step, length))
            s = folded_scores(q[b], k, tables.k.format, tables.k.group) * sm_scale
            new_maximum = torch.maximum(maximum, s.amax(-1))
            p = torch.exp(s - new_maximum[..., None])
            shrink = torch.exp(maximum - new_maximum)
            total = total * shrink + p.sum(-1)
            acc = acc * shrink[..., None] + folded_output(p, v, tables.v.format, tables.v.group)
            maximum = new_maximum
        out[b] = acc / total[..., None]
        lse[b] = maximum + total.log()
    return out.flatten(1, 2), lse.flatten(1, 2)


def folded_scores(q: torch.Tensor, k: Quantized, tensor_format: TensorFormat, group: int) -> torch.Tensor:
    """``Q K^T`` from codes.

    Args:
        q: [kv heads, group heads, head_dim], float. ``k``: codes [tokens, kv heads, head_dim] and parameters.
        group: channels (axis "token") or tokens (axis "channel") per pair.

    Returns:
        [kv heads, group heads, tokens] of q's type.
    """
    codes, scale, bias = (x.to(q.dtype) for x in (k.codes, k.scale, k.bias))
    if tensor_format.axis == "token":
        q = q.unflatten(-1, (-1, group))  # h kv heads, g group heads, x channel groups, c channels, n tokens
        dot = torch.einsum("hgxc,nhxc->hgxn", q, codes.unflatten(-1, (-1, group)))
        scale, bias = (p.permute(1, 2, 0)[:, None] for p in (scale, bias))  # [h, 1, x, n]
        return fold.k_token_score(dot, q.sum(-1)[..., None], scale, bias).sum(2)
    tokens = codes.shape[0]
    codes = _whole_groups(codes, group)  # t token groups, j tokens of one
    query = fold.k_channel_query(q, scale[:, :, None])  # [t, h, g, c]
    offset = fold.k_channel_offset(0.0, q, bias[:, :, None]).sum(-1)  # [t, h, g]
    dot = torch.einsum("thgc,tjhc->hgtj", query, codes)
    return (dot + offset.permute(1, 2, 0)[..., None]).flatten(2)[..., :tokens]


def folded_output(p: torch.Tensor, v: Quantized, tensor_format: TensorFormat, group: int) -> torch.Tensor:
    """``P V`` from codes: p [kv heads, group heads, tokens] -> [kv heads, group heads, head_dim]."""
    codes, scale, bias = (x.to(p.dtype) for x in (v.codes, v.scale, v.bias))
    if tensor_format.axis == "token":
        scale, bias = (x.permute(1, 2, 0)[:, None] for x in (scale, bias))  # [h, 1, x, n]
        weight = fold.v_token_weight(p[:, :, None], scale)  # [h, g, x, n]
        offset = fold.v_token_offset(0.0, p[:, :, None], bias).sum(-1)  # [h, g, x]
        partial = torch.einsum("hgxn,nhxc->hgxc", weight, codes.unflatten(-1, (-1, group)))
        return (partial + offset[..., None]).flatten(2)
    codes = _whole_groups(codes, group)
    p = F.pad(p, (0, -p.shape[-1] % group)).unflatten(-1, (-1, group))  # [h, g, t, j]
    partial = torch.einsum("hgtj,tjhc->thgc", p, codes)
    p_sum = p.sum(-1).permute(2, 0, 1)[..., None]
    return fold.v_channel_output(partial, p_sum, scale[:, :, None], bias[:, :, None]).sum(0)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """``|got - want| / |want|`` in the Frobenius norm, in float64; 0 for equal tensors, NaN if one holds NaN."""
    got, want = got.double().cpu(), want.double().cpu()
    difference, size = (got - want).norm().item(), want.norm().item()
    if size == 0:
        return 0.0 if difference == 0 else difference * math.inf
    return difference / size


def _whole_groups(codes: torch.Tensor, group: int) -> torch.Tensor:
    """[tokens, heads, D] -> [token groups, group, heads, D], a partial last group filled with zeros."""
    return F.pad(codes, (0, 0, 0, 0, 0, -codes.shape[0] % group)).unflatten(0, (-1, group))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Rounded to BF16, held in float32."""
    return x.to(torch.bfloat16).float()


def _prepare(q, cache, block_table, seq_lens, sm_scale):
    """Checked q as [batch, kv heads, group heads, head_dim], sm_scale, lengths on the host, q's head shape."""
    check_tables(cache.device, block_table, seq_lens)
    batch, head_dim = seq_lens.shape[0], cache.head_dim
    if q.ndim != 3 or q.shape[0] != batch or q.shape[2] != head_dim or q.shape[1] % cache.num_kv_heads:
        raise ValueError(f"q must be [{batch}, a multiple of {cache.num_kv_heads}, {head_dim}], not {list(q.shape)}")
    if q.device != cache.device:
        raise ValueError(f"q is on {q.device}, the cache on {cache.device}")
    sm_scale = 1.0 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)
    lengths = seq_lens.tolist()
    heads = (cache.num_kv_heads, q.shape[1] // cache.num_kv_heads)
    return q.unflatten(1, heads), sm_scale, lengths, heads


def _empty_results(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(q, memory_format=torch.contiguous_format), torch.full_like(q[..., 0], -math.inf)


def _dequantized_attention(q, cache, block_table, seq_lens, sm_scale, rounded, dtype, block_tokens=4096):
    """Softmax over the whole row at once; K and V dequantized in ``dtype``, then ``rounded``, block by block."""
    q, sm_scale, lengths, _ = _prepare(q, cache, block_table, seq_lens, sm_scale)
    tables = record_tables(cache.layout, cache.device)
    out, lse = _empty_results(q)
    for b, length in enumerate(lengths):
        if length == 0:
            continue
        blocks = [(i, min(i + block_tokens, length)) for i in range(0, length, block_tokens)]

        def read(side, start, stop, row=block_table[b]):
            table = getattr(tables, side)
            (x,) = cache.read_tokens(row, start, stop, side)
            return rounded(dequantize(x, table.format, group=table.group, dtype=dtype))

        s = torch.cat([torch.einsum("hgc,nhc->hgn", q[b], read("k", *block)) for block in blocks], dim=-1) * sm_scale
        maximum = s.amax(-1, keepdim=True)
        p = torch.exp(s - maximum)
        total = p.sum(-1)
        p = rounded(p)
        acc = sum(torch.einsum("hgn,nhc->hgc", p[..., i:j], read("v", i, j)) for i, j in blocks)
        out[b] = acc / total[..., None]
        lse[b] = maximum[..., 0] + total.log()
    return out.flatten(1, 2), lse.flatten(1, 2)
