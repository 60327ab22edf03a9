"""What decode and append do where torch.compile traces them: call the operators of :mod:`foscar.ops`.

Arguments are checked when the operator runs.
"""

from __future__ import annotations

import torch

from .options import AttentionOptions


def decode_attention(q, cache, block_table, seq_lens, *, options, sinks, out, return_lse, lse_base, tile, **settings):
    """:func:`foscar.decode_attention` as one node of a graph.

    Raises:
        ValueError: a ``tile``, which a graph cannot hold.
    """
    if tile is not None:
        raise ValueError("tile is not supported under torch.compile: set the knobs in foscar.TileConfig")
    options = AttentionOptions() if options is None else options
    shape = (cache.format.name, cache.page_size, cache.head_dim)
    settings["sinks"] = None if sinks is None else sinks.detach()
    settings |= {"window": options.window, "soft_cap": options.soft_cap, "out_scale": options.out_scale}
    result, lse = torch.ops.foscar.decode_attention(
        q.detach(), cache.data, block_table, seq_lens, *shape, lse_base=str(lse_base), **settings
    )
    if out is not None:
        out.copy_(result)
        result = out
    return (result, lse) if return_lse else result


def append(cache, k, v, block_table, seq_lens, indptr, check) -> None:
    """:meth:`foscar.PagedKVCache.append` as one node of a graph."""
    shape = (cache.format.name, cache.page_size, cache.head_dim)
    torch.ops.foscar.append(cache.data, k.detach(), v.detach(), block_table, seq_lens, indptr, *shape, check)
