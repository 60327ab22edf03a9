"""Small caches and calls of the operators' and torch.compile's tests."""

from __future__ import annotations

import torch

from foscar import KVFormat, PagedKVCache

from .inputs import POISON, Case, make_case, random_values

HEAD_DIM, PAGE, KV_HEADS, HEADS = 64, 16, 2, 6


def case_of(lengths, fmt: KVFormat | None = None, **options) -> Case:
    options = {"fmt": fmt, "page_size": PAGE, "kv_heads": KV_HEADS, "group_heads": 3, "head_dim": HEAD_DIM, **options}
    return make_case(lengths, **options)


def shape_of(cache: PagedKVCache) -> tuple[str, int, int]:
    return cache.format.name, cache.page_size, cache.head_dim


def tensors_of(case: Case) -> tuple:
    return case.q, case.cache.data, case.block_table, case.seq_lens, *shape_of(case.cache)


def windowed_tensors(given) -> tuple:
    """Of the inputs of a case with windows (support.window_checks), up to the cache's shape."""
    return given.q, given.cache.operator_tensors, given.table, given.lengths, given.slots


def empty_cache(pages: int = 20, fmt: KVFormat | None = None, heads: int = KV_HEADS) -> PagedKVCache:
    cache = PagedKVCache(pages, PAGE, heads, HEAD_DIM, fmt)
    cache.data.fill_(POISON)
    return cache


def new_tokens(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(random_values((n, KV_HEADS, HEAD_DIM), seed + i, torch.bfloat16) for i in range(2))
