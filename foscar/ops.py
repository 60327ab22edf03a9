"""Decode and append as torch operators: plain tensors and numbers in, so that torch.compile, torch.export and engines
that hold raw tensors can call them.

``torch.ops.foscar.decode_attention``, ``decode_attention_into`` (with ``out``) and ``append`` are
:func:`foscar.decode_attention` and :meth:`foscar.PagedKVCache.append` with the cache as its storage (uint8
[num_pages, num_kv_heads, record_bytes]), a format's name and a page size.  Both of those functions call them by
themselves where torch.compile traces them (:mod:`foscar.common.traced`): one node each, without a graph break.
"""

from __future__ import annotations

import functools
import inspect

import torch

from .api import decode_attention as _decode_attention
from .common.cache import PagedKVCache
from .common.formats import KVFormat
from .common.options import AttentionOptions

_LSE_BASES = {"2": 2, "e": "e"}
_options = functools.cache(AttentionOptions)
_parse = functools.cache(KVFormat.parse)


def _cache(data: torch.Tensor, format: str, page_size: int, head_dim: int) -> PagedKVCache:
    if data.ndim != 3:
        raise ValueError(f"cache_data must be uint8 [num_pages, num_kv_heads, record_bytes], not {list(data.shape)}")
    return PagedKVCache(data.shape[0], page_size, data.shape[1], head_dim, _parse(format), data=data)


def _decode(arguments: dict, out: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of an operator's ``arguments``, by their names."""
    lse_base = arguments.pop("lse_base")
    if lse_base not in _LSE_BASES:
        raise ValueError(f"lse_base must be '2' or 'e', not {lse_base!r}")
    cache = _cache(*(arguments.pop(name) for name in ("cache_data", "format", "page_size", "head_dim")))
    options = _options(*(arguments.pop(name) for name in ("window", "soft_cap", "out_scale")))
    more = {"cache": cache, "options": options, "out": out, "return_lse": True, "lse_base": _LSE_BASES[lse_base]}
    return _decode_attention(**arguments, **more)


# The arguments of an operator are flat: its schema knows tensors and plain values only.
@torch.library.custom_op("foscar::decode_attention", mutates_args=())
def decode_attention(
    q: torch.Tensor,
    cache_data: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    format: str,
    page_size: int,
    head_dim: int,
    sm_scale: float | None = None,
    lse_base: str = "2",
    sinks: torch.Tensor | None = None,
    q_indptr: torch.Tensor | None = None,
    max_q_len: int | None = None,
    window: int | None = None,
    soft_cap: float = 0.0,
    out_scale: float = 1.0,
    backend: str = "auto",
    check: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator ``foscar::decode_attention``; see :func:`foscar.decode_attention`.

    ``foscar::decode_attention_into`` takes ``out`` in front of these arguments, writes it and returns the LSE alone.

    Args:
        cache_data: uint8 [num_pages, num_kv_heads, record_bytes], ``PagedKVCache.data``.
        format: :attr:`foscar.KVFormat.name`.
        page_size, head_dim: the cache's.
        lse_base: "2" or "e".
        window, soft_cap, out_scale: of :class:`foscar.AttentionOptions`.

    Returns:
        (out, lse): of q's shape and dtype, and float32 [q's rows, query heads], both contiguous.

    Raises:
        ValueError, TypeError, FormatError, UnsupportedDeviceError: as :func:`foscar.decode_attention`.
    """
    return _decode(locals())


@decode_attention.register_fake
def _(q, cache_data, block_table, seq_lens, *settings, **named):
    torch._check(q.dim() == 3, lambda: f"q must be [batch, query heads, head_dim], not {list(q.shape)}")
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


_SCHEMA = torch.library.infer_schema(decode_attention._init_fn, mutates_args=())
_SIGNATURE = inspect.signature(decode_attention._init_fn)


@torch.library.custom_op(
    "foscar::decode_attention_into",
    mutates_args=("out",),
    schema=_SCHEMA.replace("(Tensor q", "(Tensor(a0!) out, Tensor q").replace("(Tensor, Tensor)", "Tensor"),
)
def decode_attention_into(out, *arguments, **named):
    bound = _SIGNATURE.bind(*arguments, **named)
    bound.apply_defaults()
    return _decode(bound.arguments, out)[1]


@decode_attention_into.register_fake
def _(out, q, *settings, **named):
    torch._check(q.dim() == 3, lambda: f"q must be [batch, query heads, head_dim], not {list(q.shape)}")
    return q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("foscar::append", mutates_args=("cache_data",))
def append(
    cache_data: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    indptr: torch.Tensor | None,
    format: str,
    page_size: int,
    head_dim: int,
    check: bool | None = None,
) -> None:
    """The operator ``foscar::append``, which writes into ``cache_data``; see :meth:`foscar.PagedKVCache.append`.

    Args:
        cache_data: uint8 [num_pages, num_kv_heads, record_bytes], ``PagedKVCache.data``.
        format: :attr:`foscar.KVFormat.name`.
        page_size, head_dim: the cache's.

    Raises:
        ValueError, TypeError, FormatError: as :meth:`foscar.PagedKVCache.append`.
    """
    _cache(cache_data, format, page_size, head_dim).append(k, v, block_table, seq_lens, indptr, check=check)


@append.register_fake
def _(cache_data, k, v, *settings, **named):
    torch._check(k.dim() == 3, lambda: f"k must be [n, KV heads, head_dim], not {list(k.shape)}")
