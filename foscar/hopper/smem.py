"""Shared memory as a ledger: which bytes belong to whom, as byte addresses.

Per math warpgroup ``w``:

- ``stages`` ring slots of ``stage_bytes``: the pages of one tile, record after record (written by bulk copies);
- Q^T, ``columns x head_dim`` s8: column ``2 h + term`` of head ``h`` (B operand of Q K^T), once per unit (folds.py);
- Q, float32 ``[head][channel]``, where K has parameters per channel;
- P^T, ``columns x TILE_TOKENS`` u8, likewise (B operand of P V), once per channel group of V;
- token parameters, float32 ``[warp][value][32 tokens]`` (softmax.prepare_params);
- reductions: float32 ``[head][warp]`` maxima, denominators and offsets, and query factors (folds.factor_pairs);
- two mbarriers a slot: ``full`` (one arrival with the bytes) and ``empty`` (one arrival per math warp).

wgmma's B operands use the no-swizzle K-major form: core matrices of 8 columns x 16 bytes of the contraction index, 128
consecutive bytes each, column groups next, then the contraction index.  Reads by wgmma are conflict-free, and the
address of an element is plain arithmetic (:func:`operand_byte`).  Where mma.sync multiplies (every K but the plain
one, see qk_folded.py), Q^T lies as its lanes load it (:func:`fragment_byte`).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int8, Int32, Int64, Uint8
from cutlass.cute.nvgpu import warpgroup

from . import folds
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
    values: Int32
    query_operand: cute.Tensor | None
    probs_operands: list  # of tensors
    full: cute.Pointer
    empty: cute.Pointer


def operand_byte(columns: int, column, k):
    """Byte of element (column, contraction index ``k``) of a B operand of ``columns`` 8-bit elements (wgmma)."""
    return (column % 8) * 16 + (column // 8) * 128 + (k // 16) * (16 * columns) + k % 16


def fragment_byte(head_dim: int, column, k):
    """Likewise of Q^T for mma.sync: [8 columns][64 channels][lane] vectors of a lane's four words (two steps)."""
    vector = (column // 8) * (8 * head_dim) + (k // 64) * 512 + (column % 8) * 64 + k % 16 // 4 * 16
    return vector + k % 64 // 16 * 4 + k % 4


def probs_byte(cfg: DecodeConfig, part: int) -> int:
    """Where P^T of channel group ``part`` of V begins."""
    beside = folds.prob_shape(cfg)[0]
    return part // beside * (cfg.prob_columns * TILE_TOKENS) + part % beside * (16 * cfg.columns)


def fragments(mma: cute.TiledMma, operand: cute.Tensor, thread) -> cute.Tensor:
    """The B operand as wgmma descriptors, one per step of the contraction index."""
    return mma.make_fragment_B(mma.get_slice(thread).partition_B(operand))


def _operand_layout(dtype, columns: int, contraction: int, count: int):
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_INTER, dtype)
    return cute.tile_to_shape(atom, (columns, contraction, count), order=(0, 1, 2))


@dataclass
class Ledger:
    """The CTA's allocations; :meth:`of` gives one warpgroup's part."""

    ring: cute.Tensor
    query: cute.Tensor
    probs: cute.Tensor
    params: cute.Tensor
    reduce: cute.Tensor
    values: cute.Tensor | None
    full: cute.Pointer
    empty: cute.Pointer

    def of(self, cfg: DecodeConfig, w) -> Shared:
        """The room of warpgroup ``w`` (a run-time value)."""
        ring = self.ring.iterator.toint() + w * (cfg.stages * cfg.stage_bytes)
        query = self.query.iterator.toint() + w * cfg.query_bytes
        probs = self.probs.iterator.toint() + w * cfg.prob_bytes
        base = self.reduce.iterator.toint() + w * cfg.reduce_bytes
        part = 16 * cfg.heads
        operands = folds.prob_shape(cfg)[1]
        plain = folds.k_side(cfg).plain
        return Shared(
            ring=ring,
            query=query,
            probs=probs,
            params=self.params.iterator.toint() + w * cfg.param_bytes,
            maxima=base,
            sums=base + part,
            offsets=base + 2 * part,
            factors=base + (2 + folds.offset_slots(cfg)) * part,
            values=0 if self.values is None else self.values.iterator.toint() + w * cfg.value_bytes,
            query_operand=self.query[None, None, w] if plain else None,
            probs_operands=[self.probs[None, None, w * operands + i] for i in range(operands)],
            full=self.full + w * cfg.stages,
            empty=self.empty + w * cfg.stages,
        )


def allocate(cfg: DecodeConfig) -> Ledger:
    w = cfg.warpgroups
    allocator = cutlass.memory.SmemAllocator()
    ring = allocator.allocate_tensor(Uint8, cute.make_layout(w * cfg.stages * cfg.stage_bytes), byte_alignment=128)
    query_layout = _operand_layout(Int8, cfg.columns, cfg.head_dim, w * folds.query_operands(cfg))
    query = allocator.allocate_tensor(Int8, query_layout.outer, byte_alignment=128, swizzle=query_layout.inner)
    probs_layout = _operand_layout(Uint8, cfg.prob_columns, TILE_TOKENS, w * folds.prob_shape(cfg)[1])
    probs = allocator.allocate_tensor(Uint8, probs_layout.outer, byte_alignment=128, swizzle=probs_layout.inner)
    params_layout = cute.make_layout(max(w * cfg.param_bytes, 16))  # none where no side has parameters per token
    params = allocator.allocate_tensor(Uint8, params_layout, byte_alignment=128)
    reduce = allocator.allocate_tensor(Uint8, cute.make_layout(w * cfg.reduce_bytes), byte_alignment=128)
    barriers = allocator.allocate_array(Int64, 2 * w * cfg.stages)
    values = None
    if cfg.value_bytes:
        values = allocator.allocate_tensor(Uint8, cute.make_layout(w * cfg.value_bytes), byte_alignment=128)
    return Ledger(ring, query, probs, params, reduce, values, barriers, barriers + w * cfg.stages)


@cute.jit
def init_barriers(ledger: Ledger, cfg: cutlass.Constexpr) -> None:
    """By one thread, before the CTA's first barrier."""
    for i in cutlass.range_constexpr(cfg.warpgroups * cfg.stages):
        cute.arch.mbarrier_init(ledger.full + i, 1)  # the load warp, with the bytes to come
        cute.arch.mbarrier_init(ledger.empty + i, 4)  # the warps of one math warpgroup
    cute.arch.mbarrier_init_fence()


def live_unit(index, unit: int, seen: tuple):
    """Whether a unit of tokens (folds.py) has one that counts; ``seen``: (first of the tile that does or None: 0, the
    one after the last)."""
    first, stop = seen
    live = index * unit < stop
    return live if first is None else live & (index * unit + unit > first)


def live_tokens(first, count: int, seen: tuple) -> list:
    """Likewise of each of ``count`` tokens from ``first`` on."""
    start, stop = seen
    live = [first + i < stop for i in range(count)]
    return live if start is None else [a & (first + i >= start) for i, a in enumerate(live)]


def unit_pairs(cfg: DecodeConfig, unit: int, index, section: int, seen: tuple | None):
    """folds.unit_offset, from the first page of the unit that a sliding window has left: pages before it are not there,
    and each of a unit's pages repeats its pairs."""
    if seen is None or seen[0] is None:
        return folds.unit_offset(cfg, unit, index, section)
    there = cutlass.max(seen[0], Int32(0)) >> (cfg.page_size.bit_length() - 1)
    return folds.unit_offset(cfg, unit, index, section, lambda page: cutlass.max(there, Int32(page)))
