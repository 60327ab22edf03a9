"""Checks of a decode, stage by stage and whole, on any :class:`support.runners.Runner`.

Every check takes a runner and a kernel's config from :mod:`support.gpu_kernels`, and sizes where a slow runner wants
smaller ones.  Exact where arithmetic is; elsewhere the numeric contract: an error at most that of the BF16 route.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from foscar.common.cache import PagedKVCache
from foscar.common.pack import pack_record, record_tables
from foscar.common.quantize import Quantized, dequantize, param_dtype
from foscar.common.reference import attention_bf16, attention_reference, relative_error
from foscar.hopper.config import TILE_TOKENS, DecodeConfig
from foscar.hopper.decode import Tables

from .compare import assert_equal, error_report
from .gpu_kernels import Q_TYPES
from .inputs import POISON, Case, indptr_of, int32, make_case, poison_slack, random_values

# Of the largest logit: what a float32 logit of Q in 15 bits may be off by, where the BF16 route happens to be closer.
LSE_UNIT = 2.0**-14
OFF = -60000.0  # K bias of tokens that must weigh nothing: exp2 of it is 0
# One-hot values of q: whole, and such that both terms of a split query are needed.
HOT = (1.0, 129 / 128, 255 / 128, 1.5)


# ---------------------------------------------------------------------------------------------- the contract
def case_for(config: DecodeConfig, lengths, *, kv_heads: int = 2, group: int | None = None, **options) -> Case:
    """A random case of a kernel's format and shape; every head that the kernel has room for, unless ``group`` says."""
    return make_case(
        lengths, fmt=config.format, page_size=config.page_size, kv_heads=kv_heads, head_dim=config.head_dim,
        group_heads=group or config.heads, dtype=Q_TYPES[config.q_dtype], **options,
    )  # fmt: skip


def tables_of(case: Case) -> Tables:
    return Tables(case.block_table, case.seq_lens)


def assert_contract(out, lse, case: Case, *, sm_scale: float | None = None, lse_base: int | str = 2) -> None:
    """Request by request: the error is at most the BF16 route's.

    Out is compared after the rounding to its type, which both routes go through: allowed is the BF16 route's float32
    error plus the error of rounding the truth, plus half a unit of float32, for single tokens whose values bfloat16
    happens to hold exactly.  The LSE may also be off by ``LSE_UNIT`` of the largest logit.
    """
    want, want_lse = attention_reference(case.q, *case.tables, sm_scale)
    usual, usual_lse = attention_bf16(case.q, *case.tables, sm_scale)
    assert out.dtype == case.q.dtype and lse.dtype == torch.float32
    if lse_base == 2:
        want_lse, usual_lse = want_lse / math.log(2.0), usual_lse / math.log(2.0)
    for b, length in enumerate(case.seq_lens.tolist()):
        if length == 0:
            assert bool((out[b] == 0).all()) and bool((lse[b] == -math.inf).all()), f"empty request {b}"
            continue
        got, rounded = relative_error(out[b], want[b]), relative_error(want[b].to(out.dtype), want[b])
        allowed = relative_error(usual[b], want[b]) + rounded + 2.0**-24
        assert got <= allowed, (f"request {b}, {length} tokens: error {got:.3e}, allowed {allowed:.3e}\n"
                                + error_report(out[b], want[b], ("head", "channel")))  # fmt: skip
        got, allowed = ((x[b].double() - want_lse[b]).abs().max().item() for x in (lse, usual_lse))
        allowed = max(allowed, LSE_UNIT * largest_logit(case, b, sm_scale))
        assert got <= allowed, f"request {b}, {length} tokens: LSE error {got:.3e}, allowed {allowed:.3e}"


def largest_logit(case: Case, b: int, sm_scale: float | None = None) -> float:
    """In base 2, at least 1.

    With K per channel also of what the kernel multiplies in integers, the logit without the constant that K's bias
    adds: Q times the scales is rounded in proportion to that.
    """
    cache, length = case.cache, int(case.seq_lens[b])
    k, _ = cache.dequantize_request(case.block_table[b], length, torch.float32)
    parts = [k]
    if cache.format.k.axis == "channel":
        (x,) = cache.read_tokens(case.block_table[b], 0, length, "k")
        bare = Quantized(x.codes, x.scale, torch.zeros_like(x.bias))
        group = record_tables(cache.layout, cache.device).k.group
        parts.append(dequantize(bare, cache.format.k, group=group, dtype=torch.float32)[..., : k.shape[-1]])
    q = case.q[b].float().unflatten(0, (cache.num_kv_heads, -1))
    scale = 1 / math.sqrt(cache.head_dim) if sm_scale is None else sm_scale
    largest = max(torch.einsum("hgc,nhc->hgn", q, part).abs().max().item() for part in parts)
    return max(1.0, largest * scale / math.log(2.0))


def decode(runner, config: DecodeConfig, case: Case, **options):
    return runner.decode(case.q, case.cache, tables_of(case), tile=config.tile, **options)


def check(runner, config: DecodeConfig, case: Case, *, sm_scale=None, lse_base=2):
    """Decode and hold to the contract; returns (out, lse)."""
    out, lse = decode(runner, config, case, sm_scale=sm_scale, lse_base=lse_base)
    assert_contract(out, lse, case, sm_scale=sm_scale, lse_base=lse_base)
    return out, lse


# ---------------------------------------------------------------------------------------------- unpack: one-hot probes
def probe_cache(config: DecodeConfig, tokens, kv_heads: int, seed: int = 0):
    """One tile of random codes per request, of which token ``tokens[r]`` alone weighs anything.

    That token has scales 1 and biases 0; the others' V parameters are random.  K is quantized per token; where V is per
    channel, the live token's group has scales 1 and biases 0.

    Returns:
        The cache (pages shuffled), its block table, K codes and V codes of the live tokens [requests, kv_heads, D].
    """
    gen = torch.Generator().manual_seed(seed)
    requests, n, d = len(tokens), TILE_TOKENS, config.head_dim
    fmt, dtype = config.format, param_dtype(config.format.params)
    rows = torch.zeros(requests, n, dtype=torch.bool)
    rows[torch.arange(requests), torch.tensor(tokens)] = True
    rows = rows.flatten()

    def codes(bits: int) -> torch.Tensor:
        return torch.randint(0, 1 << bits, (requests * n, kv_heads, d), generator=gen, dtype=torch.uint8)

    def params(side, group: int, scale, bias):
        """1 and 0 where a pair is of a live token, else ``scale`` and ``bias`` (functions of the shape)."""
        live = rows if side.axis == "token" else rows.view(-1, group).any(1)
        shape = (len(live), kv_heads, d // group if side.axis == "token" else d)
        live = live[:, None, None].expand(shape)
        values = (torch.where(live, x, f(shape)) for x, f in ((1.0, scale), (0.0, bias)))
        return tuple(x.to(dtype) for x in values)

    def random(shape) -> torch.Tensor:
        return torch.rand(shape, generator=gen) + 0.5

    assert fmt.k.axis == "token"
    k = Quantized(codes(fmt.k.bits), *params(fmt.k, config.layout.k_group, torch.ones, lambda s: torch.full(s, OFF)))
    v = Quantized(codes(fmt.v.bits), *params(fmt.v, config.layout.v_group, random, random))
    records = pack_record(config.layout, k, v)
    order = torch.randperm(len(records), generator=gen)
    data = torch.empty_like(records)
    data[order] = records
    cache = PagedKVCache(len(records), config.page_size, kv_heads, config.head_dim, fmt, data=data)
    row = torch.arange(requests) * n + torch.tensor(tokens)
    return cache, order.int().view(requests, -1), k.codes[row], v.codes[row]


def one_hot_query(config: DecodeConfig, kv_heads: int, channels: torch.Tensor) -> torch.Tensor:
    """[requests, kv_heads * G, D] from the channel of each head, ``channels`` [requests, G]; values cycle ``HOT``."""
    requests, group = channels.shape
    q = torch.zeros(requests, kv_heads, group, config.head_dim)
    value = torch.tensor(HOT).repeat(-(-group // len(HOT)))[:group]
    q.scatter_(3, channels[:, None, :, None].expand(-1, kv_heads, -1, -1), value[:, None].expand(*q.shape[:3], 1))
    return q.flatten(1, 2).to(Q_TYPES[config.q_dtype])


def k_unpack(runner, config: DecodeConfig, tokens=range(TILE_TOKENS), channels=None, kv_heads: int = 2) -> None:
    """The LSE of one token under a one-hot query is that token's code in that channel, bit for bit."""
    channels = torch.arange(config.head_dim) if channels is None else torch.tensor(channels)
    heads = config.heads
    channels = torch.nn.functional.pad(channels, (0, -len(channels) % heads)).view(-1, heads)  # [launch groups, heads]
    tokens = list(tokens)
    cache, table, codes, _ = probe_cache(config, tokens, kv_heads)
    request = torch.arange(len(tokens)).repeat_interleave(len(channels))  # all channels of one token in turn
    channels = channels.repeat(len(tokens), 1)
    q = one_hot_query(config, kv_heads, channels)
    sm_scale, base = runner.unit
    tables = Tables(table[request], int32([TILE_TOKENS] * len(request)))
    _, lse = runner.decode(q, cache, tables, tile=config.tile, sm_scale=sm_scale, lse_base=base)
    at = channels[:, None].expand(-1, kv_heads, -1)
    want = codes[request].gather(2, at) * torch.tensor(HOT).repeat(heads // len(HOT))
    got = lse.view(want.shape)
    assert_equal(got, want, ("probe", "KV head", "query head"))


def v_unpack(runner, config: DecodeConfig, tokens=range(TILE_TOKENS), kv_heads: int = 2) -> None:
    """The output of one token with V scale 1 and bias 0 is its codes, bit for bit."""
    tokens, heads = list(tokens), config.heads
    cache, table, _, codes = probe_cache(config, tokens, kv_heads, seed=1)
    channels = torch.arange(len(tokens) * heads).view(-1, heads) % config.head_dim
    q = one_hot_query(config, kv_heads, channels)
    tables = Tables(table, int32([TILE_TOKENS] * len(tokens)))
    out, _ = runner.decode(q, cache, tables, tile=config.tile, sm_scale=runner.unit[0])
    want = codes.repeat_interleave(heads, 1)
    assert_equal(out.double(), want.double(), ("probe", "head", "channel"))


# ---------------------------------------------------------------------------------------------- QK, softmax, PV
def scores(runner, config: DecodeConfig, requests: int = 40) -> None:
    """Single-token requests: the LSE is the score, out is V's row."""
    for seed, sm_scale in ((10, None), (11, 1.0)):
        check(runner, config, case_for(config, [1] * requests, seed=seed), sm_scale=sm_scale)


def uniform_weights(runner, config: DecodeConfig, lengths=(1, 127, 128, 129, 255, 257)) -> None:
    """q = 0: the mean of the valid V, LSE = log of the length; slack tokens enter neither (public report 6)."""
    shape = (len(lengths), 2 * config.heads, config.head_dim)
    case = case_for(config, lengths, q=torch.zeros(shape, dtype=Q_TYPES[config.q_dtype]), seed=20)
    poison_slack(case)
    _, lse = check(runner, config, case)
    want = torch.tensor(lengths, dtype=torch.float64).log2()[:, None]
    assert (lse - want).abs().max() <= 2.0**-16, error_report(lse, want.expand(lse.shape), ("request", "head"))


# ---------------------------------------------------------------------------------------------- store, combine
def store(runner, config: DecodeConfig, group: int) -> None:
    """``group`` query heads per KV head, both LSE bases, an output whose rows and heads are apart in memory."""
    case = case_for(config, [3, 300, 0, 128], group=group, seed=30 + group)
    heads = 2 * group
    for base in (2, "e"):
        room = torch.full((4, heads + 3, config.head_dim), math.nan, dtype=case.q.dtype)
        view = room[:, 2 : heads + 2]
        out, lse = decode(runner, config, case, lse_base=base, out=view)
        assert out.data_ptr() == view.data_ptr()
        assert bool(room[:, :2].isnan().all()) and bool(room[:, heads + 2 :].isnan().all()), "wrote beside out"
        assert_contract(out, lse, case, lse_base=base)


def strides(runner, config: DecodeConfig) -> None:
    """q as a slice of a fused qkv, interleaved layers of one cache (public report 21)."""
    lengths, d, kv_heads = [200, 17], config.head_dim, 2
    case = case_for(config, lengths, kv_heads=kv_heads, seed=40)
    want = check(runner, config, case)
    heads = kv_heads * config.heads
    fused = random_values((2, heads + 2 * kv_heads, d), 41).to(case.q.dtype)
    fused[:, kv_heads : kv_heads + heads] = case.q
    layers = torch.full((case.cache.num_pages, 3, *case.cache.data.shape[1:]), POISON, dtype=torch.uint8)
    layers[:, 1] = case.cache.data
    cache = PagedKVCache(case.cache.num_pages, config.page_size, kv_heads, d, config.format, data=layers[:, 1])
    queries = (
        fused[:, kv_heads : kv_heads + heads],
        case.q.transpose(1, 2).contiguous().transpose(1, 2),  # the channels apart
        torch.cat([fused.new_zeros(1), case.q.flatten()])[1:].view(case.q.shape),  # an address no vector load takes
    )
    for q in queries:
        apart = dataclasses.replace(case, cache=cache, q=q)
        for got, expected in zip(decode(runner, config, apart), want, strict=True):
            assert_equal(got, expected)


def combine(runner, config: DecodeConfig, tiles: int | None = None) -> None:
    """One request split over all workers, and the same request once per worker, which splits none."""
    workers = runner.workers(config)
    tiles = workers if tiles is None else tiles
    case = case_for(config, [tiles * TILE_TOKENS - 5], kv_heads=1, seed=50)
    check(runner, config, case)
    many = dataclasses.replace(
        case,
        q=case.q.expand(workers, -1, -1),
        block_table=case.block_table.repeat(workers, 1),
        seq_lens=case.seq_lens.repeat(workers),
    )
    out, lse = decode(runner, config, many)
    for x in (out, lse):
        assert_equal(x, x[:1].expand_as(x))
    assert_contract(out[:1], lse[:1], case)


# ---------------------------------------------------------------------------------------------- whole decode
def ragged_lengths(batch: int, longest: int, seed: int) -> list[int]:
    """Random lengths, 0 and 1 and the ends of tiles among them."""
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (batch,), generator=gen).tolist()
    special = [0, 1, TILE_TOKENS, TILE_TOKENS + 1, longest, 0]
    lengths[: len(special)] = [min(n, longest) for n in special]
    return [lengths[i] for i in torch.randperm(batch, generator=gen)]


def whole(runner, config: DecodeConfig, batch: int = 24, longest: int = 1500, group: int | None = None) -> None:
    """Ragged batches over poisoned slack, -1 behind the lengths; dense and compressed tables give the same bits."""
    case = case_for(config, ragged_lengths(batch, longest, 60), group=group, seed=60)
    poison_slack(case)
    want = check(runner, config, case)
    for got, expected in zip(runner.decode(case.q, case.cache, compressed(case), tile=config.tile), want, strict=True):
        assert_equal(got, expected)


def compressed(case: Case) -> Tables:
    """The same requests as FlashInfer's tables."""
    counts = [-(-n // case.cache.page_size) for n in case.seq_lens.tolist()]
    rows = [row[:n] for row, n in zip(case.block_table, counts, strict=True)]
    return Tables(torch.cat(rows), case.seq_lens, indptr_of(counts, case.seq_lens.device))


def peaked(runner, config: DecodeConfig) -> None:
    """sm_scale 1: a softmax of which few tokens hold all the mass, at any place of the request."""
    check(runner, config, case_for(config, [700, 1, 130], seed=61), sm_scale=1.0)


def flat(runner, config: DecodeConfig, length: int, v_mean: float = 1.0) -> None:
    """All weights alike: rounding errors of one sign would add up.  ``v_mean`` 0 makes the sum of V cancel."""
    d = config.head_dim
    q = (random_values((1, config.heads, d), 70, mean=0.5) * 0.02).to(Q_TYPES[config.q_dtype])
    v = random_values((length, 1, d), 71, mean=v_mean)
    check(runner, config, case_for(config, [length], kv_heads=1, q=q, v=v, seed=72))


def sink(runner, config: DecodeConfig, length: int) -> None:
    """Token 0 holds about 0.9 of the mass in front of many light tokens; V of one sign."""
    d = config.head_dim
    q = random_values((1, 1, d), 80, mean=0.5).expand(1, config.heads, d)
    k = random_values((length, 1, d), 81) * 0.05
    v = random_values((length, 1, d), 82).abs() + 0.5
    rest = ((k[1:, 0] @ q[0, 0]) / math.sqrt(d)).logsumexp(0)
    k[0, 0] = q[0, 0] * ((math.log(9.0) + rest) * math.sqrt(d) / q[0, 0].norm() ** 2)
    q = q.to(Q_TYPES[config.q_dtype])
    case = case_for(config, [length], kv_heads=1, k=k, v=v, q=q, seed=83)
    keys, _ = case.cache.dequantize_request(case.block_table[0], length, torch.float32)
    share = torch.softmax(keys[:, 0] @ q[0, 0].float() / math.sqrt(d), 0)[0].item()
    assert 0.3 < share < 0.99, f"the sink holds {share:.2f} of the mass: not the input meant"
    check(runner, config, case)


def magnitudes(runner, config: DecodeConfig, length: int = 150) -> None:
    """Constant and zero rows, ranges of 1e-4 and values of 6e4 side by side (public reports 17 and 18)."""
    shape = (length, 2, config.head_dim)
    k, v = random_values(shape, 90) * 0.1, random_values(shape, 91)
    k[::5], v[1::5] = 100.0, 0.0
    v[2::5] = v[2::5].clamp(-1, 1) * 1e-4 + 0.5
    v[3::5] = (v[3::5] * 3e4).clamp(-6e4, 6e4)
    heads = 2 * config.heads
    q = (random_values((1, heads, config.head_dim), 92) * 1e-3).to(Q_TYPES[config.q_dtype])
    check(runner, config, case_for(config, [length], k=k, v=v, q=q, seed=93))
    zeros = torch.zeros(shape)
    case = case_for(config, [length], k=zeros, v=zeros, seed=94)
    out, _ = check(runner, config, case)
    assert bool((out == 0).all())
    k, v = random_values(shape, 95) * 0.05, random_values(shape, 96) * 1e-5
    v[::10] = 0.0
    check(runner, config, case_for(config, [length], k=k, v=v, seed=97))
    v = random_values(shape, 98)
    v[0] = 0.0  # a constant row that holds 0.999 of the mass of the first head of each KV head
    q = random_values((1, heads, config.head_dim), 99).to(Q_TYPES[config.q_dtype])
    first, scale = q[0, :: config.heads].float(), math.sqrt(config.head_dim)
    rest = (torch.einsum("hd,nhd->hn", first, k[1:]) / scale).logsumexp(1)
    k[0] = first * ((math.log(999) + rest) * scale / first.square().sum(1))[:, None]
    check(runner, config, case_for(config, [length], k=k, v=v, q=q, seed=100))


def nan_stays(runner, config: DecodeConfig, where: str) -> None:
    """A NaN in one token of K or V, or in one query head, reaches its own request and head only (public report 34).

    Of V, it reaches the channels that share its parameters: those of its channel group, or its own.
    """
    lengths, heads = [130, 300, 20], config.heads
    clean = case_for(config, lengths, seed=100)
    want, want_lse = decode(runner, config, clean)
    values = {"k": clean.k.clone(), "v": clean.v.clone(), "q": clean.q.clone()}
    bad = torch.zeros(want.shape, dtype=torch.bool)
    if where == "q":
        values["q"][1, heads + 1, 7] = math.nan
        bad[1, heads + 1] = True
    else:
        values[where][130 + 141, 1, 7] = math.nan
        v_group = config.layout.v_group if config.format.v.axis == "token" else 1
        reached = slice(7 // v_group * v_group, (7 // v_group + 1) * v_group) if where == "v" else slice(None)
        bad[1, heads:, reached] = True
    case = dataclasses.replace(clean, q=values["q"])
    case.cache.append(values["k"], values["v"], case.block_table, int32([0, 0, 0]), indptr_of(lengths), check=False)
    out, lse = decode(runner, config, case)
    assert torch.equal(out.isnan(), bad), "NaN elsewhere, or not where it belongs"
    heads_reached = bad.any(-1)
    # A group's NaN scale would change how P is rounded for the others; per channel nothing changes.
    apart = ~heads_reached[..., None] if config.format.v.axis == "token" else ~bad
    assert_equal(out[apart.expand_as(out)], want[apart.expand_as(out)], ("element",))
    assert_equal(lse[~heads_reached], want_lse[~heads_reached], ("row",))
    if where == "v":
        assert (lse - want_lse).abs().max() <= LSE_UNIT * largest_logit(clean, 1), "V reached the LSE"
    else:
        assert bool(lse[heads_reached].isnan().all())


def shared_pages(runner, config: DecodeConfig) -> None:
    """Requests over the same first pages, the same pages in another order, and the same page twice (report 30)."""
    page = config.page_size
    case = case_for(config, [5 * page, 5 * page + 3, 2 * page], seed=110)
    table = case.block_table
    table[1, :3] = table[0, :3]
    table[2, :2] = table[0, 1]
    check(runner, config, case)
