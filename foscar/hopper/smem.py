"""Shared memory as a ledger: which bytes belong to whom, as byte addresses.

Per math warpgroup ``w``:

- ``stages`` ring slots of ``stage_bytes``: the pages of one tile, record after record (written by bulk copies);
- Q^T, ``columns x head_dim`` s8: column ``2 h + term`` of head ``h`` (B operand of Q K^T);
- P^T, ``columns x TILE_TOKENS`` u8, likewise (B operand of P V);
- token parameters, float32 ``[warp][value][32 tokens]`` (softmax.prepare_params);
- reductions: float32 ``[head][warp]`` maxima, denominators and offsets, and ``[head]`` query factors;
- two mbarriers a slot: ``full`` (one arrival with the bytes) and ``empty`` (one arrival per math warp).

Both B operands use the no-swizzle K-major form: core matrices of 8 columns x 16 bytes of the contraction index, 128
consecutive bytes each, column groups next, then the contraction index.  Reads by wgmma are conflict-free, and the
address of an element is plain arithmetic (:func:`operand_byte`).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int8, Int32, Int64, Uint8
from cutlass.cute.nvgpu import warpgroup

from .config import TILE_TOKENS, DecodeConfig


@dataclass
class Shared:
    """Addresses (bytes, shared window) of one math warpgroup's room, and the operands as tensors."""

    ring: Int32
    query: Int32
    probs: Int32
    params: Int32
    maxima: Int32
    sums: Int32
    offsets: Int32
    factors: Int32
    query_operand: cute.Tensor
    probs_operand: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer


def operand_byte(cfg: DecodeConfig, column, k):
    """Byte of element (column, contraction index ``k``) of a B operand of 8-bit elements."""
    return (column % 8) * 16 + (column // 8) * 128 + (k // 16) * (16 * cfg.columns) + k % 16


def fragments(mma: cute.TiledMma, operand: cute.Tensor, thread) -> cute.Tensor:
    """The B operand as wgmma descriptors, one per step of the contraction index."""
    return mma.make_fragment_B(mma.get_slice(thread).partition_B(operand))


def _operand_layout(cfg: DecodeConfig, dtype, contraction: int):
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_INTER, dtype)
    w = cfg.warpgroups
    return cute.tile_to_shape(atom, (cfg.columns, contraction, w), order=(0, 1, 2))


@dataclass
class Ledger:
    """The CTA's allocations; :meth:`of` gives one warpgroup's part."""

    ring: cute.Tensor
    query: cute.Tensor
    probs: cute.Tensor
    params: cute.Tensor
    reduce: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer

    def of(self, cfg: DecodeConfig, w) -> Shared:
        """The room of warpgroup ``w`` (a run-time value)."""
        ring = self.ring.iterator.toint() + w * (cfg.stages * cfg.stage_bytes)
        query = self.query.iterator.toint() + w * cfg.query_bytes
        probs = self.probs.iterator.toint() + w * cfg.prob_bytes
        base = self.reduce.iterator.toint() + w * cfg.reduce_bytes
        part = 16 * cfg.heads
        return Shared(
            ring=ring,
            query=query,
            probs=probs,
            params=self.params.iterator.toint() + w * cfg.param_bytes,
            maxima=base,
            sums=base + part,
            offsets=base + 2 * part,
            factors=base + 3 * part,
            query_operand=self.query[None, None, w],
            probs_operand=self.probs[None, None, w],
            full=self.full + w * cfg.stages,
            empty=self.empty + w * cfg.stages,
        )


def allocate(cfg: DecodeConfig) -> Ledger:
    w = cfg.warpgroups
    allocator = cutlass.memory.SmemAllocator()
    ring = allocator.allocate_tensor(Uint8, cute.make_layout(w * cfg.stages * cfg.stage_bytes), byte_alignment=128)
    query_layout = _operand_layout(cfg, Int8, cfg.head_dim)
    query = allocator.allocate_tensor(Int8, query_layout.outer, byte_alignment=128, swizzle=query_layout.inner)
    probs_layout = _operand_layout(cfg, Uint8, TILE_TOKENS)
    probs = allocator.allocate_tensor(Uint8, probs_layout.outer, byte_alignment=128, swizzle=probs_layout.inner)
    params = allocator.allocate_tensor(Uint8, cute.make_layout(w * cfg.param_bytes), byte_alignment=128)
    reduce = allocator.allocate_tensor(Uint8, cute.make_layout(w * cfg.reduce_bytes), byte_alignment=128)
    barriers = allocator.allocate_array(Int64, 2 * w * cfg.stages)
    return Ledger(ring, query, probs, params, reduce, barriers, barriers + w * cfg.stages)


@cute.jit
def init_barriers(ledger: Ledger, cfg: cutlass.Constexpr) -> None:
    """By one thread, before the CTA's first barrier."""
    for i in cutlass.range_constexpr(cfg.warpgroups * cfg.stages):
        cute.arch.mbarrier_init(ledger.full + i, 1)  # the load warp, with the bytes to come
        cute.arch.mbarrier_init(ledger.empty + i, 4)  # the warps of one math warpgroup
    cute.arch.mbarrier_init_fence()
