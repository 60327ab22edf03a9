"""Split-KV decode attention over a packed paged cache, for Blackwell (sm_100a, sm_103a).

Roles of one CTA (persistent, one per SM; all share one range of tiles of 128 tokens, see common/schedule.py)::

    warp 0          load: pages -> ring                                              (load.py)
    warp 1          mma: S^T = K Q^T, O^T = V^T P^T by tcgen05; owns tensor memory   (mma.py)
    warps 2, 3      query: Q of the next items -> two e4m3 terms in shared memory    (query.py)
    warps 4 .. 7    unpack: codes -> e4m3 in tensor memory                           (unpack.py)
    warps 8 .. 11   softmax: scores -> P^T in shared memory, denominators            (softmax.py)
    warps 12 .. 15  correct: O in float32 registers, output                          (correct.py, store.py)

Edges (pipeline.py: arrivals, and a check while tracing that every end of every edge is there)::

    load --full[slot]--> unpack, softmax      query --q_full[2]--> mma, softmax
    unpack --codes_full[4]--> mma             mma --s_full[2]--> softmax --p_full[2]--> mma, correct
    mma --o_full[2]--> correct                softmax --sums_full[2]--> correct

and back, where a buffer is free again: empty, codes_empty, q_empty, o_empty (of O, P^T and the maxima), sums_empty.
In steady state, tile i at the softmax::

    load      | pages of i + 1 .. i + stages
    unpack    | codes of i + 1 .. i + 4
    mma       | V^T P^T of i - 1    | K Q^T of i + 1
    softmax   | scores of i -> P of i, its maxima and denominators
    correct   | O of i - 1

One tile's product with V never meets the last one's in the accumulator: every tile is quantized to its own maximum and
added in float32 by the correct warps (DESIGN.md 3: in place, long contexts fail the contract).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..hopper.kernel import Args
from . import correct, load, mma, pipeline, query, smem, softmax, unpack
from .config import first_warp
from .tmem import TensorLedger


@cute.jit
def _roles(args, shared, tensor: Int32, warp: Int32, lane: Int32, cfg: cutlass.Constexpr) -> None:
    """One call per role."""
    if warp == first_warp("load"):
        load.load_warp(args, shared, lane, cfg)
    elif warp == first_warp("mma"):
        mma.mma_warp(args, shared, tensor, lane, cfg)
    elif warp < first_warp("unpack"):
        query.query_warp(args, shared, warp - first_warp("query"), lane, cfg)
    elif warp < first_warp("softmax"):
        unpack.unpack_warp(args, shared, tensor, warp - first_warp("unpack"), lane, cfg)
    elif warp < first_warp("correct"):
        softmax.softmax_warp(args, shared, tensor, warp - first_warp("softmax"), lane, cfg)
    else:
        correct.correct_warp(args, shared, tensor, warp - first_warp("correct"), lane, cfg)


@cute.kernel
def decode_kernel(q: Int64, q_stride: Int64, q_head_stride: Int64, cache: Int64, page_stride: Int64, head_stride: Int64,
                  pages: Int64, table_stride: Int64, indptr: Int64, lengths: Int64, out: Int64, out_stride: Int64,
                  out_head_stride: Int64, lse: Int64, partial_out: Int64, partial_lse: Int64,
                  batch: Int32, kv_heads: Int32, kv_heads_inverse: Int32, group: Int32, workers_inverse: Int32,
                  sm_scale_log2: Float32, lse_unit: Float32, cfg: cutlass.Constexpr):  # fmt: skip
    """Raw pointers and numbers only (see hopper/kernel.py's Args), so that any launcher can call it."""
    args = Args(q, q_stride, q_head_stride, cache, page_stride, head_stride, pages, table_stride, indptr, lengths, out,
                out_stride, out_head_stride, lse, partial_out, partial_lse, batch, kv_heads, kv_heads_inverse, group,
                workers_inverse, sm_scale_log2, lse_unit)  # fmt: skip
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    shared = smem.allocate(cfg)
    ledger = TensorLedger(cfg)
    ledger.check()
    if warp == first_warp("mma"):
        cute.arch.alloc_tmem(ledger.allocated, shared.tensor)
        cute.arch.relinquish_tmem_alloc_permit()
    if thread == 0:
        pipeline.init(shared.barriers)
    cute.arch.sync_threads()
    tensor = cute.arch.retrieve_tmem_ptr(Int32, alignment=16, ptr_to_buffer_holding_addr=shared.tensor)
    # Launched with programmatic stream serialization: what came before on the stream is complete from here on.
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    _roles(args, shared, tensor.toint(), warp, thread % 32, cfg)
    pipeline.check(shared.barriers)
    cute.arch.sync_threads()
    if warp == first_warp("mma"):
        cute.arch.dealloc_tmem(tensor, ledger.allocated)


@cute.jit
def host(q: Int64, q_stride: Int64, q_head_stride: Int64, cache: Int64, page_stride: Int64, head_stride: Int64,
         pages: Int64, table_stride: Int64, indptr: Int64, lengths: Int64, out: Int64, out_stride: Int64,
         out_head_stride: Int64, lse: Int64, partial_out: Int64, partial_lse: Int64,
         batch: Int32, kv_heads: Int32, kv_heads_inverse: Int32, group: Int32, workers_inverse: Int32,
         sm_scale_log2: Float32, lse_unit: Float32, cfg: cutlass.Constexpr, stream):  # fmt: skip
    """Only to compile: the kernel is launched from its cubin."""
    decode_kernel(q, q_stride, q_head_stride, cache, page_stride, head_stride, pages, table_stride, indptr, lengths,
                  out, out_stride, out_head_stride, lse, partial_out, partial_lse, batch, kv_heads, kv_heads_inverse,
                  group, workers_inverse, sm_scale_log2, lse_unit, cfg).launch(
        grid=[1, 1, 1], block=[cfg.threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )  # fmt: skip
