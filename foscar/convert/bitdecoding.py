"""BitDecoding (arXiv 2503.18773, github.com/DD-DuDa/BitDecoding): K per channel or per token, V per token, 2 or 4 bits.

Facts from ``bit_decode_interface.py``, ``evaluation/test.py`` and ``include/qpack.h`` at commit e829b5a: tensors are
[batch, tokens, kv heads, head_dim]; ``x ~ code * scale + min``, a group of equal values has scale 0; ``quant_mode``
"k-channel" has K's parameters per channel and ``group_size`` tokens, any other has them per token and ``group_size``
channels, as V's always are.

Its packed words and parameters lie in the order of tensor-core fragments, which follows from layouts of CUTLASS that
the code composes (tile shapes, copy and MMA atoms, swizzles) and states nowhere.  So packed tensors are not taken here,
but what they hold, in the shapes that the project gives to its own.
"""

from __future__ import annotations

import torch

from foscar.checks import require
from foscar.common.formats import KVFormat, TensorFormat

from .checks import check_bits, check_count, check_lengths, check_part, check_shape
from .dense import Converted, Dense, from_quantized

QUANT_MODES = ("k-channel", "k-tensor")


def from_bitdecoding_codes(
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_min: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_min: torch.Tensor,
    *,
    num_bits: int = 4,
    quant_mode: str = "k-channel",
    group_size: int = 128,
    lengths: list[int] | None = None,
    page_size: int = 64,
    params: str = "float16",
) -> Converted:
    """A cache of unpacked codes and parameters in BitDecoding's dimensions.

    Args:
        k_codes, v_codes: uint8 [batch, tokens, kv heads, head_dim], one code each.
        k_scale, k_min: float; "k-channel": [batch, ceil(tokens / group_size), kv heads, head_dim]; "k-tensor":
            [batch, head_dim / group_size, kv heads, tokens].
        v_scale, v_min: float [batch, head_dim / group_size, kv heads, tokens].
        num_bits, quant_mode, group_size: the project's; a group of 128 of a head_dim of 64 is one of 64.
        lengths: tokens of each request; None: all.

    Raises:
        TypeError: an argument of another kind.
        ValueError: types, shapes, lengths or devices that do not fit each other.
        FormatError: bits, a head_dim, group or page size that the cache does not take.
    """
    check_bits("num_bits", num_bits)
    require(quant_mode in QUANT_MODES, f"quant_mode must be one of {QUANT_MODES}, not {quant_mode!r}")
    group_size = check_count("group_size", group_size)
    for name, x in (("k_codes", k_codes), ("v_codes", v_codes)):
        check_part(name, x, "uint8", "batch, tokens, kv heads, head_dim", k_codes)
    check_shape("v_codes", v_codes, k_codes.shape)
    batch, tokens, heads, head_dim = k_codes.shape
    lengths = [tokens] * batch if lengths is None else check_lengths("lengths", lengths)
    require(
        len(lengths) == batch and max(lengths, default=0) <= tokens,
        f"lengths must be {batch} numbers up to {tokens}, not {lengths[:8]}",
    )
    channel_group = min(group_size, head_dim)
    by_token = (batch, -(-head_dim // channel_group), heads, tokens)
    by_channel = (batch, -(-tokens // group_size), heads, head_dim)
    channel = quant_mode == "k-channel"
    shapes = {"k_scale": by_channel if channel else by_token, "v_scale": by_token}
    shapes |= {"k_min": shapes["k_scale"], "v_min": by_token}
    pairs = {"k_scale": k_scale, "k_min": k_min, "v_scale": v_scale, "v_min": v_min}
    for name, x in pairs.items():
        check_part(name, x, "floats", "batch, groups, kv heads, head_dim or tokens", k_codes)
        check_shape(name, x, shapes[name])
    per_token = TensorFormat(num_bits, "token", None if channel_group == head_dim else channel_group)
    fmt = KVFormat(TensorFormat(num_bits, "channel", group_size) if channel else per_token, per_token, params)

    def of_requests(x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """[batch, n, ...] -> the first ``counts[b]`` of each request, one behind the other."""
        return torch.cat([row[:n] for row, n in zip(x, counts, strict=True)]) if counts else x.flatten(0, 1)

    def side(codes: torch.Tensor, channel: bool, *pair: torch.Tensor) -> Dense:
        counts = [-(-n // group_size) for n in lengths] if channel else lengths
        moved = (x if channel else x.permute(0, 3, 2, 1) for x in pair)
        return Dense(of_requests(codes, lengths), *(of_requests(x, counts) for x in moved))

    k, v = side(k_codes, channel, k_scale, k_min), side(v_codes, False, v_scale, v_min)
    return from_quantized(k, v, lengths, fmt, page_size)
