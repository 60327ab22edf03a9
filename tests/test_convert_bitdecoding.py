"""BitDecoding's values, built by numpy from their description, converted and decoded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.foreign import check, random_codes, random_params

from foscar.convert import from_bitdecoding_codes


def exact(codes, scale, minimum, *, per_channel: bool, group: int) -> np.ndarray:
    """float64 [batch, tokens, heads, head_dim], element by element."""
    codes, scale, minimum = (x.double().numpy() for x in (codes, scale, minimum))
    values = np.empty(codes.shape)
    for b, t, h, c in np.ndindex(*codes.shape):
        at = (b, t // group, h, c) if per_channel else (b, c // group, h, t)
        values[b, t, h, c] = codes[b, t, h, c] * scale[at] + minimum[at]
    return values


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("mode", ["k-channel", "k-tensor"])
@pytest.mark.parametrize("head_dim, group, lengths, page_size", [
    (128, 128, [160, 7], 64), (128, 32, [64, 0], 16), (64, 128, [128, 1], 64), (128, 64, None, 32),
])  # fmt: skip
def test_bitdecoding(bits, mode, head_dim, group, lengths, page_size):
    batch, tokens, heads = 2, 160, 2
    k, v = (random_codes((batch, tokens, heads, head_dim), bits, seed).to(torch.uint8) for seed in (0, 1))
    by_token = (batch, max(1, head_dim // group), heads, tokens)
    by_channel = (batch, -(-tokens // group), heads, head_dim)
    k_pair = random_params(by_channel if mode == "k-channel" else by_token, 2)
    v_pair = random_params(by_token, 3)
    converted = from_bitdecoding_codes(
        k, *k_pair, v, *v_pair, num_bits=bits, quant_mode=mode, group_size=group, lengths=lengths, page_size=page_size
    )
    keys = exact(k, *k_pair, per_channel=mode == "k-channel", group=group)
    values = exact(v, *v_pair, per_channel=False, group=group)
    lengths = lengths or [tokens] * batch
    check(converted, [tuple(torch.from_numpy(x[b, :n]) for x in (keys, values)) for b, n in enumerate(lengths)])
