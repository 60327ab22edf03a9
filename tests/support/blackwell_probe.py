"""A kernel that hosts the unpack stage and both matrix products of the Blackwell kernel for one tile.

Inputs and results are in global memory; addresses in shared and tensor memory are those of the decode kernel itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from foscar.blackwell import digits, mma, pipeline, smem, tcgen05, unpack
from foscar.blackwell.config import DIGIT_STEPS, TILE_TOKENS, DecodeConfig, first_warp
from foscar.blackwell.tmem import TensorLedger, lane_address
from foscar.common import device
from foscar.common.artifact import Artifact
from foscar.common.jit import compile_jit
from foscar.hopper import pv, qk

BUILDER, DIGITS_BUILDER = "support.blackwell_probe:build", "support.blackwell_probe:build_digits"
BUFFER = 1  # of codes and accumulators: the second, so that a forgotten offset shows


@dataclass(frozen=True)
class ProbeConfig:
    decode: DecodeConfig


def _words(address: Int64, count: int) -> cute.Tensor:
    return cute.make_tensor(device.global_pointer(Uint32, address, 4), cute.make_layout(count))


@cute.jit
def _to_shared(source: Int64, target: Int32, size: cutlass.Constexpr, thread: Int32) -> None:
    for i in cutlass.range(thread, size // 4, 128, unroll=1):
        device.store_shared(target + 4 * i, [_words(source, size // 4)[i]])


@cute.jit
def _rows_out(tensor: Int32, out: Int64, columns: cutlass.Constexpr, warp: Int32, lane: Int32) -> None:
    """All 128 lanes of ``columns`` to ``out`` [128, columns]."""
    target = _words(out, TILE_TOKENS * columns)
    halves = tcgen05.load_rows([lane_address(tensor, warp, i) for i in range(2)], columns)
    for i in cutlass.range_constexpr(2):
        for r in cutlass.range_constexpr(columns // 2):
            row = 32 * warp + 16 * i + lane // 4 + 8 * (r % 2)
            target[row * columns + 4 * (r // 2) + lane % 4] = halves[i][r]


@cute.kernel
def probe_kernel(tile: Int64, query: Int64, probs: Int64, k_out: Int64, v_out: Int64, s_out: Int64, o_out: Int64,
                 cfg: cutlass.Constexpr):  # fmt: skip
    thread = cute.arch.thread_idx()[0]
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), thread % 32
    shared, ledger = smem.allocate(cfg), TensorLedger(cfg)
    if warp == 0:
        cute.arch.alloc_tmem(ledger.allocated, shared.tensor)
        cute.arch.relinquish_tmem_alloc_permit()
    if thread == 0:
        pipeline.init(shared.barriers)
    _to_shared(tile, shared.ring, cfg.tile_bytes, thread)
    _to_shared(query, shared.query, cfg.query_bytes, thread)
    _to_shared(probs, shared.probs, cfg.prob_bytes, thread)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    pointer = cute.arch.retrieve_tmem_ptr(Int32, alignment=16, ptr_to_buffer_holding_addr=shared.tensor)
    tensor = pointer.toint()
    rooms = {name: tensor + ledger.column(name, BUFFER) for name in ledger.rooms}
    k = unpack.load_k(shared.ring + qk.thread_offset(cfg, warp, lane), cfg)
    v = pv.load_words(shared.ring + pv.thread_offset(cfg, warp, lane), cfg)
    unpack.store_k(k, rooms["k"], warp, cfg)
    unpack.store_v(v, rooms["v"], warp, cfg)
    unpack.store_scales(tensor, warp, cfg)
    tcgen05.wait_stores()
    tcgen05.fence_before()
    cute.arch.sync_threads()
    tcgen05.fence_after()
    if warp == 0:
        with cute.arch.elect_one():
            mma._scores_of(rooms["s"], rooms["k"], shared.query, tensor, cfg)
            mma._values_of(rooms["o"], rooms["v"], shared.probs, cfg)
            tcgen05.commit(pipeline.at(shared.barriers, "o_full"))
    cute.arch.mbarrier_wait(pipeline.at(shared.barriers, "o_full"), 0)
    tcgen05.fence_after()
    for room, out in (("k", k_out), ("v", v_out), ("s", s_out), ("o", o_out)):
        _rows_out(rooms[room], out, ledger.rooms[room], warp, lane)
    tcgen05.fence_before()
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.dealloc_tmem(pointer, ledger.allocated)


@cute.jit
def host(tile: Int64, query: Int64, probs: Int64, k_out: Int64, v_out: Int64, s_out: Int64, o_out: Int64,
         cfg: cutlass.Constexpr, stream):  # fmt: skip
    probe_kernel(tile, query, probs, k_out, v_out, s_out, o_out, cfg).launch(
        grid=[1, 1, 1], block=[128, 1, 1], stream=stream, min_blocks_per_mp=1
    )


def build(config: ProbeConfig, arch: str) -> Artifact:
    return compile_jit(host, *[Int64(1)] * 7, config.decode, arch=arch)


@dataclass(frozen=True)
class DigitsConfig:
    """A kernel of ``count`` threads that gives each integer and its negative as digits."""

    count: int


@cute.kernel
def digits_kernel(numbers: Int64, out: Int64, cfg: cutlass.Constexpr):
    """``numbers`` [count] float32; ``out`` [count, places] words, the number in byte 0, its negative in byte 1."""
    thread = cute.arch.thread_idx()[0]
    if thread < cfg.count:
        x = _words(numbers, cfg.count)[thread].bitcast(Float32)
        first, second = digits.terms(digits.integers([x, -x]))
        target = _words(out, cfg.count * 2 * DIGIT_STEPS)
        for i in cutlass.range_constexpr(2 * DIGIT_STEPS):
            target[thread * (2 * DIGIT_STEPS) + i] = [*first, *second][i]


@cute.jit
def digits_host(numbers: Int64, out: Int64, cfg: cutlass.Constexpr, stream):
    digits_kernel(numbers, out, cfg).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


def build_digits(config: DigitsConfig, arch: str) -> Artifact:
    return compile_jit(digits_host, *[Int64(1)] * 2, config, arch=arch)


assert first_warp("unpack") % 4 == 0  # the probe's warps 0 .. 3 reach the same lanes
