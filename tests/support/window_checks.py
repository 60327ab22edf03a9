"""Decoding a cache with windows: cases, float64 attention over what such a cache keeps, and the numeric contract."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import torch

import foscar
from foscar import AttentionOptions, KVFormat, PagedKVCache, WindowConfig, WindowedKVCache
from foscar.common.options import DEFAULT_Q_LEN, Variant
from foscar.common.reference import relative_error

from .compare import error_report
from .decode_checks import LSE_UNIT
from .gpu_kernels import config_of
from .inputs import POISON, indptr_of, int32, random_values, shuffled_table

PLAIN = AttentionOptions()
KIVI = KVFormat.make(2, k_axis="channel", k_group=32, v_group=32)


@dataclass(frozen=True)
class WindowCase:
    """Requests of ``lengths`` tokens and what a call over them adds to plain attention.

    Args:
        steps: tokens that are appended one batch at a time at the end, after the prompts: the ring wraps.
        q_lens: query tokens per request, the last ones; None: one each, without ``q_indptr``.
    """

    fmt: KVFormat
    window: WindowConfig
    lengths: tuple[int, ...]
    q_lens: tuple[int, ...] | None = None
    options: AttentionOptions = PLAIN
    sinks: bool = False
    head_dim: int = 64
    page_size: int = 16
    kv_heads: int = 2
    group: int = 3
    dtype: torch.dtype = torch.bfloat16
    sm_scale: float | None = None
    steps: int = 0

    @property
    def bounds(self) -> list[int]:
        return [0, *itertools.accumulate(self.q_lens or [1] * len(self.lengths))]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.sm_scale is None else self.sm_scale


@dataclass
class Inputs:
    """The tensors of a case on a device."""

    case: WindowCase
    cache: WindowedKVCache
    table: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    q: torch.Tensor
    sinks: torch.Tensor | None
    q_indptr: torch.Tensor | None

    def planned(self, **more) -> foscar.BatchDecodeWithPagedKVCacheWrapper:
        """A wrapper that has planned the case."""
        x, wrapper = self.case, foscar.BatchDecodeWithPagedKVCacheWrapper()
        wrapper.plan(
            block_table=self.table, seq_lens=self.lengths, slot_ids=self.slots, window=x.window, format=x.fmt,
            num_qo_heads=self.q.shape[1], num_kv_heads=x.kv_heads, head_dim=x.head_dim, page_size=x.page_size,
            q_data_type=x.dtype, options=x.options, q_indptr=self.q_indptr, max_q_len=DEFAULT_Q_LEN,
            has_sinks=x.sinks, sm_scale=x.sm_scale, **more,
        )  # fmt: skip
        return wrapper

    def decode(self, **more):
        x = self.case
        out = torch.full_like(self.q, torch.nan)
        call = {"options": x.options, "sinks": self.sinks, "q_indptr": self.q_indptr, "sm_scale": x.sm_scale,
                "max_q_len": DEFAULT_Q_LEN} | more  # fmt: skip
        tables = (self.table, self.lengths, self.slots)
        return foscar.decode_windowed(self.q, self.cache, *tables, out=out, return_lse=True, **call)


def make_inputs(x: WindowCase, device="cpu", seed: int = 0) -> Inputs:
    """Random values; all that no token is in holds poison: pages, windows of other slots, the rest of the rings."""
    batch, longest = len(x.lengths), max(x.lengths) + 1
    pages = batch * -(-longest // x.page_size)
    cache = WindowedKVCache(
        pages, x.page_size, x.kv_heads, x.head_dim, x.fmt, max_batch=batch + 2, window=x.window, device=device
    )
    cache.packed.data.fill_(POISON)
    for pair in cache.storage:
        for tensor in pair:
            tensor.fill_(torch.nan)
    table = shuffled_table([longest] * batch, x.page_size, pages, 3).to(device)
    slots = int32([(3 * b + 2) % (batch + 2) if (batch + 2) % 3 else batch + 1 - b for b in range(batch)], device)
    slots = torch.where(int32(x.lengths, device) > 0, slots, -1).int()
    lengths = torch.zeros(batch, dtype=torch.int32, device=device)
    prompts = [max(0, n - x.steps) for n in x.lengths]
    for i in range(x.steps + 1):
        counts = prompts if i == 0 else [int(n >= i) for n in x.lengths]
        k, v = (random_values((sum(counts), x.kv_heads, x.head_dim), seed + 2 * i + j, x.dtype) for j in (0, 1))
        cache.append(k.to(device), v.to(device), table, lengths, slots, indptr_of(counts, device))
        lengths = lengths + int32(counts, device)
    assert lengths.tolist() == list(x.lengths)
    heads = x.kv_heads * x.group
    q = random_values((x.bounds[-1], heads, x.head_dim), seed + 77, x.dtype, mean=0.5)
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed)) + 3 if x.sinks else None
    sinks = None if sinks is None else sinks.to(device)
    q_indptr = None if x.q_lens is None else indptr_of(list(x.q_lens), device)
    return Inputs(x, cache, table, lengths, slots, q.to(device), sinks, q_indptr)


def dense_row(q, k, v, x: WindowCase, sinks, dtype=None):
    """(out, lse natural, largest magnitude of a logit) of one query row [heads, D] over the tokens that it sees.

    In float64, or by the usual route: operands in ``dtype``, sums in float32.
    """

    def cast(y):
        return y.double() if dtype is None else y.to(dtype).float()

    q, k, v = (cast(y) for y in (q.unflatten(0, (x.kv_heads, -1)), k, v))
    s = (torch.einsum("hgc,nhc->hgn", q, k) * x.scale).flatten(0, 1)
    cap = x.options.soft_cap
    s = cap * torch.tanh(s / cap) if cap else s
    column = s if sinks is None else torch.cat([s, sinks.to(s)[:, None]], -1)
    top = column.amax(-1, keepdim=True) if column.shape[-1] else s.new_zeros(len(s), 1)
    p = torch.exp(s - top)
    total = torch.exp(column - top).sum(-1)
    out = torch.einsum("hgn,nhc->hgc", cast(p).unflatten(0, (x.kv_heads, -1)), v).flatten(0, 1)
    out = out * x.options.out_scale / torch.where(total == 0, 1.0, total)[:, None]
    return out, top[:, 0] + total.log(), max(1.0, s.abs().max().item()) if s.numel() else 1.0


def assert_contract(out, lse, given: Inputs, lse_base: int | str = 2) -> None:
    """Request by request: the error is at most the BF16 route's (support.option_checks.assert_option_contract)."""
    x, unit = given.case, 1.0 if lse_base == "e" else math.log(2.0)
    sinks = None if given.sinks is None else given.sinks.cpu()
    for b, (start, stop) in enumerate(itertools.pairwise(x.bounds)):
        if start == stop:
            continue
        k, v = given.cache.read_request(given.table[b], x.lengths[b], max(0, int(given.slots[b])))
        rows = []
        for row in range(start, stop):
            n = max(0, x.lengths[b] - (stop - row) + 1)
            seen = (given.q[row].cpu(), k[:n].cpu(), v[:n].cpu(), x, sinks)
            rows.append((*dense_row(*seen), *dense_row(*seen, torch.bfloat16)[:2]))
        want, want_lse, usual, usual_lse = (torch.stack([r[i] for r in rows]) for i in (0, 1, 3, 4))
        got, found = out[start:stop].cpu(), lse[start:stop].cpu().double() * unit
        name = f"request {b}, {x.lengths[b]} tokens, {stop - start} rows"
        allowed = relative_error(usual, want) + relative_error(want.to(got.dtype), want) + 2.0**-24
        error = relative_error(got, want)
        report = error_report(got, want, ("row", "head", "channel"))
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}\n{report}"
        empty = want_lse.isinf()
        assert bool((found[empty] == -math.inf).all()), f"{name}: LSE of a row that sees nothing"
        if not bool(empty.all()):
            error, usual_error = ((y - want_lse)[~empty].abs().max().item() for y in (found, usual_lse))
            limit = max(usual_error, LSE_UNIT * max(r[2] for r in rows))
            assert error <= limit, f"{name}: LSE error {error:.3e}, allowed {limit:.3e}"


def config(x: WindowCase, given: Inputs):
    """The case's kernel, which must be in the table of gpu_kernels.py."""
    variant = Variant(x.options, given.sinks, given.q_indptr)
    room = foscar.windowed.exact_room(given.q, given.cache)
    exact = dataclasses.replace(variant, exact=foscar.windowed.exact_tokens(given.cache, given.slots, room))
    packed = given.cache.packed
    padded = PagedKVCache(1, packed.page_size, packed.num_kv_heads, packed.padded_head_dim, packed.format)
    return config_of(given.q, padded, None, exact)


def kernel_results(x: WindowCase, device="cpu", **more):
    """(out, lse, the inputs) by the kernels, for a runner's ``run``."""
    given = make_inputs(x, device)
    config(x, given)
    out, lse = given.decode(**more)
    return out.cpu(), lse.cpu(), given
