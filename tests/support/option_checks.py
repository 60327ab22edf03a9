"""Attention options: cases, a dense float64 implementation of the formulas, and the numeric contract with options.

The dense one is written out row by row and shares nothing with :mod:`foscar.common.reference` but the dequantized K, V.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import torch

import foscar
from foscar.common.cache import PagedKVCache
from foscar.common.options import DEFAULT_Q_LEN, AttentionOptions, Variant
from foscar.common.reference import attention_bf16, relative_error

from .compare import assert_equal, error_report
from .decode_checks import LSE_UNIT, compressed
from .gpu_kernels import config_of
from .inputs import POISON, Case, indptr_of, make_case, poison_slack, random_values

PLAIN = AttentionOptions()


@dataclass
class OptionCase:
    """A case whose q has the rows of all requests, and what a call over it adds to plain attention."""

    case: Case
    q_lens: list[int] | None
    options: AttentionOptions = PLAIN
    sinks: torch.Tensor | None = None
    sm_scale: float | None = None

    @property
    def bounds(self) -> list[int]:
        return [0, *itertools.accumulate([1] * len(self.case.seq_lens) if self.q_lens is None else self.q_lens)]

    @property
    def q_indptr(self) -> torch.Tensor | None:
        return None if self.q_lens is None else indptr_of(self.q_lens, self.case.q.device)

    @property
    def variant(self) -> dict:
        """Keyword arguments of the routes in foscar.common.reference."""
        return {"options": self.options, "sinks": self.sinks, "q_indptr": self.q_indptr}


def option_case(
    lengths, q_lens=None, *, options: AttentionOptions = PLAIN, sinks: bool = False, sm_scale=None, seed=0, **shape
) -> OptionCase:
    """A random case; sinks around the LSEs, so that they weigh about as much as the tokens, but for head 0 (none).

    Args:
        q_lens: query tokens per request, the last ones of its ``lengths``; None: one each, without ``q_indptr``.
        shape: of ``support.inputs.make_case``.
    """
    heads = shape.get("kv_heads", 2) * shape.get("group_heads", 4)
    rows = len(lengths) if q_lens is None else sum(q_lens)
    dtype = shape.get("dtype", torch.bfloat16)
    q = random_values((rows, heads, shape.get("head_dim", 128)), seed + 7, dtype, mean=0.5)
    found = OptionCase(make_case(lengths, q=q, seed=seed, **shape), q_lens, options, None, sm_scale)
    if sinks:
        lse = dense_attention(found)[1]
        lse = torch.where(lse.isfinite(), lse, torch.zeros_like(lse))
        noise = torch.randn(heads, generator=torch.Generator().manual_seed(seed + 8))
        found.sinks = (lse.amax(0) + noise).float() if rows else noise
        found.sinks[0] = -3e4
    return found


def dense_attention(x: OptionCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, lse natural, largest magnitude of a logit [rows]) in float64, by the formulas of foscar.common.options."""
    case, options = x.case, x.options
    rows, heads, head_dim = case.q.shape
    scale = 1 / math.sqrt(head_dim) if x.sm_scale is None else x.sm_scale
    out = torch.zeros(rows, heads, head_dim, dtype=torch.float64)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
    largest = torch.ones(rows, dtype=torch.float64)
    for b, (start, stop) in enumerate(itertools.pairwise(x.bounds)):
        length = int(case.seq_lens[b])
        k, v = case.cache.dequantize_request(case.block_table[b], length)
        k, v = (y.repeat_interleave(heads // y.shape[1], 1) for y in (k, v))  # [tokens, query heads, head_dim]
        for row in range(start, stop):
            position = length - (stop - row)
            seen = [
                t for t in range(length) if t <= position and (options.window is None or position - t < options.window)
            ]
            s = (case.q[row].double() * k[seen]).sum(-1) * scale  # [tokens, query heads]
            if options.soft_cap > 0:
                s = options.soft_cap * (s / options.soft_cap).tanh()
            if seen:
                largest[row] = max(1.0, s.abs().max().item())
            column = s if x.sinks is None else torch.cat([s, x.sinks.double()[None]])
            if column.shape[0] == 0:
                continue
            lse[row] = column.logsumexp(0)
            p = (s - lse[row]).exp()
            out[row] = options.out_scale * (p[..., None] * v[seen]).sum(0)
    return out, lse, largest


def assert_option_contract(out, lse, x: OptionCase, *, lse_base: int | str = 2) -> None:
    """Request by request: the error is at most the BF16 route's; see ``support.decode_checks.assert_contract``."""
    want, want_lse, largest = dense_attention(x)
    usual, usual_lse = attention_bf16(x.case.q, *x.case.tables, x.sm_scale, **x.variant)
    assert out.dtype == x.case.q.dtype and lse.dtype == torch.float32
    if lse_base == 2:
        want_lse, usual_lse, largest = (y / math.log(2.0) for y in (want_lse, usual_lse, largest))
    for b, (start, stop) in enumerate(itertools.pairwise(x.bounds)):
        if start == stop:
            continue
        at, name = slice(start, stop), f"request {b}, {int(x.case.seq_lens[b])} tokens, {stop - start} rows"
        truth = want[at]
        got, rounded = relative_error(out[at], truth), relative_error(truth.to(out.dtype), truth)
        allowed = relative_error(usual[at], truth) + rounded + 2.0**-24
        report = error_report(out[at], truth, ("row", "head", "channel"))
        assert got <= allowed, f"{name}: error {got:.3e}, allowed {allowed:.3e}\n{report}"
        empty = want_lse[at].isinf()
        report = error_report(lse[at], want_lse[at], ("row", "head"))
        assert bool((lse[at][empty] == -math.inf).all()), f"{name}: LSE of a row that sees nothing\n{report}"
        error, allowed = ((y[at].double() - want_lse[at])[~empty].abs() for y in (lse, usual_lse))
        if error.numel():
            limit = max(allowed.max().item(), LSE_UNIT * max(1.0, largest[at].max().item()))
            assert error.max() <= limit, f"{name}: LSE error {error.max():.3e}, allowed {limit:.3e}\n{report}"


def call(x: OptionCase, *, wrapper: str | None = None, out=None, lse=None, lse_base: int | str = 2, **more):
    """(out, lse) by decode_attention, or by a wrapper with "dense" or "compressed" tables (``lse`` with those only)."""
    case = x.case
    shared = {"options": x.options, "q_indptr": x.q_indptr, "sm_scale": x.sm_scale, "lse_base": lse_base}
    shared |= {"max_q_len": DEFAULT_Q_LEN} | more  # one kernel, whatever the rows
    if wrapper is None:
        return foscar.decode_attention(case.q, *case.tables, sinks=x.sinks, out=out, return_lse=True, **shared)
    cache = case.cache
    shape = {"num_qo_heads": case.q.shape[1], "num_kv_heads": cache.num_kv_heads, "head_dim": cache.head_dim,
             "page_size": cache.page_size, "format": cache.format, "q_data_type": case.q.dtype}  # fmt: skip
    planned, shared = foscar.BatchDecodeWithPagedKVCacheWrapper(), shared | {"has_sinks": x.sinks is not None}
    if wrapper == "dense":
        planned.plan(block_table=case.block_table, seq_lens=case.seq_lens, **shape, **shared)
    else:
        tables = compressed(case)
        last = tables.lengths - (tables.indptr.diff() - 1).clamp(min=0) * cache.page_size
        planned.plan(tables.indptr, tables.pages, last, **shape, **shared)
    return planned.run(case.q, cache, sinks=x.sinks, out=out, lse=lse, return_lse=True)


def random_option_case(seed: int, formats, *, longest: int = 200, longest_draft: int = 16) -> OptionCase:
    """A draw of format x shape x options x lengths; rows that see nothing and requests without rows among them."""
    gen = torch.Generator().manual_seed(seed)

    def pick(values):
        return values[int(torch.randint(0, len(values), (1,), generator=gen))]

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=gen))

    batch = whole(1, 5)
    lengths = [pick((0, 1, whole(2, longest), whole(2, longest))) for _ in range(batch)]
    q_lens = pick((None, [pick((0, 1, whole(1, longest_draft), longest_draft)) for _ in range(batch)]))
    options = AttentionOptions(
        window=pick((None, 1, whole(2, 40), whole(2, longest), 10**6)),
        soft_cap=pick((0.0, 0.0, 2.5, 30.0)),
        out_scale=pick((1.0, 1.0, 0.37)),
    )
    return option_case(
        lengths, q_lens, options=options, sinks=pick((False, True)), sm_scale=pick((None, 0.3)), seed=seed,
        fmt=pick(formats), page_size=pick((16, 32, 64)), head_dim=64, kv_heads=pick((1, 2)),
        group_heads=pick((1, 3, 4)), dtype=pick((torch.bfloat16, torch.float16)),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- the kernels
def on_device(x: OptionCase, device: str | torch.device) -> OptionCase:
    """The case with everything that a call reads on a device."""
    case, device = x.case, torch.device(device)
    cache = PagedKVCache(
        case.cache.num_pages, case.cache.page_size, case.cache.num_kv_heads, case.cache.head_dim, case.cache.format,
        data=case.cache.data.to(device),
    )  # fmt: skip
    moved = {name: getattr(case, name).to(device) for name in ("q", "block_table", "seq_lens")}
    sinks = None if x.sinks is None else x.sinks.to(device)
    return dataclasses.replace(x, case=dataclasses.replace(case, cache=cache, **moved), sinks=sinks)


def call_into_nan(x: OptionCase, device: str | torch.device = "cpu", **more) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`call` on a device, into an output of NaN; (out, lse) on the CPU."""
    there = on_device(x, device)
    out, lse = call(there, out=torch.full_like(there.case.q, math.nan), **more)
    return out.cpu(), lse.cpu()


def decode(runner, x: OptionCase, **more) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by ``runner.run``; the kernel must be one of gpu_kernels.py."""
    variant = Variant(x.options, x.sinks, x.q_indptr, more.get("max_q_len", DEFAULT_Q_LEN))
    config_of(x.case.q, x.case.cache, None, variant)
    return runner.run(call_into_nan, x, **more)


def kernel_meets_contract(runner, x: OptionCase, **more) -> None:
    """Over poisoned slack, by a call with one LSE base and by a plan with the other; the output bits are the same."""
    poison_slack(x.case)
    want = decode(runner, x, lse_base="e", **more)
    assert_option_contract(*want, x, lse_base="e")
    got = decode(runner, x, wrapper="compressed", lse_base=2, **more)
    assert_option_contract(*got, x, lse_base=2)
    assert_equal(got[0], want[0], ("row", "head", "channel"))


def unseen_pages_are_not_read(runner, x: OptionCase, **more) -> None:
    """Pages wholly before all windows: poison, and table entries that are no pages."""
    want = decode(runner, x, **more)
    assert_option_contract(*want, x)
    case, size = x.case, x.case.cache.page_size
    freed = 0
    for b, (start, stop) in enumerate(itertools.pairwise(x.bounds)):
        length = int(case.seq_lens[b])
        first = max(0, length - (stop - start) + 1 - x.options.window) if stop > start else length
        for i in range(first // size):
            case.cache.data[case.block_table[b, i]] = POISON
            case.block_table[b, i] = (-1, 2**31 - 1)[i % 2]
            freed += 1
    assert freed
    for wrapper in (None, "dense", "compressed"):
        for got, expected in zip(decode(runner, x, wrapper=wrapper, **more), want, strict=True):
            assert_equal(got, expected, ("row", "head", "channel"))
