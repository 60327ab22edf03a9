"""Decode attention without a kernel: the float64 truth, the usual BF16 route, and the folded CPU backend.

Arguments and shapes, for all three::

    q [rows, num_q_heads, head_dim]      query head h reads KV head h // (num_q_heads / num_kv_heads)
    q_indptr int32 [batch + 1], or None  request b has rows q_indptr[b] : q_indptr[b + 1]; None: row b
    options, sinks                       see foscar.common.options, which has the formulas
    out [rows, num_q_heads, head_dim]    lse [rows, num_q_heads], natural logarithm of the softmax denominator

A row that sees no token, or that no request has, gives zeros and an lse of -inf (with sinks: the sink's logit).
Requests are computed one by one, so what one holds (NaN included) never reaches another; block-table entries and rows
beyond a length are not read, nor pages before all windows of a request.  Any torch device works.

The numeric contract: measured against :func:`attention_reference`, a backend's error is at most that of
:func:`attention_bf16` on the same inputs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from foscar.common import fold
from foscar.common.autocast import without_autocast
from foscar.common.formats import TensorFormat
from foscar.common.options import AttentionOptions
from foscar.common.pack import record_tables
from foscar.common.problem import Problem
from foscar.common.quantize import Quantized, dequantize


def attention_reference(
    q: torch.Tensor,
    cache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float | None = None,
    *,
    options: AttentionOptions | None = None,
    sinks: torch.Tensor | None = None,
    q_indptr: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention over the dequantized cache.

    Args:
        q: any float type. ``cache``: a PagedKVCache. ``block_table``: int32 [batch, max_pages].
        seq_lens: int32 [batch]. ``sm_scale``: None: 1 / sqrt(head_dim). The others: see above.

    Returns:
        out float64, lse float64.
    """
    problem = Problem.make(q.double(), cache, block_table, seq_lens, sm_scale, options, sinks, q_indptr)
    return _dequantized_attention(problem, _same)


@without_autocast
def attention_bf16(
    q: torch.Tensor,
    cache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float | None = None,
    *,
    options: AttentionOptions | None = None,
    sinks: torch.Tensor | None = None,
    q_indptr: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual route, the baseline of the numeric contract.

    K and V are dequantized to BF16, Q is BF16, S is accumulated in float32, P is rounded to BF16, O is accumulated in
    float32 and divided by the float32 sum of the unrounded P, a sink's term included.

    Returns:
        out float32, lse float32.
    """
    problem = Problem.make(_to_bf16(q), cache, block_table, seq_lens, sm_scale, options, sinks, q_indptr)
    return _dequantized_attention(problem, _to_bf16)


@without_autocast
def decode_folded(
    q: torch.Tensor,
    cache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float | None = None,
    *,
    options: AttentionOptions | None = None,
    sinks: torch.Tensor | None = None,
    q_indptr: torch.Tensor | None = None,
    block_tokens: int = 4096,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU backend: attention from the codes, by :mod:`foscar.common.fold`, for every format.

    float32, with an online softmax over blocks of ``block_tokens`` tokens (rounded up to whole pages), so memory
    does not grow with the length.  A sink is where the online softmax starts: its logit the maximum, 1 the sum.

    Returns:
        out float32, lse float32.
    """
    problem = Problem.make(q.float(), cache, block_table, seq_lens, sm_scale, options, sinks, q_indptr)
    tables = record_tables(cache.layout, cache.device)
    out, lse = problem.empty_results()
    for span in problem.spans:
        query, sink = problem.query(span), problem.sink(span)
        maximum = torch.full_like(query[..., 0], -math.inf) if sink is None else sink
        total = torch.full_like(maximum, 0.0 if sink is None else 1.0)
        acc = torch.zeros_like(query)
        for start, stop in problem.blocks(span, block_tokens):
            k, v = problem.read(span, start, stop)
            s = problem.logits(span, start, folded_scores(query, k, tables.k.format, tables.k.group))
            new_maximum = torch.maximum(maximum, s.amax(-1))
            shift = new_maximum.masked_fill(new_maximum == -math.inf, 0.0)  # of a row that has seen nothing yet
            p = torch.exp(s - shift[..., None])
            shrink = torch.exp(maximum - shift)
            total = total * shrink + p.sum(-1)
            acc = acc * shrink[..., None] + folded_output(p, v, tables.v.format, tables.v.group)
            maximum = new_maximum
        problem.store(out, lse, span, acc / total[..., None], maximum + total.log())
    return problem.results(out, lse)


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


def _dequantized_attention(problem: Problem, rounded, block_tokens: int = 4096):
    """Softmax over the whole row at once; K and V dequantized in q's type, then ``rounded``, block by block."""
    cache, dtype = problem.cache, problem.q.dtype
    tables = record_tables(cache.layout, cache.device)
    out, lse = problem.empty_results()
    for span in problem.spans:
        query, sink, blocks = problem.query(span), problem.sink(span), problem.blocks(span, block_tokens)

        def read(side, start, stop, span=span):
            table = getattr(tables, side)
            (x,) = problem.read(span, start, stop, side)
            return rounded(dequantize(x, table.format, group=table.group, dtype=dtype))

        scores = torch.cat([torch.einsum("hgc,nhc->hgn", query, read("k", *block)) for block in blocks], dim=-1)
        origin = blocks[0][0]
        s = problem.logits(span, origin, scores)
        maximum = s.amax(-1) if sink is None else torch.maximum(s.amax(-1), sink)
        p = torch.exp(s - maximum[..., None])
        total = p.sum(-1) if sink is None else p.sum(-1) + torch.exp(sink - maximum)
        p = rounded(p)
        acc = sum(torch.einsum("hgn,nhc->hgc", p[..., i - origin : j - origin], read("v", i, j)) for i, j in blocks)
        problem.store(out, lse, span, acc / total[..., None], maximum + total.log())
    return problem.results(out, lse)
