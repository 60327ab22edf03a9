"""One call of a torch route (:mod:`foscar.common.reference`): its checked arguments, and what the routes share.

A route walks ``spans``, reads blocks of tokens, turns scores into masked logits and stores the results of each span.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from foscar.common.append_checks import check_tables
from foscar.common.mask import Span, spans
from foscar.common.options import AttentionOptions
from foscar.common.pack import TensorTable, record_tables
from foscar.common.quantize import Quantized


@dataclass(frozen=True)
class Problem:
    """Checked arguments; the rows of a span and its heads are one dimension, ``lanes``, of rows * group heads.

    Attributes:
        q: [rows, kv heads, group heads, padded_head_dim], of the type that the route computes in.
        cache: a PagedKVCache.
        block_table: int32 [batch, max_pages].
        sm_scale, options: see :mod:`foscar.common.options`.
        sinks: [kv heads, group heads], of q's type, or None.
        spans: the requests' rows and tokens.
    """

    q: torch.Tensor
    cache: object
    block_table: torch.Tensor
    sm_scale: float
    options: AttentionOptions
    sinks: torch.Tensor | None
    spans: list[Span]

    @classmethod
    def make(cls, q, cache, block_table, seq_lens, sm_scale, options, sinks, q_indptr) -> Problem:
        """From the arguments of :func:`foscar.common.reference.attention_reference`, q in the type to compute in.

        Raises:
            ValueError: a type, shape or device that does not fit.
        """
        check_tables(cache.device, block_table, seq_lens)
        batch, head_dim = seq_lens.shape[0], cache.head_dim
        rows = batch if q_indptr is None else q.shape[0]
        if q.ndim != 3 or q.shape[0] != rows or q.shape[2] != head_dim or q.shape[1] % cache.num_kv_heads:
            raise ValueError(f"q must be [{rows}, a multiple of {cache.num_kv_heads}, {head_dim}], not {list(q.shape)}")
        if q.device != cache.device:
            raise ValueError(f"q is on {q.device}, the cache on {cache.device}")
        if q_indptr is not None and (q_indptr.dtype != torch.int32 or tuple(q_indptr.shape) != (batch + 1,)):
            raise ValueError(f"q_indptr must be int32 [{batch + 1}], not {q_indptr.dtype} {list(q_indptr.shape)}")
        if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
            raise ValueError(f"sinks must be [{q.shape[1]}], one per query head, not {list(sinks.shape)}")
        options = AttentionOptions() if options is None else options
        sm_scale = 1.0 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)
        heads = (cache.num_kv_heads, q.shape[1] // cache.num_kv_heads)
        bounds = None if q_indptr is None else q_indptr.tolist()
        sinks = None if sinks is None else sinks.to(q).unflatten(0, heads)
        found = spans(seq_lens.tolist(), bounds, options.window)
        q = F.pad(q, (0, cache.padded_head_dim - head_dim))
        return cls(q.unflatten(1, heads), cache, block_table, sm_scale, options, sinks, found)

    def empty_results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros, and the LSE of rows that see nothing."""
        lse = torch.full_like(self.q[..., 0], -math.inf)
        if self.sinks is not None:
            lse[:] = self.sinks
        return torch.zeros_like(self.q, memory_format=torch.contiguous_format), lse

    def results(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All heads in one dimension, padding channels cut off."""
        return out[..., : self.cache.head_dim].flatten(1, 2), lse.flatten(1, 2)

    def query(self, span: Span) -> torch.Tensor:
        """[kv heads, lanes, padded_head_dim]."""
        return self.q[span.row : span.row_stop].transpose(0, 1).flatten(1, 2)

    def sink(self, span: Span) -> torch.Tensor | None:
        """[kv heads, lanes]."""
        return None if self.sinks is None else self.sinks.repeat(1, span.rows)

    def store(self, out, lse, span: Span, result: torch.Tensor, log_sum: torch.Tensor) -> None:
        """Results of a span, result [kv heads, lanes, padded_head_dim] and log_sum [kv heads, lanes]."""
        shape = (span.rows, self.q.shape[2])
        out[span.row : span.row_stop] = (result * self.options.out_scale).unflatten(1, shape).transpose(0, 1)
        lse[span.row : span.row_stop] = log_sum.unflatten(1, shape).transpose(0, 1)

    def blocks(self, span: Span, block_tokens: int) -> list[tuple[int, int]]:
        """The span's tokens in blocks of whole pages, from the page of the first."""
        page = self.cache.page_size
        step = -(-block_tokens // page) * page
        return [(i, min(i + step, span.stop)) for i in range(span.first // page * page, span.stop, step)]

    def read(self, span: Span, start: int, stop: int, sides: str = "kv") -> tuple[Quantized, ...]:
        """(K, V) of tokens ``start:stop`` in codes; parameters of groups before the span, perhaps NaN, as zeros."""
        read = self.cache.read_tokens(self.block_table[span.request], start, stop, sides)
        unseen = span.first - start
        if unseen <= 0:
            return read
        tables = record_tables(self.cache.layout, self.cache.device)
        return tuple(_without(x, getattr(tables, side), unseen) for x, side in zip(read, sides, strict=True))

    def logits(self, span: Span, start: int, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``q . k`` [kv heads, lanes, tokens] of the tokens from ``start``, scaled, capped and masked."""
        s = scores * self.sm_scale
        cap = self.options.soft_cap
        if cap:
            s = cap * torch.tanh(s / cap)
        seen = span.visible(start, start + s.shape[-1], s.device)
        return s if seen is None else s.masked_fill(~seen.repeat_interleave(self.q.shape[2], 0), -math.inf)


def _without(x: Quantized, table: TensorTable, tokens: int) -> Quantized:
    """The parameters of the groups that lie within the first ``tokens`` as zeros."""
    groups = tokens if table.format.axis == "token" else tokens // table.group
    unseen = torch.arange(x.scale.shape[0], device=x.scale.device)[:, None, None] < groups
    return Quantized(x.codes, x.scale.masked_fill(unseen, 0.0), x.bias.masked_fill(unseen, 0.0))
