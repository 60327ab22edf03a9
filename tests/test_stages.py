"""Every stage of the decode kernel alone, in the emulator under every schedule, and on a GPU: the same bodies.

Exact where the stage's arithmetic is: copies, the query's integers, both matrix products.
"""

from __future__ import annotations

import math

import pytest
import torch
from support import probes
from support import stage_models as models
from support.compare import assert_equal, error_report
from support.decode_checks import compressed
from support.gpu_kernels import Q_TYPES
from support.inputs import int32, make_case, random_values
from support.probes import MARK, of_stage
from support.runners import SCHEDULES, why_no_gpu

from foscar.common import jit, plan
from foscar.common.pack import pack_record
from foscar.common.quantize import Quantized, param_dtype
from foscar.hopper import arguments
from foscar.hopper.config import ARCH, TILE_TOKENS

NO_DSL = pytest.mark.skipif(jit.dsl_version() is None, reason="compiling the kernels needs nvidia-cutlass-dsl")
NO_GPU = pytest.mark.skipif(why_no_gpu() is not None, reason=why_no_gpu() or "")
PLACES = [pytest.param(probes.emulator(**options), id=name, marks=NO_DSL) for name, options in SCHEDULES.items()]
PLACES.append(pytest.param(probes.on_gpu, id="gpu", marks=[pytest.mark.gpu, NO_GPU]))
POISON = -(2**31) + 12345
ULP = 2.0**-24  # half a unit of float32
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit


@pytest.fixture(params=PLACES)
def where(request):
    return request.param


def stage(name: str):
    return pytest.mark.parametrize("probe", of_stage(name), ids=lambda p: p.name)


def poison(*shape, dtype=torch.int32) -> torch.Tensor:
    return torch.full(shape, POISON if dtype == torch.int32 else math.nan, dtype=dtype)


def randint(low: int, high: int, shape, seed: int, dtype=torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor | float) -> None:
    """Within ``allowed``; infinities and NaNs in the same places."""
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    near = want.isfinite() & ((got - want).abs() <= allowed)
    assert bool((same | near).all()), error_report(got, want, ("block", "row", "element"))


# ---------------------------------------------------------------------------------------------- load
@stage("load")
@pytest.mark.parametrize("table", ["dense", "compressed"])
def test_load(where, probe, table):
    """Every tile's pages, whole, in their places of a slot; nothing where a tile has no page; workers of two CTAs."""
    config, kv_heads, ctas = probe.decode, 2, 2
    page, record = config.page_size, config.layout.record_bytes
    lengths = [3 * TILE_TOKENS + 1, 0, 17, TILE_TOKENS, page + 1, 2 * TILE_TOKENS]
    case = make_case(lengths, fmt=config.format, page_size=page, kv_heads=kv_heads, head_dim=config.head_dim)
    pages = case.cache.num_pages
    room = randint(0, 256, (pages, 3 * kv_heads, record + 64), 1, torch.uint8)  # layers and gaps between the records
    want = []
    for b, length in enumerate(lengths):
        for head in range(kv_heads):
            for tile in range(plan.tiles_of(length, TILE_TOKENS)):
                first = tile * config.pages_per_tile
                ids = case.block_table[b, first : min(first + config.pages_per_tile, -(-length // page))].long()
                row = torch.full((config.stage_bytes // 4,), MARK, dtype=torch.int32)
                data = room[ids, kv_heads + head, :record].flatten().view(torch.int32)
                row[: len(data)] = data
                want.append(row)
    tables = compressed(case) if table == "compressed" else None
    got = poison(len(want), config.stage_bytes // 4)
    probes.run(
        where, probe, ctas, cache=room.flatten(1)[:, kv_heads * (record + 64) :].contiguous(),
        page_stride=2 * kv_heads * (record + 64), head_stride=record + 64,
        pages=tables.pages if tables else case.block_table, table_stride=0 if tables else case.block_table.stride(0),
        indptr=tables.indptr if tables else 0, lengths=case.seq_lens, tiles=got, batch=len(lengths), kv_heads=kv_heads,
        kv_heads_inverse=plan.inverse_of(kv_heads), workers_inverse=plan.inverse_of(ctas * config.warpgroups),
    )  # fmt: skip
    assert_equal(got, torch.stack(want), ("tile", "word"))


# ---------------------------------------------------------------------------------------------- query, Q K^T, P V
@stage("query")
def test_query(where, probe):
    """Integers and factors bit for bit: zero, tiny, huge and padded heads, one at the edge of its scale, one NaN."""
    config, kv_heads, batch = probe.decode, 2, 2
    group, d, scale = config.heads - 1, config.head_dim, 0.1803
    q = random_values((batch, kv_heads * group, d), 5, mean=2.0)
    far = 100 if config.q_dtype == "bfloat16" else 12  # binary orders of magnitude
    q[:, 0], q[:, 1], q[:, 2] = 0.0, q[:, 1] * 2.0**-far, q[:, 2] * 2.0**far
    q[:, 3], q[:, 3, 9] = q[:, 3].clamp(-60, 60), 127.5  # times 256: one more than fits
    q[1, group + 1, 7] = math.nan
    q = q.to(Q_TYPES[config.q_dtype])
    operand = torch.full((batch * kv_heads, config.query_bytes), 0x55, dtype=torch.int8)
    factors = poison(batch * kv_heads, config.heads, 2, dtype=torch.float32)
    probes.run(where, probe, batch * kv_heads, q=q, q_stride=q.stride(0), q_head_stride=q.stride(1), operand=operand,
               factors=factors, kv_heads=kv_heads, group=group, sm_scale_log2=scale)  # fmt: skip
    padded = torch.nn.functional.pad(q.view(-1, group, d).float(), (0, 0, 0, 1))
    terms, factor, q_sum = models.query_terms(config, padded.nan_to_num(0.0), scale)
    good = ~padded.isnan().any(-1)
    got = models.from_operand(operand, config.columns).unflatten(1, (-1, 2))
    assert_equal(got[good], terms[good], ("head", "term", "channel"))
    assert_equal(factors[..., 0][good], factor[good], ("head",))
    assert_equal(factors[..., 1][good], q_sum[good], ("head",))
    assert bool(factors[..., 0][~good].isnan().all()) and int((~good).sum()) == 1


@stage("scores")
def test_scores(where, probe):
    """Any bytes as codes, any two terms of Q: the int32 products, bit for bit, from both slots."""
    config, blocks = probe.decode, 2
    tiles = models.random_tiles(config, blocks, 10)
    terms = randint(-128, 128, (blocks, config.columns, config.head_dim), 11, torch.int8)
    raw = poison(blocks, 2, models.THREADS, config.heads)
    probes.run(where, probe, blocks, tiles=tiles, operand=models.to_operand(terms), scores=raw)
    codes = models.codes_of(config, tiles)[0] * models.k_factor(config)
    assert_equal(models.scores_from_threads(raw), models.exact(codes, terms), ("block", "token", "column"))


@stage("values")
def test_values(where, probe):
    """Any bytes as codes, any bytes of P: the int32 products, bit for bit, from both slots."""
    config, blocks = probe.decode, 2
    tiles = models.random_tiles(config, blocks, 12)
    p = randint(0, 256, (blocks, config.columns, TILE_TOKENS), 13, torch.uint8)
    raw = poison(blocks, models.THREADS, config.columns * config.head_dim // models.THREADS)
    probes.run(where, probe, blocks, tiles=tiles, probs=models.to_operand(p), products=raw)
    codes = (models.codes_of(config, tiles)[1] * models.v_factor(config)).transpose(1, 2)
    want = models.exact(codes, p)
    assert_equal(models.products_from_threads(raw, config.head_dim), want, ("block", "channel", "column"))


# ---------------------------------------------------------------------------------------------- softmax
@stage("params")
def test_params(where, probe):
    """Five values a token; V scales of 0; NaN garbage behind ``left``; a NaN of a token that counts stays one."""
    config, left = probe.decode, (TILE_TOKENS, 70, 1)
    dtype = param_dtype(config.format.params)
    n = len(left) * TILE_TOKENS
    ks, kb, vs, vb = (random_values((n, 1), 20 + i).abs().to(dtype) * (1 - i % 2 * 3) for i in range(4))
    vs[5::16] = 0.0
    kb[40] = math.nan
    for i, count in enumerate(left):
        for x in (ks, kb, vs, vb):
            x[i * TILE_TOKENS + count : (i + 1) * TILE_TOKENS] = math.nan
    shape = (n, 1, config.head_dim)
    k = Quantized(randint(0, 1 << config.format.k.bits, shape, 24, torch.uint8), ks[..., None], kb[..., None])
    v = Quantized(randint(0, 1 << config.format.v.bits, shape, 25, torch.uint8), vs[..., None], vb[..., None])
    tiles = pack_record(config.layout, k, v).view(len(left), config.stage_bytes)
    got = poison(len(left), 5, models.THREADS, 4, dtype=torch.float32)
    probes.run(where, probe, len(left), tiles=tiles, left=int32(left), params=got)
    parts = zip(*(x.flatten().split(TILE_TOKENS) for x in (ks, kb, vs, vb)), left, strict=True)
    want = models.tokens_to_threads(torch.stack([models.token_params(*part, config.format.params) for part in parts]))
    assert_equal(got[:, :2].double(), want[:, :2], ("block", "value", "thread"))
    assert_close(got[:, 2:], want[:, 2:], 4 * ULP * want[:, 2:].abs().clamp(min=1.0))


def threads_of(x: torch.Tensor, nh: int) -> torch.Tensor:
    """[block, head, token] to [block, thread, j, the thread's four tokens]."""
    return x.unflatten(2, (32, 4)).unflatten(1, (nh, 4)).permute(0, 3, 2, 1, 4).flatten(1, 2)


@stage("softmax")
def test_softmax(where, probe):
    """A flat tile, a peaked one, one with slack, one without any token; P as integers within one unit."""
    config, heads, live = probe.decode, probe.decode.heads, (TILE_TOKENS, TILE_TOKENS, 100, 0)
    blocks = len(live)
    terms = randint(-(2**15), 2**15, (blocks, TILE_TOKENS, 2 * heads), 30) + int32([2**13, 0]).repeat(heads)
    raw = terms[..., 0::2].long() * 256 + terms[..., 1::2]
    k_scale, k_bias, v_scale, v_bias = (random_values((blocks, TILE_TOKENS), 31 + i) for i in range(4))
    params = torch.stack([models.token_params(k_scale[i].abs(), k_bias[i], v_scale[i].abs() + 0.1, v_bias[i], n)
                          for i, n in enumerate(live)]).float()  # fmt: skip
    width = torch.tensor([2.0**-24, 2.0**-19, 2.0**-22, 2.0**-22])[:, None].expand(-1, heads)
    factors = torch.stack([width, random_values((blocks, heads), 35) * 2.0**20], -1)
    nh = config.heads_per_thread
    folded, sums = (poison(blocks, models.THREADS, nh, n, dtype=torch.float32) for n in (4, 3))
    probs = torch.full((blocks, config.prob_bytes), 0x5A, dtype=torch.uint8)
    probes.run(where, probe, blocks, scores=models.scores_to_threads(terms), params=models.tokens_to_threads(params),
               factors=factors.contiguous(), folded=folded, probs=probs, sums=sums)  # fmt: skip
    want, size = models.fold(raw, params, factors)
    # w of a thread: its quad's four tokens of its heads t + 4 j
    w = folded.unflatten(1, (-1, 4)).permute(0, 3, 2, 1, 4).reshape(blocks, heads, TILE_TOKENS).double()
    assert_close(w, want, 4 * ULP * size)
    top = w.amax(-1, keepdim=True)
    p = torch.where(top.isfinite(), w - top.clamp(min=-1e30), -math.inf).exp2()
    bytes_of = models.from_operand(probs, config.columns).long()
    assert_close(bytes_of[:, 0::2] * 256 + bytes_of[:, 1::2], p * models.PROB_TOP, 1.0)
    assert_equal(sums[..., 0].double(), models.heads_to_threads(top[..., 0]), ("block", "thread", "head"))
    for i, weight in ((1, params[:, None, 3]), (2, params[:, None, 4])):
        parts = p * weight.double()
        unsure = parts.abs() * (16 + 2 * (top - w).nan_to_num(0.0, 0.0).clamp(max=200.0)) * ULP  # w - top is rounded
        allowed = threads_of(unsure, nh).sum(-1) + 2.0**-60  # and what underflows
        assert_close(sums[..., i], threads_of(parts, nh).sum(-1), allowed)


# ---------------------------------------------------------------------------------------------- store
# request, head, tile, position, left, total, workers, worker, tiles of the item, n: a whole item, the first part of
# one, a later part, an empty request; two KV heads.
SEGMENTS = ((0, 0, 0, 0, 9, 20, 4, 0, 3, 3), (0, 1, 0, 3, 2, 20, 4, 0, 12, 2), (0, 1, 7, 10, 5, 20, 4, 2, 12, 5),
            (1, 1, 0, 19, 1, 20, 4, 3, 1, 1))  # fmt: skip


@stage("store")
@pytest.mark.parametrize("unit", [1.0, math.log(2.0)])
def test_store(where, probe, unit):
    """Three tiles of products and sums to outputs and partial results; nothing else written."""
    config, steps, blocks, kv_heads = probe.decode, 3, len(SEGMENTS), 2
    heads, d, group = config.heads, config.head_dim, config.heads - 1
    products = randint(-(2**20), 2**22, (blocks, steps, d, config.columns), 40)
    top = random_values((blocks, steps, heads), 41) * 4
    sums = torch.stack([models.heads_to_threads(top), *(random_values((blocks, steps, models.THREADS, heads // 4), s)
                                                        for s in (42, 43))], -1)  # fmt: skip
    sums[..., 1].abs_()
    sums[3, ..., 0], sums[3, ..., 1:], products[3] = -math.inf, 0.0, 0
    dtype = Q_TYPES[config.q_dtype]
    out = poison(2, kv_heads * group + 1, d + 8, dtype=dtype)
    lse = poison(2, kv_heads * group, dtype=torch.float32)
    partial, partial_lse = (poison(8, group, *more, dtype=torch.float32) for more in ((d,), ()))
    probes.run(where, probe, blocks, work=int32(SEGMENTS), products=models.products_to_threads(products), steps=steps,
               sums=sums, out=out, out_stride=out.stride(0), out_head_stride=out.stride(1), lse=lse,
               partial_out=partial, partial_lse=partial_lse, kv_heads=kv_heads, group=group,
               lse_unit=unit)  # fmt: skip
    top[3] = -math.inf
    m = top.double().amax(1, keepdim=True)
    weight = torch.where(m.isfinite(), (top - m).exp2(), 0.0)
    total, offset = ((weight * models.heads_over_threads(sums[..., i].double())).sum(1) for i in (1, 2))
    exact = products[..., 0::2].double() * 256 + products[..., 1::2]
    o = (weight[:, :, None] * exact / models.v_factor(config)[:, None] / models.PROB_TOP).sum(1).transpose(1, 2)
    want = torch.where(total[..., None] == 0, 0.0, (o + offset[..., None]) / total[..., None])[:, :group]
    want_lse = (m[:, 0] + total.log2())[:, :group]
    size = want.abs().amax(-1, keepdim=True)
    rounding = ROUNDING[dtype]
    for block, request, head in ((0, 0, 0), (3, 1, 1)):
        mine = slice(head * group, (head + 1) * group)
        assert_close(out[request, mine, :d], want[block], rounding * want[block].abs() + 64 * ULP * size[block])
        assert_close(lse[request, mine], want_lse[block] * unit, 32 * ULP * 16)
        out[request, mine, :d], lse[request, mine] = math.nan, math.nan
    for block, slot in ((1, 1), (2, 4)):  # of worker 0, which holds the first tile; of worker 2, which begins in it
        assert_close(partial[slot], want[block], 64 * ULP * size[block])
        assert_close(partial_lse[slot], want_lse[block], 32 * ULP * 16)
        partial[slot], partial_lse[slot] = math.nan, math.nan
    for x in (out, lse, partial, partial_lse):
        assert bool(x.isnan().all()), "written where nothing belongs"


# ---------------------------------------------------------------------------------------------- combine
@pytest.mark.parametrize("head_dim, dtype", [(64, "bfloat16"), (128, "float16")])
@pytest.mark.parametrize("by_item", [0, 1])
@pytest.mark.parametrize("column_bits, lane_bits", [(0, 2), (0, 4), (1, 3), (3, 4), (2, 5), (5, 3)])
@pytest.mark.parametrize("lengths, workers", [([700, 0, 9000, 129], 60), ([700] * 9, 7), ([40 * 128], 97)])
def test_combine(where, head_dim, dtype, by_item, column_bits, lane_bits, lengths, workers):
    """Items whole, in few and in many parts: whole ones stay as they are, the rest is merged from the workspace."""
    group, kv_heads, unit = 5, 2, math.log(2.0)
    lane_bits = min(lane_bits, head_dim.bit_length() - 3)
    parts, parts_lse = poison(2 * workers, group, head_dim, dtype=torch.float32), poison(2 * workers, group).float()
    parts_lse.fill_(math.nan)
    out = poison(len(lengths), kv_heads * group, head_dim, dtype=Q_TYPES[dtype])
    lse = poison(len(lengths), kv_heads * group, dtype=torch.float32)
    want, want_lse = out.double(), lse.double()
    items: dict[tuple[int, int], list[int]] = {}
    for s in plan.segments(lengths, kv_heads, workers, plan.TILE_TOKENS):
        items.setdefault((s.request, s.head), []).append(2 * s.worker + (s.tile == 0))
    assert any(len(rows) > 1 for rows in items.values())
    for seed, ((request, head), rows) in enumerate(items.items()):
        if len(rows) > 1:
            parts[rows] = random_values((len(rows), group, head_dim), seed)
            parts_lse[rows] = random_values((len(rows), group), seed + 100) * 3
            o, log_sum = models.merge(parts_lse[rows], parts[rows])
            mine = slice(head * group, (head + 1) * group)
            want[request, mine], want_lse[request, mine] = o, log_sum * unit
    config = plan.CombineConfig(head_dim, dtype)
    artifact = jit.load_or_compile("hopper_combine", config, ARCH, "foscar.hopper.build:build_combine")
    values = {"out": out, "out_stride": out.stride(0), "out_head_stride": out.stride(1), "lse": lse,
              "partial_out": parts, "partial_lse": parts_lse, "lengths": int32(lengths), "batch": len(lengths),
              "kv_heads": kv_heads, "kv_heads_inverse": plan.inverse_of(kv_heads), "group": group, "lse_unit": unit,
              "workers_inverse": plan.inverse_of(workers), "workers": workers, "by_item": by_item,
              "column_bits": column_bits, "lane_bits": lane_bits}  # fmt: skip
    chunks = -(-(group * head_dim >> lane_bits + 2) >> column_bits)
    grid = (kv_heads, len(lengths), chunks) if by_item else (workers, 1, chunks)
    where(artifact, grid, {name: values[name] for name in arguments.COMBINE})
    assert_close(out, want, ROUNDING[out.dtype] * want.abs() + 32 * ULP)
    assert_close(lse, want_lse, 32 * ULP * 8)


def test_the_probes_are_exported():
    from support.gpu_kernels import jobs

    names = {name for name, _, _ in jobs()}
    assert {f"probe_{s}" for s in probes.PARAMETERS} < names
