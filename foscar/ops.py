"""Decode and append as torch operators: plain tensors and numbers in, so that torch.compile, torch.export and engines
that hold raw tensors can call them.

``torch.ops.foscar.decode_attention``, ``decode_windowed`` and ``append`` are :func:`foscar.decode_attention`,
:func:`foscar.decode_windowed` and :meth:`foscar.PagedKVCache.append` with the cache as its storage (uint8
[num_pages, num_kv_heads, record_bytes]; of a cache with windows, a list of tensors), a format's name and sizes;
``decode_attention_into`` and ``decode_windowed_into`` take ``out``.  Those functions call them by themselves where
torch.compile traces them (:mod:`foscar.common.traced`): one node each, without a graph break.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence

import torch

from .api import decode_attention as _decode_attention
from .common.cache import PagedKVCache
from .common.formats import KVFormat
from .common.options import AttentionOptions
from .common.windows import WindowedKVCache
from .windowed import decode_windowed as _decode_windowed

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
    options = _options(*(arguments.pop(name) for name in ("window", "soft_cap", "out_scale")))
    more = {"options": options, "out": out, "return_lse": True, "lse_base": _LSE_BASES[lse_base]}
    shape = {name: arguments.pop(name) for name in ("format", "page_size", "head_dim")}
    if "cache_data" in arguments:
        return _decode_attention(cache=_cache(arguments.pop("cache_data"), *shape.values()), **arguments, **more)
    storage, n_recent = (arguments.pop(name) for name in ("storage", "n_recent"))
    shape["format"] = _parse(shape["format"])
    cache = WindowedKVCache.from_storage(storage, **shape, n_recent=n_recent)
    return _decode_windowed(cache=cache, **arguments, **more)


def _make_lse(q: torch.Tensor) -> torch.Tensor:
    torch._check(q.dim() == 3, lambda: f"q must be [batch, query heads, head_dim], not {list(q.shape)}")
    return q.new_empty(q.shape[:2], dtype=torch.float32)


def _fake(q, *settings, **named):
    return q.new_empty(q.shape), _make_lse(q)


def _with_out(operator):
    """The operator that takes ``out`` in front of ``operator``'s arguments, writes it and returns the LSE alone."""
    schema = torch.library.infer_schema(operator._init_fn, mutates_args=())
    signature = inspect.signature(operator._init_fn)

    def into(out, *arguments, **named):
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        return _decode(bound.arguments, out)[1]

    schema = schema.replace("(Tensor q", "(Tensor(a0!) out, Tensor q").replace("(Tensor, Tensor)", "Tensor")
    made = torch.library.custom_op(f"{operator._qualname}_into", into, mutates_args=("out",), schema=schema)
    made.register_fake(lambda out, q, *settings, **named: _make_lse(q))
    return made


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


@torch.library.custom_op("foscar::decode_windowed", mutates_args=())
def decode_windowed(
    q: torch.Tensor,
    storage: Sequence[torch.Tensor],
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_ids: torch.Tensor,
    format: str,
    page_size: int,
    head_dim: int,
    n_recent: int,
    sm_scale: float | None = None,
    lse_base: str = "2",
    sinks: torch.Tensor | None = None,
    q_indptr: torch.Tensor | None = None,
    max_q_len: int | None = None,
    window: int | None = None,
    soft_cap: float = 0.0,
    out_scale: float = 1.0,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator ``foscar::decode_windowed``; see :func:`foscar.decode_windowed`.

    ``foscar::decode_windowed_into`` takes ``out`` in front of these arguments, writes it and returns the LSE alone.

    Args:
        storage: ``WindowedKVCache.operator_tensors``.
        format: :attr:`foscar.KVFormat.name`.
        page_size, head_dim: the cache's; ``n_recent``: its window's.
        lse_base: "2" or "e".
        window: None; any other is refused.
        soft_cap, out_scale: of :class:`foscar.AttentionOptions`.

    Returns:
        (out, lse): of q's shape and dtype, and float32 [q's rows, query heads], both contiguous.

    Raises:
        ValueError, TypeError, FormatError, UnsupportedDeviceError: as :func:`foscar.decode_windowed`.
    """
    return _decode(locals())


for _operator in (decode_attention, decode_windowed):
    _operator.register_fake(_fake)
decode_attention_into, decode_windowed_into = map(_with_out, (decode_attention, decode_windowed))


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
