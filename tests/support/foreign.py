"""Random caches as other projects lay them out, by loops that follow the layouts' descriptions, and the check of what
they become."""

from __future__ import annotations

import torch

import foscar
from foscar.common.reference import attention_bf16, relative_error

from .compare import assert_equal, error_report
from .inputs import random_values

NAMES = ("token", "head", "channel")


def random_codes(shape, bits: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(seed))


def random_params(shape, seed: int, dtype=torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    """A positive scale and an offset of either sign."""
    gen = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=gen) + 0.1).to(dtype), (torch.randn(shape, generator=gen) - 1).to(dtype)


def kivi_words(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32: the first of 32 / bits consecutive codes along ``dim`` in the lowest bits."""
    codes = codes.movedim(dim, -1)
    per_word = 32 // bits
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // per_word, dtype=torch.int64)
    for i in range(codes.shape[-1]):
        words[..., i // per_word] += codes[..., i] << (bits * (i % per_word))
    words[words >= 2**31] -= 2**32
    return words.to(torch.int32).movedim(-1, dim)


def qserve_blocks(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, more: int) -> torch.Tensor:
    """codes [blocks, tokens, heads, D], parameters [blocks, tokens, heads] -> int8 [blocks, bytes], by loops."""
    blocks, tokens, heads, head_dim = codes.shape
    code_bytes, params = heads * tokens * head_dim // 2, heads * tokens
    out = torch.full((blocks, code_bytes + 4 * params + more), 0x7F, dtype=torch.uint8)
    for h in range(heads):
        for t in range(tokens):
            row = codes[:, t, h].to(torch.uint8)
            start = (h * tokens + t) * head_dim // 2
            out[:, start : start + head_dim // 2] = row[:, 0::2] | (row[:, 1::2] << 4)
            for p, at in ((scale, code_bytes), (zero, code_bytes + 2 * params)):
                at += 2 * (h * tokens + t)
                out[:, at : at + 2] = p[:, t, h].contiguous().view(torch.uint8).view(blocks, 2)
    return out.view(torch.int8)


def check(converted, requests) -> None:
    """Exact values, then attention by the numeric contract; ``requests``: (K, V) float64 [length, heads, D] of each."""
    cache, table, lengths = converted.cache, converted.block_table, converted.seq_lens
    assert table.dtype == lengths.dtype == torch.int32
    assert lengths.tolist() == [len(k) for k, _ in requests]
    q = random_values((len(requests), 3 * cache.num_kv_heads, cache.head_dim), 99, torch.float16, mean=0.5)
    out, lse = foscar.decode_attention(q, cache, table, lengths, sm_scale=0.02, return_lse=True, lse_base="e")
    usual, usual_lse = attention_bf16(q, cache, table, lengths, 0.02)
    for b, (k, v) in enumerate(requests):
        for got, want in zip(cache.dequantize_request(table[b], len(k)), (k, v), strict=True):
            assert_equal(got, want, NAMES)
        if len(k) == 0:
            assert not bool(out[b].any())
            continue
        s = torch.einsum("hgc,nhc->hgn", q[b].double().unflatten(0, (cache.num_kv_heads, -1)), k) * 0.02
        want, want_lse = torch.einsum("hgn,nhc->hgc", s.softmax(-1), v).flatten(0, 1), s.logsumexp(-1).flatten()
        allowed = relative_error(usual[b], want) + relative_error(want.half(), want) + 2.0**-22
        assert relative_error(out[b], want) <= allowed, error_report(out[b], want, ("head", "channel"))
        allowed = max((usual_lse[b] - want_lse).abs().max(), 2.0**-20 * s.abs().max())
        assert (lse[b] - want_lse).abs().max() <= allowed
