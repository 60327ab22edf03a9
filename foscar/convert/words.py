"""Packed integers -> codes."""

from __future__ import annotations

import torch


def unpack_words(words: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """[..., n] words -> uint8 [..., n * width / bits] codes, those of a word from its lowest bits up.

    Args:
        words: an integer type of ``width`` bits or more, signed or not.
        bits: a divisor of ``width``.
    """
    shifts = torch.arange(0, width, bits, device=words.device)
    codes = (words.long()[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2).to(torch.uint8)
