"""The checks of an append's arguments: one line that names the argument and what it must be."""

from __future__ import annotations

import itertools

import torch

from foscar.common.tensor_checks import check_tensors


def check_tables(device: torch.device, block_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """Types, shapes and device of the tensors that say where requests live.

    Raises:
        ValueError: not int32 [batch, max_pages] and int32 [batch] on ``device``.
    """
    wanted = (("block_table", block_table, 2, "[batch, max_pages]"), ("seq_lens", seq_lens, 1, "[batch]"))
    for name, x, ndim, shape in wanted:
        if x.dtype != torch.int32 or x.ndim != ndim:
            raise ValueError(f"{name} must be int32 {shape}, not {x.dtype} {list(x.shape)}")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, the cache on {device}")
    if block_table.shape[0] != seq_lens.shape[0]:
        raise ValueError(f"block_table has {block_table.shape[0]} requests, seq_lens {seq_lens.shape[0]}")


def check_page_ids(cache, page: torch.Tensor, request: torch.Tensor) -> None:
    """Page ids (int64, on the CPU) that are about to be used.

    Raises:
        ValueError: one is outside the cache; says whose.
    """
    bad = ((page < 0) | (page >= cache.num_pages)).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        raise ValueError(
            f"block_table[{int(request[at])}] holds page id {int(page[at])} where tokens are stored; "
            f"the cache has pages 0 .. {cache.num_pages - 1}"
        )


def check_new_values(cache, k, v, block_table, seq_lens, indptr) -> None:
    """The arguments of an append, but for what would make the host wait for a device.

    Raises:
        TypeError: an argument that is no tensor.
        ValueError: a type, shape or device that does not fit ``cache``; on the CPU also a bad ``indptr``.
    """
    tensors = {"k": k, "v": v, "block_table": block_table, "seq_lens": seq_lens}
    check_tensors(**(tensors if indptr is None else tensors | {"indptr": indptr}))
    want = (cache.num_kv_heads, cache.head_dim)
    for name, x in (("k", k), ("v", v)):
        if not x.is_floating_point() or x.itemsize < 2 or x.ndim != 3 or tuple(x.shape[1:]) != want:
            raise ValueError(
                f"{name} must be a float tensor, of 16 bits or more, [n, {want[0]}, {want[1]}] (KV heads, head_dim), "
                f"not {x.dtype} {list(x.shape)}"
            )
        if x.device != cache.device:
            raise ValueError(f"{name} is on {x.device}, the cache on {cache.device}")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"k has {k.shape[0]} tokens, v {v.shape[0]}")
    check_tables(cache.device, block_table, seq_lens)
    n, batch = k.shape[0], seq_lens.shape[0]
    if indptr is not None:
        _check_indptr(cache.device, indptr, batch, n)
    elif n != batch:
        raise ValueError(f"k has {n} tokens for {batch} requests: without indptr each request gets one")


def _check_indptr(device, indptr, batch, n) -> None:
    if indptr.dtype != torch.int32 or tuple(indptr.shape) != (batch + 1,) or indptr.device != device:
        raise ValueError(
            f"indptr must be int32 [{batch + 1}] on {device}, "
            f"not {indptr.dtype} {list(indptr.shape)} on {indptr.device}"
        )
    if device.type == "cpu":
        ends = indptr.tolist()
        if ends[0] != 0 or ends[-1] != n or any(a > b for a, b in itertools.pairwise(ends)):
            raise ValueError(f"indptr must ascend from 0 to the {n} tokens of k, not {ends[:8]}{'...' * (batch > 7)}")


def check_positions(cache, block_table, request, position, column) -> None:
    bad = ((position < 0) | (column >= block_table.shape[1])).nonzero()
    if len(bad):
        i = int(bad[0])
        raise ValueError(
            f"request {int(request[i])}: position {int(position[i])} is outside its block table of "
            f"{block_table.shape[1]} pages of {cache.page_size} tokens"
        )


def check_cut_groups(cache, block_table: torch.Tensor, starts: list[int], ends: list[int], group: int) -> None:
    """Token groups that have tokens and get more must lie in pages of their request alone: their parameters, which all
    of their pages hold, may change (CPU tensors).

    Args:
        starts: [batch], the requests' tokens before the append.
        ends: [batch + 1], the bounds of the new rows.
        group: tokens.

    Raises:
        ValueError: another request of the batch has such a page, below its length; says whose.
    """
    page, owners = cache.page_size, {}
    rows = [b - a for a, b in itertools.pairwise(ends)]
    cut = [(b, n) for b, n in enumerate(starts) if rows[b] and n % group]
    if not cut:
        return
    tables = block_table.tolist()
    for b, (start, more) in enumerate(zip(starts, rows, strict=True)):
        for i in set(tables[b][: -(-(start + more) // page)]):
            owners.setdefault(i, []).append(b)
    for b, start in cut:
        base = start // group * group
        for i in tables[b][base // page : -(-min(base + group, start + rows[b]) // page)]:
            if len(owners[i]) > 1:
                raise ValueError(
                    f"page {i} is of requests {owners[i][:2]}, and request {b} appends to its token group "
                    f"{base} .. {base + group - 1} there: copy the pages of a group that a shared prefix cuts"
                )
