"""Plans of a case, and refusals."""

from __future__ import annotations

import pytest
import torch

from foscar import BatchDecodeWithPagedKVCacheWrapper

from .decode_checks import compressed
from .inputs import Case


def planned(case: Case, heads: int | None = None, *, wrapper=None, dense: bool = False, **options):
    """A wrapper that has planned the case."""
    wrapper = wrapper or BatchDecodeWithPagedKVCacheWrapper()
    cache = case.cache
    options = {"format": cache.format, "q_data_type": case.q.dtype, **options}
    sizes = {"num_qo_heads": heads or case.q.shape[1], "num_kv_heads": cache.num_kv_heads, "head_dim": cache.head_dim,
             "page_size": cache.page_size}  # fmt: skip
    if dense:
        wrapper.plan(block_table=case.block_table, seq_lens=case.seq_lens, **sizes, **options)
    else:
        wrapper.plan(*flashinfer_tables(case), **sizes, **options)
    return wrapper


def flashinfer_tables(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """indptr, indices, last_page_len; nonsense where a request has no page."""
    tables = compressed(case)
    last = tables.lengths - (tables.indptr.diff() - 1) * case.cache.page_size
    return tables.indptr, tables.pages, torch.where(tables.lengths > 0, last, 99).to(torch.int32)


def refuse(error, match, call, *args, **kwargs):
    with pytest.raises(error, match=match) as info:
        call(*args, **kwargs)
    assert "\n" not in str(info.value), "one line"
