"""A kernel that hosts the query stage of a K with parameters per channel for one step."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from foscar.blackwell import channel_query, smem
from foscar.blackwell.config import ROLES, STEP_TILES, DecodeConfig
from foscar.common import device
from foscar.common.artifact import Artifact
from foscar.common.jit import compile_jit

BUILDER = "support.blackwell_query_probe:build"
BUFFER = 1  # the second, so that a forgotten offset shows
THREADS = 32 * ROLES["query"]


@dataclass(frozen=True)
class QueryConfig:
    """``tokens``: of the segment from the step on."""

    decode: DecodeConfig
    tokens: int
    sm_scale_log2: float


@dataclass
class Scale:
    """What the stage takes of the kernel's arguments."""

    sm_scale_log2: Float32


def _words(address, count: int) -> cute.Tensor:
    return cute.make_tensor(device.global_pointer(Uint32, address, 4), cute.make_layout(count))


@cute.jit
def _to_shared(source: Int64, target: Int32, count: cutlass.Constexpr, thread: Int32) -> None:
    for i in cutlass.range(thread, count, THREADS, unroll=1):
        device.store_shared(target + 4 * i, [_words(source, count)[i]])


@cute.jit
def _to_global(source: Int32, target: Int64, count: cutlass.Constexpr, thread: Int32) -> None:
    for i in cutlass.range(thread, count, THREADS, unroll=1):
        _words(target, count)[i] = device.load_shared(source + 4 * i, 1)[0]


@cute.kernel
def query_kernel(q: Int64, step: Int64, operands: Int64, numbers: Int64, tokens: cutlass.Constexpr,
                 sm_scale_log2: cutlass.Constexpr, cfg: cutlass.Constexpr):  # fmt: skip
    """``q`` [heads, head_dim] of 16 bits, ``step`` the records of its tiles; ``operands``, ``numbers`` as in shared."""
    thread = cute.arch.thread_idx()[0]
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), thread % 32
    shared = smem.allocate(cfg)
    _to_shared(step, shared.ring, STEP_TILES * cfg.tile_bytes // 4, thread)
    cute.arch.sync_threads()
    pairs, each = [], cfg.head_dim // 64
    for j in cutlass.range_constexpr(cfg.heads // ROLES["query"]):
        own = cute.make_rmem_tensor((each,), Uint32)
        for i in cutlass.range_constexpr(each):
            row = (warp + ROLES["query"] * j) * (cfg.head_dim // 2)
            own[i] = _words(q, cfg.heads * cfg.head_dim // 2)[row + each * lane + i]
        pairs.append(own)
    args, room = Scale(Float32(sm_scale_log2)), smem.reduction(cfg, shared, BUFFER).factors
    found = channel_query.load_pairs(shared.ring, Int32(tokens), lane, cfg)
    for number in cutlass.range_constexpr(cfg.query_operands):
        operand = shared.query + smem.query_operand(cfg, BUFFER, number)
        channel_query._unit(pairs, found[number], args, operand, room + 8 * cfg.heads * number, warp, lane, cfg)
    cute.arch.sync_threads()
    first = shared.query + smem.query_operand(cfg, BUFFER)
    _to_global(first, operands, cfg.query_operands * cfg.query_bytes // 4, thread)
    _to_global(room, numbers, 2 * cfg.heads * cfg.query_operands, thread)


@cute.jit
def host(q: Int64, step: Int64, operands: Int64, numbers: Int64, tokens: cutlass.Constexpr,
         sm_scale_log2: cutlass.Constexpr, cfg: cutlass.Constexpr, stream):  # fmt: skip
    query_kernel(q, step, operands, numbers, tokens, sm_scale_log2, cfg).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


def build(config: QueryConfig, arch: str) -> Artifact:
    return compile_jit(host, *[Int64(1)] * 4, config.tokens, config.sm_scale_log2, config.decode, arch=arch)
