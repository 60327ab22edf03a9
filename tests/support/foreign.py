"""Random caches as other projects lay them out: loops that follow the layouts' descriptions."""

from __future__ import annotations

import torch


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
