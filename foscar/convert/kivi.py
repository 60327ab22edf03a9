"""KIVI (arXiv 2402.02750, github.com/jy-yuan/KIVI): K per channel, V per token, 2 or 4 bits.

Facts from ``quant/new_pack.py`` and ``models/llama_kivi.py`` at commit 876b4d2: an int32 word holds ``32 / bits`` codes
of consecutive tokens (K) or channels (V), the first in the lowest bits; ``x ~ code * scale + mn``.  K is quantized in
multiples of ``residual_length`` tokens, V one token at a time behind the last ``residual_length``, so the two lengths
differ.  A group of equal values has scale 0 there, and codes of no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from foscar.checks import require
from foscar.common.formats import KVFormat, TensorFormat
from foscar.common.window_move import WindowConfig
from foscar.common.windows import WindowedKVCache

from .checks import check_bits, check_count, check_part, check_shape
from .dense import Converted, Dense, from_quantized
from .words import unpack_words


def from_kivi(
    k_codes: torch.Tensor,
    k_scale: torch.Tensor,
    k_min: torch.Tensor,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor,
    v_min: torch.Tensor,
    *,
    k_bits: int = 2,
    v_bits: int = 2,
    page_size: int = 64,
    params: str = "float16",
) -> Converted:
    """The quantized part of a layer's KIVI cache: entries 0, 2, 3, 4, 6, 7 of its ``past_key_value``.

    Only tokens that are quantized in both K and V are taken, the first ``min`` of the two lengths; the rest belongs
    in a window: :func:`add_kivi_residual`.

    Args:
        k_codes: int32 [batch, kv heads, head_dim, K tokens / (32 / k_bits)].
        k_scale, k_min: float [batch, kv heads, head_dim, K tokens / group].
        v_codes: int32 [batch, kv heads, V tokens, head_dim / (32 / v_bits)].
        v_scale, v_min: float [batch, kv heads, V tokens, head_dim / group].

    Raises:
        TypeError: an argument of another kind; ``None`` is what the project keeps while nothing is quantized.
        ValueError: types, shapes or devices that do not fit each other or the bits.
        FormatError: bits, a head_dim, group or page size that the cache does not take (see
            :class:`foscar.TensorFormat`).
    """
    check_bits("k_bits", k_bits)
    check_bits("v_bits", v_bits)
    _check_side("k", "head_dim", k_codes, k_scale, k_min, k_codes)
    _check_side("v", "tokens", v_codes, v_scale, v_min, k_codes)
    k = unpack_words(k_codes, k_bits, 32)  # [batch, heads, head_dim, tokens]
    v = unpack_words(v_codes, v_bits, 32)  # [batch, heads, tokens, head_dim]
    batch, heads, head_dim, k_tokens = k.shape
    if v.shape[:2] != k.shape[:2] or v.shape[3] != head_dim:
        raise ValueError(f"with {k_bits} and {v_bits} bits the codes are K [batch, heads, head_dim, tokens] = "
                         f"{list(k.shape)} and V [batch, heads, tokens, head_dim] = {list(v.shape)}")  # fmt: skip
    tokens = min(k_tokens, v.shape[2])
    k_group = _group("K", k_tokens, k_scale.shape[3])
    v_group = _group("V", head_dim, v_scale.shape[3])
    whole = v_group == head_dim  # also a head_dim that is no multiple of a group's unit
    k_side = TensorFormat(k_bits, "channel", k_group)
    fmt = KVFormat(k_side, TensorFormat(v_bits, "token", None if whole else v_group), params)
    groups = -(-tokens // k_group)

    def by_group(x: torch.Tensor, count: int) -> torch.Tensor:
        """[batch, heads, head_dim, n] -> [batch * count, heads, head_dim]."""
        return x[..., :count].permute(0, 3, 1, 2).flatten(0, 1)

    def by_token(x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, n, m] -> [batch * tokens, heads, m]."""
        return x[:, :, :tokens].transpose(1, 2).flatten(0, 1)

    return from_quantized(
        Dense(by_group(k, tokens), by_group(k_scale, groups), by_group(k_min, groups)),
        Dense(by_token(v), by_token(v_scale), by_token(v_min)),
        [tokens] * batch,
        fmt,
        page_size,
    )


def _check_side(name: str, dim: str, codes, scale, minimum, like: torch.Tensor) -> None:
    """``dim``: what the third dimension is."""
    check_part(f"{name}_codes", codes, "integers of 32 bits", f"batch, kv heads, {dim}, words", like)
    for what, x in ((f"{name}_scale", scale), (f"{name}_min", minimum)):
        check_part(what, x, "floats", f"batch, kv heads, {dim}, groups", like)
        check_shape(what, x, (*codes.shape[:3], scale.shape[3]))


def _group(name: str, elements: int, pairs: int) -> int:
    if pairs == 0 or elements % pairs:
        raise ValueError(f"{name}: {pairs} parameter pairs do not divide {elements} quantized elements evenly")
    return elements // pairs


@dataclass(frozen=True)
class ConvertedWindows:
    """What :func:`foscar.decode_windowed` takes: a cache, int32 [batch, max_pages], int32 [batch], int32 [batch]."""

    cache: WindowedKVCache
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    slot_ids: torch.Tensor


def add_kivi_residual(
    converted: Converted, k_tail: torch.Tensor, v_tail: torch.Tensor, *, residual_length: int = 128
) -> ConvertedWindows:
    """The whole of a KIVI cache: what :func:`from_kivi` returned, and the tokens behind it in fp16.

    Where the project has quantized more tokens of K than of V, the tail of K begins with those, dequantized; that is
    what it computes with, in fp16.

    Args:
        k_tail, v_tail: float [batch, kv heads, n, head_dim]: the last n tokens, ``past_key_value[1]`` and ``[5]`` but
            for the start of K's.  At most ``residual_length`` tokens.

    Raises:
        TypeError: an argument of another kind.
        ValueError: types, shapes or devices that do not fit the converted part, or values that float16 does not hold.
    """
    if not isinstance(converted, Converted):
        raise TypeError(f"converted must be what from_kivi returned, not {type(converted).__name__}")
    residual_length = check_count("residual_length", residual_length, 0)
    old, batch = converted.cache, len(converted.seq_lens)
    for name, x in (("k_tail", k_tail), ("v_tail", v_tail)):
        check_part(name, x, "floats", "batch, kv heads, tokens, head_dim", old.data)
    heads, n, head_dim = old.num_kv_heads, k_tail.shape[2], old.head_dim
    want = (batch, heads, n, head_dim)
    if tuple(k_tail.shape) != want or tuple(v_tail.shape) != want or n > residual_length:
        raise ValueError(f"the tails must be {list(want[:2])} + [up to {residual_length}, {head_dim}], "
                         f"not {list(k_tail.shape)} and {list(v_tail.shape)}")  # fmt: skip
    for name, x in (("k_tail", k_tail), ("v_tail", v_tail)):
        require(bool(x.half().isfinite().all()), f"{name} holds a value that is not finite in float16")
    cache = WindowedKVCache(
        old.num_pages, old.page_size, heads, head_dim, old.format,
        max_batch=batch, window=WindowConfig(0, residual_length, "float16"), device=old.device,
    )  # fmt: skip
    cache.packed.data.copy_(old.data)
    cache.packed_lens.copy_(converted.seq_lens)
    slots = torch.arange(batch, dtype=torch.int32, device=old.device)
    entry = (converted.seq_lens.long()[:, None] + torch.arange(n, device=old.device)) % max(
        cache.capacity, 1
    )  # [batch, n]
    for ring, x in ((cache.recent_k, k_tail), (cache.recent_v, v_tail)):
        ring[slots.long()[:, None], :, entry] = F.pad(x.transpose(1, 2).to(ring), (0, ring.shape[3] - head_dim))
    return ConvertedWindows(cache, converted.block_table, converted.seq_lens + n, slots)
