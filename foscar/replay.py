"""Calls of ``run`` after the first: the launch that was checked then, with other addresses."""

from __future__ import annotations

import torch

from .common.cache import PagedKVCache
from .common.windows import WindowedKVCache
from .hopper.decode import Bound

Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def _kind(x: torch.Tensor | None) -> Kind | None:
    """All of a tensor but its address."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def _parts(cache: PagedKVCache | WindowedKVCache) -> tuple[PagedKVCache, tuple[torch.Tensor, ...]]:
    """The packed cache, and what a decode reads beside it."""
    return (cache.packed, cache.window_tensors) if isinstance(cache, WindowedKVCache) else (cache, ())


class Replay:
    """A checked and launched call, repeated for calls whose arguments differ from its own in addresses only.

    Args:
        q, cache, out, lse, sinks: what the call was given; the last three may be None.
        log_sum: where the call wrote the LSE, or None.
        bound: the launch.
    """

    def __init__(
        self,
        q: torch.Tensor,
        cache: PagedKVCache | WindowedKVCache,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        log_sum: torch.Tensor | None,
        bound: Bound,
    ):
        self._kinds = tuple(map(_kind, (q, out, lse, sinks)))
        self._type = type(cache)
        packed, windows = _parts(cache)
        self._cache, self._strides = (packed.layout, packed.num_kv_heads, packed.device), packed.data.stride()
        self._windows = [(_kind(x), x.data_ptr() % 16) for x in windows]
        self._wants_lse, self._bound = log_sum is not None, bound

    def fits(
        self,
        q: torch.Tensor,
        cache: PagedKVCache | WindowedKVCache,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        wants_lse: bool,
    ) -> bool:
        """Whether the call needs no check that the first one has not passed."""
        return (
            type(q) is torch.Tensor
            and type(cache) is self._type
            and wants_lse == self._wants_lse
            and all(x is None or type(x) is torch.Tensor for x in (out, lse, sinks))
            and (_kind(q), _kind(out), _kind(lse), _kind(sinks)) == self._kinds
            and q.data_ptr() % 8 == 0
            and self._fits_cache(cache)
        )

    def _fits_cache(self, cache: PagedKVCache | WindowedKVCache) -> bool:
        packed, windows = _parts(cache)
        return (
            packed.data.stride() == self._strides
            and (packed.layout, packed.num_kv_heads, packed.data.device) == self._cache
            and [(_kind(x), x.data_ptr() % 16) for x in windows] == self._windows
        )

    def __call__(
        self,
        q: torch.Tensor,
        cache: PagedKVCache | WindowedKVCache,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch; returns (out, lse), new tensors where they are None."""
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if lse is None and self._wants_lse:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        packed, windows = _parts(cache)
        self._bound(q, packed.data, out, lse, sinks, windows)
        return out, lse
