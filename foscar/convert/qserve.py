"""QServe (arXiv 2405.04532, github.com/mit-han-lab/omniserve): K and V per token and head, 4 bits with zero points.

Facts from ``omniserve/worker/cache_engine.py`` and ``kernels/csrc/fused_attention`` (``applyBiasRopeUpdateKVCache.h``
and ``decoderMaskedMultiheadAttentionUtils.h``) at commit 02b2925: a block of K, and one of V, is

    codes [kv heads, block_size, head_dim / 2] bytes, fp16 scales [kv heads, block_size], fp16 zeros, likewise

and perhaps statistics behind them; byte ``j`` of a row holds channel ``2j`` in its low and ``2j + 1`` in its high half;
the kernel computes ``code * scale + round16(-scale * zero)``, with the zero a float: exactly foscar's parameters.
"""

from __future__ import annotations

import torch

from foscar.common.formats import KVFormat

from .checks import check_count, check_ids, check_part
from .dense import Converted, Dense, from_quantized
from .words import unpack_words


def from_qserve(
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 64,
    page_size: int | None = None,
) -> Converted:
    """A layer's KV4 cache (``INT4_ENABLED`` and ``ZEROS_ENABLED``).

    Args:
        k_blocks, v_blocks: int8 or uint8 [blocks, bytes per block], a layer's pair of the cache engine.
        block_table: int32 [batch, max_blocks], ids of blocks; entries beyond a request's length are not read.
        seq_lens: int32 [batch].
        block_size: tokens per block.
        page_size: of the new cache; None: ``block_size``.

    Raises:
        TypeError: an argument of another kind.
        ValueError: types, shapes or devices that do not fit each other, blocks too small for the shape, or block ids
            outside them.
        FormatError: a head_dim or page_size that the cache does not take.
    """
    for name, x in (("k_blocks", k_blocks), ("v_blocks", v_blocks)):
        check_part(name, x, "bytes", "blocks, bytes per block", k_blocks)
    check_part("block_table", block_table, "integers", "batch, max_blocks")
    check_part("seq_lens", seq_lens, "integers", "batch")
    num_kv_heads, block_size = check_count("num_kv_heads", num_kv_heads), check_count("block_size", block_size)
    page_size = block_size if page_size is None else check_count("page_size", page_size)
    layout = KVFormat.int4().layout(check_count("head_dim", head_dim), page_size)
    lengths, rows = [check_count("seq_lens", n, 0) for n in seq_lens.tolist()], block_table.cpu().long()
    counts = [-(-n // block_size) for n in lengths]
    if len(rows) != len(counts) or any(n > rows.shape[1] for n in counts):
        raise ValueError(f"block_table {list(rows.shape)} does not hold the blocks of {lengths[:8]} tokens")
    ids = torch.cat([row[:n] for row, n in zip(rows, counts, strict=True)]) if counts else rows.flatten()
    check_ids("block_table", ids, min(len(k_blocks), len(v_blocks)), "the blocks")
    used = [torch.arange(n) + first * block_size for n, first in zip(lengths, _starts(counts), strict=True)]
    rows_used = torch.cat(used).to(k_blocks.device) if used else ids
    shape = (num_kv_heads, block_size, layout.head_dim)
    k, v = (_dense(name, x, ids.to(x.device), rows_used, shape) for name, x in (("k", k_blocks), ("v", v_blocks)))
    return from_quantized(k, v, lengths, KVFormat.int4(), page_size)


def _starts(counts: list[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts))]


def _dense(name: str, blocks: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, shape: tuple) -> Dense:
    """Of the tokens ``rows`` of the blocks ``ids``, counted over all of them."""
    heads, size, head_dim = shape
    code_bytes, param_bytes = heads * size * head_dim // 2, 2 * heads * size
    if blocks.shape[1] < code_bytes + 2 * param_bytes:
        raise ValueError(f"{name}_blocks must be bytes [blocks, {code_bytes + 2 * param_bytes} or more] for {heads} KV "
                         f"heads of {head_dim} and {size} tokens, not {blocks.dtype} {list(blocks.shape)}")  # fmt: skip
    taken = blocks[ids].view(torch.uint8)
    codes = taken[:, :code_bytes].reshape(-1, heads, size, head_dim // 2).transpose(1, 2).flatten(0, 1)[rows]
    scale, zero = (
        taken[:, start : start + param_bytes].contiguous().view(torch.float16).view(-1, heads, size)
        for start in (code_bytes, code_bytes + param_bytes)
    )
    scale, zero = (p.transpose(1, 2).flatten(0, 1)[rows, :, None].float() for p in (scale, zero))
    return Dense(unpack_words(codes, 4, 8), scale, -scale * zero)
