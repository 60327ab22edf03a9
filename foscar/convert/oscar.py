"""OSCAR (arXiv 2605.17757, github.com/FutureMLS-Lab/OSCAR): K and V per token, 2 bits, rotated.

Facts from ``sglang-research/python/sglang``, ``srt/mem_cache/memory_pool.py`` (buffers) and
``QuantKernel/oscar_rotation_clip_int2_kv.py`` and ``srt/mem_cache/kv_quant_kernels.py`` (bytes), at commit 473ff3f:
byte ``i`` of a row holds channels ``i, i + D/4, i + 2D/4, i + 3D/4`` in ascending bits, which is foscar's order too;
scale and zero of a channel group follow each other; ``x ~ (code - zero) * scale``, the zero a float.  The rotations
stay where they are: K is in the space of ``q R_K``, and the output in that of ``v R_V``.
"""

from __future__ import annotations

import torch

from foscar.common.formats import KVFormat
from foscar.common.pack import unpack_codes

from .dense import Converted, Dense, from_quantized


def from_oscar(
    k_codes: torch.Tensor,
    k_scales_zeros: torch.Tensor,
    v_codes: torch.Tensor,
    v_scales_zeros: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *,
    page_size: int = 64,
    params: str = "float16",
) -> Converted:
    """A layer's INT2 pool, of the tokens that the requests have there (not those of its BF16 windows).

    Args:
        k_codes, v_codes: uint8 [slots, kv heads, head_dim / 4], the pool's ``k_buffer`` and ``v_buffer``.
        k_scales_zeros, v_scales_zeros: float [slots, kv heads, 2 * channel groups].
        kv_indptr, kv_indices: int [batch + 1] and [tokens]: request b's tokens are in slots
            ``kv_indices[kv_indptr[b] : kv_indptr[b + 1]]``.

    Raises:
        ValueError: shapes that do not fit each other.
        FormatError: a group that the cache does not take (see :class:`foscar.TensorFormat`).
    """
    ends = kv_indptr.tolist()
    lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    slots = kv_indices[ends[0] : ends[-1]].long()
    k, k_group = _dense("K", k_codes, k_scales_zeros, slots)
    v, v_group = _dense("V", v_codes, v_scales_zeros, slots)
    fmt = KVFormat.make(2, k_group=k_group, v_group=v_group, params=params)
    return from_quantized(k, v, lengths, fmt, page_size)


def _dense(name: str, codes: torch.Tensor, pairs: torch.Tensor, slots: torch.Tensor) -> tuple[Dense, int | None]:
    head_dim, width = 4 * codes.shape[2], pairs.shape[2]
    if codes.dtype != torch.uint8 or codes.shape[:2] != pairs.shape[:2] or width % 2 or head_dim % (width // 2 or 1):
        raise ValueError(f"{name}: codes must be uint8 [slots, kv heads, head_dim / 4] and scales_zeros [slots, "
                         f"kv heads, 2 * groups], not {codes.dtype} {list(codes.shape)} and "
                         f"{list(pairs.shape)}")  # fmt: skip
    scale, zero = pairs[slots].double().unflatten(2, (-1, 2)).unbind(3)
    group = None if width == 2 else head_dim // (width // 2)
    return Dense(unpack_codes(codes[slots], 2), scale, -zero * scale), group
