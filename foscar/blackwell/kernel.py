"""Split-KV decode attention over a packed paged cache, for Blackwell (sm_100a, sm_103a).

Roles of one CTA (persistent, one per SM; all share one range of tiles of 128 tokens, see common/schedule.py, in steps
of two, walk.py)::

    warp 0          load: pages -> ring                                              (load.py)
    warp 1          mma: S^T = K Q^T, O^T = V^T P^T by tcgen05; owns tensor memory   (mma.py)
    warps 2, 3      query: Q of the next items -> two terms in shared memory         (query.py)
    warps 4 .. 7    unpack: codes -> e4m3 or e2m1 in tensor memory                   (unpack.py)
    warps 8 .. 11   softmax: scores -> P^T in shared memory, denominators            (softmax.py)
    warps 12 .. 15  correct: O in float32 registers, output                          (correct.py, store.py)

Edges (pipeline.py: arrivals, and a check while tracing that every end of every edge is there)::

    load --full[slot]--> unpack, softmax      query --q_full[2]--> mma, softmax
    unpack --codes_full[2]--> mma             mma --s_full[2]--> softmax --p_full[2]--> mma, correct
    mma --o_full[2]--> correct                softmax --sums_full[2]--> correct

and back, where a buffer is free again: empty, codes_empty, q_empty, o_empty (of O, P^T and the maxima), sums_empty.
In steady state, step i at the softmax::

    load      | pages of i + 1 .. i + stages
    unpack    | codes of i + 1, i + 2
    mma       | V^T P^T of i - 1    | K Q^T of i + 1
    softmax   | scores of i -> P of i, its maxima and denominators
    correct   | O of i - 1

With parameters per channel roles are the same, and two more read the ring: with K's the query warps (channel_query.py:
q_full and q_empty are then of a step, not of an item), with V's the correct warps.

One tile's product with V never meets the last one's in the accumulator: every tile is quantized to its own maximum and
added in float32 by the correct warps (DESIGN.md 3: in place, long contexts fail the contract).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..hopper import arguments, folds
from ..hopper.kernel import Args
from . import channel_query, correct, load, mma, pipeline, query, smem, softmax, unpack
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
        stage = channel_query if cutlass.const_expr(folds.k_side(cfg).channel) else query
        stage.query_warp(args, shared, warp - first_warp("query"), lane, cfg)
    elif warp < first_warp("softmax"):
        unpack.unpack_warp(args, shared, tensor, warp - first_warp("unpack"), lane, cfg)
    elif warp < first_warp("correct"):
        softmax.softmax_warp(args, shared, tensor, warp - first_warp("softmax"), lane, cfg)
    else:
        correct.correct_warp(args, shared, tensor, warp - first_warp("correct"), lane, cfg)


@cute.kernel
def decode_kernel(values: list, cfg: cutlass.Constexpr):
    """Raw pointers and numbers only (hopper/kernel.py's Args, arguments.py), so that any launcher can call it."""
    args = Args(**dict(zip(arguments.decode(cfg.options), values, strict=True)), rows=Int32(cfg.heads))
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
def host(values: list, cfg: cutlass.Constexpr, stream):
    """Only to compile: the kernel is launched from its cubin."""
    decode_kernel(values, cfg).launch(
        grid=[1, 1, 1], block=[cfg.threads, 1, 1], stream=stream, min_blocks_per_mp=1
    )  # fmt: skip
