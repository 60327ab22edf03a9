"""What decode and append do where torch.compile traces them: call the operators of :mod:`foscar.ops`.

Tensors and numbers are checked when the operator runs; here, what the operators' schemas have no room for.
"""

from __future__ import annotations

import torch

from .options import AttentionOptions
from .tensor_checks import check_kinds


def decode_attention(q, cache, block_table, seq_lens, *, tile, out, return_lse, **settings):
    """:func:`foscar.decode_attention` as one node of a graph.

    Raises:
        TypeError: tensors or options of another kind.
        ValueError: a ``tile``, which a graph cannot hold; another ``lse_base``.
    """
    check_kinds(q=q, block_table=block_table, seq_lens=seq_lens)
    if tile is not None:
        raise ValueError("tile is not supported under torch.compile: set the knobs in foscar.TileConfig")
    settings = _flat(out=out, **settings)
    arguments = (q.detach(), cache.data, block_table, seq_lens, *cache.operator_shape)
    if out is None:
        out, lse = torch.ops.foscar.decode_attention(*arguments, **settings)
    else:  # rows that no request has stay as they are
        lse = torch.ops.foscar.decode_attention_into(out, *arguments, **settings)
    return (out, lse) if return_lse else out


def decode_windowed(q, cache, block_table, seq_lens, slot_ids, *, out, return_lse, **settings):
    """:func:`foscar.decode_windowed` as one node of a graph.

    Raises:
        TypeError, ValueError: as :func:`decode_attention`.
    """
    check_kinds(q=q, block_table=block_table, seq_lens=seq_lens, slot_ids=slot_ids)
    settings = _flat(out=out, **settings)
    arguments = (q.detach(), cache.operator_tensors, block_table, seq_lens, slot_ids, *cache.operator_shape)
    if out is None:
        out, lse = torch.ops.foscar.decode_windowed(*arguments, **settings)
    else:
        lse = torch.ops.foscar.decode_windowed_into(out, *arguments, **settings)
    return (out, lse) if return_lse else out


def _flat(*, options, sinks, out, lse_base, **settings) -> dict:
    """A call's settings as the operators take them."""
    check_kinds(**{name: x for name, x in (("sinks", sinks), ("out", out)) if x is not None})
    if options is not None and not isinstance(options, AttentionOptions):
        raise TypeError(f"options must be foscar.AttentionOptions or None, not {type(options).__name__}")
    options = AttentionOptions() if options is None else options
    settings["sinks"] = None if sinks is None else sinks.detach()
    settings |= {"window": options.window, "soft_cap": options.soft_cap, "out_scale": options.out_scale}
    if not isinstance(lse_base, str) and lse_base != 2:
        raise ValueError("lse_base must be 2 or 'e'")
    settings["lse_base"] = lse_base if isinstance(lse_base, str) else "2"
    return settings


def append(cache, k, v, block_table, seq_lens, indptr, check) -> None:
    """:meth:`foscar.PagedKVCache.append` as one node of a graph.

    Raises:
        TypeError: k or v that is no tensor.
    """
    check_kinds(k=k, v=v)
    new, tables = (k.detach(), v.detach()), (block_table, seq_lens, indptr)
    torch.ops.foscar.append(cache.data, *new, *tables, *cache.operator_shape, check)
