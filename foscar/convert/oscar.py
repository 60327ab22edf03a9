"""OSCAR (arXiv 2605.17757, github.com/FutureMLS-Lab/OSCAR): K and V per token, 2 bits, rotated.

Facts from ``sglang-research/python/sglang``, ``srt/mem_cache/memory_pool.py`` (buffers) and
``QuantKernel/oscar_rotation_clip_int2_kv.py`` and ``srt/mem_cache/kv_quant_kernels.py`` (bytes), at commit 473ff3f:
byte ``i`` of a row holds channels ``i, i + D/4, i + 2D/4, i + 3D/4`` in ascending bits, which is foscar's order too;
scale and zero of a channel group follow each other; ``x ~ (code - zero) * scale``, the zero a float.  The rotations
stay where they are: K is in the space of ``q R_K``, and the output in that of ``v R_V``.
"""

from __future__ import annotations

import itertools

import torch

from foscar.common.formats import KVFormat
from foscar.common.pack import unpack_codes

from .checks import check_ids, check_part, check_ranges, check_shape
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
        TypeError: an argument of another kind.
        ValueError: types, shapes or devices that do not fit each other, ranges or slots outside what they index.
        FormatError: a head_dim, group or page size that the cache does not take (see :class:`foscar.TensorFormat`).
    """
    for name, codes, pairs in (("k", k_codes, k_scales_zeros), ("v", v_codes, v_scales_zeros)):
        check_part(f"{name}_codes", codes, "uint8", "slots, kv heads, head_dim / 4", k_codes)
        check_part(f"{name}_scales_zeros", pairs, "floats", "slots, kv heads, 2 * groups", k_codes)
        check_shape(f"{name}_scales_zeros", pairs, (*codes.shape[:2], pairs.shape[2]))
    check_shape("v_codes", v_codes, k_codes.shape)
    check_part("kv_indptr", kv_indptr, "integers", "batch + 1")
    check_part("kv_indices", kv_indices, "integers", "tokens")
    ends = kv_indptr.tolist()
    check_ranges("kv_indptr", ends, "kv_indices", len(kv_indices))
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    slots = kv_indices[ends[0] : ends[-1]].to(k_codes.device, torch.int64)
    check_ids("kv_indices", slots, len(k_codes), "the pool's slots")
    k, k_group = _dense("K", k_codes, k_scales_zeros, slots)
    v, v_group = _dense("V", v_codes, v_scales_zeros, slots)
    fmt = KVFormat.make(2, k_group=k_group, v_group=v_group, params=params)
    return from_quantized(k, v, lengths, fmt, page_size)


def _dense(name: str, codes: torch.Tensor, pairs: torch.Tensor, slots: torch.Tensor) -> tuple[Dense, int | None]:
    head_dim, width = 4 * codes.shape[2], pairs.shape[2]
    if width == 0 or width % 2 or head_dim % (width // 2):
        raise ValueError(f"{name}: {width} scales and zeros are no pairs for groups that divide {head_dim} channels")
    scale, zero = pairs[slots].double().unflatten(2, (-1, 2)).unbind(3)
    group = None if width == 2 else head_dim // (width // 2)
    return Dense(unpack_codes(codes[slots], 2), scale, -zero * scale), group
