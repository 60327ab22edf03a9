"""Kernels that host one stage of the Hopper decode kernel each: inputs from global memory, results back to it.

``build`` compiles one; :mod:`support.probes` names the stages and their parameters, and runs them.  Addresses in shared
memory are those of the decode kernel itself (its ledger, its :class:`Thread`), so a probe follows what it changes.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from foscar.common import device, schedule
from foscar.common.artifact import Artifact
from foscar.common.jit import compile_jit
from foscar.hopper import arguments, kernel, load, pv, qk, query, smem, softmax, store
from foscar.hopper.config import TILE_TOKENS

from .probes import MARK, PARAMETERS, WORK, ProbeConfig

KINDS = {"i64": Int64, "i32": Int32, "f32": Float32}
MATH_THREADS = 128


def arguments_of(**given) -> kernel.Args:
    """The decode kernel's arguments with zeros for what a stage does not read."""
    return kernel.Args(**{name: given.get(name, KINDS[kind](0)) for name, kind in arguments.DECODE.items()})


def words_at(address, count: int, dtype=Uint32) -> cute.Tensor:
    """32-bit elements of global memory."""
    return cute.make_tensor(device.global_pointer(dtype, address, 4), cute.make_layout(count))


@cute.jit
def fill_shared(target: Int32, source: Int64, size: cutlass.Constexpr, thread: Int32, threads: cutlass.Constexpr):
    """``size`` bytes of global memory to shared memory."""
    words = words_at(source, size // 4)
    for i in cutlass.range(thread, size // 4, threads, unroll=1):
        device.store_shared(target + 4 * i, [words[i]])


@cute.jit
def dump_shared(target: Int64, source: Int32, size: cutlass.Constexpr, thread: Int32, threads: cutlass.Constexpr):
    """``size`` bytes of shared memory to global memory."""
    words = words_at(target, size // 4)
    for i in cutlass.range(thread, size // 4, threads, unroll=1):
        words[i] = device.load_shared(source + 4 * i, 1)[0]


def dump_registers(target, values: cute.Tensor, thread) -> None:
    """A register tensor of every thread to ``[thread][element]``."""
    n = cute.size(values)
    row = words_at(target + Int64(4 * n) * Int64(thread), n, values.element_type)
    for i in range(n):
        row[i] = values[i]


def registers_from(source, count: int, thread, dtype) -> cute.Tensor:
    """The inverse of :func:`dump_registers`."""
    row = words_at(source + Int64(4 * count) * Int64(thread), count, dtype)
    values = cute.make_rmem_tensor((count,), dtype)
    for i in range(count):
        values[i] = row[i]
    return values


def place(cfg):
    """(thread, block, shared memory of math warpgroup 0, its Thread, byte offset of a slot that differs by block)."""
    thread = cute.arch.thread_idx()[0]
    block = cute.arch.block_idx()[0]
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    shared = smem.allocate(cfg).of(cfg, Int32(0))
    me = kernel._thread(cfg, shared, Int32(0), warp, lane)
    return thread, block, shared, me, block % cfg.stages * cfg.stage_bytes


# ---------------------------------------------------------------------------------------------- load
@cute.jit
def _drain(args, shared, local: Int32, lane: Int32, tiles: Int64, cfg: cutlass.Constexpr) -> None:
    """In the place of a math warpgroup, one warp: every slot to ``tiles[position]``, then marked and released."""
    work = schedule.start(args, local, cfg.warpgroups, lane)
    slot, phase = Int32(0), Int32(0)
    for i in cutlass.range(work.left, unroll=1):
        cute.arch.mbarrier_wait(shared.full + slot, phase)
        base = shared.ring + slot * cfg.stage_bytes
        dump_shared(tiles + Int64(work.position + i) * cfg.stage_bytes, base, cfg.stage_bytes, lane, 32)
        for word in cutlass.range(lane, cfg.stage_bytes // 4, 32, unroll=1):
            device.store_shared(base + 4 * word, [Uint32(MARK)])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        device.arrive_where(lane < 4, (shared.empty + slot).toint())  # one lane for each math warp
        slot = slot + 1
        if slot == cfg.stages:
            slot = Int32(0)
            phase = phase ^ 1


@cute.kernel
def load_kernel(cache: Int64, page_stride: Int64, head_stride: Int64, pages: Int64, table_stride: Int64, indptr: Int64,
                lengths: Int64, tiles: Int64, batch: Int32, kv_heads: Int32, kv_heads_inverse: Int32,
                workers_inverse: Int32, cfg: cutlass.Constexpr):  # fmt: skip
    """Load warps first, then as many warps that drain their rings."""
    args = arguments_of(
        cache=cache, page_stride=page_stride, head_stride=head_stride, pages=pages, table_stride=table_stride,
        indptr=indptr, lengths=lengths, batch=batch, kv_heads=kv_heads, kv_heads_inverse=kv_heads_inverse,
        workers_inverse=workers_inverse,
    )  # fmt: skip
    thread = cute.arch.thread_idx()[0]
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), thread % 32
    ledger = smem.allocate(cfg)
    if thread == 0:
        smem.init_barriers(ledger, cfg)
    ring = ledger.of(cfg, Int32(0)).ring
    for i in cutlass.range(thread, cfg.warpgroups * cfg.stages * cfg.stage_bytes // 4, 64 * cfg.warpgroups, unroll=1):
        device.store_shared(ring + 4 * i, [Uint32(MARK)])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    if warp < cfg.warpgroups:
        load.load_warp(args, ledger.of(cfg, warp), warp, lane, cfg)
    else:
        local = warp - cfg.warpgroups
        _drain(args, ledger.of(cfg, local), local, lane, tiles, cfg)


# ---------------------------------------------------------------------------------------------- query, Q K^T
@cute.kernel
def query_kernel(q: Int64, q_stride: Int64, q_head_stride: Int64, operand: Int64, factors: Int64, kv_heads: Int32,
                 group: Int32, sm_scale_log2: Float32, cfg: cutlass.Constexpr):  # fmt: skip
    """A block per (request, KV head): Q's operand bytes and (factor, q_sum) of every head."""
    args = arguments_of(
        q=q, q_stride=q_stride, q_head_stride=q_head_stride, kv_heads=kv_heads, group=group,
        sm_scale_log2=sm_scale_log2,
    )  # fmt: skip
    thread, block, shared, me, _ = place(cfg)
    query.load_query(args, block // kv_heads, block % kv_heads, shared, me.warp, me.lane, cfg)
    cute.arch.sync_threads()
    dump_shared(operand + Int64(block) * cfg.query_bytes, shared.query, cfg.query_bytes, thread, MATH_THREADS)
    dump_shared(factors + Int64(block) * (8 * cfg.heads), shared.factors, 8 * cfg.heads, thread, MATH_THREADS)


@cute.kernel
def scores_kernel(tiles: Int64, operand: Int64, scores: Int64, cfg: cutlass.Constexpr):
    """A block per tile: records and Q's operand bytes to the int32 products ``[block][half][thread][element]``."""
    thread, block, shared, me, at = place(cfg)
    fill_shared(shared.ring + at, tiles + Int64(block) * cfg.stage_bytes, cfg.stage_bytes, thread, MATH_THREADS)
    fill_shared(shared.query, operand + Int64(block) * cfg.query_bytes, cfg.query_bytes, thread, MATH_THREADS)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    s = qk.accumulators(cfg)
    qk.scores(s, me.k + at, smem.fragments(qk.make_mma(cfg), shared.query_operand, thread), cfg)
    warpgroup.wait_group(0)
    for half in cutlass.range_constexpr(qk.HALVES):
        size = 4 * cute.size(s[half])
        row = Int64(block * qk.HALVES + half) * (MATH_THREADS * size)
        dump_registers(scores + row, s[half], thread)


# ---------------------------------------------------------------------------------------------- softmax
@cute.kernel
def params_kernel(tiles: Int64, left: Int64, params: Int64, cfg: cutlass.Constexpr):
    """A block per tile, of which ``left[block]`` tokens count: the five values ``[block][value][thread][token]``."""
    thread, block, shared, me, at = place(cfg)
    fill_shared(shared.ring + at, tiles + Int64(block) * cfg.stage_bytes, cfg.stage_bytes, thread, MATH_THREADS)
    cute.arch.sync_threads()
    valid = Int32(me.token < words_at(left, 1 << 20, Int32)[block])
    softmax.prepare_params(me.k_pair + at, me.v_pair + at, me.prepared, valid, cfg)
    cute.arch.sync_warp()
    found = softmax.load_params(me.params, cfg)
    values = (found.k_scale, found.k_bias, found.v_log, found.v_reciprocal, found.v_ratio)
    for i in cutlass.range_constexpr(len(values)):
        row = Int64(block * len(values) + i) * (MATH_THREADS * 4 * softmax.TOKENS)
        dump_registers(params + row, values[i], thread)


@cute.kernel
def softmax_kernel(scores: Int64, params: Int64, factors: Int64, folded: Int64, probs: Int64, sums: Int64,
                   cfg: cutlass.Constexpr):  # fmt: skip
    """A block per tile: integer scores and parameters, as above, to w, P^T and (maximum, sum, offset) per thread."""
    thread, block, shared, me, _ = place(cfg)
    nh = cfg.heads_per_thread
    s, given = [], []
    for half in cutlass.range_constexpr(qk.HALVES):
        row = Int64(block * qk.HALVES + half) * (MATH_THREADS * 16 * nh)
        s.append(registers_from(scores + row, 4 * nh, thread, Int32))
    for i in cutlass.range_constexpr(5):
        row = Int64(block * 5 + i) * (MATH_THREADS * 4 * softmax.TOKENS)
        given.append(registers_from(params + row, softmax.TOKENS, thread, Float32))
    token_params = softmax.TokenParams(*given)
    pairs = words_at(factors + Int64(block) * (8 * cfg.heads), 2 * cfg.heads, Float32)
    factor = [pairs[2 * (me.lane % 4 + 4 * j)] for j in range(nh)]
    q_sum = [pairs[2 * (me.lane % 4 + 4 * j) + 1] for j in range(nh)]
    w = softmax.fold_scores(s, token_params, factor, q_sum, cfg)
    top = softmax.tile_maxima(w, shared, me.warp, me.lane, me.barrier, cfg)
    found = softmax.probabilities(w, top, token_params, me.probs, cfg)
    cute.arch.sync_threads()
    out = cute.make_rmem_tensor((nh * softmax.TOKENS,), Float32)
    stats = cute.make_rmem_tensor((3 * nh,), Float32)
    for j in cutlass.range_constexpr(nh):
        for i in cutlass.range_constexpr(softmax.TOKENS):
            out[j * softmax.TOKENS + i] = w[j][i]
        for i, value in enumerate((*found[j][:2], *found[j][2])):
            stats[3 * j + i] = value
    dump_registers(folded + Int64(block) * (MATH_THREADS * 4 * nh * softmax.TOKENS), out, thread)
    dump_registers(sums + Int64(block) * (MATH_THREADS * 12 * nh), stats, thread)
    dump_shared(probs + Int64(block) * cfg.prob_bytes, shared.probs, cfg.prob_bytes, thread, MATH_THREADS)


# ---------------------------------------------------------------------------------------------- P V, store
@cute.kernel
def values_kernel(tiles: Int64, probs: Int64, products: Int64, cfg: cutlass.Constexpr):
    """A block per tile: records and P's operand bytes to the int32 products ``[block][thread][element]``."""
    thread, block, shared, me, at = place(cfg)
    fill_shared(shared.ring + at, tiles + Int64(block) * cfg.stage_bytes, cfg.stage_bytes, thread, MATH_THREADS)
    fill_shared(shared.probs, probs + Int64(block) * cfg.prob_bytes, cfg.prob_bytes, thread, MATH_THREADS)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    codes = pv.unpack(pv.load_words(me.v + at, cfg), me.masks, 0, 0, cfg)
    (d,) = pv.accumulate([codes], [smem.fragments(pv.make_mma(cfg), x, thread) for x in shared.probs_operands], 0, cfg)
    warpgroup.wait_group(0)
    dump_registers(products + Int64(block) * (MATH_THREADS * 4 * cute.size(d)), d, thread)


@cute.kernel
def store_kernel(work: Int64, products: Int64, sums: Int64, steps: Int32, out: Int64, out_stride: Int64,
                 out_head_stride: Int64, lse: Int64, partial_out: Int64, partial_lse: Int64,
                 kv_heads: Int32, group: Int32, lse_unit: Float32, cfg: cutlass.Constexpr):  # fmt: skip
    """A block per segment ``work[block]``: ``steps`` tiles ``[block][step][thread]`` promoted, then stored."""
    args = arguments_of(
        out=out, out_stride=out_stride, out_head_stride=out_head_stride, lse=lse, partial_out=partial_out,
        partial_lse=partial_lse, kv_heads=kv_heads, group=group, lse_unit=lse_unit,
    )  # fmt: skip
    thread, block, shared, me, _ = place(cfg)
    nh, size = cfg.heads_per_thread, 2 * cfg.heads_per_thread * cfg.head_dim // 32
    state = softmax.new_state(cfg)
    softmax.reset(state)
    for step in cutlass.range(steps, unroll=1):
        row = Int64(block * steps + step)
        d = registers_from(products + row * (MATH_THREADS * 4 * size), size, thread, Int32)
        stats = registers_from(sums + row * (MATH_THREADS * 12 * nh), 3 * nh, thread, Float32)
        softmax.promote(state, [(stats[3 * j], stats[3 * j + 1], [stats[3 * j + 2]]) for j in range(nh)], [d], cfg)
    fields = words_at(work + Int64(block) * (4 * len(WORK)), len(WORK), Int32)
    values = [fields[i] for i in range(len(WORK))]
    here, tiles, n = schedule.Work(*values[:-2]), values[-2], values[-1]
    store.finish(args, state, here, n == tiles, shared, me.warp, me.lane, me.barrier, cfg)


KERNELS = {
    "load": load_kernel,
    "query": query_kernel,
    "scores": scores_kernel,
    "params": params_kernel,
    "softmax": softmax_kernel,
    "values": values_kernel,
    "store": store_kernel,
}


@cute.jit
def host(values: list, config: cutlass.Constexpr, threads: cutlass.Constexpr, stream):
    """Only to compile: the kernel is launched from its cubin."""
    KERNELS[config.stage](*values, config.decode).launch(
        grid=[1, 1, 1], block=[threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )


def build(config: ProbeConfig, arch: str) -> Artifact:
    threads = 64 * config.decode.warpgroups if config.stage == "load" else MATH_THREADS
    values = [KINDS[kind](1) for kind in PARAMETERS[config.stage].values()]
    return compile_jit(host, values, config, threads, arch=arch)


assert TILE_TOKENS == MATH_THREADS  # a thread for each token's parameters
